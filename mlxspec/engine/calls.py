"""`generate` and `chat`, declared once for both kinds of engine: `Engine` returns answers, `AsyncEngine` awaitables of them.

Checks what callers give: prompts, conversations, sampling parameters and their fields.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any, Generic, Literal, TypeVar, overload

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.image_prompt import PromptWithImages
from mlxspec.errors import ConfigError, HookError
from mlxspec.option import by_name, near, of_kind, shown

Prompt = str | Sequence[int] | PromptWithImages
Prompts = list[str] | tuple[str, ...] | Sequence[Sequence[int]] | Sequence[Sequence[int] | PromptWithImages]
Message = Mapping[str, Any]
Conversation = str | Sequence[Message]  # a string is what the user says first
Conversations = list[str] | tuple[str, ...] | Sequence[Sequence[Message]]
_FIELDS = tuple(each.name for each in fields_of(SamplingParams))
ROLES = ("system", "user", "assistant", "tool")
One = TypeVar("One", covariant=True)
Many = TypeVar("Many", covariant=True)
Events = TypeVar("Events", covariant=True)


class Calls(ABC, Generic[One, Many, Events]):
    """The interface of both kinds of engine, whose calls give answers. Type parameters: One is the type of one answer, Many that of
    several answers, Events that of one answer's events while it is decoded."""

    @overload
    def generate(
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        *,
        spec: SpecConfig | None = None,
        **fields: Any,
    ) -> One: ...

    @overload
    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        spec: SpecConfig | None = None,
        **fields: Any,
    ) -> Many: ...

    @by_name
    def generate(
        self,
        prompts: Prompt | Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        spec: SpecConfig | None = None,
        **fields: Any,
    ) -> One | Many:
        """Answer one prompt (a string or token ids) and return its Result, or several prompts together and return a list of Results in
        the same order.

        params: one for all prompts, or a list with one for each. fields: fields of SamplingParams, such as `max_tokens=3`, which replace
        those of params. A string is continued as it is; `chat` uses the model's chat format. An invalid argument raises a subclass of
        MlxspecError before any work. An error during decoding ends only its own answer, with finish_reason "error". Where one prompt is
        answered, a logits processor or a sampler that fails raises HookError. In an AsyncEngine the call returns an awaitable.
        """
        return self._answer(lambda _: prompts, with_fields(params, fields), spec)

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
    ) -> One: ...

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
    ) -> Events: ...

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
    ) -> Many: ...

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
    ) -> One | Events | Many:
        """Answer a conversation in the model's chat format, and return its Result, or with `stream` an iterator over its events. Several
        conversations decode together and return a list of Results in the same order. In an AsyncEngine Results are awaited.

        messages: a list of {"role", "content"} mappings; a string, which is one message of the user; or a list of such conversations.
        The roles are system, user, assistant and tool. The content of a message may be a list of parts, {"type": "text", "text": ...}
        and {"type": "image", "image": ...}; an image is a path, the bytes of a file, a Pillow image or a data: URL. params: one for all
        conversations, or a list with one for each. template: variables of the model's chat template, such as {"enable_thinking": False};
        a warning names those that the template does not read. fields: as in `generate`. Raises ConfigError where the model has no chat
        template, where messages are no conversation, and for an unknown keyword.
        """
        asked, single = conversations(messages)
        params = with_fields(params, fields)

        def prompts(engine: Any) -> Any:
            found = [engine.chat_input(each, template) for each in asked]
            return found[0] if single else found

        if not stream:
            return self._answer(prompts, params, spec)
        if not single or isinstance(params, Sequence):
            raise ConfigError("One conversation is streamed at a time.")
        return self._events_of(prompts, params, spec)

    # what each kind of engine does. prompts: makes them of an engine that is loaded

    @abstractmethod
    def _answer(self, prompts: Callable[[Any], Any], params: Any, spec: SpecConfig | None) -> Any:
        """Answer one prompt or several, and return one Result or a list of them. prompts: makes the prompts, given the loaded engine."""

    @abstractmethod
    def _events_of(self, prompt: Callable[[Any], Any], params: Any, spec: SpecConfig | None) -> Events:
        """Return an iterator over the events of one answer. prompt: makes the prompt, given the loaded engine."""


def ended(results: list[Any], failures: Sequence[BaseException | None], *, single: bool) -> Any:
    """Return `results`, or with `single` the one result in it. failures: for each answer the exception that ended it, or None. Raises
    HookError where the only answer was ended by its caller's own logits processor or sampler; among several answers it is not raised,
    because the other answers would be lost."""
    if not single:
        return results
    (result,), (failure,) = results, failures
    if isinstance(failure, HookError):
        raise HookError(str(failure), result) from failure
    return result


def paired(
    prompts: Prompt | Prompts, params: SamplingParams | Sequence[SamplingParams] | None
) -> tuple[list[tuple[Any, Any]], bool]:
    """Return each prompt with its parameters, and whether `prompts` is one prompt rather than a list of them. Raises ConfigError where
    there is no prompt, or where the numbers of prompts and of parameters differ."""
    if not isinstance(prompts, PromptWithImages) and (not isinstance(prompts, Sequence) or len(prompts) == 0):
        raise ConfigError("There is no prompt: give a string, token ids, or a list of either.")
    single = isinstance(prompts, (str, bytes, PromptWithImages)) or isinstance(prompts[0], int)
    several: Any = [prompts] if single else prompts
    each: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params] * len(several)
    if len(each) != len(several):
        raise ConfigError(f"There are {len(several)} prompts but {len(each)} sampling parameters.")
    return list(zip(several, each, strict=True)), single


def with_fields(params: SamplingParams | Sequence[SamplingParams] | None, fields: Mapping[str, Any]) -> Any:
    """Return the parameters with these fields replaced in each of them. Raises ConfigError for a name that is no field of
    SamplingParams, and for an object that is no SamplingParams."""
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
    """Return the conversations as a list, and whether `messages` is one conversation rather than a list of them. Raises ConfigError for
    an argument that is neither."""
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
    """Return a conversation as a list of messages; a string becomes one message of the user. Raises ConfigError for an item that is no
    message, and for an unknown role or content."""
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
