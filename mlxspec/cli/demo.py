"""`mlxspec demo`: answers prompts, or edits a file, with drafting off and with the default in turns, and compares texts and speeds.

`--all` always drafts, with each choice of drafters. Knows options and output; prompts, runs and comparison are mlxspec.bench.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from mlxspec.cli import options, stats_line, terminal
from mlxspec.cli.parser import declare
from mlxspec.cli.progress_bar import Waiting
from mlxspec.config import SpecConfig
from mlxspec.errors import ConfigError
from mlxspec.option import check_number, shown

if TYPE_CHECKING:
    from rich.console import Console

    from mlxspec.bench.demo_prompts import DemoPrompt
    from mlxspec.bench.demo_runs import DemoOutcome
    from mlxspec.bench.turns import Score
    from mlxspec.engine.engine import Engine

DEMO_CHOICES = {
    options.DEMO: ("ngram-simple,mtp", "ngram-simple,draft-model"),
    options.DEMO_VISION: ("mtp",),
}
_SHOWN_LINES, _SHOWN_WIDTH = 4, 96
_LONGEST, _MORE_THAN_FILE = 96, 64  # tokens of an answer
_REQUEST = "remove the docstrings"
_NO_TERMINAL_WIDTH = 110

HEADINGS = (
    "prompt",
    "token ids",
    "off\ntok/s",
    "on\ntok/s",
    "ratio",
    "tokens\na round",
    "who drafted: accepted/drafted",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help="edit this file instead of the built-in prompts"
    )
    options.add_model(parser)
    declare(
        parser,
        ("--request", str, "TEXT", f"how FILE is to be edited (default: {_REQUEST})"),
        ("--max-tokens", int, "N", f"longest answer in tokens (default {_LONGEST}, for FILE its length)"),
        (
            "--all",
            bool,
            "",
            "always draft, with each choice of drafters; first let g++ compile MLX's kernels on a CPU",
        ),
        ("--draft", list, "LIST", "--all with these drafters; given again: one more choice"),
        options.DRAFT_MODEL,
        ("--repeat", int, "N", "measured runs of each, medians count (default 3)", 3),
        (
            "--vision",
            bool,
            "",
            "questions about pictures, for demo-vision or another model that reads images",
        ),
        options.JSON,
    )
    options.add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Run all prompts and print the comparison. Returns 0 where every answer is the same as in plain decoding, else 1."""
    check_numbers(args)
    prompts = _prompts(args)
    args.all = args.all or bool(args.draft)
    started = time.perf_counter()
    engine, choices = load(args)
    from mlxspec.bench.demo_runs import asked, run_prompt

    if not args.json:
        ways = ", then ".join(" + ".join(c) for c in choices)
        on = f"always on: {ways}" if args.all else "auto, the default"
        num = stats_line.counted(len(prompts), "prompt")
        terminal.say(f"{num} for {engine.name}, in turns with drafting off and {on}.\n")
    outcomes = []
    for i, prompt in enumerate(prompts):
        longest = args.max_tokens or (len(asked(engine, prompt)) + _MORE_THAN_FILE if args.file else _LONGEST)
        with Waiting(f"{i + 1} of {len(prompts)}: {prompt.what}"):
            outcomes.append(run_prompt(engine, prompt, choices, max_tokens=longest, repeat=args.repeat))
        if not args.json:
            _show_answer(outcomes[-1], whole=args.file is not None)
        if not args.json and not args.all:
            terminal.say(_row(outcomes[-1].scores[0]) + "\n")
    seconds = time.perf_counter() - started
    same = not any(o.differences for o in outcomes)
    if args.json:
        data = {
            "model": engine.name,
            "identical": same,
            "seconds": round(seconds, 2),
            "repeat": args.repeat,
            "prompts": [outcome_data(o) for o in outcomes],
            "device": stats_line.device_data(),
        }
        terminal.say(json.dumps(data) + "\n")
    else:
        console = _console()
        if args.all:
            _table(console, outcomes)
        _summarize(console, engine, outcomes, seconds)
    return 0 if same else 1


def check_numbers(args: argparse.Namespace) -> None:
    """Check the numbers among the options of `add_options`. Raises ConfigError for one that is out of range."""
    if args.max_tokens is not None:
        check_number("--max-tokens", args.max_tokens, 2, 4096, integer=True)
    check_number("--repeat", args.repeat, 1, 100, integer=True)


