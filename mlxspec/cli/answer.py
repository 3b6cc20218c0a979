"""Turns a prompt into events: what a command needs between its options and its output.

Knows the engine's requests and chat format; knows no stream of answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlxspec.cli.images import Picture, content
from mlxspec.cli.interrupt import Interrupt
from mlxspec.cli.progress_bar import Waiting
from mlxspec.errors import ConfigError, MlxspecError
from mlxspec.events import Event, FinishEvent, PrefillEvent

if TYPE_CHECKING:
    from mlxspec.engine.calls import Prompt
    from mlxspec.engine.engine import Engine
    from mlxspec.engine.request import Request

Message = Mapping[str, Any]


def has_template(engine: Engine) -> bool:
    """Return whether the model has a chat template."""
    return engine.tokenizer is not None and engine.tokenizer.template is not None


def encode(
    engine: Engine,
    text: str,
    *,
    system: str | None = None,
    plain: bool = False,
    pictures: Sequence[Picture] = (),
) -> Prompt:
    """Return the prompt of one question for the engine: in the model's chat template where it has one, else as plain text. system: the
    system prompt; plain: do not use the chat template; pictures: images for the question.

    Raises ConfigError for a system prompt or images where no chat template is used.
    """
    if plain or not has_template(engine):
        if pictures:
            raise ConfigError("Images have no place in a prompt without a chat template.")
        if system is not None:
            raise ConfigError(
                f"{engine.name} has no chat template, so there is no place for a system prompt."
            )
        if engine.tokenizer is None:
            raise ConfigError(f"{engine.name} has no tokenizer.")
        return engine.tokenizer.encode(text)
    messages: list[dict[str, Any]] = [{"role": "user", "content": content(text, pictures)}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return engine.chat_input(messages)


def follow(engine: Engine, requests: Sequence[Request], interrupt: Interrupt) -> Iterator[Event]:
    """Run the engine and yield the events of submitted requests until all have ended or Ctrl-C was pressed; the requests are then
    cancelled. Shows the progress of reading a long prompt on stderr.

    Raises MlxspecError where a request fails.
    """
    mine = {r.number for r in requests}
    reading = Waiting("reading the prompt", unit="tokens")
    try:
        with reading:
            while any(r.finish_reason is None for r in requests) and not interrupt.asked:
                for event in engine.step():
                    if event.request not in mine:
                        continue
                    if isinstance(event, PrefillEvent):
                        reading.tell(event.num_done, event.num_total, num_free=event.num_cached)
                    else:
                        reading.end()
                    yield event
                    if isinstance(event, FinishEvent) and event.reason == "error":
                        raise MlxspecError(event.error or "The answer could not be finished.")
    finally:
        for request in requests:
            engine.cancel(request.number)
