#!/usr/bin/env python3
"""A real Gemma 3 270M on this machine's CPU: whether its texts are the same, how much lookup drafting gains, what it needs. 200 prompts.

    python scripts/bench_real_model.py FOLDER [--modes mlx-lm float32 bfloat16 4bit] [--per-kind 25]        texts; resumed where it ended
    python scripts/bench_real_model.py FOLDER --timed [--minutes 10] [--llama-server PATH] [--per-kind 5]   speeds; on a quiet machine
    python scripts/bench_real_model.py FOLDER --page                                     docs/data/real-model.json, docs/real-model.md

FOLDER takes the results. The model must be there: scripts/real_model. Texts: mlx-lm's in float32; then ours in float32, bfloat16 and 4 bits
(our own `convert`), each prompt plain and drafted by lookup that always drafts, 48 tokens, greedy, ended where the model ends. The drafted
one finds the prompt in the prefix store. Where two texts differ, the distance of the two likeliest log-probabilities there is kept. Every
mode is a process of its own. Speeds: drafting off and `auto` in turn in one float32 engine, by time of decoding behind the first token.
"""

from __future__ import annotations

import argparse
import hashlib
import json
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

from real_parts import places, real_page  # noqa: E402
from real_parts.prompts import KINDS, PER_KIND, Prompt, prompts  # noqa: E402

MODES = ("mlx-lm", "float32", "bfloat16", "4bit")
TOKENS = 48
STEP = 5  # prompts of each kind that every mode runs before any mode goes on
TIMED_KIND, REPEATS = 5, 2
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
    elif options.timed:
        _timed(options)
    elif options.mode:
        _texts(options)
    else:
        wanted = options.per_kind or PER_KIND
        for per_kind in [
            *range(STEP, wanted, STEP),
            wanted,
        ]:  # every mode has the first prompts before one has the last
            for mode in options.modes:
                command = [sys.executable, __file__, str(options.folder), "--mode", mode]
                command += ["--per-kind", str(per_kind), "--tokens", str(options.tokens)]
                done = subprocess.run(command)
                if done.returncode:
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
    parser.add_argument("--tokens", type=int, default=TOKENS, help="longest answer")
    parser.add_argument("--timed", action="store_true", help="measure speeds")
    parser.add_argument("--minutes", type=float, default=10.0, help="longest time for speeds")
    parser.add_argument(
        "--llama-server", type=Path, help="llama.cpp's server, to be timed on the same GGUF file"
    )
    parser.add_argument("--page", action="store_true", help="write the page from the results")
    return parser.parse_args()


# --- texts


def _texts(options: argparse.Namespace) -> None:
    """One mode's rows, appended to its file."""
    path = options.folder / f"{options.mode}.jsonl"
    known = {(row["name"], row["digest"]) for row in real_page.read(path) if "name" in row}
    run = _mlx_lm(options) if options.mode == "mlx-lm" else _ours(options)
    peer = {row["name"]: row for row in real_page.read(options.folder / real_page.PEER) if "name" in row}
    next(run)
    with path.open("a") as out:
        for prompt in _prompts(options.per_kind or PER_KIND):
            digest = _digest(prompt)
            if (prompt.name, digest) in known:
                continue
            expected = peer.get(prompt.name)
            same_prompt = expected is not None and expected["digest"] == digest
            row = run.send((prompt, expected["tokens"] if same_prompt else None))
            head = {"name": prompt.name, "kind": prompt.kind, "digest": digest, "prompt": len(prompt.tokens)}
            print(json.dumps(head | row | {"commit": _commit()}), file=out, flush=True)
        print(json.dumps({"summary": run.send(None)} | {"commit": _commit()}), file=out, flush=True)


Run = Iterator[Any]  # is sent (prompt, expected tokens) and gives a row; is sent None and gives a summary


def _mlx_lm(options: argparse.Namespace) -> Any:
    from mlxspec.platform import device  # before MLX: both engines compute with the same BLAS

    with device.private_kernels():
        import mlx.core as mx
        from mlx.utils import tree_map
        from mlx_lm.generate import generate_step
        from mlx_lm.utils import load_model

        model, _ = load_model(places.place(places.MODEL))
        model.update(tree_map(lambda p: p.astype(mx.float32), model.parameters()))
        mx.eval(model.parameters())
        ends = _tokenizer().eos_ids
        asked = yield
        while asked is not None:
            tokens: list[int] = []
            for token, _ in generate_step(mx.array(asked[0].tokens), model, max_tokens=options.tokens):
                if int(token) in ends:
                    break
                tokens.append(int(token))
            mx.clear_cache()
            asked = yield {"tokens": tokens}
        yield {"peak_bytes": mx.get_peak_memory()}


