"""A checked request body to what the engine is asked for: prompts, sampling, drafting, and how the answer is to be read.

Everything that can be wrong with a request is found here or when the engine takes it, before the first byte of an answer. Knows the fields'
meaning; knows no HTTP and no answer's shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.errors import ConfigError
from mlxspec.parsers.call_grammar import calls_grammar
from mlxspec.parsers.formats import ChatFormat, detect
from mlxspec.parsers.pieces import Parser
from mlxspec.server.errors import BadField
from mlxspec.server.messages import normalize

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine

_PLAIN = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "ignore_eos", "thinking_budget", "regex", "lark", "max_tokens",
)  # fmt: skip
_SEED_BITS = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One answer that is wanted."""

    prompt: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True, kw_only=True)
class Job:
    """All answers of one request. `parser()` gives a fresh parser for one of them, None for plain text."""

    asks: tuple[Ask, ...]
    spec: SpecConfig
    num_prompts: int = 1
    timeout: float | None = None
    form: ChatFormat = field(default_factory=ChatFormat)
    rendered: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    is_chat: bool = False
    notices: tuple[str, ...] = ()

    def parser(self) -> Parser | None:
        return self.form.parser(self.rendered, self.tools) if self.is_chat else None


def chat_job(body: Mapping[str, Any], engine: Engine, defaults: SamplingParams) -> Job:
    """Of /v1/chat/completions. Slow enough (template, tokenizer) to be called off the event loop. Raises MlxspecErrors."""
    form = format_of(engine)
    choice = body.get("tool_choice") or ("auto" if body.get("tools") else "none")
    if choice != "none" and body.get("tool_choice") is not None and not body.get("tools"):
        raise BadField("tool_choice", "tool_choice needs tools.")
    tools = [] if choice == "none" else list(body.get("tools") or ())
    if tools and form.tools is None:
        raise BadField("tools", f"The chat template of {engine.name} takes no tools.")
    kwargs = _template_kwargs(body)
    rendered, prompt = render(engine, body["messages"], tools, kwargs)
    extra: dict[str, Any] = {}
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise BadField("top_logprobs", "top_logprobs needs logprobs to be true.")
    extra |= {"logprobs": bool(body.get("logprobs")), "top_logprobs": body.get("top_logprobs") or 0}
    if body.get("max_completion_tokens") is not None:
        extra["max_tokens"] = body["max_completion_tokens"]
    if form.thinking:
        extra["thinking_tags"] = form.thinking
    extra |= _grammar(body, form, tools, choice, engine)
    params = _params(body, defaults, extra, len(prompt), engine)
    return Job(
        asks=_asks([prompt], params, body),
        spec=spec_of(body, engine),
        timeout=body.get("timeout"),
        form=form,
        rendered=rendered,
        tools=tools,
        is_chat=True,
    )


def completion_job(body: Mapping[str, Any], engine: Engine, defaults: SamplingParams) -> Job:
    """Of /v1/completions: one or several prompts, continued as they stand."""
    prompts = _prompts(body["prompt"], engine)
    logprobs = body.get("logprobs")
    if body.get("echo") and logprobs is not None:
        raise BadField(
            "echo", "echo and logprobs together are not possible: the prompt's own are not computed."
        )
    extra: dict[str, Any] = {"logprobs": logprobs is not None, "top_logprobs": logprobs or 0}
    if body.get("json_schema") is not None:
        extra["json_schema"] = body["json_schema"]
    params = _params(body, defaults, extra, min(map(len, prompts)), engine)
    return Job(
        asks=_asks(prompts, params, body),
        spec=spec_of(body, engine),
        num_prompts=len(prompts),
        timeout=body.get("timeout"),
    )


def format_of(engine: Engine) -> ChatFormat:
    template = None if engine.tokenizer is None else engine.tokenizer.template
    return detect(None if template is None else template.source)


def render(
    engine: Engine, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, list[int]]:
    """A conversation as the model reads it: text and token ids. Raises ConfigError."""
    if engine.tokenizer is None or engine.tokenizer.template is None:
        raise ConfigError(f"{engine.name} has no chat template; use /v1/completions.")
    options = dict(kwargs)
    if tools:
        options["tools"] = list(tools)
    text = engine.tokenizer.template.render(normalize(messages), **options)
    return text, engine.tokenizer.encode(text, special=False)


def spec_of(body: Mapping[str, Any], engine: Engine) -> SpecConfig:
    """Who drafts for this request, and how much. Raises ConfigError."""
    changes: dict[str, Any] = {}
    for name in ("n_max", "n_min", "p_min"):
        value = body.get(name, body.get(f"speculative.{name}"))
        if value is not None:
            changes[name] = value
    for name in ("policy", "acceptance"):
        if body.get(name) is not None:
            changes[name] = body[name]
    draft = body.get("draft")
    if draft is not None:
        changes["drafters"] = _drafters(draft, engine)
    if changes.get("policy") == "auto" and engine.chain.auto is None:
        raise BadField(
            "policy",
            'policy "auto" needs a server that was started with drafters and without --policy fixed: it measures first.',
        )
    if changes.get("acceptance") == "rejection" and "n_min" not in changes:
        changes["n_min"] = 0
    return replace(engine.spec, **changes) if changes else engine.spec


