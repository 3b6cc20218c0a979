"""A conversation: its messages, its statistics, and how a turn is added to it or taken back.

The prompt of a turn is always the template's own rendering of the whole conversation, so what the engine read before it need not read
again; whether earlier thinking stays in it is the template's choice. Knows the engine and the order of turns; knows no stream, no commands
and no signal but the one that ends an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from mlxspec.cli.answer import Message, follow
from mlxspec.cli.images import Picture, content, read_picture
from mlxspec.cli.interrupt import Interrupt
from mlxspec.cli.saved import Saved
from mlxspec.cli.stats_line import Finished, finished
from mlxspec.config import ALWAYS_THERE, MAX_CONTEXT, SamplingParams, SpecConfig
from mlxspec.engine.image_prompt import PromptWithImages, split_images
from mlxspec.errors import ConfigError
from mlxspec.events import TokensEvent
from mlxspec.parsers.formats import detect
from mlxspec.parsers.pieces import Content, Reasoning
from mlxspec.parsers.pieces import Piece as Part

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine
    from mlxspec.engine.receipt import Receipt
    from mlxspec.engine.request import Request
    from mlxspec.loading.template import ChatTemplate


class Piece(NamedTuple):
    """A piece of an answer's text, or of the thinking before the answer."""

    text: str
    is_thinking: bool = False


