"""Turns a chat request, or a checked body of the completion routes, into a `Job`: prompts, sampling, drafting, and how to read the answer.

Everything that can be wrong with a request is found here or when the engine takes it, before the first byte of an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxspec.config import ALWAYS_THERE, SamplingParams, SpecConfig, drafter_names
from mlxspec.engine.image_prompt import PromptWithImages, prepared_prompt
from mlxspec.errors import ConfigError, ContextOverflowError, GrammarError, ImageError
from mlxspec.loading.hub import DEMO_AGENT
from mlxspec.loading.spelled_tokens import unmarked
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.option import options
from mlxspec.parsers.call_grammar import calls_grammar
from mlxspec.parsers.channels import ChannelParser
from mlxspec.parsers.formats import AnswerParser, ChatFormat, detect
from mlxspec.parsers.lark_regex import regex_of
from mlxspec.parsers.patterns import usable_pattern
from mlxspec.parsers.tool_schemas import ToolSchemas
from mlxspec.sampling.constraints import Compiled
from mlxspec.server.answer_format import held, held_schema
from mlxspec.server.chat_request import ChatRequest, CustomGrammar, GoesOn, ToolChoice
from mlxspec.server.demo_agent import NOTICE, Asked, scripted
from mlxspec.server.errors import BadField
from mlxspec.server.http.fairness import check_wanted
from mlxspec.server.http.limits import ServerLimits
from mlxspec.server.images import decode_limits, placed
from mlxspec.server.messages import call_lead, render_conversation, without_unseen_answers

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine

_NEVER = -1e9  # a bias
_SEED_BITS = 2**63 - 1
_FORMATS = ("json_schema", "regex", "lark")  # read by answer_format, with their other names
_AUTO, _NONE = ToolChoice(kind="auto"), ToolChoice(kind="none")


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """One answer that is wanted."""

    prompt: Sequence[int] | PromptWithImages
    params: SamplingParams


@dataclass(frozen=True, kw_only=True)
class Job:
    """All answers of one request. `parser()` gives a fresh parser for one of them, None for plain text. tools: those that may be called.
    goes_on: which part of the last message the answers continue. compiled: of the parameters that all
    answers share. notices: what the client is told of its request. prompts: of each answer as text, where the client wants to see it.
    first_tokens: of each prompt as text, where log-probabilities of prompts are wanted. special: tags of calls that are special tokens.
    is_held: a format that the request asked for holds the text. loosening: of the grammar of its calls. fingerprint: of the model.
    proves: each answer is decoded again without drafts, and the client gets a receipt."""

    asks: tuple[AnswerRequest, ...]
    spec: SpecConfig
    num_prompts: int = 1
    timeout: float | None = None
    form: ChatFormat = field(default_factory=ChatFormat)
    rendered: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    is_chat: bool = False
    goes_on: GoesOn | None = None
    compiled: Compiled | None = None
    notices: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    first_tokens: tuple[str, ...] = ()
    special: frozenset[str] = frozenset()
    is_held: bool = False
    loosening: Loosening | None = None
    fingerprint: str = ""
    proves: bool = False

    def parser(self) -> AnswerParser | ChannelParser | None:
        if not self.is_chat:
            return None
        is_thinking = None if self.goes_on is None else self.goes_on == "reasoning"
        return self.form.parser(
            self.rendered, self.tools, is_thinking=is_thinking, special=self.special, is_held=self.is_held
        )


def chat_job(
    request: ChatRequest, engine: Engine, defaults: SamplingParams, limits: ServerLimits | None = None
) -> Job:
    """Of a conversation. Slow enough (template, tokenizer, images) to be called off the event loop. Raises MlxspecErrors."""
    form = format_of(engine)
    tools, choice = _tools(request, form, engine)
    request, prompt = _render(engine, request, tools, limits or ServerLimits())
    extra: dict[str, Any] = {"logprobs": request.logprobs, "top_logprobs": request.top_logprobs}
    if form.thinking:
        extra["thinking_tags"] = form.thinking
        extra["thinks_first"] = (
            request.template.get("enable_thinking") is not False and request.goes_on is None
        )
    if choice.of(tools):
        extra["stop_outside"] = form.call_spans
    asked: Asked = (request, tools, choice)
    if engine.name == DEMO_AGENT:
        asked = scripted(*asked)
    grammar, notices, loosening = _grammar(*asked, form, engine)
    notices += [NOTICE] if engine.name == DEMO_AGENT else []
    notices += _not_enforced(request, form)
    extra |= grammar
    params, spec = (
        params_of(request.options, defaults, extra, len(prompt.tokens), engine),
        spec_of(request.options, engine),
    )
    return Job(
        asks=asks_of([prompt.tokens], params, request.options),
        spec=spec,
        timeout=request.options.get("timeout"),
        form=form,
        rendered=prompt.text,
        tools=choice.of(tools),
        special=frozenset(_special_tags(form, engine)),
        is_held=request.wanted is not None and choice.kind != "required",
        loosening=loosening,
        is_chat=True,
        goes_on=request.goes_on,
        proves=bool(request.options.get("prove")),
        notices=(*request.notices, *prompt.notices, *notices, *unused_prediction(spec)),
    )


def _tools(
    request: ChatRequest, form: ChatFormat, engine: Engine
) -> tuple[list[Mapping[str, Any]], ToolChoice]:
    """The tools that the model is told of, and which of them it must call. Raises BadField."""
    choice = request.tool_choice or (_AUTO if request.tools else _NONE)
    if choice.kind != "none" and request.tool_choice is not None and not request.tools:
        raise BadField("tool_choice", "tool_choice needs tools.")
    tools = [] if choice.kind == "none" else list(request.tools)
    names = {t["function"]["name"] for t in tools}
    for name in choice.allowed or () if choice.named is None else (choice.named,):
        if name not in names:
            raise BadField("tool_choice", f"There is no tool {name[:60]!r}.")
    if choice.kind == "required" and not choice.of(tools):
        raise BadField("tool_choice", "tool_choice allows none of the tools.")
    if choice.kind == "required" and tools and form.tools is None and (form.takes_tools or form.is_unknown):
        raise BadField(
            "tool_choice", f"A call cannot be required of {engine.name}: no grammar of its notation is known."
        )
    if tools and not (form.takes_tools or form.is_unknown):
        raise BadField("tools", f"The chat template of {engine.name} takes no tools.")
    return tools, choice


def rendered(request: ChatRequest, engine: Engine) -> tuple[str, list[int] | PromptWithImages]:
    """The prompt of a chat request, as text and as the engine takes it, which nobody answers. Raises MlxspecErrors."""
    tools, _ = _tools(request, format_of(engine), engine)
    _, prompt = _render(engine, request, tools, ServerLimits())
    return prompt.text, prompt.tokens


def token_ids(prompt: Sequence[int] | PromptWithImages) -> Sequence[int]:
    """Under the vocabulary's ids."""
    return prompt.tokens if isinstance(prompt, PromptWithImages) else prompt


