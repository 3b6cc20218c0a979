#!/usr/bin/env python3
"""What each of several processes that run a model together reads of its files, and the memory that loading takes.

    scripts/bench_ranks FOLDER [--ranks 2] [--dtype bfloat16] [--packed]

Starts so many processes on this machine, joined by MLX's ring, and has each load its share and compute a step. Columns, in megabytes:
    share     the rank's weights in memory, the whole MTP head included
    read      bytes that the process read from files while it loaded
    stored    bytes that its share has in the files
    MLX peak  most memory that MLX held while it loaded
    resident  most memory of the process while it loaded, less what it had before (Linux only)
--packed keeps quantized weights as they are in the files, as a Mac does; without it they are unpacked on a CPU.
The process also reads headers, the tokenizer and what Python imports meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mlxspec.platform import device  # before mlx: it loads the BLAS  # isort: skip

import mlx.core as mx

from mlxspec.checkpoints.memory import bytes_of
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.assemble import assemble
from mlxspec.models.folder import ModelFolder
from mlxspec.models.ranks import Ranks, share
from mlxspec.models.registry import architecture

_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
_IO, _STATUS = Path("/proc/self/io"), Path("/proc/self/status")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of the weights in memory")
    parser.add_argument("--packed", action="store_true", help="keep quantized weights packed")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        if options.packed:
            device.UNPACKED_AT_MOST = 0
        print(json.dumps(measured(options.folder, _DTYPES[options.dtype])))
        return
    found = [json.loads(said) for said in on_ring(options.ranks, sys.argv[1:])]
    print("rank     share      read    stored  read/stored  MLX peak  over share  resident  over share")
    for rank, f in enumerate(found):
        print(
            f"{rank:4}  {f['share'] / 1e6:8.1f}  {f['read'] / 1e6:8.1f}  {f['stored'] / 1e6:8.1f}  {f['read'] / f['stored']:11.3f}  "
            f"{f['peak'] / 1e6:8.1f}  {f['peak'] / f['share']:10.3f}  {f['resident'] / 1e6:8.1f}  {f['resident'] / f['share']:10.3f}"
        )


def on_ring(size: int, arguments: list[str]) -> list[str]:
    """What each of `size` processes of this script says."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    hosts = [[f"127.0.0.1:{s.getsockname()[1]}"] for s in sockets]
    for s in sockets:
        s.close()
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "hosts.json"
        listed.write_text(json.dumps(hosts))
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, *arguments, "--as-rank"],
                env=os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(listed)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            said = [process.communicate()[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(process.returncode for process in processes):
        sys.exit("A rank failed; see above.")
    return said


def measured(folder: Path, dtype: mx.Dtype) -> dict[str, int]:
    """By one rank."""
    group = mx.distributed.init(strict=True, backend="ring")
    ranks = Ranks(rank=group.rank(), size=group.size(), group=group)
    model = ModelFolder(folder)
    config, weights = model.config(), model.read()
    own = share(architecture(config).parse(config), ranks)
    stored = 0
    for name, value in weights.items():
        cut = own.cut_of(name)
        kept = 1.0 if cut is None else sum(end - first for first, end in cut.ranges) / cut.total
        stored += int(kept * value.nbytes)
    del weights
    mx.eval(ranks.sum(mx.ones(1)))  # the ring stands before anything is counted
    mx.reset_peak_memory()
    before, read = _resident("VmRSS"), _read()
    _forget_peak()
    made = assemble(config, model.read, dtype, ranks=ranks)
    found = {"read": _read() - read, "peak": mx.get_peak_memory(), "resident": _resident("VmHWM") - before}
    held = [m for m in (made.model, made.mtp) if m is not None]
    out = made.model.forward(mx.zeros(1, mx.int32), FlatRows((1,)), made.model.make_cache(1))
    mx.eval(out.logits)
    return found | {"share": bytes_of(*held), "stored": stored}


def _read() -> int:
    if not _IO.is_file():
        return 0
    return int(_fields(_IO)["rchar"])


def _resident(field: str) -> int:
    return 1024 * int(_fields(_STATUS)[field].split()[0]) if _STATUS.is_file() else 0


def _forget_peak() -> None:
    clear = Path("/proc/self/clear_refs")
    if clear.is_file():
        clear.write_text("5")


def _fields(path: Path) -> dict[str, Any]:
    lines = (line.partition(":") for line in path.read_text().splitlines())
    return {name: value.strip() for name, _, value in lines}


if __name__ == "__main__":
    main()
