#!/usr/bin/env python3
"""What a model of real size costs on this machine, in ratios: load, memory, prefill, plain decoding, verify, first token.

    scripts/bench_sizes FOLDER ... [--dtypes float32 bfloat16] [--parts load decode] [--rounds 3] [--prefill 512] [--json FILE]

FOLDER is a model as scripts/write_checkpoint makes them, or any other that mlx-lm runs too. A folder of floats is measured in float32, as a
CPU runs it by default, and in bfloat16; a quantized folder as each engine runs it. mlx-lm loads a folder of floats as it is stored. For
float32 its weights are cast behind that, and the time of the load with the cast stands in the table too.

load: each measurement is a process of its own, and processes take turns. Imports are not timed, but in "first token", which is from
the start of the process to the first token behind a prompt of --first tokens. Reading is a sequential read of the same files into memory
that is kept, with a warm page cache: the files are read once before anything is timed. A load has to fill memory too. "through a buffer"
is the same read into one buffer of 8 MiB. Weights: the load without the tokenizer. Peak over what stays: the most memory that the process
held until the model was loaded, over what it holds then; of MLX: the same of MLX's own memory.

decode: both engines hold the model and take turns. A verify is a forward of so many tokens with sampling, acceptance and rollback, of
which none is accepted; a plain step is a round of plain decoding of the same runner. Prompts and answers are shortened where a measurement
would take more than --seconds.

Figures are medians over rounds, ratios are medians of the ratios within rounds. --json keeps what was measured; parts that are in
it are not measured again. Needs a quiet machine and memory for two copies of the model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from alternating import alternate, median, ratio  # noqa: E402
from peers.talk import Worker, peak_memory, serve  # noqa: E402

READING, THROUGH_A_BUFFER = "reading", "through a buffer"
OURS, WITH_DRAFTERS, PEER, PEER_CAST = "mlxspec", "mlxspec with drafters", "mlx-lm", "mlx-lm, cast"
PARTS = ("decode", "load")  # in this order, so that what MLX compiles for a CPU is there when loads are timed
VERIFIES = (4, 16)
PROBES = 8, 64  # tokens of prompts by which the length of the timed one is chosen
ANSWERED = 2  # tokens of the prompt behind which plain decoding is timed
PLAIN_STEPS = 4  # of the runner of verifies, timed together
_BUFFER = 8 << 20

Part = dict[str, Any]

# measure -> (part, how it follows from what was found); in the order of the table
_RATIOS: dict[str, tuple[str, str, str]] = {
    "load / reading": ("load", OURS, READING),
    "load / reading through a buffer": ("load", OURS, THROUGH_A_BUFFER),
    "load / mlx-lm's load": ("load", OURS, PEER),
    "load / mlx-lm's load, cast to float32": ("load", OURS, PEER_CAST),
    "load with drafters / mlx-lm's load": ("load", WITH_DRAFTERS, PEER),
    "weights / reading": ("weights", OURS, READING),
    "weights / mlx-lm's": ("weights", OURS, PEER),
    "weights / mlx-lm's, cast to float32": ("weights", OURS, PEER_CAST),
    "first token / mlx-lm's": ("first", OURS, PEER),
    "prefill / mlx-lm's": ("prefill", OURS, PEER),
    "plain decoding, speed / mlx-lm's": ("plain", PEER, OURS),
    **{f"verify of {w} / plain step": ("verify", f"verify {w}", "plain step") for w in VERIFIES},
}


def main() -> int:
    options = _options()
    if options.process:
        name, folder, dtype, first, born = options.process
        print(json.dumps(_loaded(name, Path(folder), dtype, int(first), float(born))))
        return 0
    if options.worker:
        _serve(options.worker)
        return 0
    kept = json.loads(options.json.read_text()) if options.json and options.json.is_file() else {}
    columns: dict[str, Part] = {}
    for folder in options.folders:
        for dtype in _dtypes(folder, options.dtypes):
            name = f"{folder.resolve().name}, {dtype}"
            found = columns[name] = kept.setdefault(name, {})
            for part in PARTS:
                if part in options.parts and part not in found:
                    measure = {"load": measure_load, "decode": measure_decode}[part]
                    found[part] = measure(folder, dtype, options)
                    if options.json:
                        options.json.write_text(json.dumps(kept, indent=1) + "\n")
    print(table({name: summary(found) for name, found in columns.items()}))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt, at most")
    parser.add_argument("--tokens", type=int, default=16, help="of a timed answer, at most")
    parser.add_argument("--first", type=int, default=8, help='tokens of the prompt of "first token"')
    parser.add_argument("--seconds", type=float, default=12.0, help="of one measurement, about")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--process", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=(OURS, PEER), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process or options.worker:
        return options
    if not options.folders:
        parser.error("name a model folder")
    for folder in options.folders:
        if not (folder / "config.json").is_file():
            parser.error(f"there is no config.json in {folder}")
    if min(options.rounds, options.prefill, options.tokens, options.first) < 1:
        parser.error("--rounds, --prefill, --tokens and --first must be at least 1")
    return options


def _dtypes(folder: Path, asked: list[str]) -> list[str]:
    """What a folder is run in: a quantized one in one way only."""
    quantized = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization")
    return asked if quantized is None else [f"{quantized['bits']} bits"]


def summary(found: Mapping[str, Part]) -> dict[str, float | str]:
    """Measure -> ratio, of one folder and dtype; a part that was not measured is left out."""
    out: dict[str, float | str] = {}
    taken = {**found.get("load", {}).get("taken", {}), **found.get("decode", {}).get("taken", {})}
    for name, (kind, one, other) in _RATIOS.items():
        seconds = taken.get(kind, {})
        if one in seconds and other in seconds:
            out[name] = ratio(seconds, one, other)
    if "load" in found:
        for who in (OURS, PEER):
            memory = found["load"]["memory"][who]
            own = "" if who == OURS else ", mlx-lm"
            out[f"peak / what stays{own}"] = memory["peak"] / memory["stays"]
            out[f"of MLX: peak / what stays{own}"] = memory["mlx_peak"] / memory["mlx_stays"]
        out["files, GB"] = found["load"]["bytes"] / 1e9
        out["reading, GB/s"] = found["load"]["bytes"] / median(taken["load"], READING) / 1e9
    if "decode" in found:
        decode = found["decode"]
        rows = decode["row_bytes"]
        out["bytes of a row / mlx-lm's"] = rows[OURS] / rows[PEER]
        out["a row, MB"] = rows[OURS] / 1e6
        out["weights in memory, GB"] = decode["weights"] / 1e9
        out["tokens of the prompt, answer"] = f"{decode['prompt']}, {decode['answer']}"
    return out


def table(columns: Mapping[str, Mapping[str, float | str]]) -> str:
    """One table: a line for each measure, a column for each folder and dtype."""
    measures = dict.fromkeys(measure for found in columns.values() for measure in found)
    lines = [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for measure in measures:
        cells = [found.get(measure, "") for found in columns.values()]
        shown = [cell if isinstance(cell, str) else f"{cell:.2f}" for cell in cells]
        lines.append(f"| {measure} | {' | '.join(shown)} |")
    return "\n".join(lines)


def measure_load(folder: Path, dtype: str, options: argparse.Namespace) -> Part:
    """Processes that load, in turn. Whatever they time themselves is the time of their turn."""
    names = [READING, THROUGH_A_BUFFER, PEER, OURS, WITH_DRAFTERS]
    if dtype == "float32":
        names.insert(3, PEER_CAST)
    _read(folder, keep=False)
    found: dict[str, list[Part]] = {name: [] for name in names}
    clock = 0.0

    def load(name: str) -> None:
        nonlocal clock
        command = [sys.executable, __file__, "--process", name, str(folder), dtype, str(options.first)]
        done = subprocess.run(
            [*command, repr(time.monotonic())], check=True, stdout=subprocess.PIPE, text=True
        )
        found[name].append(json.loads(done.stdout.splitlines()[-1]))
        clock += found[name][-1]["load"]

    turns = {name: partial(load, name) for name in names}
    loads = alternate(turns, rounds=options.rounds, warmup=0, clock=lambda: clock)
    taken = {"load": loads}
    for kind in ("weights", "first"):
        taken[kind] = {name: [run[kind] for run in runs] for name, runs in found.items() if kind in runs[0]}
    taken["weights"][READING] = loads[READING]
    memory = {
        name: _medians([r["memory"] for r in runs]) for name, runs in found.items() if "memory" in runs[0]
    }
    return {"taken": taken, "memory": memory, "bytes": sum(f.stat().st_size for f in _files(folder))}


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _read(folder: Path, *, keep: bool) -> float:
    """Seconds of reading all weights' files, one behind the other."""
    files, held, buffer = _files(folder), [], bytearray(_BUFFER)
    started = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            if keep:
                held.append(file.read())
            while not keep and file.readinto(buffer):
                pass
    return time.perf_counter() - started