def tokenizer_of(engine: Engine) -> Tokenizer:
    """Raises ConfigError."""
    if engine.tokenizer is None:
        raise ConfigError(f"{engine.name} has no tokenizer.")
    return engine.tokenizer


def format_of(engine: Engine) -> ChatFormat:
    template = None if engine.tokenizer is None else engine.tokenizer.template
    return detect(None if template is None else template.source)


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """A conversation as the model reads it: as text, and as token ids with the images where there are some."""

    text: str
    tokens: list[int] | PromptWithImages
    notices: tuple[str, ...]


def _render(
    engine: Engine, request: ChatRequest, tools: Sequence[Any], limits: ServerLimits
) -> tuple[ChatRequest, _Prompt]:
    """The prompt, and the request without what the model is not told. Raises ConfigError, ImageError, ContextOverflowError."""
    if engine.tokenizer is None or engine.tokenizer.template is None:
        raise ConfigError(f"{engine.name} has no chat template; use /v1/completions.")
    if tools and format_of(engine).is_unknown:
        said = "the notation of this model's tool calls is not known: they come as text"
        request = replace(request, notices=(*request.notices, said))
    options: dict[str, Any] = {**request.template, **({"tools": list(tools)} if tools else {})}
    if not request.opens_answer:
        options["add_generation_prompt"] = False
    request = without_unseen_answers(request, engine.tokenizer.template, options)
    if request.goes_on is not None:
        options["continue_final_message"] = True
    check_wanted()
    form, source = format_of(engine), engine.tokenizer.template.source
    unknown = _without_effect(request, form, source)
    most, bad = engine.max_context, dict[str, str]()
    while True:
        found = placed(
            request.messages, limits, why="" if engine.vision is not None else engine.no_images, bad=bad
        )
        text, notices = render_conversation(engine.tokenizer.template, found.messages, options)
        text, off = _without_thinking(text, request, form, source)
        notices = (*found.notices, *notices, *off, *unknown)
        if not found.sources or engine.vision is None:
            tokens = engine.tokenizer.encode(text, special=False, most=most)
            return request, _Prompt(text=unmarked(text), tokens=tokens, notices=notices)
        try:
            prompt = prepared_prompt(
                text, found.sources, engine.vision, engine.tokenizer, limits=decode_limits(limits), most=most
            )
            return request, _Prompt(text=unmarked(text), tokens=prompt, notices=(*notices, *prompt.notices))
        except (
            ImageError
        ) as error:  # of one image: where it is not needed, the conversation goes on without it
            where = str(error).partition(": ")[0]
            if where in bad or where not in (s.where for s in found.sources):
                raise
            bad[where] = str(error)


