"""A conversation: its messages, its statistics, and how a turn is added to it or taken back.

Knows the engine and the order of turns; knows no stream, no commands and no signal but the one that ends an answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mlxspec.cli.answer import Message, finished, follow, has_template
from mlxspec.cli.interrupt import Interrupt
from mlxspec.cli.stats_line import Finished
from mlxspec.config import SamplingParams
from mlxspec.errors import ConfigError
from mlxspec.events import TokensEvent

if TYPE_CHECKING:
    from mlxspec.config import SpecConfig
    from mlxspec.engine.engine import Engine


@dataclass(kw_only=True)
class Conversation:
    """Turns held with one engine. `system` stands before all of them and may change at any time; `spec` says who drafts."""

    engine: Engine
    params: SamplingParams
    spec: SpecConfig
    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    answers: list[Finished] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not has_template(self.engine):
            raise ConfigError(
                f"{self.engine.name} has no chat template, so it cannot hold a conversation; `mlxspec generate` continues a text."
            )

    def ask(self, text: str, interrupt: Interrupt) -> Iterator[str]:
        """Pieces of the answer to `text`. Both become part of the conversation, the answer as far as it came.

        Raises ConfigError or ContextOverflowError before the first piece; the conversation is as it was then.
        """
        turns = [*self.turns, {"role": "user", "content": text}]
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        prompt = self.engine.chat_prompt([*before, *turns])
        request = self.engine.submit(prompt, self.params, spec=self.spec)
        pieces: list[str] = []
        started = False
        try:
            for event in follow(self.engine, [request], interrupt):
                started = True
                if isinstance(event, TokensEvent) and event.text:
                    pieces.append(event.text)
                    yield event.text
        finally:
            if started:
                self.turns = [*turns, {"role": "assistant", "content": "".join(pieces)}]
                self.answers.append(finished(request))

    def draft_with(self, names: str) -> None:
        """Change who drafts: "off", "auto" (all that were loaded for it), or names. Raises ConfigError."""
        there = tuple(self.engine.chain.drafters)
        if names == "off":
            chosen: tuple[str, ...] = ()
        elif names == "auto":
            chosen = self.engine.spec.drafters
        else:
            chosen = tuple(n.strip() for n in names.split(","))
        spec = replace(self.spec, drafters=chosen)
        missing = [n for n in chosen if n not in there]
        if missing:
            loaded = ", ".join(there) or "none"
            raise ConfigError(
                f"{missing[0]} was not loaded; loaded are: {loaded} (--draft at the start chooses others)."
            )
        self.spec = spec

    def clear(self) -> None:
        """Forget all turns; system prompt, drafters and statistics stay."""
        self.turns = []
