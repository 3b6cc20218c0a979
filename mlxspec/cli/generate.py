"""`mlxspec generate`: streams the answer to one prompt to stdout, or answers several together; writes statistics to stderr.

Knows options, streams and requests; knows no model. Everything that can be wrong is found before the first character is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxspec.cli import options, stats_line, terminal
from mlxspec.cli.answer import encode, follow
from mlxspec.cli.images import read_picture
from mlxspec.cli.interrupt import Interrupt
from mlxspec.cli.parser import declare
from mlxspec.cli.progress_bar import Waiting
from mlxspec.config import SamplingParams
from mlxspec.errors import ConfigError
from mlxspec.events import Event, FinishEvent, TokensEvent
from mlxspec.option import shown

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine
    from mlxspec.engine.receipt import Receipt
    from mlxspec.engine.request import Request

INTERRUPTED = 130
STATS = ("--stats", bool, "", "show all figures of an answer, not only its length, speed and acceptance")
SYSTEM = ("--system", str, "TEXT", "the system prompt: instructions before the conversation")


def add_prompts(parser: argparse.ArgumentParser, again: str) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="PROMPT", help="the prompt, in quotes; a piped text goes below it"
    )
    declare(parser, ("-p --prompt", list, "TEXT", f"a prompt, - to read stdin; given again: {again}"))


def add_options(parser: argparse.ArgumentParser) -> None:
    add_prompts(parser, "answered together")
    options.add_model(parser)
    options.add_sampling(parser, SamplingParams.max_tokens)
    options.add_drafting(parser)
    declare(
        parser,
        SYSTEM,
        ("--image", list, "FILE", "an image that the prompt is about; given again: one more image"),
        ("--ignore-chat-template", bool, "", "continue the prompt as it stands instead of answering it"),
        ("--json", bool, "", "one JSON object an answer, on a line of its own"),
        (
            "--prediction",
            str,
            "FILE",
            "what the answer will probably be: a file that is to be returned with a change",
        ),
        (
            "--prove",
            bool,
            "",
            "decode each answer again without drafts, and say whether the text is the same",
        ),
        ("--show-draft", bool, "", "colour drafted tokens that were accepted (on a terminal)"),
        STATS,
    )
    options.add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Answer the prompts of the command line. Returns 0, 130 where Ctrl-C ended the answers, or 1 where --prove found another text."""
    params, spec = options.sampling_params(args), options.spec_config(args)
    if args.system is not None and args.ignore_chat_template:
        raise ConfigError("--system needs the chat template that --ignore-chat-template leaves out.")
    predicted = "" if args.prediction is None else _text_of(args.prediction)
    if predicted and args.draft == "off":
        raise ConfigError("--prediction is drafted from, which --draft off leaves out.")
    options.engine_config(args)  # what is wrong with it is said before stdin is read
    prompts = read_prompts(args)
    if not prompts:
        raise ConfigError('There is no prompt: `mlxspec generate "TEXT"`, or pipe one in.')
    if args.image and (args.ignore_chat_template or len(prompts) > 1):
        raise ConfigError("--image goes with one prompt that the chat template is applied to.")
    if args.image and args.no_images:
        raise ConfigError("--image needs the vision tower that --no-images leaves out.")
    system = None if args.system is None else terminal.checked(args.system, "--system")
    engine = options.load_engine(args, spec)
    pictures = [read_picture(name, engine) for name in args.image or ()]
    encoded = [
        encode(engine, text, system=system, plain=args.ignore_chat_template, pictures=pictures)
        for text in prompts
    ]
    requests = [
        engine.submit(tokens, params, spec=replace(engine.spec, predicted=predicted)) for tokens in encoded
    ]
    with Interrupt() as interrupt:
        events = follow(engine, requests, interrupt)
        if not args.json:
            _print_text(events, requests, prompts, show_draft=args.show_draft)
        for _ in events:  # with --json nothing is shown before the end
            pass
    from mlxspec.engine.api import Result

    has_ended = not interrupt.asked and all(r.finish_reason != "error" for r in requests)
    asked = zip(encoded, requests, strict=True) if args.prove and has_ended else ()
    proofs = [engine.prove(tokens, Result.of(request), request.params) for tokens, request in asked]
    if args.json:
        _print_json(engine, requests, prompts, proofs)
    if not args.json:
        answers = [stats_line.finished(r) for r in requests]
        terminal.note(
            stats_line.line(
                answers, engine.stats.plain, engine.stats.round_seconds if len(requests) > 1 else None
            )
        )
        if args.stats:
            terminal.note(stats_line.details(answers))
        for proof in proofs:
            terminal.note(stats_line.proof(proof, engine.tokenizer))
        for notice in stats_line.notices(r.stats for r in requests):
            terminal.note(notice)
    if any(not proof.is_equal for proof in proofs):
        return 1
    return INTERRUPTED if interrupt.asked else 0


