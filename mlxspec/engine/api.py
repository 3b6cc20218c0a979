"""The blocking calls of an engine, `generate`, `stream` and `chat`, made of submitting requests and running steps.

`Engine` inherits from the class here. This module deals with requests, results and the chat format, and not with rounds, caches or
drafters.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from mlxspec.config import MAX_CONTEXT, MAX_TOP_LOGPROBS, SamplingParams, SpecConfig
from mlxspec.engine.calls import Calls, Conversation, Prompt, checked_messages, ended, paired, with_fields
from mlxspec.engine.image_prompt import PromptWithImages, prepared_prompt, split_images
from mlxspec.engine.receipt import Difference, Receipt, first_difference
from mlxspec.engine.request import Request
from mlxspec.engine.stats import RequestStats
from mlxspec.errors import ConfigError, ImageError, MlxspecError
from mlxspec.events import Event, FinishReason, TokenLogprob
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.models.vision.base import Vision
from mlxspec.option import by_name, of_kind, shown


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished answer. tokens: its token ids, without the end token. finish_reason: "stop", "length", "cancelled", or "error"; `error`
    is then the sentence that says why.

    logprobs: one for each token, None where they were not requested. prompt_logprobs: one for each token of the prompt except the first,
    None where they were not requested.
    """

    text: str
    tokens: tuple[int, ...] = field(repr=False)
    finish_reason: FinishReason
    stats: RequestStats = field(repr=False)
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None

    @classmethod
    def of(cls, request: Request) -> Result:
        """Return the result of a request that has ended."""
        return cls(
            text=request.answer.text,
            tokens=tuple(request.history[len(request.prompt) :]),
            finish_reason=request.finish_reason or "error",
            stats=request.stats,
            logprobs=None if request.logprobs is None else tuple(request.logprobs),
            prompt_logprobs=None if request.prompt_logprobs is None else tuple(request.prompt_logprobs),
            error=request.error,
        )


T = TypeVar("T")
# Yields prompts that must be answered, is sent their results, and returns a value made of them
Asking = Generator[tuple[Prompt, SamplingParams], Result | None, T]


def proof(prompt: Prompt, result: Result, params: SamplingParams) -> Asking[Receipt]:
    """Make the receipt of an answer, as a generator that returns it. Yields a prompt and parameters that must be answered without
    drafts, and is sent the Result. The first is the answer's own prompt. The second, only where the texts differ, finds the likeliest
    tokens at the first place that differs. Raises ConfigError for an answer that failed or was stopped before its first token, and
    for one whose text does not belong to its tokens; an empty text is not compared."""
    if result.finish_reason == "error":
        raise ConfigError(f"An answer that failed cannot be proved: {result.error}")
    is_cut = result.finish_reason == "cancelled"
    is_open = (
        params.max_tokens == MAX_CONTEXT and result.finish_reason == "length"
    )  # memory ended it, or a loop
    if is_cut and not result.tokens:
        raise ConfigError("An answer that was stopped before its first token cannot be proved.")
    asked = replace(params, seed=result.stats.seed)
    plain = yield prompt, replace(asked, max_tokens=len(result.tokens)) if is_cut or is_open else asked
    if plain is None or plain.error is not None:
        raise MlxspecError(f"Plain decoding of this prompt failed: {plain and plain.error}")
    difference = None
    if plain.tokens != result.tokens or not (is_cut or plain.finish_reason == result.finish_reason):
        difference = yield from _differing(prompt, result.tokens, plain.tokens)
    elif result.text != (plain.text[: len(result.text)] if is_cut else plain.text) and result.text:
        raise ConfigError("The answer's text is not what its tokens say: one of them was changed.")
    return Receipt(
        num_tokens=len(result.tokens),
        num_accepted=result.stats.num_accepted,
        seconds=result.stats.decode_seconds,
        plain_seconds=plain.stats.decode_seconds,
        difference=difference,
    )


def _differing(prompt: Prompt, answer: Sequence[int], plain: Sequence[int]) -> Asking[Difference]:
    """Make the Difference of two answers to one prompt, as a generator that returns it. Yields one prompt, the original one and the
    tokens that both answers share, with parameters that request the likeliest next tokens; is sent the Result."""
    place = first_difference(answer, plain)
    if isinstance(prompt, PromptWithImages):
        there: Prompt = replace(prompt, tokens=[*prompt.tokens, *answer[:place]])
    else:
        there = [*map(int, prompt), *answer[:place]]
    said = yield (
        there,
        SamplingParams(
            max_tokens=1, temperature=0.0, logprobs=True, top_logprobs=MAX_TOP_LOGPROBS, ignore_eos=True
        ),
    )
    likely = {t.token: t.logprob for one in (said and said.logprobs) or () for t in one.top}
    return Difference.at(place, answer, plain, likely)