def _without_effect(request: ChatRequest, form: ChatFormat, template: str) -> tuple[str, ...]:
    """Notices on what a request tells the chat template that it does not know. A model that always thinks honours that it should."""
    asked = [name for name, value in request.template.items() if value not in (False, None, "none")]
    unknown = [name for name in asked if name not in template]
    return tuple(
        f"{name} has no effect: the chat template does not know it"
        for name in unknown
        if name != "enable_thinking" or form.thinking is None
    )


def _without_thinking(
    text: str, request: ChatRequest, form: ChatFormat, template: str
) -> tuple[str, tuple[str, ...]]:
    """A prompt in which thinking is off where the request turns it off, and a notice where the template does not do it by itself."""
    is_off = request.template.get("enable_thinking") is False
    if not is_off or form.thinking is None or request.goes_on is not None or not request.opens_answer:
        return text, ()
    if form.opens_thinking(text):
        closed = f"{text.rstrip()}\n\n{form.thinking[1]}\n\n"
        return closed, (
            "the chat template opens thinking although it is turned off: it is closed in the prompt",
        )
    if "enable_thinking" not in template and "thinking" not in template.replace(form.thinking[0], ""):
        return text, ("enable_thinking has no effect: the chat template does not know it",)
    return text, ()


def _given(body: Mapping[str, Any], config: type[Any]) -> dict[str, Any]:
    """The options of a config class that a checked body has. A whole number may be written as 5.0."""
    found = {own: body[own.body] for own in options(config).values() if body.get(own.body) is not None}
    whole = {own: int(v) if isinstance(v, float) and own.is_whole else v for own, v in found.items()}
    return {own.name: own.default if own.off is not None and v == own.off else v for own, v in whole.items()}


def spec_of(body: Mapping[str, Any], engine: Engine) -> SpecConfig:
    """Who drafts for this request, and how much. Raises ConfigError."""
    changes = _given(body, SpecConfig)
    draft = body.get("draft")
    if draft is not None:
        changes["drafters"] = _drafters(draft, engine)
    if body.get("prediction") is not None:
        changes["predicted"] = _predicted(body["prediction"]["content"], engine)
    return replace(engine.spec, **changes) if changes else engine.spec


