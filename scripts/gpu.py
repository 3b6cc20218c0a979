#!/usr/bin/env python3
"""What this machine's GPU makes of mlxspec, in ten minutes: whether drafted text is plain text, and what drafting gains.

    scripts/gpu [--seconds 600] [--only SECTION ...] [--out FILE] [--rehearse]

The demo model and the 0.8B's shape with random weights, in float32 and bfloat16: answers with drafting off, with fixed depths and with
policy auto, in turns; mlx-lm beside plain decoding; kernels a round and how busy the GPU is, where PyTorch is installed beside CUDA; then
tests/metal as far as time goes. Figures with device and date go to docs/measurements/gpu.json, from which scripts/measurements.py makes
the tables of docs/measurements.md. `scripts/mac_check` checks more of what is particular to Macs, and writes nothing.

--rehearse runs every section at a small size on whatever MLX computes with. With it or with --only, figures go only where --out says.

Exit status: 0 no section failed, 1 one did, 2 no GPU, or a mistake in the options.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from mlxspec.platform import device  # before mlx: it loads the BLAS  # isort: skip

from gpu_parts import kernels, texts
from gpu_parts.base import FULL, ROOT, WITHOUT_METAL, Here, Sections, run
from gpu_parts.model import Model

FIGURES = ROOT / "docs" / "measurements" / "gpu.json"


def main(arguments: list[str] | None = None) -> int:
    began = time.perf_counter()
    formatter = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=__doc__, formatter_class=formatter)
    parser.add_argument("--seconds", type=float, default=600, help="no further section begins after this")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="run these sections")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--rehearse", action="store_true", help="small sizes, on any device")
    options = parser.parse_args(arguments)
    if not device.has_gpu() and not options.rehearse:
        print("scripts/gpu: MLX finds no GPU here; --rehearse tries the script without one.", file=sys.stderr)
        return 2
    if not options.seconds > 0:
        parser.error("--seconds must be above 0")
    # some sections alone do not make the tables of the page
    out = options.out or (None if options.rehearse or options.only else FIGURES)
    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.open("a").close()
        except OSError as error:  # said before ten minutes of work
            parser.error(f"--out: {out} cannot be written: {error.strerror}")
    with tempfile.TemporaryDirectory(prefix="mlxspec-gpu-") as folder:
        here = Here(
            sizes=WITHOUT_METAL if options.rehearse else FULL,
            has_metal=device.backend() == "metal",
            folder=Path(folder),
            ends=began + options.seconds,
        )
        chosen = sections(here)
        unknown = [name for name in options.only or () if name not in chosen]
        if unknown:
            parser.error(f"there is no section {unknown[0]}; sections are {', '.join(chosen)}")
        _, failed = run(here, {name: chosen[name] for name in options.only or chosen})
    if out is not None:
        out.write_text(json.dumps(figures(here), indent=1) + "\n", encoding="utf-8")
        print(f"figures: {out}")
    print("\n".join([*here.summary, f"failed: {', '.join(failed) or 'nothing'}"]))
    return 1 if failed else 0


def sections(here: Here) -> Sections:
    """Title and function by name, in the order in which they are worth having."""
    model = Model(here)
    return {
        "machine": ("Machine", partial(kernels.machine, here)),
        "self-checks": ("Self-checks of the kernels", partial(kernels.self_checks, here)),
        **{
            f"{name}-{dtype}": (f"{title}, {dtype}", partial(section, here, dtype))
            for dtype in texts.DTYPES
            for name, title, section in (("demo", "Demo", texts.demo), ("shape", "0.8B shape", texts.shape))
        },
        "decode": ("Plain decoding against mlx-lm", model.decode),
        "tests": ("Kernel tests", partial(kernels.kernel_tests, here)),
    }


def figures(here: Here) -> dict[str, object]:
    """What scripts/measurements.py reads."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    report = device.report()
    machine = [
        f"{report.device} ({report.backend})",
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        commit.stdout.strip() or "unknown",
        *(importlib.metadata.version(name) for name in ("mlx", "mlx-lm")),
    ]
    tables = {"machine": [["device", "date", "commit", "mlx", "mlx-lm"], machine], **here.tables}
    return {
        "said": here.summary,
        "tables": {name: {"head": rows[0], "rows": rows[1:]} for name, rows in tables.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