class EngineApi(Calls[Result, list[Result], Iterator[Event]]):
    """The part of an engine that callers use. Attributes: tokenizer (None: prompts are token ids only), name, vision (None: text only;
    no_images is then the sentence that says why)."""

    tokenizer: Tokenizer | None
    name: str
    vision: Vision | None
    no_images: str

    def __repr__(self) -> str:
        """Return the line that a notebook shows: the model's name, its drafters, and the longest context in tokens."""
        engine: Any = self
        drafters = ", ".join(engine.spec.drafters) or "nothing drafts"
        return f"<mlxspec engine of {self.name}: {drafters}, {engine.max_context:,} tokens of context>"

    def __init__(self) -> None:
        self._inboxes: dict[
            int, deque[Event]
        ] = {}  # of the requests that this class made: each gets its own events, whichever call runs the step

    @by_name
    def prove(
        self, prompt: Prompt, result: Result, params: SamplingParams | None = None, **fields: Any
    ) -> Receipt:
        """Decode an answer's prompt again without drafts, and return the receipt that says whether the answer is the same. result: the
        answer to `prompt`. params, fields: those of the answer's request. Raises ConfigError for an answer that failed."""
        if not isinstance(result, Result):
            raise ConfigError(f"Give prove the Result of one answer, not {shown(result)}.")
        if isinstance(prompt, str) and self.tokenizer is not None:
            prompt = self.tokenizer.encode(prompt)
        of_kind("params", params, SamplingParams)
        return self._plainly(proof(prompt, result, with_fields(params or SamplingParams(), fields)))

    def difference(
        self, prompt: Sequence[int] | PromptWithImages, answer: Sequence[int], plain: Sequence[int]
    ) -> Difference:
        """Return the first place at which an answer to `prompt` differs from plain decoding's, with both tokens and their
        log-probabilities. answer, plain: token ids of both texts. Runs the model once, for the log-probabilities after the tokens
        that both share."""
        return self._plainly(_differing(prompt, answer, plain))

    def _plainly(self, steps: Asking[T]) -> T:
        """Run the generator `steps` to its end and return its value. Each prompt that it yields is answered without drafts."""
        answer: Result | None = None
        while True:
            try:
                asked = steps.send(answer)
            except StopIteration as done:
                found: T = done.value
                return found
            answer = self.generate(*asked, spec=SpecConfig())

    @by_name
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        spec: SpecConfig | None = None,
        **fields: Any,
    ) -> Iterator[Event]:
        """Return an iterator over the events of one answer as they happen. The last one is a FinishEvent. Closing the iterator cancels
        the request. fields: as in `generate`.

        Raises MlxspecError subclasses in this call, before the first event is requested.
        """
        return self._events(self._new_request(prompt, with_fields(params, fields), spec))

    @by_name
    def chat_prompt(self, messages: Conversation, template: Mapping[str, Any] | None = None) -> list[int]:
        """Return the token ids of one conversation in the model's chat format. messages, template: as in `chat`, without images. Raises
        ConfigError where the model has no chat template, where a message is invalid, and where the conversation has images, for which
        `chat_input` is."""
        found = self.chat_input(messages, template)
        if isinstance(found, PromptWithImages):
            raise ConfigError("A conversation with images is more than token ids; use chat_input.")
        return found

    @by_name
    def chat_input(
        self, messages: Conversation, template: Mapping[str, Any] | None = None
    ) -> list[int] | PromptWithImages:
        """Return one conversation in the model's chat format: token ids, or a PromptWithImages where it holds images. messages,
        template: as in `chat`. Raises ConfigError where the model has no chat template and where a message is invalid, ImageError for
        an image that cannot be used."""
        if self.tokenizer is None or self.tokenizer.template is None:
            raise ConfigError(f"{self.name} has no chat template; give a plain prompt.")
        of_kind("template", template, Mapping)
        unread = self.tokenizer.template.unread(map(str, template or ()))
        if unread:
            warnings.warn(
                f"The chat template of {self.name} does not read {', '.join(unread)}.", stacklevel=7
            )
        messages, sources = split_images(checked_messages(messages))
        if sources and self.vision is None:
            raise ImageError(self.no_images)
        text = self.tokenizer.template.render(messages, **{str(k): v for k, v in (template or {}).items()})
        if sources and self.vision is not None:
            return prepared_prompt(text, sources, self.vision, self.tokenizer)
        return self.tokenizer.encode(text, special=False)

    # --- what the other half gives

    @abstractmethod
    def _advance(self) -> None:
        """Run one step of the engine, and put each event where its reader finds it."""

    @abstractmethod
    def enqueue(self, request: Request) -> None:
        """Queue a request without the limit on the number of waiting requests."""

    @abstractmethod
    def _rest(self) -> None:
        """Do the work that was put off while an answer was decoded. Called after an answer has ended."""

    @abstractmethod
    def cancel(self, number: int) -> bool:
        """End the request of this number, and return whether it was running."""

    @abstractmethod
    def _new_request(self, prompt: Prompt, params: SamplingParams | None, spec: SpecConfig | None) -> Request:
        """Return a checked request that is not yet queued."""

    # ---

    def _answer(
        self, prompts: Callable[[Any], Any], params: Any, spec: SpecConfig | None
    ) -> Result | list[Result]:
        asked, single = paired(prompts(self), params)
        requests = [self._new_request(prompt, each, spec) for prompt, each in asked]
        self._run_until(requests)
        found: Result | list[Result] = ended(
            [Result.of(r) for r in requests], [r.failure for r in requests], single=single
        )
        return found

    def _events_of(
        self, prompt: Callable[[Any], Any], params: Any, spec: SpecConfig | None
    ) -> Iterator[Event]:
        return self.stream(prompt(self), params, spec=spec)

    def _events(self, request: Request) -> Generator[Event, None, None]:
        inbox = self._inboxes[request.number] = deque()
        try:
            self.enqueue(request)
            while inbox or request.finish_reason is None:
                if inbox:
                    yield inbox.popleft()
                else:
                    self._advance()
        finally:
            self.cancel(request.number)
            del self._inboxes[request.number]
        self._rest()

    def _run_until(self, requests: Sequence[Request]) -> None:
        """Run steps until all of these requests have ended. Other requests decode in the same rounds, and their events stay in their own
        queues."""
        try:
            for request in requests:
                self._inboxes[request.number] = deque(maxlen=0)
                self.enqueue(request)
            while any(r.finish_reason is None for r in requests):
                self._advance()
        finally:
            for request in requests:
                self.cancel(request.number)
                self._inboxes.pop(request.number, None)
        self._rest()
