"""Instructions of a kernel's longest loop, as nvcc makes them: what a weight costs beside its bytes. Needs nvcc and nvdisasm; no GPU.

A product of 8 x 8 matrices, one instruction of an Apple GPU, counts as one. A conversion of a half counts, which an Apple GPU does for
nothing where the half is read.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import build
from .cases import Launch

_DEFINED = "#define METAL_COUNTS_INSTRUCTIONS\n"
_INSTRUCTION = re.compile(r"^\s*(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)(?:\s+(.*?))?\s*;")


def missing_tool() -> str | None:
    """Why nothing can be counted here, or None."""
    return build.missing_compiler() or (None if shutil.which("nvdisasm") else "there is no nvdisasm")


def of_loops(launches: Sequence[Launch], arch: str = "sm_90") -> list[tuple[int, int]]:
    """Of each launch's kernel: instructions of its longest loop, and registers of a thread."""
    source, places = build.unit(launches)
    with tempfile.TemporaryDirectory() as folder:
        made, said = build.compile_unit(_DEFINED + source, Path(folder), arch=arch, output="kernels.cubin")
        done = subprocess.run(["nvdisasm", "-c", str(made)], capture_output=True, text=True, check=True)
    used = build.resources(said)
    texts = {
        int(found[1]): text
        for text in re.split(r"^//-{5,}", done.stdout, flags=re.M)
        if (found := re.search(r"^\.text\.\S*kernel_(\d+)\D", text, re.M))
    }
    found = [places[build.key_of(launch)] for launch in launches]
    return [(_longest_loop(texts[place]), used[place][0]) for place in found]


def _longest_loop(text: str) -> int:
    labels: dict[str, int] = {}
    num, longest = 0, 0
    for line in text.splitlines():
        if label := re.match(r"^(\.L_x_\d+):", line):
            labels[label[1]] = num
        elif found := _INSTRUCTION.match(line):
            num += 1
            to = re.search(r"\.L_x_\d+", found[2] or "")
            if found[1].startswith("BRA") and to and to[0] in labels:
                longest = max(longest, num - labels[to[0]])
    return longest