@dataclass(kw_only=True)
class Conversation:
    """A conversation with one engine. Raises ConfigError where the model has no chat template.

    params, spec: sampling and drafting of the next answers; a max_tokens of MAX_CONTEXT lets an answer go on to the end of the context.
    system: the system prompt, which may change at any time. thinking: the value of the template's switch for thinking, None for its
    default. recommended: sampling that the model's files recommend, by field of SamplingParams. turns: messages; those with images have
    them under "images". pictures: images for the next question. answers: statistics of all answers. num_forgotten: number of the first
    messages that are no longer part of the prompt, because the context is full. last: the prompt and the request of the last answer.
    """

    engine: Engine
    params: SamplingParams
    spec: SpecConfig
    system: str | None = None
    thinking: bool | None = None
    recommended: Mapping[str, Any] = field(default_factory=dict)
    turns: list[Message] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    answers: list[Finished] = field(default_factory=list)
    num_forgotten: int = 0
    last: tuple[list[int] | PromptWithImages, Request] | None = None

    def __post_init__(self) -> None:
        _template(self.engine)  # there is one

    def ask(self, text: str, interrupt: Interrupt) -> Iterator[Piece]:
        """Ask a question and yield the pieces of the answer. Both become part of the conversation, also where the answer is incomplete
        because Ctrl-C or an error ended it.

        Raises ConfigError or ContextOverflowError before the first piece; the conversation is then unchanged.
        """
        asked: dict[str, Any] = {"role": "user", "content": text}
        if self.pictures:
            asked["images"] = list(self.pictures)
        turns = [*self.turns, asked]
        form = detect(_template(self.engine).source)
        params = self.params if form.thinking is None else replace(self.params, thinking_tags=form.thinking)
        begin, prompt = self._fitting(turns)
        if params.max_tokens == MAX_CONTEXT:
            params = replace(params, max_tokens=self._room(len(prompt)))
        request = self.engine.submit(prompt, params, spec=self.spec)
        parts: dict[bool, list[str]] = {False: [], True: []}
        parser = form.parser(self._rendered(turns[begin:]))
        started = False
        try:
            for event in follow(self.engine, [request], interrupt):
                started = True
                if isinstance(event, TokensEvent) and event.text:
                    yield from _kept(parser.push(event.text), parts)
            yield from _kept(parser.finish(cut=request.finish_reason == "length"), parts)
        finally:
            if started:
                self.last = prompt, request
                answer = {"role": "assistant", "content": "".join(parts[False])}
                if parts[True]:
                    answer["reasoning_content"] = "".join(parts[True])
                self.turns, self.pictures = [*turns, answer], []
                if begin > self.num_forgotten:
                    said = "The first turn is" if begin == 2 else f"The first {begin // 2} turns are"
                    request.stats.notices.append(f"{said} no longer shown to the model: the context is full.")
                self.num_forgotten = begin
                self.answers.append(finished(request))

    def prove(self, interrupt: Interrupt) -> Receipt | None:
        """Decode the last answer again without drafts. Returns the receipt of the comparison, None where Ctrl-C ended it. Raises
        ConfigError where there is no answer, or it cannot be proved."""
        from mlxspec.engine.api import Result, proof

        if self.last is None:
            raise ConfigError("There is no answer to prove.")
        prompt, request = self.last
        steps, answer = proof(prompt, Result.of(request), request.params), None
        while True:
            try:
                asked = steps.send(answer)
            except StopIteration as done:
                receipt: Receipt = done.value
                return receipt
            again = self.engine.submit(*asked, spec=SpecConfig())
            for _ in follow(self.engine, [again], interrupt):
                pass
            if interrupt.asked:
                return None
            answer = Result.of(again)

    def _fitting(self, turns: Sequence[Message]) -> tuple[int, list[int] | PromptWithImages]:
        """Return the number of first messages to leave out of the prompt, and the prompt of the others. Where less than an eighth of the
        context is left for the answer, the first turns are left out until a quarter is left, so that the prompt keeps its beginning
        for some turns. The last question is always kept."""
        begin, room = self.num_forgotten, self._room(0) // 8
        while True:
            prompt = self._prompt(turns[begin:])
            if self._room(len(prompt)) >= room or begin + 2 >= len(turns):
                break
            begin, room = begin + 2, self._room(0) // 4
        return begin, prompt

    def _room(self, num_prompt: int) -> int:
        """Return the most tokens that an answer after `num_prompt` tokens may have: to the end of the context, or as many as fit into
        memory. At least 1."""
        engine = self.engine
        most = min(engine.max_context, engine.memory.most_tokens(self.spec))
        return max(1, most - num_prompt)

    def _messages(self, turns: Sequence[Message]) -> list[Message]:
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*before, *map(_with_images, turns)]

    @property
    def _options(self) -> dict[str, Any]:
        return {} if self.thinking is None else {"enable_thinking": self.thinking}

    def _prompt(self, turns: Sequence[Message]) -> list[int] | PromptWithImages:
        return self.engine.chat_input(self._messages(turns), self._options)

    def _rendered(self, turns: Sequence[Message]) -> str:
        return _template(self.engine).render(split_images(self._messages(turns))[0], **self._options)

    def think(self, wanted: bool) -> None:
        """Set the chat template's switch for thinking. Raises ConfigError where the template has none."""
        before, probe = self.thinking, [{"role": "user", "content": "x"}]
        found = []
        try:
            for value in (True, False):
                self.thinking = value
                found.append(self._rendered(probe))
        finally:
            self.thinking = before
        if found[0] == found[1]:
            raise ConfigError(f"{self.engine.name} has no switch for thinking in its chat template.")
        self.thinking = wanted

    def draft_with(self, names: str) -> None:
        """Choose the drafters of the next answers. names: "off", "auto" (the drafters that the command line chose), or names separated
        by commas. Raises ConfigError for a drafter that is unknown or not loaded."""
        there = tuple(self.engine.drafts.drafters)
        if names == "off":
            chosen: tuple[str, ...] = ()
        elif names == "auto":
            chosen = self.engine.spec.drafters
        else:
            chosen = tuple(n.strip() for n in names.split(","))
        spec = replace(self.spec, drafters=chosen)
        missing = [n for n in spec.drafters if n not in (*there, *ALWAYS_THERE)]
        if missing:
            loaded = ", ".join(("suffix", *there))
            raise ConfigError(
                f"{missing[0]} was not loaded; loaded are: {loaded} (--draft at the start chooses others)."
            )
        self.spec = spec

    def undo(self) -> str:
        """Remove the last question and its answer. Returns the question, whose images are attached to the next one. Raises ConfigError
        where there is no turn."""
        if not self.turns:
            raise ConfigError("There is no turn to take back.")
        question = str(self.turns[-2]["content"])
        self.pictures = list(self.turns[-2].get("images", ()))
        self.turns = self.turns[:-2]
        self.num_forgotten = min(self.num_forgotten, len(self.turns))
        return question

    def show(self, *names: str) -> None:
        """Attach images to the next question. names: paths. Raises ConfigError where the model reads no images, ImageError for a file
        that cannot be read; no image is attached then."""
        self.pictures = [*self.pictures, *(read_picture(name, self.engine) for name in names)]

    def clear(self) -> None:
        """Remove all turns and images. System prompt, drafters and statistics are kept."""
        self.turns, self.pictures, self.num_forgotten = [], [], 0

    def go_on_with(self, engine: Engine, recommended: Mapping[str, Any]) -> None:
        """Continue the conversation with another model, and start its statistics again. recommended: the model's sampling, which
        replaces the values that the user has not changed. Raises ConfigError where the model has no chat template; nothing has
        changed then."""
        _template(engine)  # there is one
        default = SamplingParams()
        changed = {
            name: recommended.get(name, getattr(default, name))
            for name in (*self.recommended, *recommended)
            if getattr(self.params, name) == self.recommended.get(name, getattr(default, name))
        }
        self.params, self.recommended = replace(self.params, **changed), recommended
        if engine is not self.engine:
            self.engine.prefix.close()
        self.engine, self.spec, self.thinking, self.answers = engine, engine.spec, None, []
        self.last = None
        self.num_forgotten = 0

    def saved(self) -> Saved:
        return Saved(model=self.engine.name, system=self.system, messages=[_named(t) for t in self.turns])

    def restore(self, saved: Saved) -> None:
        """Replace this conversation by a saved one. Raises ConfigError or ImageError where the template refuses it or an image cannot be
        read; nothing has changed then."""
        before = self.system, self.turns
        turns = [
            {**m, "images": [read_picture(name, self.engine) for name in m["images"]]} if "images" in m else m
            for m in saved.messages
        ]
        self.system, self.turns, self.num_forgotten = saved.system, turns, 0
        try:
            self._prompt([*self.turns, {"role": "user", "content": "x"}])
        except BaseException:
            self.system, self.turns = before
            raise


def _with_images(message: Message) -> Message:
    """Return a message with its images as part of its content, as chat templates and the engine read it."""
    if "images" not in message:
        return message
    given = content(str(message["content"]), message["images"])
    return {**{k: v for k, v in message.items() if k != "images"}, "content": given}


def _named(message: Message) -> dict[str, Any]:
    """Return a message with the paths of its images in place of their data, for saving."""
    found = dict(message)
    if "images" in found:
        found["images"] = [picture.path for picture in found["images"]]
    return found


def _kept(pieces: Sequence[Part], parts: dict[bool, list[str]]) -> Iterator[Piece]:
    for piece in pieces:
        if isinstance(piece, Content | Reasoning):  # without tools there are no calls
            is_thinking = isinstance(piece, Reasoning)
            parts[is_thinking].append(piece.text)
            yield Piece(piece.text, is_thinking)


def _template(engine: Engine) -> ChatTemplate:
    if engine.tokenizer is None or engine.tokenizer.template is None:
        raise ConfigError(
            f"{engine.name} has no chat template, so it cannot hold a conversation; `mlxspec generate` continues a text."
        )
    return engine.tokenizer.template