def _predicted(content: str | Sequence[Mapping[str, str]], engine: Engine) -> tuple[int, ...]:
    """Ids of OpenAI's `prediction`. Raises ConfigError."""
    tokenizer = tokenizer_of(engine)
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    try:
        return tuple(tokenizer.encode(text, special=False, most=engine.max_context + 1))
    except ContextOverflowError as error:
        raise BadField("prediction", "The prediction is longer than the context of the model.") from error


def unused_prediction(spec: SpecConfig) -> tuple[str, ...]:
    """A notice where nothing drafts from a prediction."""
    return (
        ("prediction is not used: nothing drafts for this request",)
        if spec.predicted and not spec.drafters
        else ()
    )


def _drafters(draft: Any, engine: Engine) -> tuple[str, ...]:
    if draft in (False, "off"):
        return ()
    if draft in (True, "auto"):
        return engine.spec.drafters
    names = tuple(n.strip() for n in draft.split(",")) if isinstance(draft, str) else tuple(draft)
    there = tuple(engine.drafts.drafters)
    for name in drafter_names(names):
        if name not in (*there, *ALWAYS_THERE):
            loaded = ", ".join(("suffix", *there))
            raise BadField("draft", f"The drafter {name[:60]!r} is not loaded; loaded are: {loaded}.")
    return names


def _grammar(
    request: ChatRequest,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    form: ChatFormat,
    engine: Engine,
) -> tuple[dict[str, Any], list[str], Loosening | None]:
    """What the answer must look like: the format that was asked for, a call, or either; or what its calls look like, where it has some.
    Then sentences on what of it is not held, and how it is loosened where it cannot be compiled."""
    wanted, must_call = request.wanted, choice.kind == "required"
    notices: list[str] = []
    schema = None
    if wanted is not None and must_call:
        notices.append(f"{wanted.field} is for answers of text: this one must be a call of a tool")
        wanted = None
    if wanted is not None and wanted.kind != "json_schema":
        return {wanted.kind: wanted.value}, notices, None
    if wanted is not None:
        schema, notices = held_schema(wanted)
    chosen = choice.of(tools)
    if schema is not None and not chosen:
        return {"json_schema": schema}, notices, None
    tags = form.call_tags
    if not chosen or (tags is None and not must_call and schema is None):
        return {}, notices, None
    is_free = not must_call and schema is None
    schemas = ToolSchemas([_with_pattern(tool, request.customs, form) for tool in chosen])
    write = partial(
        calls_grammar,
        form,
        schemas=schemas,
        tokens=_special_tags(form, engine),
        several=choice.named is None and request.several_calls and not is_free,
        lead="" if is_free else _lead(request, form, engine),
        is_opened=is_free,
        texts={c.tool: c.definition for c in request.customs if _is_written_as_lark(c, form)},
        otherwise=None if must_call else schema,
    )
    loose: dict[str, str] = {}
    grammar = write(chosen, loose=loose)
    for name in schemas:
        strict, path = schemas.is_strict(name) and not is_free, f"tools.{name}.parameters"
        if name in loose and strict:
            raise BadField(path, loose[name])
        if name not in loose and (schemas.is_strict(name) or not is_free):
            notices += held(schemas.left_out(name), path, strict=strict)
    at = {"lark_at": tags.open, "lark_once": not request.several_calls} if is_free and tags else {}
    strict_ones = frozenset() if is_free else frozenset(filter(schemas.is_strict, schemas))
    loosening = Loosening(write=write, tools=chosen, loose=loose, strict=strict_ones)
    return {"lark": grammar, **at}, [*notices, *loose.values()], loosening


