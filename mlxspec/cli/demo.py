"""`mlxspec demo`: the same prompts with drafting off and on, side by side: same text, which speed, who drafted.

Knows options and output; prompts, runs and comparison are mlxspec.bench.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlxspec.cli import options, stats_line, terminal
from mlxspec.cli.parser import declare
from mlxspec.cli.progress_bar import Waiting
from mlxspec.config import SpecConfig
from mlxspec.errors import ConfigError
from mlxspec.option import check_number

if TYPE_CHECKING:
    from rich.console import Console

    from mlxspec.bench.demo_runs import Comparison, DemoOutcome
    from mlxspec.engine.engine import Engine

DEMO_CHOICES = {
    options.DEMO: ("ngram-simple,mtp", "ngram-simple,draft-model"),
    options.DEMO_VISION: ("mtp",),
}
_SHOWN_LINES, _SHOWN_WIDTH = 4, 96
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
    options.add_model(parser)
    declare(
        parser,
        ("--max-tokens", int, "N", "longest answer in tokens (default 96)", 96),
        (
            "--draft",
            list,
            "LIST",
            "drafters to compare with plain decoding; given again: one more comparison",
        ),
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
    """Run all prompts. Returns 0 only if every answer was identical, else 1."""
    check_number("--max-tokens", args.max_tokens, 2, 4096, integer=True)
    check_number("--repeat", args.repeat, 1, 100, integer=True)
    started = time.perf_counter()
    engine, choices = load(args)
    from mlxspec.bench import demo_prompts
    from mlxspec.bench.demo_runs import run_prompt

    prompts = demo_prompts.picture_prompts() if args.vision else demo_prompts.PROMPTS
    if not args.json:
        ways = ", then with ".join(" + ".join(c) for c in choices)
        terminal.say(
            f"{len(prompts)} prompts for {engine.name}, each with drafting off and with {ways}.{_why(engine)}\n"
        )
    outcomes = []
    for i, prompt in enumerate(prompts):
        with Waiting(f"{i + 1} of {len(prompts)}: {prompt.what}"):
            outcomes.append(
                run_prompt(engine, prompt, choices, max_tokens=args.max_tokens, repeat=args.repeat)
            )
        if not args.json:
            _show_answer(outcomes[-1])
    seconds = time.perf_counter() - started
    same = all(c.is_identical for o in outcomes for c in o.comparisons)
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
        _report(engine, outcomes, seconds)
    return 0 if same else 1


def load(args: argparse.Namespace) -> tuple[Engine, list[tuple[str, ...]]]:
    """The engine with every drafter that is to be compared, and the choices of drafters. Raises MlxspecError subclasses."""
    from mlxspec.platform import device

    if args.vision:
        if args.no_images:
            raise ConfigError("--vision asks about pictures, and --no-images leaves out what reads them.")
        args.model = options.DEMO_VISION if args.model == options.DEMO else args.model
    device.compile_kernels()  # what is measured is worth waiting for
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


def _why(engine: Engine) -> str:
    """What the first line says of a model for which drafting does not pay."""
    if engine.name != options.DEMO_VISION:
        return ""
    return (
        " Drafting is forced here to compare texts: answers of a number or a short line are over before drafts pay, so --policy auto "
        "would leave them alone."
    )


def _seeing(engine: Engine, args: argparse.Namespace) -> Engine:
    """The engine. Raises ConfigError where it is to read images and cannot."""
    if args.vision and engine.vision is None:
        raise ConfigError(engine.no_images)
    return engine


def _show_answer(outcome: DemoOutcome) -> None:
    """The beginning of what was said, as proof that there is a text."""
    lines = [line for line in outcome.result.text.splitlines() if line.strip()]
    shown = [terminal.clean(line)[:_SHOWN_WIDTH] for line in lines[:_SHOWN_LINES]]
    more = ["..."] * (len(lines) > _SHOWN_LINES)
    says = f" It says {outcome.prompt.says}" if outcome.prompt.says else ""
    terminal.say(
        f"\n{outcome.prompt.name}: {outcome.prompt.what}{says}\n"
        + "".join(f"    {line}\n" for line in shown + more)
    )


def _report(engine: Engine, outcomes: Sequence[DemoOutcome], seconds: float) -> None:
    from rich import box
    from rich.table import Table

    console = _console()
    table = Table(box=box.SIMPLE_HEAD)
    *first, last = HEADINGS
    for i, heading in enumerate(first):
        table.add_column(heading, justify="left" if i < 2 else "right", no_wrap=True)
    table.add_column(last)
    for outcome in outcomes:
        for i, c in enumerate(outcome.comparisons):
            table.add_row(outcome.prompt.name if i == 0 else "", *_cells(c))
    console.print()
    console.print(table)
    _summarize(console, engine, outcomes, seconds)


def _cells(c: Comparison) -> list[str]:
    works = c.stats.drafters
    who = [
        f"{name} {works[name].num_accepted}/{works[name].num_drafted}" if name in works else f"{name} 0/0"
        for name in c.drafters
    ]
    ratio = "-" if c.speedup is None else f"{c.speedup:.2f}x"
    colour = "" if c.speedup is None else "[green]" if c.speedup >= 1 else "[yellow]"
    return [
        "identical" if c.is_identical else "[bold red]differ[/]",
        f"{c.plain_speed:.0f}",
        f"{c.decode_speed:.0f}",
        f"{colour}{ratio}",
        f"{c.stats.tokens_per_round:.2f}",
        ", ".join(who),
    ]


def _summarize(console: Console, engine: Engine, outcomes: Sequence[DemoOutcome], seconds: float) -> None:
    pairs = [(o, c) for o in outcomes for c in o.comparisons]
    for outcome, c in pairs:
        if c.flip is not None:
            console.print(_flip(outcome, c), markup=False, highlight=False)
    differing = sum(not c.is_identical for _, c in pairs)
    verdict = (
        f"All {len(pairs)} answers with drafting have the token ids of plain decoding."
        if not differing
        else f"{differing} of {len(pairs)} answers with drafting differ from plain decoding."
    )
    ratios = sorted(c.speedup for _, c in pairs if c.speedup is not None)
    speeds = f" Ratios from {ratios[0]:.2f}x to {ratios[-1]:.2f}x." if ratios else ""
    lines = [verdict + speeds, *_read(outcomes), f"{stats_line.machine()} · {seconds:.0f} s in all."]
    notices = dict.fromkeys(n for _, c in pairs for n in stats_line.notices([c.stats]))
    lines += [terminal.sentence(n) for n in notices]
    if engine.name in options.DEMO_FAMILY:
        lines.append(
            "The demo model is tiny: it shows the engine at work, not what a useful model would say, nor the ratios of a large one."
        )
    for line in lines:
        console.print(line, markup=False, highlight=False)
    if engine.name in options.DEMO_FAMILY:
        terminal.say(f"\n{_next_steps(engine.name)}\n")


def _read(outcomes: Sequence[DemoOutcome]) -> list[str]:
    """How many pictures were read without a fault, where there were some."""
    asked = [o for o in outcomes if o.prompt.says]
    right = sum(o.result.text.strip() == o.prompt.says for o in asked)
    return [f"{right} of {len(asked)} pictures were read without a fault."] if asked else []


def _next_steps(model: str) -> str:
    """What to type next, with the command as it was called."""
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


def _flip(outcome: DemoOutcome, c: Comparison) -> str:
    flip = c.flip
    if flip is None:
        return ""
    return (
        f"{outcome.prompt.name} with {' + '.join(c.drafters)}: token {flip.position} of the answer is {flip.plain_token} without"
        f" drafting and {flip.drafted_token} with it; the best token there leads by {flip.gap:.2g}."
    )


def _console() -> Console:
    """rich's console on stdout: colour by its own rules (NO_COLOR, TERM), a fixed width where nobody looks on."""
    from rich.console import Console

    return Console(file=sys.stdout, width=None if terminal.is_terminal(sys.stdout) else _NO_TERMINAL_WIDTH)


def outcome_data(outcome: DemoOutcome) -> dict[str, Any]:
    """One prompt's outcome for JSON."""
    return {
        "prompt": outcome.prompt.name,
        "temperature": outcome.prompt.temperature,
        **({"says": outcome.prompt.says} if outcome.prompt.says else {}),
        "text": outcome.result.text,
        "tokens": list(outcome.result.tokens),
        "comparisons": [
            {
                "drafters": list(c.drafters),
                "identical": c.is_identical,
                "plain_speed": round(c.plain_speed, 2),
                "decode_speed": round(c.decode_speed, 2),
                "speedup": None if c.speedup is None else round(c.speedup, 4),
                "flip": None if c.flip is None else vars(c.flip),
                "stats": stats_line.as_data(c.stats),
            }
            for c in outcome.comparisons
        ],
    }
