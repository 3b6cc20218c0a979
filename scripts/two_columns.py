"""The animated picture of one prompt answered with drafting off and as it is by default: docs/pictures/two-columns.svg.

A turn is one answer each way, one after the other. The turn with the median ratio is shown; the ratio is not said, as it differs from run
to run. Pieces of the text appear when their tokens came, all of it slowed down. Knows the engine and SVG. A renderer without animation
shows both answers whole.
"""

from __future__ import annotations

import time
from dataclasses import replace
from html import escape
from typing import NamedTuple

import mlxspec
from mlxspec.bench.demo_prompts import PROMPTS, DemoPrompt
from mlxspec.events import FinishEvent, TokensEvent

TURNS, WARM = 15, 2
SHOWN_SECONDS, PAUSE = 6.0, 4.0  # of the slower answer, and behind it
_LEFT, _TOP, _LINE, _CHAR, _COLUMN = 24, 92, 20, 7.8, 560
_STYLE = """
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre; fill: #24292f }
.head { font: 600 15px system-ui, sans-serif } .said { font: 15px system-ui, sans-serif } rect { fill: #ffffff; stroke: #d0d7de }
.drafted { fill: #1a7f37 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } rect { fill: #0d1117; stroke: #30363d } .drafted { fill: #56d364 } }
@media (prefers-reduced-motion: reduce) { text { visibility: visible !important } }
"""


class Piece(NamedTuple):
    """Text that came `seconds` after the first token; drafted: characters at its beginning that were."""

    seconds: float
    text: str
    drafted: int


class Answer(NamedTuple):
    """pieces: none where the answer is empty. seconds: from the first token to the last."""

    pieces: tuple[Piece, ...]
    tokens: tuple[int, ...]
    seconds: float


def answer(engine: mlxspec.Engine, prompt: DemoPrompt, *, drafts: bool) -> Answer:
    spec = engine.spec if drafts else replace(engine.spec, drafters=())
    tokens = engine.chat_input([{"role": "user", "content": prompt.text}])
    request = engine.submit(tokens, mlxspec.SamplingParams(max_tokens=200), spec=spec)
    pieces, began = list[Piece](), 0.0
    while request.finish_reason is None:
        for event in engine.step():
            began = began or time.perf_counter()
            if isinstance(event, TokensEvent) and event.text:
                pieces.append(Piece(time.perf_counter() - began, event.text, event.num_drafted_chars))
            elif isinstance(event, FinishEvent) and event.error:
                raise RuntimeError(event.error)
    return Answer(tuple(pieces), tuple(request.history[len(request.prompt) :]), time.perf_counter() - began)


def median_turn(engine: mlxspec.Engine, prompt: DemoPrompt) -> tuple[Answer, Answer]:
    """The answers with drafting off and on of the turn with the median ratio of times. Raises RuntimeError where texts differ."""
    found = []
    for turn in range(WARM + TURNS):
        first, second = (answer(engine, prompt, drafts=drafts) for drafts in (bool(turn % 2), not turn % 2))
        found.append((second, first) if turn % 2 else (first, second))
    if len({one.tokens for both in found for one in both}) > 1:
        raise RuntimeError("The texts differ.")
    return sorted(found[WARM:], key=lambda both: both[0].seconds / both[1].seconds)[TURNS // 2]


def title(engine: mlxspec.Engine, prompt: DemoPrompt = PROMPTS[0]) -> str:
    return f"{_request(prompt)}: without drafting, and with {', '.join(engine.spec.drafters)}"


def _request(prompt: DemoPrompt) -> str:
    return prompt.text.splitlines()[0].rstrip(":")


def svg(engine: mlxspec.Engine, prompt: DemoPrompt = PROMPTS[0]) -> str:
    off, on = median_turn(engine, prompt)
    slower = SHOWN_SECONDS / max(off.seconds, on.seconds)
    height = _TOP + _LINE * (len("".join(p.text for p in off.pieces).splitlines()) + 3)
    length = SHOWN_SECONDS + PAUSE
    heads = (("off", "without drafting", off), (", ".join(engine.spec.drafters), "with drafting", on))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _COLUMN} {height}"><style>{_STYLE}</style>',
        f"<title>{escape(title(engine, prompt))}</title>",
        f'<rect x="1" y="1" width="{2 * _COLUMN - 2}" height="{height - 2}" rx="8">',
        f'<animate id="turn" attributeName="rx" values="8" dur="{length:.2f}s" begin="0s;turn.end"/></rect>',
        f'<text class="head" x="{_LEFT}" y="34">mlxspec, the built-in model: "{escape(_request(prompt))}"</text>',
    ]
    for column, (drafters, how, one) in enumerate(heads):
        x = _LEFT + column * _COLUMN
        parts.append(f'<text class="said" x="{x}" y="66">{how}{f": {drafters}" if column else ""}</text>')
        parts.extend(_text(one, x, slower))
        said = f"{len(one.tokens)} tokens in {1000 * one.seconds:.0f} ms"
        if column:
            said += ": the same text"
        parts.append(_shown(said, x, height - _LINE, one.seconds * slower, "said"))
    parts.append(
        f'<text class="said" x="{_COLUMN * 2 - _LEFT}" y="34" text-anchor="end">slowed down {slower:.0f} times</text></svg>\n'
    )
    return "\n".join(parts)


def _text(one: Answer, x: float, slower: float) -> list[str]:
    """Pieces of an answer where they stand, drafted characters in their colour."""
    parts, line, place = [], 0, 0
    for piece in one.pieces:
        halves = ((piece.text[: piece.drafted], "drafted"), (piece.text[piece.drafted :], ""))
        for text, kind in halves:
            for i, part in enumerate(text.split("\n")):
                if i:
                    line, place = line + 1, 0
                if part.strip():
                    parts.append(
                        _shown(part, x + place * _CHAR, _TOP + _LINE * line, piece.seconds * slower, kind)
                    )
                place += len(part)
    return parts


def _shown(text: str, x: float, y: float, seconds: float, kind: str) -> str:
    """A text that is hidden at the beginning of each turn for so many seconds."""
    return (
        f'<text x="{x:.1f}" y="{y}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""} xml:space="preserve">{escape(text)}'
        f'<set attributeName="visibility" to="hidden" begin="turn.begin" dur="{max(seconds, 0.01):.2f}s"/></text>'
    )