@dataclass(frozen=True, kw_only=True)
class Loosening:
    """How the grammar of calls is written where some of the tools cannot be compiled. write: see calls_grammar. loose: sentences on the
    tools, by name, that may have any arguments already. strict: tools that must not."""

    write: Callable[..., str]
    tools: Sequence[Mapping[str, Any]]
    loose: Mapping[str, str]
    strict: Container[str]

    def loosened(self, trouble: Callable[[str], str | None]) -> tuple[str, tuple[str, ...]] | None:
        """Return the grammar in which those may have any arguments that cannot be compiled by themselves, and sentences on them; None
        where that is no help. trouble: says why a grammar cannot be compiled, None where it can."""
        found = dict(self.loose)
        for tool in self.tools:
            name = str(tool["function"]["name"])
            if name not in found and (why := trouble(self.write([tool], loose={}))) is not None:
                found[name] = f"calls of {name} may have any arguments: {why}"
        new = found.keys() - self.loose.keys()
        if not new or any(name in self.strict for name in new):
            return None
        return self.write(self.tools, loose=found), tuple(found[name] for name in sorted(new))


def _pattern(custom: CustomGrammar) -> str | None:
    """The expression that a custom tool's text matches, where its grammar is held so: a regex, and in JSON a Lark grammar that has such a
    form. None where there is none."""
    try:
        found = custom.definition if custom.syntax == "regex" else regex_of(custom.definition)
    except GrammarError:
        return None
    return None if usable_pattern(f"^(?:{found})$") is None else f"^(?:{found})$"


def _is_written_as_lark(custom: CustomGrammar, form: ChatFormat) -> bool:
    """Whether the notation of calls writes texts as they stand."""
    return custom.syntax == "lark" and form.tools != "json"


def _with_pattern(
    tool: Mapping[str, Any], customs: Sequence[CustomGrammar], form: ChatFormat
) -> Mapping[str, Any]:
    """A custom tool with the pattern of its text."""
    found = next((c for c in customs if c.tool == tool["function"]["name"]), None)
    pattern = None if found is None or _is_written_as_lark(found, form) else _pattern(found)
    if pattern is None:
        return tool
    text = {"type": "string", "pattern": pattern}
    schema = {**tool["function"]["parameters"], "properties": {"input": text}}
    return {**tool, "function": {**tool["function"], "parameters": schema}}


def _not_enforced(request: ChatRequest, form: ChatFormat) -> list[str]:
    """Notices about grammars of custom tools that are told to the model alone."""
    why = (
        "no grammar of this model's calls is known"
        if form.tools is None
        else "in this model's calls only what has the form of one regular expression can be held"
    )
    return [
        f"{c.path}.format is told to the model and not enforced: {why}"
        for c in request.customs
        if form.tools is None or not (_is_written_as_lark(c, form) or _pattern(c))
    ]


def _lead(request: ChatRequest, form: ChatFormat, engine: Engine) -> str:
    """The white space in front of the first call of an answer."""
    template = None if engine.tokenizer is None else engine.tokenizer.template
    if template is None or request.goes_on is not None:
        return ""
    return call_lead(template, form, request.template)


def _special_tags(form: ChatFormat, engine: Engine) -> dict[str, int]:
    """Those of the format's tags that are special tokens of the vocabulary."""
    calls, tokenizer = form.notation, engine.tokenizer
    if calls is None or tokenizer is None:
        return {}
    rows = engine.model.vocab_size
    added = tokenizer.added_tokens().items()
    special = {tokenizer.token_text(i): i for i, is_special in added if is_special and i < rows}
    return {tag: special[tag] for tag in form.tags if tag in special}