def _text_of(name: str) -> str:
    """Return the text of the file of --prediction. Raises ConfigError where it cannot be read as UTF-8."""
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"--prediction {shown(name)} cannot be read: {why}.") from error


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts of the command line: its words, or each `-p`. stdin is read for `-` and where there is no prompt; piped text is
    put below a prompt that is given as words. The list is empty where there is no prompt at all. Raises ConfigError for an empty
    prompt or contradicting ones."""
    words, given = args.words, args.prompt or []
    if words and given:
        raise ConfigError(f"{shown(words[0])} stands beside -p; give every prompt with -p, or one without.")
    if len(words) > 1:
        raise ConfigError(f"{shown(words[1])} stands behind the prompt; put the whole prompt in quotes.")
    if given.count("-") > 1:
        raise ConfigError("-p - was given twice, but the standard input can be read only once.")
    is_rank = getattr(args, "ranks", None) is not None
    if is_rank and ((not given and not words) or "-" in (*given, *words)):
        raise ConfigError(
            "Among ranks a prompt is given on the command line: the standard input that mlx.launch gives does not end."
        )
    if not given and not words and not terminal.is_terminal(sys.stdin):
        words = ["-"]
    prompts = [_stdin() if text == "-" else terminal.checked(text, "The prompt") for text in (*given, *words)]
    if not all(prompts):
        raise ConfigError("The prompt is empty.")
    if words and words != ["-"] and not is_rank and terminal.stdin_is_piped() and (piped := _stdin()):
        prompts[0] += f"\n\n{piped}"
    return prompts


def _stdin() -> str:
    if terminal.is_terminal(sys.stdin):
        return terminal.read_stdin()
    with Waiting("reading the standard input"):
        return terminal.read_stdin()


class _InOrder:
    """A printer of several answers that are decoded together. The first that has not ended is streamed; the events of later ones wait.
    show_draft: whether drafted tokens that were accepted are coloured."""

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
        """Print the events that are still waiting, after the last event."""
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
    text = first if len(first) <= 60 else first[:57] + "..."
    return f"{chr(10) if index else ''}=== {index + 1} of {len(prompts)}: {text}\n"


def _record(engine: Engine, request: Request) -> dict[str, Any]:
    """Return the record of an answer, from which it can be proved later. Where that cannot be made, print a notice and return the finish
    reason and statistics alone."""
    from mlxspec.engine.record import record
    from mlxspec.engine.request import described

    try:
        return record(request, engine.name, engine.config.kv_bits, engine.weights_digest)
    except Exception as error:  # whatever is wrong with a record, the answer is whole
        terminal.note(f"An answer has no record, so it cannot be proved later: {described(error)}")
        return {"finish_reason": request.finish_reason, "stats": request.stats.data()}


def _print_json(
    engine: Engine, requests: Sequence[Request], prompts: Sequence[str], proofs: Sequence[Receipt]
) -> None:
    for i, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        data = {
            "prompt": prompt,
            "text": request.answer.text,
            **_record(engine, request),
            **({"ratio": engine.stats.plain.ratio(request.stats).data()} if len(requests) == 1 else {}),
            "device": stats_line.device_data(),
            **({"receipt": asdict(proofs[i])} if proofs else {}),
        }
        terminal.say(json.dumps(data) + "\n")
