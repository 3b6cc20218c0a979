"""`mlxspec generate`: one prompt streamed to stdout, or several answered together; statistics to stderr.

Knows options, streams and requests; knows no model. Everything that can be wrong is found before the first character is printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mlxspec.cli import options, stats_line, terminal
from mlxspec.cli.answer import encode, finished, follow
from mlxspec.cli.interrupt import Interrupt
from mlxspec.errors import ConfigError
from mlxspec.events import Event, FinishEvent, TokensEvent

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine
    from mlxspec.engine.request import Request

INTERRUPTED = 130


def run(args: argparse.Namespace) -> int:
    """Answer the prompts. Returns 0, or 130 after Ctrl-C."""
    params, spec = options.sampling_params(args), options.spec_config(args)
    if args.system_prompt is not None and args.ignore_chat_template:
        raise ConfigError("--system-prompt needs the chat template that --ignore-chat-template leaves out.")
    prompts = read_prompts(args.prompt)
    system = None if args.system_prompt is None else terminal.checked(args.system_prompt, "--system-prompt")
    engine = options.load_engine(args, spec)
    encoded = [encode(engine, text, system=system, plain=args.ignore_chat_template) for text in prompts]
    requests = [engine.submit(tokens, params) for tokens in encoded]
    with Interrupt() as interrupt:
        events = follow(engine, requests, interrupt)
        if args.json:
            _print_json(events, engine, requests, prompts)
        else:
            _print_text(events, requests, prompts, show_draft=args.show_draft)
    if not args.json:
        _print_statistics(engine, requests)
    return INTERRUPTED if interrupt.asked else 0


def read_prompts(given: Sequence[str] | None) -> list[str]:
    """What `-p` named, stdin read for `-`. Raises ConfigError for none, an empty one, or stdin named twice."""
    if not given:
        raise ConfigError(
            "There is no prompt: give one with -p TEXT, or -p - to read it from the standard input."
        )
    if given.count("-") > 1:
        raise ConfigError("-p - was given twice, but the standard input can be read only once.")
    prompts = [
        terminal.read_stdin() if text == "-" else terminal.checked(text, "The prompt") for text in given
    ]
    if not all(prompts):
        raise ConfigError("The prompt is empty.")
    return prompts


class _InOrder:
    """Answers that grow together, printed one behind the other: the first that has not ended streams, later ones wait. show_draft: what
    was drafted and stood is coloured."""

    def __init__(self, requests: Sequence[Request], prompts: Sequence[str], *, show_draft: bool) -> None:
        self._show_draft = show_draft
        self._order = [r.number for r in requests]
        self._prompts = prompts
        self._waiting: dict[int, list[TokensEvent]] = {number: [] for number in self._order}
        self._ended: set[int] = set()
        self._current = 0
        self._begin()

    def take(self, event: Event) -> None:
        if isinstance(event, FinishEvent):
            self._ended.add(event.request)
            self._advance()
        elif not isinstance(event, TokensEvent):
            return
        elif self._current < len(self._order) and event.request == self._order[self._current]:
            self._say(event)
        else:
            self._waiting.setdefault(event.request, []).append(event)

    def close(self) -> None:
        """No more events: whatever has come is shown."""
        self._ended.update(self._order)
        self._advance()

    def _begin(self) -> None:
        terminal.say(_header(self._current, self._prompts))
        for event in self._waiting.pop(self._order[self._current]):
            self._say(event)

    def _say(self, event: TokensEvent) -> None:
        terminal.say_drafted(event.text, event.num_drafted_chars if self._show_draft else 0)

    def _advance(self) -> None:
        while self._current < len(self._order) and self._order[self._current] in self._ended:
            terminal.say("\n")
            self._current += 1
            if self._current < len(self._order):
                self._begin()


def _print_text(
    events: Iterable[Event], requests: Sequence[Request], prompts: Sequence[str], *, show_draft: bool
) -> None:
    printer = _InOrder(requests, prompts, show_draft=show_draft)
    try:
        for event in events:
            printer.take(event)
    except Exception as error:
        if not isinstance(error, OSError):
            terminal.say("\n")  # the sentence on what happened begins a line
        raise
    printer.close()


def _header(index: int, prompts: Sequence[str]) -> str:
    if len(prompts) == 1:
        return ""
    first = terminal.sentence(prompts[index])
    shown = first if len(first) <= 60 else first[:57] + "..."
    return f"{chr(10) if index else ''}=== {index + 1} of {len(prompts)}: {shown}\n"


def _print_json(
    events: Iterable[Event], engine: Engine, requests: Sequence[Request], prompts: Sequence[str]
) -> None:
    for _ in events:
        pass
    for request, prompt in zip(requests, prompts, strict=True):
        record = {
            "model": engine.name,
            "prompt": prompt,
            "text": request.answer.text,
            "tokens": request.history[len(request.prompt) :],
            "finish_reason": request.finish_reason,
            "stats": stats_line.as_data(request.stats),
            "device": stats_line.device_data(),
        }
        terminal.say(json.dumps(record) + "\n")


def _print_statistics(engine: Engine, requests: Sequence[Request]) -> None:
    answers = [finished(r) for r in requests]
    shared = engine.stats.round_seconds if len(requests) > 1 else None
    terminal.note(f"{stats_line.summary(answers, shared)} · {stats_line.machine()}")
    for notice in stats_line.notices(r.stats for r in requests):
        terminal.note(notice)