def _drafters(draft: Any, engine: Engine) -> tuple[str, ...]:
    if draft in (False, "off"):
        return ()
    if draft in (True, "auto"):
        return engine.spec.drafters
    names = tuple(n.strip() for n in draft.split(",")) if isinstance(draft, str) else tuple(draft)
    there = tuple(engine.chain.drafters)
    for name in names:
        if name not in (*there, "forced"):
            loaded = ", ".join(there) or "none"
            raise BadField("draft", f"The drafter {name[:60]!r} is not loaded; loaded are: {loaded}.")
    return names


def _template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    """What may be passed on to the template: a short list, all of it plain."""
    kwargs = {k: v for k, v in (body.get("chat_template_kwargs") or {}).items() if v is not None}
    for name in ("enable_thinking", "preserve_thinking", "reasoning_effort"):
        if body.get(name) is not None:
            kwargs[name] = body[name]
    if kwargs.get("reasoning_effort") == "none":
        kwargs.setdefault("enable_thinking", False)
    return kwargs


def _grammar(
    body: Mapping[str, Any], form: ChatFormat, tools: Sequence[Any], choice: Any, engine: Engine
) -> dict[str, Any]:
    """What the answer must look like: the format that was asked for, a call, or either."""
    schema = _answer_schema(body.get("response_format"))
    named = choice["function"]["name"] if isinstance(choice, Mapping) else None
    must_call = named is not None or choice == "required"
    other = [name for name in ("regex", "lark") if body.get(name) is not None]
    if other and (schema is not None or must_call):
        raise BadField(other[0], f"{other[0]} contradicts what else was asked of the answer.")
    if must_call and schema is not None:
        raise BadField(
            "response_format", "An answer that must be a tool call cannot be of another format too."
        )
    if not must_call and (schema is None or not tools):
        return {} if schema is None else {"json_schema": schema}
    chosen = [t for t in tools if named in (None, t["function"]["name"])]
    if not chosen:
        raise BadField("tool_choice", f"There is no tool {str(named)[:60]!r}.")
    several = named is None and body.get("parallel_tool_calls") is not False
    otherwise = None if must_call else schema
    grammar = calls_grammar(
        form, chosen, tokens=_special_tags(form, engine), several=several, otherwise=otherwise
    )
    return {"lark": grammar}


def _special_tags(form: ChatFormat, engine: Engine) -> dict[str, int]:
    """Those of the format's tags that are special tokens of the vocabulary."""
    tags, tokenizer = form.call_tags, engine.tokenizer
    if tags is None or tokenizer is None:
        return {}
    special = {tokenizer.token_text(i): i for i, is_special in tokenizer.added_tokens().items() if is_special}
    return {tag: special[tag] for tag in (tags.open, tags.close, tags.mark) if tag in special and tag}


def _answer_schema(wanted: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    kind = "text" if wanted is None else wanted["type"]
    if kind == "text" or wanted is None:
        return None
    if kind == "json_object":
        return {"type": "object"}
    if "json_schema" not in wanted:
        raise BadField("response_format.json_schema", "response_format.json_schema is missing.")
    return dict(wanted["json_schema"]["schema"])


def _params(
    body: Mapping[str, Any],
    defaults: SamplingParams,
    extra: Mapping[str, Any],
    num_prompt: int,
    engine: Engine,
) -> SamplingParams:
    given = {name: body[name] for name in _PLAIN if body.get(name) is not None}
    given = {
        k: int(v) if isinstance(v, float) and k in ("top_k", "max_tokens", "thinking_budget") else v
        for k, v in given.items()
    }
    given |= extra
    if "max_tokens" not in given:
        given["max_tokens"] = max(1, min(defaults.max_tokens, engine.max_context - num_prompt))
    given["max_tokens"] = int(given["max_tokens"])
    if body.get("seed") is not None:
        given["seed"] = int(body["seed"]) & _SEED_BITS
    stop = body.get("stop")
    if stop is not None:
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if body.get("bad_words") is not None:
        given["bad_words"] = tuple(body["bad_words"])
    if body.get("logit_bias"):
        given["logit_bias"] = {int(k): v for k, v in body["logit_bias"].items()}
        size = engine.model.vocab_size
        if max(given["logit_bias"]) >= size:
            raise BadField(
                "logit_bias", f"logit_bias names a token that is not there; ids end at {size - 1}."
            )
    if any(name in given for name in ("json_schema", "regex", "lark")):
        given = {"json_schema": None, "regex": None, "lark": None, **given}
    return replace(defaults, **given)


def _asks(
    prompts: Sequence[Sequence[int]], params: SamplingParams, body: Mapping[str, Any]
) -> tuple[Ask, ...]:
    """n answers to each prompt; with a seed, each its own."""
    num = int(body.get("n") or 1)
    seeds = [None if params.seed is None else (params.seed + i) & _SEED_BITS for i in range(num)]
    return tuple(
        Ask(prompt=p, params=replace(params, seed=s) if num > 1 else params) for p in prompts for s in seeds
    )


def _prompts(given: Any, engine: Engine) -> list[list[int]]:
    if engine.tokenizer is None:
        raise ConfigError(f"{engine.name} has no tokenizer.")
    several = given if isinstance(given, list) and not isinstance(given[0], (int, float)) else [given]
    out = [engine.tokenizer.encode(p) if isinstance(p, str) else [int(t) for t in p] for p in several]
    for place, tokens in enumerate(out):
        if not tokens:
            raise BadField(f"prompt[{place}]", "The prompt is empty.")
    return out
