"""Turns a conversation into the prompt of its answers: the chat template, the tokenizer, images, and the constraints of an answer.

Every fault of a conversation is found here or when the engine accepts the request, before the first byte of an answer. Sampling is read
elsewhere (params.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mlxspec.config import SamplingParams
from mlxspec.engine.image_prompt import PromptWithImages, prepared_prompt
from mlxspec.errors import ConfigError, ImageError
from mlxspec.loading.spelled_tokens import unmarked
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.parsers.formats import ChatFormat, detect
from mlxspec.server.forms.shared import PromptText
from mlxspec.server.http.fairness import check_wanted
from mlxspec.server.http.limits import ServerLimits
from mlxspec.server.images import decode_limits, placed
from mlxspec.server.job import ChatRequest, GoesOn, ToolChoice
from mlxspec.server.messages import render_conversation, without_unseen_answers
from mlxspec.server.rules import Rules, allowed_tools, rules_of, special_tags

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine

MakeRules = Callable[[ChatRequest, Sequence[Mapping[str, Any]], ToolChoice, ChatFormat, "Engine"], Rules]


@dataclass(frozen=True, kw_only=True)
class Context:
    """The model that answers a request, and the settings of the server for it. defaults: the sampling of requests that set none. owner:
    the digest of the request's API key. fingerprint: of the model. rules: makes the rules of answers to conversations. notices:
    sentences for the client that precede all others."""

    engine: Engine
    defaults: SamplingParams
    limits: ServerLimits = field(default_factory=ServerLimits)
    owner: str = ""
    fingerprint: str = ""
    rules: MakeRules = rules_of
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """The prompt of a conversation, and how its answers are parsed and constrained. talk: the conversation as the template renders it,
    with all of its tools. text, tokens: the prompt as text, and as token ids with its images. tools: the tools that may be called.
    special: tags of calls that are special tokens. is_held: a response format constrains the answer. params: fields of SamplingParams
    that follow from the rules and the conversation."""

    talk: ChatRequest
    text: str
    tokens: list[int] | PromptWithImages
    form: ChatFormat
    tools: Sequence[Mapping[str, Any]]
    goes_on: GoesOn | None
    special: frozenset[str]
    is_held: bool
    rules: Rules
    params: Mapping[str, Any]
    notices: tuple[str, ...]


def chat_prompt(talk: ChatRequest, at: Context) -> ChatPrompt:
    """Return the prompt of a conversation. Call it outside of the event loop, since template, tokenizer and images take long. Raises
    subclasses of MlxspecError."""
    engine, form = at.engine, format_of(at.engine)
    tools, choice = allowed_tools(talk, form, engine)
    talk, text, tokens, said = render_prompt(engine, talk, tools, at.limits)
    rules = at.rules(talk, tools, choice, form, engine)
    params: dict[str, Any] = {}
    if form.thinking:
        is_on = talk.template.get("enable_thinking") is not False
        params = {"thinking_tags": form.thinking, "thinks_first": is_on and talk.goes_on is None}
    callable_tools = choice.of(tools)
    if callable_tools:
        params["stop_outside"] = form.call_spans
    return ChatPrompt(
        talk=replace(talk, tools=tools),
        text=text,
        tokens=tokens,
        form=form,
        tools=callable_tools,
        goes_on=talk.goes_on,
        special=frozenset(special_tags(form, engine)),
        is_held=talk.wanted is not None and choice.kind != "required",
        rules=rules,
        params={**params, **rules.params},
        notices=(*talk.notices, *said, *rules.notices),
    )


def rendered(talk: ChatRequest, engine: Engine) -> tuple[str, list[int] | PromptWithImages]:
    """Return the prompt of a conversation as text and as token ids with its images, for routes that only count or show it. Raises
    subclasses of MlxspecError."""
    tools, _ = allowed_tools(talk, format_of(engine), engine)
    _, text, tokens, _ = render_prompt(engine, talk, tools, ServerLimits())
    return text, tokens


def token_ids(prompt: Sequence[int] | PromptWithImages) -> Sequence[int]:
    """Return the token ids of a prompt. In a prompt with images, the places of an image have the id of the vocabulary's image token."""
    return prompt.tokens if isinstance(prompt, PromptWithImages) else prompt


def tokenizer_of(engine: Engine) -> Tokenizer:
    """Return the tokenizer of an engine. Raises ConfigError for a model without one."""
    if engine.tokenizer is None:
        raise ConfigError(f"{engine.name} has no tokenizer.")
    return engine.tokenizer