def _loaded(name: str, folder: Path, dtype: str, first: int, born: float) -> Part:
    """What a process of its own does: reads or loads once, and says a first token."""
    if name in (READING, THROUGH_A_BUFFER):
        return {"load": _read(folder, keep=name == READING)}
    if name in (PEER, PEER_CAST):
        return _loaded_by_mlx_lm(folder, dtype, first, born, cast=name == PEER_CAST)
    return _loaded_by_mlxspec(folder, dtype, first, born, draft="off" if name == OURS else "auto")


def _loaded_by_mlxspec(folder: Path, dtype: str, first: int, born: float, *, draft: str) -> Part:
    from unittest.mock import patch

    import mlxspec.engine.load as loading
    from mlxspec.config import SamplingParams
    from mlxspec.loading.tokenizer import Tokenizer

    read, tokenizing = Tokenizer.from_folder, 0.0

    def timed(*arguments: Any) -> Tokenizer:
        nonlocal tokenizing
        started = time.perf_counter()
        made = read(*arguments)
        tokenizing += time.perf_counter() - started
        return made

    with patch.object(Tokenizer, "from_folder", timed):
        started = time.perf_counter()
        engine = loading.load(str(folder), dtype=_own_dtype(dtype), draft=draft)
        taken = time.perf_counter() - started
    memory = _memory()
    engine.generate(_prompt(first), SamplingParams(max_tokens=1, ignore_eos=True))
    return {"load": taken, "weights": taken - tokenizing, "first": time.monotonic() - born, "memory": memory}


