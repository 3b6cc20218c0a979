"""`mlxspec tune`: measures what rounds and drafts cost on this machine with this model, compares every drafter with plain decoding, and
prints which options to use.

Costs are kept where policy auto reads them. Knows options and output; what is measured is mlxspec.bench.tune and engine.rehearsal.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlxspec.cli import options, stats_line, terminal
from mlxspec.cli.parser import declare, declare_options
from mlxspec.cli.progress_bar import Waiting
from mlxspec.cli.table import print_table
from mlxspec.config import EngineConfig, SamplingParams
from mlxspec.errors import ConfigError
from mlxspec.option import check_number

if TYPE_CHECKING:
    from mlxspec.bench.tune import Reduced
    from mlxspec.bench.turns import Score
    from mlxspec.engine.engine import Engine
    from mlxspec.policy.costs import CostModel

_WIDEST = 17  # tokens of a round, as far as a plot goes
_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 17)
_SHORT = 200  # tokens of an answer
_MOST_LISTED = 1 << 17  # tokens that are counted from texts


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_drafting(parser)
    declare(
        parser,
        ("--prompts", str, "FILE", "your own prompts, one a line, or .jsonl objects with prompt or messages"),
        (
            "--texts",
            list,
            "PATH",
            "count this file's or folder's tokens: models propose the most frequent of them",
        ),
        ("--repeat", int, "N", "measured answers of each drafter to each prompt (default 3)", 3),
        ("--max-tokens", int, "N", "longest answer in tokens (default 96)", 96),
        options.PLOT,
        options.JSON,
    )
    declare_options(parser, EngineConfig, "memory_budget")
    options.add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Measure the costs of rounds and drafts and the speed of every drafter, keep the costs and print the result. Returns 0, or 1 where
    a text differs."""
    check_number("--max-tokens", args.max_tokens, 2, 4096, integer=True)
    check_number("--repeat", args.repeat, 1, 100, integer=True)
    from mlxspec.bench import plots
    from mlxspec.bench import tune as bench
    from mlxspec.bench.prompts import encoded, read_prompts
    from mlxspec.bench.turns import compare

    texts = None if args.prompts is None else read_prompts(Path(args.prompts))
    if args.draft == "off":
        raise ConfigError(
            "Tuning compares drafting with plain decoding; --draft off leaves nothing to compare."
        )
    spec = replace(options.spec_config(args), policy="auto")  # whose costs are measured
    if args.plot is not None:
        plots.check(Path(args.plot))
    if args.texts:
        count_texts(args)
    options.compile_kernels()
    engine = bench.with_lookups(options.load_engine(args, spec), args.draft == "auto")
    prompts = encoded(engine, texts)
    from mlxspec.engine import rehearsal

    with Waiting("measuring what rounds cost here", is_long=True):
        path = rehearsal.measure(engine)
    costs = engine.policies.costs
    with Waiting("measuring every drafter", unit="answers", is_long=True) as wait:
        plain, scores = compare(
            engine,
            [[p] for p in prompts],
            bench.contestants(engine),
            SamplingParams(max_tokens=args.max_tokens),
            repeat=args.repeat,
            told=wait.tell,
        )
    winner = bench.best(scores)
    if args.plot is not None:
        title = f"{engine.name}, {len(prompts)} prompts, {stats_line.computer()}"
        plots.draw(Path(args.plot), title, costs.curve(0).known_until(_WIDEST), scores)
    if args.json:
        data = {
            "model": engine.name,
            "costs": costs.as_data(),
            "kept": str(path),
            "plain_speed": round(plain.decode_speed, 2),
            "scores": [s.data() for s in scores],
            "reduced_vocabulary": [asdict(r) for r in bench.reductions(engine, scores)],
            "best": None if winner is None else winner.data(),
            "num_prompts": len(prompts),
            "device": stats_line.device_data(),
        }
        terminal.say(json.dumps(data) + "\n")
    else:
        _print(engine, costs, plain, scores)
        for reduced in bench.reductions(engine, scores):
            terminal.say(f"{reduction(reduced)}\n")
        terminal.say(f"\n{verdict(winner, plain, scores)}\n")
        terminal.note(f"costs are kept in {path} for --policy auto · {stats_line.machine()}")
        for report in engine.kernels:
            if report.refusals:
                terminal.note(str(report.notice))
    return 1 if any(s.num_different for s in scores) else 0


