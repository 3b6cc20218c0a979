"""What one caller who wants answers asks of an engine: `generate`, `stream` and `chat`, on top of submitting and stepping.

Knows requests, results and the chat format; knows no rounds, no caches and no drafters. `Engine` is made of this and of the queue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.request import Request
from mlxspec.engine.stats import RequestStats
from mlxspec.errors import ConfigError
from mlxspec.events import Event, FinishReason, TokenLogprob
from mlxspec.loading.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Prompts = list[str] | tuple[str, ...] | Sequence[Sequence[int]]
Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished answer. tokens: its ids, without the end token; finish_reason "stop", "length", or "error" with the sentence in `error`.

    logprobs: one a token, None where they were not asked for.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: RequestStats = field(repr=False)
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None

    @classmethod
    def of(cls, request: Request) -> Result:
        """What a request that has ended came to."""
        return cls(
            text=request.answer.text,
            tokens=tuple(request.history[len(request.prompt) :]),
            finish_reason=request.finish_reason or "error",
            stats=request.stats,
            logprobs=None if request.logprobs is None else tuple(request.logprobs),
            error=request.error,
        )


class EngineApi(ABC):
    """The half of an engine that callers meet. Attributes: tokenizer (None: token ids only), name."""

    tokenizer: Tokenizer | None
    name: str

    def __init__(self) -> None:
        self._inboxes: dict[
            int, deque[Event]
        ] = {}  # of the requests that are made here: whoever steps, each gets its own events

    @overload
    def generate(
        self, prompts: Prompt, params: SamplingParams | None = None, *, spec: SpecConfig | None = None
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        spec: SpecConfig | None = None,
    ) -> list[Result]: ...

    def generate(
        self,
        prompts: Prompt | Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        spec: SpecConfig | None = None,
    ) -> Result | list[Result]:
        """Answer one prompt (a string or token ids: a Result) or several together (a list of Results, in order).

        params: one for all prompts, or one each. A string is continued as it stands; see `chat` for the model's chat format. Raises
        MlxspecError subclasses before any work; what goes wrong later ends its own answer, with finish_reason "error".
        """
        asked, single = paired(prompts, params)
        requests = [self._make(prompt, each, spec) for prompt, each in asked]
        self._run_until(requests)
        results = [Result.of(r) for r in requests]
        return results[0] if single else results

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, spec: SpecConfig | None = None
    ) -> Iterator[Event]:
        """Events of one answer as they happen, the last one a FinishEvent. Closing the iterator cancels the request.

        Raises MlxspecError subclasses at once, before the first event is asked for.
        """
        return self._stream(self._make(prompt, params, spec))

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        spec: SpecConfig | None = None,
        **template: Any,
    ) -> Result: ...

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        spec: SpecConfig | None = None,
        **template: Any,
    ) -> Iterator[Event]: ...

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        spec: SpecConfig | None = None,
        **template: Any,
    ) -> Result | Iterator[Event]:
        """The answer to a conversation ({"role", "content"} messages) in the model's chat format: a Result, or with `stream` its events.

        template: what the model's chat template takes besides (enable_thinking=False, say). Raises ConfigError without a template.
        """
        prompt = self.chat_prompt(messages, **template)
        if stream:
            return self.stream(prompt, params, spec=spec)
        return self.generate(prompt, params, spec=spec)

    def chat_prompt(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of messages ({"role", "content"}) in the model's chat format. Raises ConfigError without a template."""
        if self.tokenizer is None or self.tokenizer.template is None:
            raise ConfigError(f"{self.name} has no chat template; give a plain prompt.")
        return self.tokenizer.encode(self.tokenizer.template.render(messages, **options), special=False)

    # --- what the other half gives

    @abstractmethod
    def _advance(self) -> None:
        """Run one round; its events go where they belong."""

    @abstractmethod
    def _enqueue(self, request: Request) -> None:
        """Queue it, however many wait."""

    @abstractmethod
    def cancel(self, number: int) -> bool:
        """End a request."""

    @abstractmethod
    def _make(self, prompt: Prompt, params: SamplingParams | None, spec: SpecConfig | None) -> Request:
        """A checked request, not yet queued."""

    # ---

    def _stream(self, request: Request) -> Generator[Event, None, None]:
        inbox = self._inboxes[request.number] = deque()
        try:
            self._enqueue(request)
            while inbox or request.finish_reason is None:
                if inbox:
                    yield inbox.popleft()
                else:
                    self._advance()
        finally:
            self.cancel(request.number)
            del self._inboxes[request.number]

    def _run_until(self, requests: Sequence[Request]) -> None:
        """Until all of these have ended. Others have their turns meanwhile, and keep their events."""
        try:
            for request in requests:
                self._inboxes[request.number] = deque(maxlen=0)
                self._enqueue(request)
            while any(r.finish_reason is None for r in requests):
                self._advance()
        finally:
            for request in requests:
                self.cancel(request.number)
                self._inboxes.pop(request.number, None)


def paired(
    prompts: Prompt | Prompts, params: SamplingParams | Sequence[SamplingParams] | None
) -> tuple[list[tuple[Any, Any]], bool]:
    """Each prompt with its parameters, and whether it was one prompt rather than a list. Raises ConfigError where that cannot be told."""
    if not isinstance(prompts, Sequence) or len(prompts) == 0:
        raise ConfigError("There is no prompt: give a string, token ids, or a list of either.")
    single = isinstance(prompts, (str, bytes)) or isinstance(prompts[0], int)
    several: Sequence[Any] = [prompts] if single else prompts
    each: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params] * len(several)
    if len(each) != len(several):
        raise ConfigError(f"There are {len(several)} prompts but {len(each)} sampling parameters.")
    return list(zip(several, each, strict=True)), single