def _loaded_by_mlx_lm(folder: Path, dtype: str, first: int, born: float, *, cast: bool) -> Part:
    from mlxspec.platform import device  # noqa: F401  # the BLAS that both engines use

    # isort: split
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model, load_tokenizer

    started = time.perf_counter()
    model, config = load_model(folder)
    if cast:
        _cast(model, dtype)
    weights = time.perf_counter() - started
    tokenizer = load_tokenizer(folder, eos_token_ids=config.get("eos_token_id"))
    taken = time.perf_counter() - started
    memory = _memory()
    next(generate_step(mx.array(_prompt(first)), model, max_tokens=1))
    del tokenizer
    return {"load": taken, "weights": weights, "first": time.monotonic() - born, "memory": memory}


def _own_dtype(dtype: str) -> str | None:
    """What `load` is told: nothing where it runs a folder by default as the column says."""
    return "bfloat16" if dtype == "bfloat16" else None


def _cast(model: Any, dtype: str) -> None:
    """All floats of an mlx-lm model, as mlx-lm's users would."""
    import mlx.core as mx
    from mlx.utils import tree_map

    kind = {"float32": mx.float32, "bfloat16": mx.bfloat16}[dtype]
    model.update(
        tree_map(lambda p: p.astype(kind) if mx.issubdtype(p.dtype, mx.floating) else p, model.parameters())
    )
    mx.eval(model.parameters())


