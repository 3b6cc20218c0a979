#!/usr/bin/env python3
"""The same weights through mlxspec, mlx-lm, mlx-vlm and llama.cpp on this machine's CPU, in turn, in one run.

    python scripts/compare_peers.py --llama-cpp SOURCE [--dtype float32 bfloat16] [--rounds 3] [--prompts 4] [--tokens 128] [--rows 1 4]

Every engine is a process of its own with an environment of its own (made under --work the first time; nothing goes into ours), holds
the demo family in its own layout, and is fed token ids. Contestants take turns prompt by prompt; a figure is the median over rounds, and a
speed-up is the median of the ratios within rounds. What is timed: the tokens behind each row's first. All MLX engines load the same BLAS.
An engine that cannot be built or started, and a method that it lacks, stands in the table with the reason.

A table is of one run. --rows and --dtype with --keep make a page of several runs where one would take too long; --out writes it
and the picture of the docs. --draw PAGE draws that picture from the tables of a page and measures nothing.

--python NAME=PATH takes an environment that exists (mlx-lm, mlx-vlm, convert) instead of making one; --skip leaves engines out.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from peers import llama_cpp, tables  # noqa: E402
from peers.contest import PREFILLS, Contest, Engine  # noqa: E402
from peers.folders import environment, export  # noqa: E402
from peers.talk import PeerError, Worker  # noqa: E402

from mlxspec.demo import DRAFT, TARGET  # noqa: E402

PICTURE = ROOT / "docs" / "pictures" / "peers.png"
ENGINES = ("mlxspec", "mlx-lm", "mlx-vlm", "llama.cpp")
PACKAGES = {
    "mlx-lm": ["mlx[cpu]>=0.32", "mlx-lm>=0.32"],
    "mlx-vlm": ["mlx[cpu]>=0.32", "mlx-vlm>=0.7.10"],
    "convert": ["torch", "transformers", "sentencepiece", "gguf"],
}


def main() -> int:
    options = _options()
    if options.draw:
        tables.plot(options.draw.read_text(encoding="utf-8"), PICTURE)
        return 0
    options.work.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"machine": _machine(), "dtypes": {}, "missing": {}}
    results = options.work / "results.json"
    if options.keep and results.is_file():
        found["dtypes"] = json.loads(results.read_text())["dtypes"]
    for dtype in options.dtype:
        engines = _start(options, dtype, found["missing"])
        try:
            contest = Contest(
                engines,
                prompts=options.prompts,
                tokens=options.tokens,
                rounds=options.rounds,
                rows=options.rows,
                prefills=options.prefill,
            )
            part, before = contest.run(), found["dtypes"].get(dtype, {})
            part["lacks"] = before.get("lacks", {}) | part["lacks"]
            found["dtypes"][dtype] = before | part
        finally:
            for engine in engines:
                engine.close()
        results.write_text(json.dumps(found, indent=1))
    text = tables.page(found)
    print(text)
    if options.out:
        options.out.write_text(text)
        tables.plot(text, PICTURE)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-cpp", type=Path, help="a checkout of llama.cpp; left out without it")
    parser.add_argument(
        "--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--prompts", type=int, default=4, help="of each workload; four make one group of rows"
    )
    parser.add_argument("--tokens", type=int, default=128, help="of an answer at most")
    parser.add_argument("--rows", nargs="+", type=int, choices=(1, 4), default=[1, 4])
    parser.add_argument(
        "--prefill",
        nargs="+",
        type=int,
        default=PREFILLS,
        metavar="LENGTH",
        help="prompts to time reading of",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="leave what earlier runs found of other dtypes and numbers of rows",
    )
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "peers")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--skip", nargs="+", choices=ENGINES[1:], default=[])
    parser.add_argument("--out", type=Path, help=f"write the page here, and {PICTURE.relative_to(ROOT)}")
    parser.add_argument(
        "--draw", type=Path, metavar="PAGE", help="measure nothing, draw the picture of a page"
    )
    return parser.parse_args()


def _machine() -> dict[str, Any]:
    from mlxspec.platform import device

    report = device.report()
    return {
        "system": platform.platform(),
        "device": report.device,
        "threads": report.threads,
        "blas": report.blas,
    }


def _start(options: argparse.Namespace, dtype: str, missing: dict[str, str]) -> list[Engine]:
    """Every engine that can be had, ours first; why the others cannot goes to `missing`."""
    from mlxspec.platform import device

    given = dict(entry.split("=", 1) for entry in options.python)
    work, blas = options.work, device.report().blas_path or ""
    models = {
        "target": export(TARGET, work / "target"),
        "draft": export(DRAFT, work / "draft"),
        "text": export(TARGET, work / "text", model_type="qwen3_5_text"),
        "text-draft": export(DRAFT, work / "text-draft", model_type="qwen3_5_text"),
    }

    def python(name: str) -> Path:
        return Path(given[name]) if name in given else environment(work / f"venv-{name}", PACKAGES[name])

    def worker(module: str, interpreter: Path | str, **question: str) -> tuple[Worker, str]:
        started = Worker(
            [interpreter, "-m", f"peers.{module}", blas], ROOT / "scripts", work / f"{module}.log"
        )
        return started, str(started.ask("start", dtype=dtype, **question)["version"])

    def llama() -> tuple[llama_cpp.LlamaCpp, str]:
        if options.llama_cpp is None:
            raise PeerError("no checkout was given (--llama-cpp)")
        source, log = options.llama_cpp.resolve(), work / "llama.cpp.log"
        server = llama_cpp.build(source, work / "llama.cpp", log)
        files = [
            llama_cpp.convert(
                python("convert"),
                source,
                models[name],
                work / f"{name}-{dtype}.gguf",
                dtype,
                log,
                head=name == "text",
            )
            for name in ("text", "text-draft")
        ]
        peer = llama_cpp.LlamaCpp(
            server=server, model=files[0], draft=files[1], threads=device.report().threads, log=log
        )
        return peer, llama_cpp.revision(source)

    target, draft = str(models["target"]), str(models["draft"])
    makers = {
        "mlxspec": lambda: worker("worker_mlxspec", sys.executable, model=target, draft_model=draft),
        "mlx-lm": lambda: worker("worker_mlx_lm", python("mlx-lm"), model=target, draft_model=draft),
        "mlx-vlm": lambda: worker(
            "worker_mlx_vlm", python("mlx-vlm"), model=str(models["text"]), head=target
        ),
        "llama.cpp": llama,
    }
    engines = []
    for name, make in makers.items():
        if name in options.skip:
            missing[name] = "left out"
            continue
        try:
            peer, version = make()
        except PeerError as error:
            if name == "mlxspec":
                raise
            missing[name] = str(error)
            print(f"{name}: {error}", file=sys.stderr)
            continue
        engines.append(Engine(name=name, peer=peer, version=version))
    return engines


if __name__ == "__main__":
    sys.exit(main())
