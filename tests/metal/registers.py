"""An upper count of the 32-bit registers that a thread of a kernel holds at once, from clang's intermediate code.

clang reads the source as `emulator.front_end` does, optimises it for no GPU in particular, and writes LLVM's intermediate code, in which
each value is assigned once. Values that are live at the same instruction need registers at the same time: a float or an int one, a 16-bit
number half of one, a 64-bit integer two, a vector the sum of its numbers. The largest sum over all instructions is the count.

Not counted: addresses, and integers that follow from a thread's position, the shapes and constants alone. clang keeps many of them, where a
compiler for a GPU computes them again or folds them into the load. So a count of 96 leaves a quarter of a thread's 128 registers to them.
A compiler for a GPU may hold fewer values, by loading them again, or more, by loading ahead.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from emulator import front_end

_TYPE = r"(?:<\d+ x \w+>|\[[^\]]*\]|ptr(?: addrspace\(\d+\))?|i\d+|half|bfloat|float|double|%[\w.\":]+|void|\{[^}]*\})"
_VALUE = re.compile(r"%(?:[\w.]+|\"[^\"]+\")")
_RESULT = re.compile(rf"\s*({_VALUE.pattern}) = (.*)")
_LABEL = re.compile(r"([\w.]+|\"[^\"]+\"):")
_PHI = re.compile(rf"\[ ([^,]+), ({_VALUE.pattern}) \]")
_FLAGS = r"(?:(?:nuw|nsw|exact|disjoint|nneg|samesign|fast|nnan|ninf|nsz|arcp|contract|afn|reassoc|volatile|noundef|zeroext|signext) )*"


class _Instruction(NamedTuple):
    """One instruction. result: the value that it assigns, if any. used: values that it reads. came: of a phi, the value by the block that
    control came from."""

    result: str | None
    used: list[str]
    came: dict[str, str]


def missing() -> str | None:
    """Return why registers cannot be counted here, or None."""
    return None if _compiler() else "needs clang++ 19 or newer"


def _compiler() -> str | None:
    for name in ("clang++", *(f"clang++-{n}" for n in range(19, 30))):
        if found := shutil.which(name):
            version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
            number = re.search(r"version (\d+)", version)
            if number and int(number[1]) >= 19:
                return found
    return None


def most_live(text: str) -> float:
    """Return the count for one kernel. text: the Metal source that MLX generates for it."""
    return _most_live(_intermediate(text))


def _intermediate(text: str) -> list[str]:
    """Return the lines of the kernel's function."""
    command = _compiler()
    assert command is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.cpp")
        source.write_text(front_end.spelled(text), encoding="utf-8")
        flags = [
            *front_end.FLAGS,
            "-std=c++17",
            "-O2",
            "-fno-vectorize",
            "-fno-slp-vectorize",
            "-mllvm",
            "-inline-threshold=100000",
        ]
        run = [command, *flags, "-w", "-S", "-emit-llvm", "-o", "-", str(source)]
        code = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    functions = re.findall(r"^define [^\n]*\{\n.*?^\}", code, flags=re.S | re.M)
    return max(functions, key=len).splitlines()


def _most_live(lines: list[str]) -> float:
    """Return the largest sum of the sizes of values that are live at one instruction."""
    blocks, after, sizes = _blocks(lines)
    live_in: dict[str, set[str]] = {name: set() for name in blocks}
    most, changed = 0.0, True
    while changed:
        changed, most = False, 0.0
        for name in reversed(list(blocks)):
            live: set[str] = set()
            for target in after.get(name, ()):
                live |= live_in[target]
                live |= {i.came[name] for i in blocks[target] if i.came.get(name) in sizes}
            most = max(most, sum(sizes[v] for v in live))
            for instruction in reversed(blocks[name]):
                live.discard(instruction.result or "")
                live.update(v for v in instruction.used if v in sizes)
                most = max(most, sum(sizes[v] for v in live))
            changed |= live != live_in[name]
            live_in[name] = live
    return most


def _blocks(lines: list[str]) -> tuple[dict[str, list[_Instruction]], dict[str, list[str]], dict[str, float]]:
    """Return the instructions of each block, the blocks that may follow each, and the registers of each value but the arguments."""
    blocks: dict[str, list[_Instruction]] = {}
    after: dict[str, list[str]] = {}
    sizes: dict[str, float] = {}
    arguments = _VALUE.findall(lines[0].partition("(")[2])
    # a first block without a label has the number behind those of the arguments
    name = f"%{sum(re.fullmatch(r'%[0-9]+', a) is not None for a in arguments)}"
    for line in lines[1:-1]:
        if label := _LABEL.match(line):
            name = f"%{label[1]}"
            continue
        text = re.sub(r", ![\w.]+.*|#\d+", "", line).strip()
        if not text or text.startswith((";", "]")):
            continue
        result = _RESULT.match(text)
        body = result[2] if result else text
        came = {block: value for value, block in _PHI.findall(body)} if body.startswith("phi") else {}
        targets = re.findall(rf"label ({_VALUE.pattern})", text)
        after.setdefault(name, []).extend(targets)
        used = [] if came else [v for v in _VALUE.findall(body) if v not in targets]
        if result:
            kind = _type_of_result(body)
            is_read = body.startswith(("phi", "call", "tail", "load")) and "addrspace(2)" not in body
            is_integer = re.fullmatch(r"i\d+|ptr.*", kind) is not None
            follows = is_integer and not is_read and not any(sizes.get(v, 0.0) for v in used)
            sizes[result[1]] = 0.0 if follows else sum(_sizes([kind]))
        blocks.setdefault(name, []).append(_Instruction(result[1] if result else None, used, came))
    return blocks, after, sizes


def _type_of_result(body: str) -> str:
    """Return the type of an instruction's result."""
    word = body.split()[0]
    if word in ("icmp", "fcmp"):
        return "i1"
    if word == "getelementptr":
        return "ptr"
    patterns = {"alloca": rf"alloca ({_TYPE})", "extractelement": r"x (\w+)>", "select": rf", ({_TYPE}) "}
    plain = rf"^(?:tail )?\w+ {_FLAGS}(?:\w+cc )?({_TYPE})"
    found = re.search(rf" to ({_TYPE})$", body.rstrip()) or re.search(patterns.get(word, plain), body)
    assert found is not None, body
    if word == "shufflevector":
        return re.sub(r"<\d+", f"<{re.findall(r'<([0-9]+) x i32>', body)[-1]}", found[1])
    return found[1]


def _sizes(types: Iterable[str]) -> Iterator[float]:
    for name in types:
        if vector := re.fullmatch(r"[<\[](\d+) x (.*)[>\]]", name):
            yield int(vector[1]) * sum(_sizes([vector[2]]))
        elif name.startswith("ptr"):
            yield 0.0
        elif name in ("half", "bfloat", "i1", "i8", "i16"):
            yield 0.5
        elif name in ("i64", "double"):
            yield 2.0
        elif whole := re.fullmatch(r"i(\d+)", name):
            yield int(whole[1]) / 32
        elif name == "float":
            yield 1.0
        elif name == "void":
            yield 0.0
        else:
            raise ValueError(f"The size of {name} is not known.")