def _memory() -> dict[str, float]:
    """Bytes of this process, and of MLX in it: the most until now, and now. Without /proc the process's memory is MLX's."""
    import mlx.core as mx

    peak, stays = float(mx.get_peak_memory()), float(mx.get_active_memory())
    found = {"mlx_peak": peak, "mlx_stays": stays, "peak": float(peak_memory()), "stays": stays}
    with contextlib.suppress(OSError):
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        found["peak"], found["stays"] = (1024.0 * int(lines[key].split()[0]) for key in ("VmHWM", "VmRSS"))
    return found


def _prompt(length: int, first: int = 0) -> list[int]:
    return [(7 * i + first) % 250 + 1 for i in range(length)]


def measure_decode(folder: Path, dtype: str, options: argparse.Namespace) -> Part:
    """Two processes that hold the model, in turn."""
    log = Path(os.devnull)
    workers = {who: Worker([sys.executable, __file__, "--worker", who], ROOT, log) for who in (OURS, PEER)}
    try:
        started = {
            who: w.ask("start", folder=str(folder.resolve()), dtype=dtype) for who, w in workers.items()
        }

        def seconds(worker: Worker, do: str, **question: Any) -> float:
            return float(worker.ask(do, **question)["seconds"])

        def each(do: str, **question: Any) -> dict[str, Callable[[], float]]:
            return {who: partial(seconds, worker, do, **question) for who, worker in workers.items()}

        def turns(do: str, **question: Any) -> dict[str, list[float]]:
            return _told(each(do, **question), rounds=options.rounds)

        prompt = min(PROBES[0], options.prefill)
        for probe in (prompt, PROBES[1]):
            if probe <= prompt:
                _told(each("prefill", length=probe), rounds=1)
                slowest = max(map(max, _told(each("prefill", length=probe), rounds=1).values()))
                prompt = _fitting(slowest / probe, options.seconds, options.prefill)
        slowest = max(map(max, _told(each("plain", tokens=2), rounds=1).values()))
        answer = _fitting(slowest, options.seconds, options.tokens)
        taken = {
            "prefill": turns("prefill", length=prompt),
            "plain": turns("plain", tokens=answer),
        }
        taken["verify"] = workers[OURS].ask("verify", rounds=options.rounds)["taken"]
        row_bytes = {who: w.ask("row", length=prompt)["bytes"] for who, w in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    return {
        "taken": taken,
        "row_bytes": row_bytes,
        "weights": started[OURS]["weights"],
        "prompt": prompt,
        "answer": answer,
    }


def _told(contestants: Mapping[str, Callable[[], float]], *, rounds: int) -> dict[str, list[float]]:
    """Alternating, where a turn takes as long as it says itself."""
    clock = 0.0

    def turn(work: Callable[[], float]) -> None:
        nonlocal clock
        clock += work()

    turns = {name: partial(turn, work) for name, work in contestants.items()}
    return alternate(turns, rounds=rounds, warmup=0, clock=lambda: clock)


def _fitting(each: float, seconds: float, most: int) -> int:
    """How many of `each` seconds fit into so many seconds: at least 2, at most `most`, and a power of two below that."""
    fits = 2
    while 2 * fits * each <= seconds and 2 * fits <= most:
        fits *= 2
    return most if most * each <= seconds else min(fits, most)


def _serve(who: str) -> None:
    serve((_our_handlers if who == OURS else _peer_handlers)())


def _our_handlers() -> dict[str, Callable[..., Part]]:
    from mlxspec.platform import device

    device.compile_kernels()
    import mlx.core as mx

    from mlxspec import load
    from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
    from mlxspec.engine.engine import Engine
    from mlxspec.kernels.flat import FlatRows
    from mlxspec.policy.bare_rounds import BareRounds

    engines: list[Engine] = []

    def start(folder: str, dtype: str) -> Part:
        made = load(folder, dtype=_own_dtype(dtype), draft="off", config=EngineConfig(prefix_budget=0))
        engines[:] = [made]
        return {"weights": made.memory.weights}

    def prefill(length: int) -> Part:
        started = time.perf_counter()
        engines[0].generate(_prompt(length), SamplingParams(max_tokens=1, ignore_eos=True))
        return {"seconds": time.perf_counter() - started}

    def plain(tokens: int) -> Part:
        """Seconds a token behind the first."""
        engine, started = engines[0], time.perf_counter()
        request = engine.submit(
            _prompt(ANSWERED), SamplingParams(max_tokens=1 + tokens, ignore_eos=True), spec=SpecConfig()
        )
        while not engine.is_idle:
            engine.step()
        # by what reading the prompt took: when its first token is heard of, further rounds are on their way already
        spent = time.perf_counter() - started - request.stats.prefill_seconds
        return {"seconds": spent / tokens}

    def verify(rounds: int) -> Part:
        engine = engines[0]
        with device.private_kernels():
            drafted, plainly = (
                BareRounds(engine.model, engine.config, drafts=drafts, layers=engine.chain.streams.layers)
                for drafts in (True, False)
            )

            def steps() -> float:
                started = time.perf_counter()
                for _ in range(PLAIN_STEPS):
                    plainly.run(1)
                mx.synchronize()  # a round more is on its way, as one was at the start
                return (time.perf_counter() - started) / PLAIN_STEPS

            contestants = {"plain step": steps}
            contestants |= {f"verify {w}": partial(drafted.run, w) for w in VERIFIES}
            for _ in range(2):
                for contestant in contestants.values():
                    contestant()
            return {"taken": _told(contestants, rounds=max(rounds, 5))}

    def row(length: int) -> Part:
        model = engines[0].model
        with device.private_kernels():
            cache = model.make_cache(1)
            tokens = mx.array(_prompt(length), mx.int32)
            out = model.forward(tokens, FlatRows((length,)), cache, facts=True, logits_at="last")
            cache.commit()
            mx.eval(out.logits, cache.arrays)
        return {"bytes": sum(array.nbytes for array in cache.arrays)}

    return {"start": start, "prefill": prefill, "plain": plain, "verify": verify, "row": row}


def _peer_handlers() -> dict[str, Callable[..., Part]]:
    from mlxspec.platform import device  # noqa: F401  # the BLAS that both engines use

    # isort: split
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    models: list[Any] = []

    def start(folder: str, dtype: str) -> Part:
        made, _ = load_model(Path(folder))
        if dtype == "float32":
            _cast(made, dtype)
        models[:] = [made]
        return {}

    def prefill(length: int) -> Part:
        started = time.perf_counter()
        next(generate_step(mx.array(_prompt(length)), models[0], max_tokens=1))
        return {"seconds": time.perf_counter() - started}

    def plain(tokens: int) -> Part:
        stream = generate_step(mx.array(_prompt(ANSWERED)), models[0], max_tokens=1 + tokens)
        next(stream)
        started = time.perf_counter()
        counted = sum(1 for _ in stream)
        return {"seconds": (time.perf_counter() - started) / counted}

    def row(length: int) -> Part:
        cache = make_prompt_cache(models[0])
        mx.eval(models[0](mx.array(_prompt(length))[None], cache=cache), [c.state for c in cache])
        arrays = [a for c in cache for _, a in tree_flatten(vars(c)) if isinstance(a, mx.array)]
        return {"bytes": sum(a.nbytes for a in arrays)}

    return {"start": start, "prefill": prefill, "plain": plain, "row": row}


if __name__ == "__main__":
    sys.exit(main())
