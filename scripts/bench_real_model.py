#!/usr/bin/env python3
"""A real Gemma 3 270M on this machine's CPU: whether its texts are the same, how much lookup drafting gains, what it needs. 200 prompts.

    python scripts/bench_real_model.py FOLDER [--modes float32 mlx-lm bfloat16 4bit] [--minutes M]          texts; resumed where it ended
    python scripts/bench_real_model.py FOLDER --memory                                   peaks at 2,000 and 8,000 tokens, by dtype
    python scripts/bench_real_model.py FOLDER --timed [--minutes 10] [--per-kind 5]      speeds; on a quiet machine
    python scripts/bench_real_model.py FOLDER --llama-server PATH [--per-kind 5]         llama.cpp's n-gram drafting on the same GGUF file
    python scripts/bench_real_model.py FOLDER --page                                     docs/data/real-model.json, docs/real-model.md

FOLDER takes the results. The model must be there: scripts/real_model. Texts: ours in float32, bfloat16 and 4 bits (our own `convert`), 48
tokens, greedy, ended where the model ends. Many prompts decode together, plain and then drafted by a lookup that always drafts. The
drafted requests find their prompts in the prefix store. mlx-lm in float32
reads prompt and answer in one forward (real_parts/mlx_lm_reader.py). Where two texts differ, the distance of the two likeliest
log-probabilities there is kept. Every mode is a process of its own. Speeds: drafting off and `auto` in turn in one float32 engine, by time
of decoding behind the first token.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from mlxspec.platform import device  # noqa: E402  # isort: skip  (before MLX: it loads a real BLAS)
from real_parts import mlx_lm_reader, places, real_page  # noqa: E402
from real_parts.prompts import KINDS, LENGTHS, PER_KIND, Prompt, prompts  # noqa: E402

MODES = ("float32", "mlx-lm", "bfloat16", "4bit")  # mlx-lm reads float32's answers
TOKENS = 48
ROWS = (
    21  # prompts that decode together, three of each short kind: a forward of all rows reads the weights once
)
NUM_LENGTHS = len(LENGTHS[0])  # of each long document
MEMORY_PROMPTS = {"long-03": 2000, "long-24": 8000}
TIMED_KIND, REPEATS, TIMED_MINUTES = 5, 2, 10
Row = dict[str, Any]


def main() -> int:
    options = _options()
    why = places.missing(places.MODEL)
    if why:
        print(f"bench_real_model: {why}.", file=sys.stderr)
        return 1
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.page:
        real_page.write(options.folder, ROOT / "docs")
    elif options.llama_server:
        _llama(options)
    elif options.memory:
        _memory(options)
    elif options.peak_of:
        _peak(options)
    elif options.timed:
        _timed(options)
    elif options.mode:
        _texts(options)
    else:
        until = _until(options)
        for mode in options.modes:
            left = until - time.monotonic()
            if left <= 0:
                break
            command = [sys.executable, __file__, str(options.folder), "--mode", mode]
            command += ["--per-kind", str(options.per_kind or PER_KIND), "--tokens", str(options.tokens)]
            command += ["--kinds", *options.kinds]
            command += ["--minutes", str(left / 60)] if math.isfinite(left) else []
            if subprocess.run(command).returncode:
                print(f"bench_real_model: {mode} ended early; the same command goes on.", file=sys.stderr)
                return 1
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where results are kept")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--mode", choices=MODES, help="one of them, in this process")
    parser.add_argument(
        "--per-kind", type=int, help=f"prompts a kind (texts {PER_KIND}, speeds {TIMED_KIND})"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, help="prompts of these kinds only"
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, help="longest answer")
    parser.add_argument("--memory", action="store_true", help="measure peaks of memory")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    parser.add_argument("--timed", action="store_true", help="measure speeds")
    parser.add_argument("--minutes", type=float, help="begin nothing new after so long (speeds: 10)")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server, asked with the same GGUF file")
    parser.add_argument("--page", action="store_true", help="write the page from the results")
    return parser.parse_args()


def _until(options: argparse.Namespace) -> float:
    """The time of the monotonic clock behind which nothing new begins."""
    return math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes


# --- texts


def _texts(options: argparse.Namespace) -> None:
    """One mode's rows, appended to its file. mlx-lm's are for prompts that float32 has rows for."""
    path = options.folder / f"{options.mode}.jsonl"
    known = {(row["name"], row["digest"]) for row in real_page.read(path) if "name" in row}
    rows = real_page.read(options.folder / "float32.jsonl")
    ours = {(row["name"], row["digest"]): row["tokens"] for row in rows if "name" in row}
    groups = [[p for p in group if (p.name, _digest(p)) not in known] for group in _groups(options)]
    if options.mode == "mlx-lm":  # one by one: nothing decodes together
        groups = [[p] for group in groups for p in group if (p.name, _digest(p)) in ours]
    groups = [group for group in groups if group]
    if not groups:
        return
    until = _until(options)
    run = _mlx_lm(options) if options.mode == "mlx-lm" else _ours(options)
    next(run)
    with path.open("a") as out:
        for group in groups:
            if time.monotonic() > until:
                break
            answers = [ours.get((prompt.name, _digest(prompt))) for prompt in group]
            for prompt, row in zip(group, run.send((group, answers)), strict=True):
                head = {"name": prompt.name, "kind": prompt.kind, "digest": _digest(prompt)}
                head["prompt"] = len(prompt.tokens)
                print(json.dumps(head | row | {"commit": _commit()}), file=out, flush=True)
        print(json.dumps({"summary": run.send(None)} | {"commit": _commit()}), file=out, flush=True)


def _groups(options: argparse.Namespace) -> list[list[Prompt]]:
    """Prompts that decode together. Long ones are apart and the shortest first, so that the longer ones begin with what the prefix store
    has of the same document."""
    found = [p for p in _prompts(options.per_kind or PER_KIND) if p.kind in options.kinds]
    short = [p for p in found if p.kind != "long"]
    groups = [short[i : i + ROWS] for i in range(0, len(short), ROWS)]
    for place in range(NUM_LENGTHS):
        group = [p for p in found if p.kind == "long" and int(p.name[-2:]) % NUM_LENGTHS == place]
        groups.insert(2 * place + 1, group)
    return [group for group in groups if group]


# A run is sent (prompts, answers of ours or None) and gives one row for each prompt; it is sent None and gives a summary.
Run = Iterator[Any]


def _mlx_lm(options: argparse.Namespace) -> Any:
    """Rows of mlx-lm. It reads our answer behind the prompt in one forward, and its likeliest token at each place must be ours. Where they
    differ or nearly tie, it decodes."""
    with device.private_kernels():
        import mlx.core as mx
        from mlx.utils import tree_map
        from mlx_lm.utils import load_model

        model, _ = load_model(places.place(places.MODEL))
        model.update(tree_map(lambda p: p.astype(mx.float32), model.parameters()))
        mx.eval(model.parameters())
        reader = mlx_lm_reader.Reader(model, ends=_tokenizer().eos_ids, limit=options.tokens)
        asked = yield
        while asked is not None:
            rows = []
            for prompt, answer in zip(*asked, strict=True):
                read = reader.read(prompt.tokens, answer)
                tokens = list(answer) if read["sure"] else reader.decode(prompt.tokens)
                rows.append({"tokens": tokens, "decoded": not read["sure"], "read": read})
                mx.clear_cache()
            asked = yield rows
        yield {"peak_bytes": mx.get_peak_memory()}


def _ours(options: argparse.Namespace) -> Any:
    """Rows of our engine: a group of prompts plain together, then drafted together."""
    import mlx.core as mx

    from mlxspec import EngineConfig, SamplingParams, SpecConfig, load

    dtype = None if options.mode == "4bit" else options.mode
    engine = load(_model(options), dtype=dtype, config=EngineConfig(max_rows=ROWS))
    params = SamplingParams(max_tokens=options.tokens)
    off, on = SpecConfig(drafters=()), SpecConfig(drafters=("ngram-simple",), policy="fixed")
    asked = yield
    while asked is not None:
        given = [list(prompt.tokens) for prompt in asked[0]]
        plain = engine.generate(given, params, spec=off)
        drafted = engine.generate(given, params, spec=on)
        rows = []
        for prompt, first, second in zip(asked[0], plain, drafted, strict=True):
            for result in (first, second):
                if result.error is not None:
                    raise SystemExit(f"{prompt.name}: {result.error}")
            row = {
                "tokens": list(first.tokens),
                "cached": second.stats.num_cached,
                "drafted": second.stats.num_drafted,
                "accepted": second.stats.num_accepted,
                "rounds": second.stats.num_rounds,
                "decoded": second.stats.num_decoded,
                "num_rows": len(given),
                "same_drafted": second.tokens == first.tokens,
            }
            if second.tokens != first.tokens:
                again = engine.generate(
                    list(prompt.tokens), params, spec=off
                )  # plain, with the same prefix hit
                row["same_hit"] = again.tokens == first.tokens
                row["flip"] = _flip(engine, prompt.tokens, first.tokens, second.tokens)
            rows.append(row)
        asked = yield rows
    yield {
        "peak_bytes": mx.get_peak_memory(),
        "weight_bytes": engine.memory.weights,
        "notices": list(engine.notices),
    }


def _flip(engine: Any, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> Row:
    """Where two texts part, and by how much the likeliest token leads the second there (log-probabilities, plain decoding)."""
    from mlxspec import SamplingParams, SpecConfig

    pairs = enumerate(zip(plain, other, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(other)))
    params = SamplingParams(max_tokens=1, top_logprobs=2, ignore_eos=True)
    found = engine.generate([*prompt, *plain[:place]], params, spec=SpecConfig(drafters=()))
    top = found.logprobs[0].top if found.logprobs else ()
    return {"place": place, "gap": float(top[0].logprob - top[1].logprob) if len(top) > 1 else None}


# --- memory


def _memory(options: argparse.Namespace) -> None:
    """Peaks by dtype and prompt, each in a process of its own; what is known already is kept."""
    path = options.folder / "memory.jsonl"
    known = {(row["mode"], row["prompt"]) for row in real_page.read(path)}
    for mode in [mode for mode in options.modes if mode in real_page.OURS]:
        for name, length in MEMORY_PROMPTS.items():
            if (mode, length) in known:
                continue
            command = [sys.executable, __file__, str(options.folder), "--mode", mode, "--peak-of", name]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            with path.open("a") as out:
                out.write(done.stdout.splitlines()[-1] + "\n")


def _peak(options: argparse.Namespace) -> None:
    """One process: a prompt is read, 16 tokens are decoded with drafts; what MLX held at most behind the load, as a line of JSON."""
    import resource

    import mlx.core as mx

    from mlxspec import SamplingParams, load

    prompt = next(p for p in _prompts(PER_KIND) if p.name == options.peak_of)
    engine = load(_model(options), dtype=None if options.mode == "4bit" else options.mode)
    load_peak = mx.get_peak_memory()
    mx.reset_peak_memory()
    answer = engine.generate(list(prompt.tokens), SamplingParams(max_tokens=16, ignore_eos=True))
    if answer.error is not None:
        raise SystemExit(f"{prompt.name}: {answer.error}")
    found = {
        "mode": options.mode,
        "prompt": len(prompt.tokens),
        "weight_bytes": engine.memory.weights,
        "load_peak_bytes": load_peak,
        "peak_bytes": mx.get_peak_memory(),
        "resident_bytes": 1024
        * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,  # of the process, the load included
        "commit": _commit(),
    }
    print(json.dumps(found))


def _model(options: argparse.Namespace) -> str:
    """The folder to load; the one in 4 bits is made here, once."""
    folder = places.place(places.MODEL)
    if options.mode != "4bit":
        return str(folder)
    made = options.folder / "gemma-3-270m-4bit"
    if not made.exists():
        command = [sys.executable, "-m", "mlxspec", "convert", str(folder), "--bits", "4", "-o", str(made)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return str(made)


# --- speeds


def _timed(options: argparse.Namespace) -> None:
    """Off and auto in turn; a prompt of every kind, then the next of every kind, until the time is over."""
    from mlxspec import SamplingParams, SpecConfig, load

    until = time.monotonic() + 60 * (options.minutes or TIMED_MINUTES)
    engine = load(str(places.place(places.MODEL)), dtype="float32")
    specs = {"off": SpecConfig(drafters=()), "auto": engine.spec}
    per_kind = options.per_kind or TIMED_KIND
    rows = []
    for prompt in _prompts(per_kind):
        for temperature in (0.0, 1.0):
            if time.monotonic() > until:
                break
            params = SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=1)
            engine.generate(list(prompt.tokens), SamplingParams(max_tokens=1), spec=specs["off"])  # read it
            taken: dict[str, list[Any]] = {name: [] for name in specs}
            for turn in range(REPEATS):
                for name in list(specs)[:: -1 if turn % 2 else 1]:
                    taken[name].append(engine.generate(list(prompt.tokens), params, spec=specs[name]))
            rows.append(_timed_row(prompt, temperature, taken))
    found = {"machine": _machine(), "commit": _commit(), "tokens": options.tokens, "rows": rows}
    (options.folder / "timed.json").write_text(json.dumps(found, indent=1) + "\n")
    print(real_page.speeds_table(real_page.summary({mode: [] for mode in real_page.OURS}, found)))


def _timed_row(prompt: Prompt, temperature: float, taken: dict[str, list[Any]]) -> Row:
    off, auto = taken["off"], taken["auto"]
    seconds = {name: statistics.median(r.stats.decode_seconds for r in runs) for name, runs in taken.items()}
    return {
        "name": prompt.name,
        "kind": prompt.kind,
        "temperature": temperature,
        "prompt": len(prompt.tokens),
        "decoded": off[0].stats.num_decoded,
        "off_seconds": seconds["off"],
        "auto_seconds": seconds["auto"],
        # within each turn, so that what slows the machine down slows both
        "ratio": statistics.median(
            a.stats.decode_seconds / b.stats.decode_seconds for a, b in zip(off, auto, strict=True)
        )
        if off[0].stats.num_decoded and seconds["auto"]
        else None,
        "rounds": auto[-1].stats.num_rounds,
        "drafted": auto[-1].stats.num_drafted,
        "accepted": auto[-1].stats.num_accepted,
        "cached": auto[-1].stats.num_cached,
        "same": all(r.tokens == off[0].tokens for r in (*off, *auto)),
    }


# --- llama.cpp


def _llama(options: argparse.Namespace) -> None:
    """Plain decoding and n-gram drafting of llama.cpp on the GGUF file that the weights are from, appended to a file."""
    from peers.llama_cpp import LlamaCpp

    path = options.folder / real_page.LLAMA
    known = {(row["name"], row["digest"]) for row in real_page.read(path)}
    gguf, until = places.place(places.MODEL) / places.GGUF, _until(options)
    threads, log = device.report().threads, options.folder / "llama-server.log"
    peer = LlamaCpp(
        server=options.llama_server, model=gguf, draft=gguf, threads=threads, log=log, context=9216
    )
    try:
        with path.open("a") as out:
            asked = [p for p in _prompts(options.per_kind or TIMED_KIND) if p.kind in options.kinds]
            for prompt in asked:
                if (prompt.name, _digest(prompt)) not in known and time.monotonic() < until:
                    head = {"name": prompt.name, "kind": prompt.kind, "digest": _digest(prompt)}
                    print(json.dumps(head | _llama_row(peer, prompt, options.tokens)), file=out, flush=True)
    finally:
        peer.close()


def _llama_row(peer: Any, prompt: Prompt, tokens: int) -> Row:
    """Counts of drafting, and the seconds of decoding of both ways."""
    plain, drafted = (
        peer.ask("run", prompts=[list(prompt.tokens)], num_tokens=[tokens], method=method)
        for method in ("plain", "ngram-simple")
    )
    return {
        "prompt": len(prompt.tokens),
        "decoded": drafted["num_timed"],
        "rounds": drafted["num_rounds"],
        "drafted": drafted["num_drafted"],
        "accepted": drafted["num_accepted"],
        "plain_seconds": plain["seconds"],
        "seconds": drafted["seconds"],
        "same": plain["tokens"] == drafted["tokens"],
    }


# --- what all share


def _tokenizer() -> Any:
    from mlxspec.loading.tokenizer import Tokenizer

    return Tokenizer.from_folder(places.place(places.MODEL))


def _prompts(per_kind: int) -> list[Prompt]:
    """One of every kind, then the next of every kind: what there is when a run ends early is of all kinds."""
    found = prompts(_tokenizer().encode, per_kind=per_kind)
    return sorted(found, key=lambda p: (int(p.name[-2:]), KINDS.index(p.kind)))


def _digest(prompt: Prompt) -> str:
    return hashlib.sha256(json.dumps(prompt.tokens).encode()).hexdigest()[:16]


def _commit() -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def _machine() -> Row:
    report = device.report()
    return {
        "system": platform.platform(),
        "device": report.device,
        "threads": report.threads,
        "blas": report.blas,
    }


if __name__ == "__main__":
    sys.exit(main())