def count_texts(args: argparse.Namespace) -> None:
    """Count the tokens of the texts of --texts, and keep the list of the most frequent for all loads of models with this vocabulary.
    Raises ConfigError."""
    from mlxspec.bench.texts import texts_in
    from mlxspec.checkpoints.pull import check_fits
    from mlxspec.loading import hub, row_lists
    from mlxspec.loading.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(hub.resolve(args.model, revision=args.revision, judge=check_fits))
    counts = row_lists.count(tokenizer, texts_in(Path(p).expanduser() for p in args.texts))
    total, num_found = int(counts.sum()), int((counts > 0).sum())
    ids = row_lists.by_frequency(counts, tokenizer.num_ordinary, _MOST_LISTED)
    if not total:
        raise ConfigError("--texts: there is no text to be counted.")
    path = row_lists.own_path(tokenizer)
    try:
        row_lists.write(path, tokenizer, ids)
    except OSError as error:
        raise ConfigError(f"--texts: {path} cannot be written: {error.strerror}.") from error
    terminal.note(f"{total} tokens were counted, {num_found} different ones; the list is kept in {path}.")


def reduction(r: Reduced) -> str:
    """Return a sentence on what drafting over a part of the vocabulary costs in acceptance and saves in bytes read."""
    lost = 100 * (r.whole_acceptance - r.acceptance)
    return (
        f"{r.name}, depth {r.depth}, over {r.num_rows} of {r.vocab_size} tokens: {100 * r.acceptance:.1f} % accepted, {lost:.1f} "
        f"points less than over all; a drafted token reads {stats_line.size(r.read_bytes)} instead of "
        f"{stats_line.size(r.whole_read_bytes)}"
    )


def _print(engine: Engine, costs: CostModel, plain: Score, scores: list[Score]) -> None:
    from mlxspec.policy.costs import GREEDY

    curve = costs.curve(0)
    terminal.say(f"{engine.name}, plain decoding: {plain.decode_speed:.1f} tokens a second\n\n")
    one = curve.seconds(1)
    rows = [[str(w), f"{1000 * curve.seconds(w):.2f}", f"{curve.seconds(w) / one:.2f}"] for w in _WIDTHS]
    print_table(["tokens verified", "ms a round", "plain rounds"], rows, right=(0, 1, 2))
    for name in (n for n, kind in costs.drafts if kind == GREEDY):
        cost = costs.draft(name, GREEDY, one)
        terminal.say(f"a draft by {name}: {1000 * cost.call:.2f} ms and {1000 * cost.step:.2f} ms a token\n")
    terminal.say("\n")
    print_table(
        ["who drafts", "depth", "tok/s", "speed-up", "accepted", "tokens a round"],
        table(scores),
        right=(1, 2, 3, 4, 5),
    )


def table(scores: list[Score]) -> list[list[str]]:
    """Return the rows of the printed table, one for each measured way of drafting."""
    return [
        [
            f"{s.name}, whole vocabulary" if s.whole else s.name,
            "" if s.depth is None else str(s.depth),
            f"{s.decode_speed:.1f}",
            str(s.ratio),
            "nothing drafted" if s.acceptance is None else f"{100 * s.acceptance:.0f} %",
            f"{s.tokens_per_round:.2f}",
        ]
        for s in scores
    ]


def verdict(winner: Score | None, plain: Score, scores: Sequence[Score] = ()) -> str:
    """Return a sentence on which options to use. winner: the best way of drafting, None where none beats plain decoding; plain: plain
    decoding; scores: all, to explain why the default is slower."""
    if winner is None and any(not s.ratio.refusal and not s.ratio.is_settled for s in scores):
        return "Nothing is settled to beat plain decoding: the turns differ too much. A larger --repeat asks again."
    if winner is None:
        return (
            "Nothing beats plain decoding here with these prompts: use --draft off, or --policy auto (the default), "
            "which drafts only where it pays."
        )
    gain = f"{winner.ratio} plain decoding ({plain.decode_speed:.1f} -> {winner.decode_speed:.1f} tokens a second)"
    whole = " --draft-vocab 0" if winner.whole else ""
    if winner.name.startswith("policy"):
        return f"Best: --{winner.name}{whole} with {', '.join(winner.drafters)}, {gain}.{_beside_auto(winner, scores)}"
    depth = "" if winner.depth is None else f" --draft-max {winner.depth}"
    return f"Best: --policy fixed --draft {winner.name}{depth}{whole}, {gain}.{_beside_auto(winner, scores)}"


def _beside_auto(winner: Score, scores: Sequence[Score]) -> str:
    """Return a sentence on why the default, policy auto, is slower than the winner; "" where it was not measured or is the winner."""
    from mlxspec.bench import tune as bench

    auto = next((s for s in scores if s.name == "policy auto" and not s.ratio.refusal), None)
    if auto is None or winner is auto:
        return ""
    behind = f" --policy auto, the default, came to {auto.ratio}"
    if not bench.is_clear(winner, auto):
        return f"{behind}: the difference is within the spread of these answers, so nothing need be set."
    length = auto.num_decoded // max(1, auto.num_answers)
    if length < _SHORT:
        return (
            f"{behind}: answers of {length} tokens end before it knows how much of a draft is accepted. Measure with your own --prompts "
            "and a larger --max-tokens before you set anything."
        )
    return f"{behind}: it spends rounds on finding out what pays. Set this for texts that are all like these only."
