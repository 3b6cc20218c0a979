"""The blocking calls of an engine, `generate`, `stream` and `chat`, on top of submitting requests and stepping.

Knows requests, results and the chat format; knows no rounds, no caches and no drafters. `Engine` is made of this and of the queue.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from typing import Any, Literal, TypeVar, overload

from mlxspec.config import MAX_TOP_LOGPROBS, SamplingParams, SpecConfig
from mlxspec.engine.image_prompt import PromptWithImages, prepared_prompt, split_images
from mlxspec.engine.receipt import Difference, Receipt, first_difference
from mlxspec.engine.request import Request
from mlxspec.engine.stats import RequestStats
from mlxspec.errors import ConfigError, ImageError, MlxspecError
from mlxspec.events import Event, FinishReason, TokenLogprob
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.models.vision.base import Vision
from mlxspec.option import by_name, near, of_kind, shown

Prompt = str | Sequence[int] | PromptWithImages
Prompts = list[str] | tuple[str, ...] | Sequence[Sequence[int]] | Sequence[Sequence[int] | PromptWithImages]
Message = Mapping[str, Any]
Conversation = str | Sequence[Message]  # a string is what the user says first
Conversations = list[str] | tuple[str, ...] | Sequence[Sequence[Message]]
_FIELDS = tuple(each.name for each in fields_of(SamplingParams))
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished answer. tokens: its ids, without the end token; finish_reason "stop", "length", or "error" with the sentence in `error`.

    logprobs: one a token, None where they were not asked for; prompt_logprobs: one a token of the prompt behind its first.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: RequestStats = field(repr=False)
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None

    @classmethod
    def of(cls, request: Request) -> Result:
        """The result of a request that has ended."""
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
# Yields what must be asked, is sent the results, and returns what is made of them
Asking = Generator[tuple[Prompt, SamplingParams], Result | None, T]


def proof(prompt: Prompt, result: Result, params: SamplingParams) -> Asking[Receipt]:
    """Makes the receipt of an answer. Yields a prompt and parameters that must be answered without drafts, and is sent the result: first
    the answer again, then, where that differs, what the model finds likely there. Raises ConfigError for an answer that failed."""
    if result.finish_reason == "error":
        raise ConfigError(f"An answer that failed cannot be proved: {result.error}")
    is_cut = result.finish_reason == "cancelled"
    if is_cut and not result.tokens:
        raise ConfigError("An answer that was stopped before its first token cannot be proved.")
    asked = replace(params, seed=result.stats.seed)
    plain = yield prompt, replace(asked, max_tokens=len(result.tokens)) if is_cut else asked
    if plain is None or plain.error is not None:
        raise MlxspecError(f"Plain decoding of this prompt failed: {plain and plain.error}")
    difference = None
    if plain.tokens != result.tokens or not (is_cut or plain.finish_reason == result.finish_reason):
        difference = yield from _differing(prompt, result.tokens, plain.tokens)
    return Receipt(
        num_tokens=len(result.tokens),
        num_accepted=result.stats.num_accepted,
        seconds=result.stats.decode_seconds,
        plain_seconds=plain.stats.decode_seconds,
        difference=difference,
    )


def _differing(prompt: Prompt, answer: Sequence[int], plain: Sequence[int]) -> Asking[Difference]:
    """Makes the difference of two answers to a prompt of token ids: asks what may follow the tokens that both have."""
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


class EngineApi(ABC):
    """The half of an engine that callers meet. Attributes: tokenizer (None: token ids only), name, vision (None: text only, and
    no_images says why)."""

    tokenizer: Tokenizer | None
    name: str
    vision: Vision | None
    no_images: str

    def __init__(self) -> None:
        self._inboxes: dict[
            int, deque[Event]
        ] = {}  # of the requests that are made here: whoever steps, each gets its own events

    @overload
    def generate(
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        *,
        spec: SpecConfig | None = None,
        **fields: Any,
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        spec: SpecConfig | None = None,
        **fields: Any,
    ) -> list[Result]: ...

    @by_name
    def generate(
        self,
        prompts: Prompt | Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        spec: SpecConfig | None = None,
        **fields: Any,
    ) -> Result | list[Result]:
        """Answer one prompt (a string or token ids: a Result) or several together (a list of Results, in order).

        params: one for all prompts, or one each. fields: of SamplingParams, as in `max_tokens=3`, in place of those of params. A string is
        continued as it stands; see `chat` for the model's chat format. Raises MlxspecError subclasses before any work; what goes wrong
        later ends its own answer, with finish_reason "error".
        """
        asked, single = paired(prompts, with_fields(params, fields))
        requests = [self._new_request(prompt, each, spec) for prompt, each in asked]
        self._run_until(requests)
        results = [Result.of(r) for r in requests]
        return results[0] if single else results

    @by_name
    def prove(
        self, prompt: Prompt, result: Result, params: SamplingParams | None = None, **fields: Any
    ) -> Receipt:
        """The receipt of an answer to `prompt`: it is decoded again without drafts. params, fields: those that it was asked with. Raises
        ConfigError for an answer that failed."""
        if not isinstance(result, Result):
            raise ConfigError(f"Give prove the Result of one answer, not {shown(result)}.")
        if isinstance(prompt, str) and self.tokenizer is not None:
            prompt = self.tokenizer.encode(prompt)
        of_kind("params", params, SamplingParams)
        return self._plainly(proof(prompt, result, with_fields(params or SamplingParams(), fields)))

    def difference(
        self, prompt: Sequence[int] | PromptWithImages, answer: Sequence[int], plain: Sequence[int]
    ) -> Difference:
        """The first place at which an answer to `prompt` differs from plain decoding's. The model is asked once more for what may follow
        the tokens that both have."""
        return self._plainly(_differing(prompt, answer, plain))

    def _plainly(self, steps: Asking[T]) -> T:
        """Runs `steps` to its value; all that it asks is answered without drafts."""
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
        """Events of one answer as they happen, the last one a FinishEvent. Closing the iterator cancels the request. fields: as in
        `generate`.

        Raises MlxspecError subclasses at once, before the first event is asked for.
        """
        return self._stream(self._new_request(prompt, with_fields(params, fields), spec))

    @overload
    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        spec: SpecConfig | None = None,
        template: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Result: ...

    @overload
    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        spec: SpecConfig | None = None,
        template: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Iterator[Event]: ...

    @overload
    def chat(
        self,
        messages: Conversations,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[False] = False,
        spec: SpecConfig | None = None,
        template: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> list[Result]: ...

    @by_name
    def chat(
        self,
        messages: Conversation | Conversations,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: bool = False,
        spec: SpecConfig | None = None,
        template: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Result | Iterator[Event] | list[Result]:
        """The answer to a conversation in the model's chat format: a Result, or with `stream` its events; of several conversations, which
        decode together, a list of Results in order.

        messages: {"role", "content"} mappings, or a string, which is one message of the user; or a list of such conversations. The roles
        are system, user, assistant and tool. The content of a message may be a list of parts, {"type": "text", "text": ...} and
        {"type": "image", "image": ...} with a path, bytes of a file, a Pillow image or a data: URL. params: one for all conversations, or
        one each. template: variables of the model's chat template, as {"enable_thinking": False}; a warning names those that it does not
        read. fields: as in `generate`. Raises
        ConfigError without a template, for what is no conversation, and for a keyword that names nothing.
        """
        asked, single = conversations(messages)
        if stream:
            if not single or isinstance(params, Sequence):
                raise ConfigError("One conversation is streamed at a time.")
            return self.stream(self.chat_input(asked[0], template), with_fields(params, fields), spec=spec)
        params = with_fields(params, fields)
        prompts: Prompts = [self.chat_input(each, template) for each in asked]
        results = self.generate(prompts, params, spec=spec)
        return results[0] if single else results

    @by_name
    def chat_prompt(self, messages: Conversation, template: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of one conversation without images, as `chat` takes it, in the model's chat format. Raises ConfigError without a
        template, for a message that is none, and for images: `chat_input` is for those."""
        found = self.chat_input(messages, template)
        if isinstance(found, PromptWithImages):
            raise ConfigError("A conversation with images is more than token ids; use chat_input.")
        return found

    @by_name
    def chat_input(
        self, messages: Conversation, template: Mapping[str, Any] | None = None
    ) -> list[int] | PromptWithImages:
        """One conversation, as `chat` takes it, in the model's chat format: token ids, with the images where it holds some. Raises
        ConfigError without a template and for a message that is none, ImageError for an image that cannot be used."""
        if self.tokenizer is None or self.tokenizer.template is None:
            raise ConfigError(f"{self.name} has no chat template; give a plain prompt.")
        of_kind("template", template, Mapping)
        unread = self.tokenizer.template.unread(map(str, template or ()))
        if unread:
            warnings.warn(
                f"The chat template of {self.name} does not read {', '.join(unread)}.", stacklevel=5
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
        """Run one round; its events go where they belong."""

    @abstractmethod
    def enqueue(self, request: Request) -> None:
        """Queue it, however many wait."""

    @abstractmethod
    def _rest(self) -> None:
        """An answer has ended: do what was put off while it grew."""

    @abstractmethod
    def cancel(self, number: int) -> bool:
        """End a request."""

    @abstractmethod
    def _new_request(self, prompt: Prompt, params: SamplingParams | None, spec: SpecConfig | None) -> Request:
        """A checked request, not yet queued."""

    # ---

    def _stream(self, request: Request) -> Generator[Event, None, None]:
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
        """Until all of these have ended. Others have their turns meanwhile, and keep their events."""
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


def paired(
    prompts: Prompt | Prompts, params: SamplingParams | Sequence[SamplingParams] | None
) -> tuple[list[tuple[Any, Any]], bool]:
    """Each prompt with its parameters, and whether it was one prompt rather than a list. Raises ConfigError where that cannot be told."""
    if not isinstance(prompts, PromptWithImages) and (not isinstance(prompts, Sequence) or len(prompts) == 0):
        raise ConfigError("There is no prompt: give a string, token ids, or a list of either.")
    single = isinstance(prompts, (str, bytes, PromptWithImages)) or isinstance(prompts[0], int)
    several: Any = [prompts] if single else prompts
    each: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params] * len(several)
    if len(each) != len(several):
        raise ConfigError(f"There are {len(several)} prompts but {len(each)} sampling parameters.")
    return list(zip(several, each, strict=True)), single