def params_of(
    body: Mapping[str, Any],
    defaults: SamplingParams,
    extra: Mapping[str, Any],
    num_prompt: int,
    engine: Engine,
) -> SamplingParams:
    given = _given({name: v for name, v in body.items() if name not in _FORMATS}, SamplingParams)
    given |= extra
    room = max(1, engine.max_context - num_prompt)
    if body.get("max_tokens") is None:
        given["max_tokens"] = min(defaults.max_tokens, room)
    elif body["max_tokens"] == -1:
        given["max_tokens"] = room
    if given.get("seed") is not None:
        given["seed"] &= _SEED_BITS
    if body.get("logit_bias"):
        given["logit_bias"] = _biases(body["logit_bias"], engine)
        size = engine.model.vocab_size
        if max(given["logit_bias"]) >= size:
            raise BadField(
                "logit_bias", f"logit_bias names a token that is not there; ids end at {size - 1}."
            )
    if body.get("lora") is not None:
        given["adapters"] = scales_of(body["lora"], engine, "lora")
    if any(name in given for name in _FORMATS):
        given = dict.fromkeys(_FORMATS) | given
    return replace(defaults, **given)


def scales_of(given: str | Sequence[Mapping[str, Any]], engine: Engine, field: str) -> dict[str, float]:
    """How much adapters count: one by name, or llama.cpp's list, by place among those that were loaded. Raises BadField."""
    names = engine.adapters
    known = dict.fromkeys(names, 1.0) if isinstance(given, str) else dict.fromkeys(range(len(names)), 1.0)
    asked = [(given, 1.0)] if isinstance(given, str) else [(int(a["id"]), a.get("scale", 1.0)) for a in given]
    for which, scale in asked:
        if which not in known and scale:
            there = ", ".join(f"{i} {name}" for i, name in enumerate(names))
            said = (
                f"there are: {there}"
                if there
                else "a server that was started with --model NAME=MODEL+ADAPTER has some"
            )
            raise BadField(field, f"{field} names an adapter that is not there, {repr(which)[:80]}; {said}.")
    return {which if isinstance(which, str) else names[which]: scale for which, scale in asked if scale}


def _biases(given: Mapping[str, float] | Sequence[Sequence[Any]], engine: Engine) -> dict[int, float]:
    """An object by token id or by text, or llama.cpp's pairs. Raises BadField."""
    if isinstance(given, Mapping):
        given = [(int(k) if re.fullmatch("[0-9]{1,9}", k) else k, v) for k, v in given.items()]
    found: dict[int, float] = {}
    for place, (token, bias) in enumerate(given):
        is_id = (
            isinstance(token, (int, float))
            and not isinstance(token, bool)
            and token >= 0
            and token == int(token)
        )
        is_text = isinstance(token, str) and engine.tokenizer is not None
        is_number = isinstance(bias, (int, float)) and bias is not True and abs(bias) <= 100
        if not (is_id or is_text) or not is_number:
            raise BadField(
                f"logit_bias[{place}]",
                f"logit_bias[{place}] must be a token id or a text, and a number from -100 to 100 or false.",
            )
        tokens = (
            [int(token)]
            if is_id or engine.tokenizer is None
            else engine.tokenizer.encode(token, special=False)
        )
        found |= dict.fromkeys(tokens, _NEVER if bias is False else float(bias))
    return found


def asks_of(
    prompts: Sequence[Sequence[int] | PromptWithImages], params: SamplingParams, body: Mapping[str, Any]
) -> tuple[AnswerRequest, ...]:
    """n answers to each prompt; with a seed, each its own."""
    num = int(body.get("n") or 1)
    seeds = [None if params.seed is None else (params.seed + i) & _SEED_BITS for i in range(num)]
    return tuple(
        AnswerRequest(prompt=p, params=replace(params, seed=s) if num > 1 else params)
        for p in prompts
        for s in seeds
    )


def ids_of(prompt: Any, encode: Callable[..., Sequence[int]]) -> list[int]:
    """Of a text, of llama.cpp's object with one, or of ids with texts between them."""
    if isinstance(prompt, Mapping):
        prompt = prompt["prompt_string"]
    tokens: list[int] = []
    for part in [prompt] if isinstance(prompt, str) else prompt:
        tokens += encode(part, special=not tokens) if isinstance(part, str) else [int(part)]
    return tokens