def load(args: argparse.Namespace) -> tuple[Engine, list[tuple[str, ...]]]:
    """Return the engine with all drafters that are compared, and the drafters of each comparison. Raises MlxspecError."""
    if args.vision:
        if args.no_images:
            raise ConfigError("--vision asks about pictures, and --no-images leaves out what reads them.")
        args.model = options.DEMO_VISION if args.model == options.DEMO else args.model
    if not args.all:
        engine = options.load_engine(args, SpecConfig(), draft="auto")
        return _seeing(engine, args), [engine.spec.drafters]
    options.compile_kernels()
    wanted: Sequence[str] = args.draft or DEMO_CHOICES.get(args.model, ("auto",))
    if "off" in wanted:
        raise ConfigError(
            "The demo compares drafting with plain decoding anyway; --draft off leaves nothing to compare."
        )
    if "auto" in wanted and len(wanted) > 1:
        raise ConfigError("--draft auto stands alone; name the drafters to compare several choices.")
    if "auto" in wanted:
        engine = options.load_engine(args, SpecConfig(policy="fixed"), draft="auto")
        return _seeing(engine, args), [engine.spec.drafters]
    choices = [SpecConfig(drafters=tuple(n.strip() for n in names.split(","))).drafters for names in wanted]
    every = dict.fromkeys(name for choice in choices for name in choice)
    engine = options.load_engine(args, SpecConfig(policy="fixed"), draft=",".join(every))
    return _seeing(engine, args), choices


def _prompts(args: argparse.Namespace) -> Sequence[DemoPrompt]:
    """Return the built-in prompts, or the request to edit the file that the command line names. Raises ConfigError where the file cannot
    be read."""
    from mlxspec.bench import demo_prompts

    if args.file is None:
        if args.request is not None:
            raise ConfigError("--request says how a file is to be edited; name the file too.")
        return demo_prompts.picture_prompts() if args.vision else demo_prompts.PROMPTS
    if args.vision:
        raise ConfigError("--vision asks about the built-in pictures; a file is edited without it.")
    try:
        text = Path(args.file).expanduser().read_text(encoding="utf-8").rstrip()
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"{shown(args.file)} cannot be read: {why}.") from error
    if not text:
        raise ConfigError(f"{shown(args.file)} is empty.")
    request = args.request or _REQUEST
    return [
        demo_prompts.DemoPrompt(
            name=Path(args.file).name, what=request, text=demo_prompts.edit(request, text)
        )
    ]


def _seeing(engine: Engine, args: argparse.Namespace) -> Engine:
    """Return the engine. Raises ConfigError where the command line has --vision and the model reads no images."""
    if args.vision and engine.vision is None:
        raise ConfigError(engine.no_images)
    return engine


def _show_answer(outcome: DemoOutcome, *, whole: bool) -> None:
    """Print the beginning of an answer, or the whole of it, below the name of its prompt."""
    lines = [terminal.clean(line) for line in outcome.result.text.splitlines() if whole or line.strip()]
    shown = lines if whole else [line[:_SHOWN_WIDTH] for line in lines[:_SHOWN_LINES]]
    more = ["..."] * (len(lines) > len(shown))
    says = f" It says {outcome.prompt.says}" if outcome.prompt.says else ""
    terminal.say(
        f"\n{outcome.prompt.name}: {outcome.prompt.what}{says}\n"
        + "".join(f"    {line}\n" for line in shown + more)
    )


def _row(c: Score) -> str:
    """Return the line of one comparison: `    same text · off 161 tok/s · auto 426 tok/s · 2.65x (2.50x to 2.71x)`"""
    if c.ratio.refusal:
        return f"    {'' if c.num_different else 'same text · '}{c.ratio}"
    return f"    same text · off {c.plain_speed:4.0f} tok/s · auto {c.decode_speed:4.0f} tok/s · {c.ratio}"