def with_fields(params: SamplingParams | Sequence[SamplingParams] | None, fields: Mapping[str, Any]) -> Any:
    """The parameters, each with these fields in place of its own. Raises ConfigError for a name that is no field, and for a value that is
    none of it."""
    if not fields:
        return params
    for name in fields:
        if name not in _FIELDS:
            meant = near(name, _FIELDS) or "the options are the fields of SamplingParams."
            raise ConfigError(
                f"There is no option {shown(name)}; {meant} Variables of the chat template are given as template={{...}}."
            )
    for each in params if isinstance(params, (list, tuple)) else [params]:
        of_kind("params", each, SamplingParams)
    if isinstance(params, (list, tuple)):
        return [replace(each, **fields) for each in params]
    return replace(SamplingParams() if params is None else params, **fields)  # type: ignore[type-var]


def conversations(messages: Conversation | Conversations) -> tuple[list[Conversation], bool]:
    """Each conversation, and whether it was one rather than a list of them. Raises ConfigError for what is neither."""
    if isinstance(messages, str):
        return [messages], True
    if not isinstance(messages, Sequence) or not messages:
        raise ConfigError(
            'Give chat a string, a list of messages like {"role": "user", "content": "..."}, or a list of such conversations.'
        )
    given: list[Any] = list(messages)
    if isinstance(given[0], Mapping):
        return [given], True
    return given, False


def checked_messages(messages: Conversation) -> Sequence[Message]:
    """A conversation as messages. Raises ConfigError for what is no message, and for a role or content that is none."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence) or not messages:
        raise ConfigError(f"A conversation is a string or a list of messages, not {shown(messages)}.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ConfigError(
                f'messages[{i}] must be like {{"role": "user", "content": "..."}}, not {shown(message)}.'
            )
        role = message.get("role")
        if role not in ROLES:
            what = (
                f"messages[{i}] has no role" if role is None else f"messages[{i}] has the role {shown(role)}"
            )
            raise ConfigError(f"{what}; the roles are {', '.join(ROLES)}.")
        content = message.get("content")
        if content is None and role != "assistant":  # which may hold calls of tools alone
            raise ConfigError(f"messages[{i}] has no content.")
        if not isinstance(content, str | Sequence | None):
            raise ConfigError(
                f"messages[{i}].content must be a string or a list of parts, not {shown(content)}."
            )
    return [m for m in messages if isinstance(m, Mapping)]
