"""`mlxspec versus URL`: sends the same prompts to another server and to one of mlxspec's in turns, and compares texts and speeds.

Knows options and output; the contest is bench.versus, and our server is started as for `launch`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mlxspec.cli import launch, options, stats_line, terminal
from mlxspec.cli.interrupt import clearing_away
from mlxspec.cli.parser import declare
from mlxspec.cli.progress_bar import Waiting
from mlxspec.cli.run import fetch_absent
from mlxspec.errors import ConfigError
from mlxspec.option import check_number

if TYPE_CHECKING:
    from mlxspec.bench.rival import Rival
    from mlxspec.bench.versus import BothAnswers, Contest

KEY_VARIABLE = "MLXSPEC_RIVAL_KEY"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s URL [-m MODEL] [options]"
    parser.add_argument(
        "url",
        metavar="URL",
        help=f"the other server's address, like http://127.0.0.1:8080; {KEY_VARIABLE} has its key",
    )
    options.add_model(parser)
    options.add_drafting(parser)
    declare(
        parser,
        ("--rival-model", str, "NAME", "the model as the other server names it (default: the first that it lists)"),
        ("--ask", list, "TEXT", "a prompt in place of the built-in ones; given again: one more"),
        ("--longest", int, "N", "longest answer in tokens (default 128)", 128),
        ("--repeat", int, "N", "measured turns of each prompt (default 3)", 3),
        ("--any-host", bool, "", "let the other server be on another machine, which then sees the prompts"),
        options.JSON,
    )  # fmt: skip
    options.add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Send the same prompts to another server and to one of mlxspec's, and print texts and speeds compared. Returns 0, or 1 where a text
    differs."""
    from mlxspec.bench import versus
    from mlxspec.bench.rival import Rival
    from mlxspec.loading import hub
    from mlxspec.loading.tokenizer import Tokenizer
    from mlxspec.platform import processes

    check_number("--longest", args.longest, 1, 1 << 20, integer=True)
    check_number("--repeat", args.repeat, 1, 1000, integer=True)
    options.spec_config(args)
    options.engine_config(args)
    if any(not text.strip() for text in args.ask or ()):
        raise ConfigError("--ask is empty; give it a prompt.")
    rival = Rival(
        url=args.url,
        model=args.rival_model or "",
        key=os.environ.get(KEY_VARIABLE, ""),
        any_host=args.any_host,
    )
    if not rival.model:
        listed = rival.models()
        if not listed:
            raise ConfigError(f"{args.url} lists no model; --rival-model names one.")
        rival = replace(rival, model=listed[0])
    asked = [(f"prompt {i}", text) for i, text in enumerate(args.ask or (), 1)] or versus.prompts()
    with clearing_away():
        fetch_absent(args)
        with launch.started(args) as served:
            own = Rival(url=served.root, model=served.model, key=served.key)
            tokenizer = Tokenizer.from_folder(hub.resolve(hub.named(args.model), revision=args.revision))
            with Waiting(f"asking {rival.model} and {served.model}", is_long=True) as wait:
                contests = versus.contest(
                    rival,
                    own,
                    asked,
                    lambda text: len(tokenizer.encode(text, special=False)),
                    max_tokens=args.longest,
                    repeat=args.repeat,
                    told=_teller(wait, args.repeat),
                )
            memory = [
                None if process is None else processes.resident_bytes(process)
                for process in (processes.listening(s.port) if s.is_here else None for s in (rival, own))
            ]
    if args.json:
        data = versus.as_data(rival, own, contests, memory, stats_line.computer())
        terminal.say(json.dumps(data) + "\n")
    else:
        terminal.say("".join(f"{line}\n" for line in _lines(rival, own, contests, memory)))
    return int(any(c.num_different for c in contests))


def _teller(wait: Waiting, repeat: int) -> Callable[[str, int, BothAnswers], None]:
    def tell(name: str, turn: int, answers: BothAnswers) -> None:
        wait.tell(what=f"{name}, turn {turn} of {repeat}")

    return tell


def _lines(rival: Rival, own: Rival, contests: Sequence[Contest], memory: Sequence[int | None]) -> list[str]:
    """Return the lines to print on the comparison. memory: resident bytes of the two servers, None where unknown."""
    lines = []
    for c in contests:
        sides = []
        for side, answers in (
            (rival.model, [t.rival for t in c.turns]),
            (f"mlxspec {own.model}", [t.own for t in c.turns]),
        ):
            speed, first = c.middle(answers)
            sides.append(f"{side} {speed:.0f} tok/s, first token after {first:.2f} s")
        same = "same text" if not c.num_different else f"the texts differ after {c.common} characters"
        ratio = f" · {c.ratio}" if not c.ratio.refusal else "" if c.num_different else f" · {c.ratio.refusal}"
        lines.append(f"{c.name}: {' · '.join(sides)} · {same}{ratio}")
    if any(c.num_different for c in contests):
        lines.append(
            "Speeds of different texts are no ratio: other weights, another chat template or another rounding gives other work."
        )
    for c in contests:
        if c.miscounted:
            said, counted = c.miscounted
            lines.append(
                f"{rival.model} reports {said:,} tokens for a text of {counted:,}; both sides are counted by our tokenizer."
            )
            break
    found = [stats_line.size(m) if m is not None else "not known" for m in memory]
    lines.append(f"Resident memory: {rival.model} {found[0]}, mlxspec {found[1]}. {stats_line.computer()}.")
    return lines