def _table(console: Console, outcomes: Sequence[DemoOutcome]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    *first, last = HEADINGS
    for i, heading in enumerate(first):
        table.add_column(heading, justify="left" if i < 2 else "right", no_wrap=True)
    table.add_column(last)
    for outcome in outcomes:
        for i, c in enumerate(outcome.scores):
            table.add_row(outcome.prompt.name if i == 0 else "", *_cells(c))
    console.print()
    console.print(table)


def _cells(c: Score) -> list[str]:
    works = c.newest[0].stats.drafters
    who = [
        f"{name} {works[name].num_accepted}/{works[name].num_drafted}" if name in works else f"{name} 0/0"
        for name in c.drafters
    ]
    colour = "" if not c.ratio.is_settled else "[green]" if c.ratio.median >= 1 else "[yellow]"
    return [
        "[bold red]differ[/]" if c.num_different else "identical",
        f"{c.plain_speed:.0f}",
        f"{c.decode_speed:.0f}",
        f"{colour}{c.ratio}" if not c.ratio.refusal else "-",
        f"{c.tokens_per_round:.2f}",
        ", ".join(who),
    ]


def _summarize(console: Console, engine: Engine, outcomes: Sequence[DemoOutcome], seconds: float) -> None:
    pairs = [(o, c) for o in outcomes for c in o.scores]
    for outcome in outcomes:
        for i, difference in outcome.differences.items():
            who = f"{outcome.prompt.name} with {outcome.scores[i].name}"
            said = stats_line.difference(difference, engine.tokenizer)
            console.print(f"{who}: {said}", markup=False, highlight=False)
    lines = ["", *_read(outcomes), f"{stats_line.machine()} · {seconds:.0f} s in all."]
    notices = dict.fromkeys(n for _, c in pairs for n in stats_line.notices([c.newest[0].stats]))
    lines += [terminal.sentence(n) for n in notices]
    if engine.name in options.DEMO_FAMILY:
        lines.append(
            "The demo model is tiny: it shows the engine at work, not what a useful model would say, nor the ratios of a large one."
        )
    for line in lines:
        console.print(line, markup=False, highlight=False)
    if engine.name in options.DEMO_FAMILY:
        terminal.say(f"\n{_next_steps(engine.name)}\n")
    console.print(f"\n{_conclusion(pairs)}", markup=False, highlight=False)


def _conclusion(pairs: Sequence[tuple[DemoOutcome, Score]]) -> str:
    same = sum(not c.num_different for _, c in pairs)
    said = f"Same text in {same} of {len(pairs)}."
    settled = sorted((c.ratio.median, o.prompt.name) for o, c in pairs if c.ratio.is_settled)
    num_open = sum(not c.ratio.refusal and not c.ratio.is_settled for _, c in pairs)
    if settled:
        middle, (least, where), (most, best) = median(r for r, _ in settled), settled[0], settled[-1]
        span = f"{where} {least:.2f} to {best} {most:.2f}" if len(settled) > 1 else where
        said += f" {middle:.2f} times as fast as without drafting ({span})."
    if num_open:
        said += f" Not settled: {num_open} of {len(pairs)}; a larger --repeat asks again."
    return said


def _read(outcomes: Sequence[DemoOutcome]) -> list[str]:
    """Return one line on how many pictures were read right; no line where no prompt has a picture."""
    asked = [o for o in outcomes if o.prompt.says]
    right = sum(o.result.text.strip() == o.prompt.says for o in asked)
    return [f"{right} of {len(asked)} pictures were read without a fault."] if asked else []


def _next_steps(model: str) -> str:
    """Return lines with commands to try next, with the command's name as the user typed it."""
    own = terminal.own_name()
    text = (
        ("chat", "a conversation with this model"),
        ('generate "what does os.path.join do?"', "one answer"),
    )
    pictures = (
        (f'generate --model {model} --image FILE "Read the number."', "a picture of your own"),
        (f"chat --model {model}", "/image FILE, or paste its path"),
    )
    steps = (
        *(pictures if model == options.DEMO_VISION else text),
        ("pull mlx-community/Qwen3.5-4B-4bit", "fetch a real model; chat --model takes it then"),
    )
    return "\n".join(
        ["Go on with:", *(f"  {f'{own} {words}':<64} {about}".rstrip() for words, about in steps)]
    )


def _console() -> Console:
    """Return rich's console on stdout. It uses colour by rich's own rules (NO_COLOR, TERM), and has a fixed width where stdout is no
    terminal."""
    from rich.console import Console

    return Console(file=sys.stdout, width=None if terminal.is_terminal(sys.stdout) else _NO_TERMINAL_WIDTH)


def outcome_data(outcome: DemoOutcome) -> dict[str, Any]:
    """Return the outcome of one prompt as plain objects, for JSON."""
    return {
        "prompt": outcome.prompt.name,
        "temperature": outcome.prompt.temperature,
        **({"says": outcome.prompt.says} if outcome.prompt.says else {}),
        "text": outcome.result.text,
        "tokens": list(outcome.result.tokens),
        "comparisons": [
            {
                "drafters": list(c.drafters),
                "identical": not c.num_different,
                "plain_speed": round(c.plain_speed, 2),
                "decode_speed": round(c.decode_speed, 2),
                "ratio": c.ratio.data(),
                "difference": asdict(outcome.differences[i]) if i in outcome.differences else None,
                "stats": c.newest[0].stats.data(),
            }
            for i, c in enumerate(outcome.scores)
        ],
    }