def format_of(engine: Engine) -> ChatFormat:
    template = None if engine.tokenizer is None else engine.tokenizer.template
    return detect(None if template is None else template.source)


def ids_of(prompt: Any, encode: Callable[..., Sequence[int]]) -> list[int]:
    """Return the token ids of a prompt: a text, llama.cpp's object with a text, or a list of token ids and texts. encode: the
    tokenizer's method; special tokens are added only to a text at the beginning."""
    if isinstance(prompt, PromptText):
        prompt = prompt.prompt_string
    tokens: list[int] = []
    for part in [prompt] if isinstance(prompt, str) else prompt:
        tokens += encode(part, special=not tokens) if isinstance(part, str) else [int(part)]
    return tokens


def render_prompt(
    engine: Engine, talk: ChatRequest, tools: Sequence[Any], limits: ServerLimits
) -> tuple[ChatRequest, str, list[int] | PromptWithImages, tuple[str, ...]]:
    """Render a conversation into a prompt. Returns the conversation without those earlier answers of which the template renders nothing,
    the prompt's text, its token ids (with the images, if it has any), and notices for the client. Raises ConfigError, ImageError,
    ContextOverflowError."""
    if engine.tokenizer is None or engine.tokenizer.template is None:
        raise ConfigError(f"{engine.name} has no chat template; use /v1/completions.")
    if tools and format_of(engine).is_unknown:
        said = "the notation of this model's tool calls is not known: they come as text"
        talk = replace(talk, notices=(*talk.notices, said))
    options: dict[str, Any] = {**talk.template, **({"tools": list(tools)} if tools else {})}
    if not talk.opens_answer:
        options["add_generation_prompt"] = False
    talk = without_unseen_answers(talk, engine.tokenizer.template, options)
    if talk.goes_on is not None:
        options["continue_final_message"] = True
    check_wanted()
    form, source = format_of(engine), engine.tokenizer.template.source
    unknown = _without_effect(talk, form, source)
    most, bad = engine.max_context, dict[str, str]()
    while True:
        found = placed(
            talk.messages, limits, why="" if engine.vision is not None else engine.no_images, bad=bad
        )
        text, notices = render_conversation(engine.tokenizer.template, found.messages, options)
        text, off = _without_thinking(text, talk, form, source)
        notices = (*found.notices, *notices, *off, *unknown)
        if not found.sources or engine.vision is None:
            tokens = engine.tokenizer.encode(text, special=False, most=most)
            return talk, unmarked(text), tokens, notices
        try:
            prompt = prepared_prompt(
                text, found.sources, engine.vision, engine.tokenizer, limits=decode_limits(limits), most=most
            )
            return talk, unmarked(text), prompt, (*notices, *prompt.notices)
        except (
            ImageError
        ) as error:  # of one image: where it is not needed, the conversation goes on without it
            where = str(error).partition(": ")[0]
            if where in bad or where not in (s.where for s in found.sources):
                raise
            bad[where] = str(error)


def _without_effect(talk: ChatRequest, form: ChatFormat, template: str) -> tuple[str, ...]:
    """Return notices on variables of the request that the chat template does not contain. There is none for enable_thinking with a model
    that always thinks."""
    asked = [name for name, value in talk.template.items() if value not in (False, None, "none")]
    unknown = [name for name in asked if name not in template]
    return tuple(
        f"{name} has no effect: the chat template does not know it"
        for name in unknown
        if name != "enable_thinking" or form.thinking is None
    )


def _without_thinking(
    text: str, talk: ChatRequest, form: ChatFormat, template: str
) -> tuple[str, tuple[str, ...]]:
    """Return the prompt with thinking closed, if the request disables thinking and the template opens it nevertheless, and notices on
    this. The notice says that enable_thinking has no effect where the template has no variable for it."""
    is_off = talk.template.get("enable_thinking") is False
    if not is_off or form.thinking is None or talk.goes_on is not None or not talk.opens_answer:
        return text, ()
    if form.opens_thinking(text):
        closed = f"{text.rstrip()}\n\n{form.thinking[1]}\n\n"
        return closed, (
            "the chat template opens thinking although it is turned off: it is closed in the prompt",
        )
    if "enable_thinking" not in template and "thinking" not in template.replace(form.thinking[0], ""):
        return text, ("enable_thinking has no effect: the chat template does not know it",)
    return text, ()