def _ours(options: argparse.Namespace) -> Any:
    import mlx.core as mx

    from mlxspec import SamplingParams, SpecConfig, load

    engine = load(_model(options), dtype=None if options.mode == "4bit" else options.mode)
    params = SamplingParams(max_tokens=options.tokens)
    off, on = SpecConfig(drafters=()), SpecConfig(drafters=("ngram-simple",), policy="fixed")
    asked = yield
    while asked is not None:
        prompt, expected = list(asked[0].tokens), asked[1]
        plain = engine.generate(prompt, params, spec=off)
        drafted = engine.generate(prompt, params, spec=on)
        row = {
            "tokens": list(plain.tokens),
            "cached": drafted.stats.num_cached,
            "drafted": drafted.stats.num_drafted,
            "accepted": drafted.stats.num_accepted,
            "rounds": drafted.stats.num_rounds,
            "decoded": drafted.stats.num_decoded,
            "same_drafted": drafted.tokens == plain.tokens,
        }
        if drafted.tokens != plain.tokens:
            again = engine.generate(prompt, params, spec=off)  # plain, with the same prefix hit
            row["same_hit"] = again.tokens == plain.tokens
            row["flip"] = _flip(engine, prompt, plain.tokens, drafted.tokens)
        if options.mode == "float32" and expected is not None and list(plain.tokens) != expected:
            row["peer_flip"] = _flip(engine, prompt, plain.tokens, expected)
        asked = yield row
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

    started = time.monotonic()
    engine = load(str(places.place(places.MODEL)), dtype="float32")
    peer = _llama_server(options) if options.llama_server else None
    specs = {"off": SpecConfig(drafters=()), "auto": engine.spec}
    per_kind = options.per_kind or TIMED_KIND
    rows = []
    for prompt in _prompts(per_kind):
        for temperature in (0.0, 1.0):
            if time.monotonic() - started > 60 * options.minutes:
                break
            params = SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=1)
            engine.generate(list(prompt.tokens), SamplingParams(max_tokens=1), spec=specs["off"])  # read it
            taken: dict[str, list[Any]] = {name: [] for name in specs}
            for turn in range(REPEATS):
                for name in list(specs)[:: -1 if turn % 2 else 1]:
                    taken[name].append(engine.generate(list(prompt.tokens), params, spec=specs[name]))
            row = _timed_row(prompt, temperature, taken)
            if peer is not None and temperature == 0.0:
                row["llama.cpp"] = _llama_row(peer, prompt, options.tokens)
            rows.append(row)
    if peer is not None:
        peer.close()
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


def _llama_server(options: argparse.Namespace) -> Any:
    from peers.llama_cpp import LlamaCpp

    from mlxspec.platform import device

    gguf = places.place(places.MODEL) / places.GGUF
    return LlamaCpp(
        server=options.llama_server,
        model=gguf,
        draft=gguf,
        threads=device.report().threads,
        log=options.folder / "llama-server.log",
        context=9216,
    )


def _llama_row(peer: Any, prompt: Prompt, tokens: int) -> Row:
    """Tokens a second and the ratio of llama.cpp's plain decoding and its n-gram drafting; the second of two runs each."""
    found = {}
    for method in ("plain", "ngram-simple"):
        answers = [
            peer.ask("run", prompts=[list(prompt.tokens)], num_tokens=[tokens], method=method) for _ in "12"
        ]
        found[method] = answers[-1]
    speed = {m: a["num_timed"] / a["seconds"] if a["seconds"] else None for m, a in found.items()}
    same = found["plain"]["tokens"] == found["ngram-simple"]["tokens"]
    ratio = speed["ngram-simple"] / speed["plain"] if speed["plain"] and speed["ngram-simple"] else None
    return {"plain": speed["plain"], "ngram-simple": speed["ngram-simple"], "ratio": ratio, "same": same}


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
    from mlxspec.platform import device

    report = device.report()
    return {
        "system": platform.platform(),
        "device": report.device,
        "threads": report.threads,
        "blas": report.blas,
    }


if __name__ == "__main__":
    sys.exit(main())
