"""Reads the fields that all APIs share (forms.shared.Generation): sampling, drafting, formats and thinking, and makes the `Job` of them and
of prompts. A field that is added to that form, to SamplingParams or to SpecConfig is read here for all APIs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxspec.config import ALWAYS_THERE, MAX_CONTEXT, SamplingParams, SpecConfig, drafter_names
from mlxspec.engine.image_prompt import PromptWithImages
from mlxspec.errors import ContextOverflowError, GrammarError
from mlxspec.option import options
from mlxspec.sampling.grammar import source_bytes
from mlxspec.server.answer_format import FORMATS
from mlxspec.server.errors import BadField
from mlxspec.server.forms import shared
from mlxspec.server.forms.base import names_of
from mlxspec.server.http.limits import ServerLimits
from mlxspec.server.job import AnswerRequest, Extras, Job, Loosen
from mlxspec.server.prompt import ChatPrompt, Context, tokenizer_of

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine

_NEVER = -1e9  # a bias
_SEED_BITS = 2**63 - 1
_KINDS = ("json_schema", "regex", "lark")  # read by answer_format, with their other names


@dataclass(frozen=True, kw_only=True)
class Own:
    """The values of a request's fields that have another name in each API. max_tokens: None for the default, -1 for the rest of the
    context. stop: texts that end an answer. num: the number of answers to each prompt. params: other fields of SamplingParams. ends:
    token ids that end an answer, in addition to the request's; ignored with ignore_eos. returns_ids: token ids are sent in addition
    to the text."""

    max_tokens: int | None
    stop: str | Sequence[str] | None = None
    num: int = 1
    params: Mapping[str, Any] = field(default_factory=dict)
    ends: Sequence[int] = ()
    streams: bool = False
    stream_options: shared.StreamOptions | None = None
    returns_ids: bool = False


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The prompts of a request as token ids, and the settings of their answers. rules: fields of SamplingParams that constrain an
    answer, or follow from the prompts. loosen: makes a less strict grammar of calls, where one cannot be compiled."""

    tokens: Sequence[Sequence[int] | PromptWithImages]
    own: Own
    rules: Mapping[str, Any]
    notices: Sequence[str] = ()
    loosen: Loosen | None = None


def formats_of(form: shared.Generation) -> dict[str, Any]:
    """Return the values of the fields that set the format of an answer, by the names in FORMATS."""
    found: dict[str, Any] = {}
    for path in FORMATS:
        inner, _, name = path.rpartition(".")
        owner = form.structured_outputs if inner else form
        if owner is not None:
            found[path] = getattr(owner, names_of(type(owner)).attributes[name])
    return found


def template_variables(form: shared.ThinkingFields) -> dict[str, Any]:
    """Return the variables of the chat template that the fields about thinking set."""
    found: dict[str, Any] = {}
    for asked in (form.chat_template_kwargs, form):
        for name in shared.ThinkingAsked.model_fields if asked is not None else ():
            if getattr(asked, name) is not None:
                found[name] = getattr(asked, name)
    if found.get("reasoning_effort") == "none":
        found.setdefault("enable_thinking", False)
    return found


def chat_job(form: shared.Generation, at: Context, prompt: ChatPrompt, own: Own) -> Job:
    """Return the job that answers a conversation. Raises BadField, ConfigError, GrammarError, ContextOverflowError."""
    prepared = Prepared(
        tokens=[prompt.tokens],
        own=own,
        rules=prompt.params,
        notices=prompt.notices,
        loosen=prompt.rules.loosen,
    )
    return replace(
        job_of(form, at, prepared),
        form=prompt.form,
        rendered=prompt.text,
        tools=prompt.tools,
        is_chat=True,
        goes_on=prompt.goes_on,
        special=prompt.special,
        is_held=prompt.is_held,
        talk=prompt.talk,
    )


def job_of(form: shared.Generation, at: Context, found: Prepared) -> Job:
    """Return the job that answers these prompts. Raises BadField, ConfigError, GrammarError, ContextOverflowError."""
    prompts, own = found.tokens, found.own
    params = _sampling(form, at, own, found.rules, min(map(len, prompts)))
    spec = replace(spec_of(form, at.engine), owner=at.owner)
    unused = spec.predicted and not spec.drafters
    told = ["prediction is not used: nothing drafts for this request"] if unused else []
    job = Job(
        asks=_answers(prompts, params, own.num),
        spec=spec,
        num_prompts=len(prompts),
        timeout=form.timeout,
        proves=bool(form.prove),
        notices=(*at.notices, *found.notices, *told),
        fingerprint=at.fingerprint,
        loosen=found.loosen,
        streams=own.streams,
        extras=_extras(form, own),
        returns_ids=own.returns_ids,
    )
    return _compiled(job, params, at)


def check_number(num: int, num_prompts: int, limits: ServerLimits) -> None:
    """Raise BadField where a request has too many answers. num: the answers to each prompt."""
    if num * num_prompts > limits.max_answers:
        raise BadField(
            "n",
            f"A request may ask for {limits.max_answers} answers at most, not {num * num_prompts}.",
        )


def check_same(given: Any, name: str, value: Any, other: str) -> None:
    """Raise BadField where the field `name` has a value, `given`, other than the value of the field `other`."""
    if given not in (None, value):
        raise BadField(name, f"{name} and {other} contradict each other.")


def _extras(form: shared.Generation, own: Own) -> Extras:
    asked = own.stream_options
    if asked is not None and not own.streams:
        raise BadField("stream_options", "stream_options needs stream to be true.")
    return Extras(
        usage=asked is not None and bool(asked.include_usage),
        usages=asked is not None and bool(asked.include_usage and asked.continuous_usage_stats),
        progress=bool(form.return_progress),
        timings=bool(form.timings_per_token),
        drafted=bool(form.return_drafted),
    )


def _given(form: shared.Generation, config: type[Any]) -> dict[str, Any]:
    """Return the options of a config class that a request sets, by name. A whole number may be written as 5.0."""
    found: dict[str, Any] = {}
    for own in options(config).values():
        value = getattr(form, own.body, None) if own.body else None
        if value is None:
            continue
        value = int(value) if isinstance(value, float) and own.is_whole else value
        found[own.name] = own.default if own.off is not None and value == own.off else value
    return found


def spec_of(form: shared.Generation, engine: Engine) -> SpecConfig:
    """Return the SpecConfig of a request: the engine's, with the request's drafters and limits of drafts. Raises BadField, ConfigError."""
    changes = _given(form, SpecConfig)
    if form.draft is not None:
        changes["drafters"] = _drafters(form.draft, engine)
    if form.prediction is not None:
        changes["predicted"] = _predicted(form.prediction, engine)
    return replace(engine.spec, **changes) if changes else engine.spec


def _predicted(prediction: shared.Prediction, engine: Engine) -> tuple[int, ...]:
    """Return the token ids of a request's `prediction`. Raises BadField where it is longer than the context, ConfigError for a model
    without a tokenizer."""
    tokenizer, content = tokenizer_of(engine), prediction.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    try:
        return tuple(tokenizer.encode(text, special=False, most=engine.max_context + 1))
    except ContextOverflowError as error:
        raise BadField("prediction", "The prediction is longer than the context of the model.") from error


def _drafters(draft: bool | str | list[str], engine: Engine) -> tuple[str, ...]:
    if draft is False or draft == "off":
        return ()
    if draft is True or draft == "auto":
        return engine.spec.drafters
    names = tuple(n.strip() for n in draft.split(",")) if isinstance(draft, str) else tuple(draft)
    there = tuple(engine.drafts.drafters)
    for name in drafter_names(names):
        if name not in (*there, *ALWAYS_THERE):
            loaded = ", ".join(("suffix", *there))
            raise BadField("draft", f"The drafter {name[:60]!r} is not loaded; loaded are: {loaded}.")
    return names


def _sampling(
    form: shared.Generation, at: Context, own: Own, rules: Mapping[str, Any], num_prompt: int
) -> SamplingParams:
    given = {name: value for name, value in _given(form, SamplingParams).items() if name not in _KINDS}
    given |= {"stop": own.stop} if own.stop is not None else {}
    given |= {**own.params, **rules}
    if own.ends and not given.get("ignore_eos"):
        given["stop_token_ids"] = [*given.get("stop_token_ids", ()), *own.ends]
    room = max(1, at.engine.max_context - num_prompt)
    usual = at.defaults.max_tokens
    given["max_tokens"] = usual if usual == MAX_CONTEXT else min(usual, room)
    if own.max_tokens is not None:
        given["max_tokens"] = room if own.max_tokens == -1 else own.max_tokens
    if given.get("seed") is not None:
        given["seed"] &= _SEED_BITS
    if form.logit_bias:
        given["logit_bias"] = _biases(form.logit_bias, at.engine)
        size = at.engine.model.vocab_size
        if max(given["logit_bias"]) >= size:
            raise BadField(
                "logit_bias", f"logit_bias names a token that is not there; ids end at {size - 1}."
            )
    if form.lora is not None:
        given["adapters"] = scales_of(form.lora, at.engine, "lora")
    if any(name in given for name in _KINDS):
        given = dict.fromkeys(_KINDS) | given
    return replace(at.defaults, **given)


def scales_of(given: str | Sequence[shared.Adapter], engine: Engine, field: str) -> dict[str, float]:
    """Return the scale of each adapter that a request uses, by name. given: the name of one adapter, which has scale 1, or llama.cpp's
    list with each adapter's place in the order of loading. field: the request's field, for errors. Raises BadField."""
    names = engine.adapters
    known = dict.fromkeys(names, 1.0) if isinstance(given, str) else dict.fromkeys(range(len(names)), 1.0)
    asked = [(given, 1.0)] if isinstance(given, str) else [(a.id, a.scale) for a in given]
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
    """Return a request's logit biases by token id. given: an object with token ids or texts as names, or llama.cpp's pairs. A bias for a
    text applies to each of its tokens. Raises BadField."""
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


def _answers(
    prompts: Sequence[Sequence[int] | PromptWithImages], params: SamplingParams, num: int
) -> tuple[AnswerRequest, ...]:
    """Return the requests for `num` answers to each prompt. With a seed, the i-th answer to a prompt, counted from 0, gets the seed plus
    i."""
    seeds = [None if params.seed is None else (params.seed + i) & _SEED_BITS for i in range(num)]
    return tuple(
        AnswerRequest(prompt=p, params=replace(params, seed=s) if num > 1 else params)
        for p in prompts
        for s in seeds
    )


def _compiled(job: Job, params: SamplingParams, at: Context) -> Job:
    """Return the job with the compiled constraints of its answers, which all answers share. Where the grammar of calls that the model
    may write is too large or cannot be compiled, the grammar of the tools at fault, or of all tools, is dropped with a notice. Raises
    BadField, GrammarError."""
    try:
        _check_constraints(params, at.limits)
        return replace(job, compiled=at.engine.compile(params, len(job.asks), at.owner))
    except (BadField, GrammarError) as error:
        found = None if job.loosen is None else job.loosen(partial(_trouble, at))
        if found is not None:
            changed: dict[str, Any] = {"lark": found[0]}
            told = found[1]
        elif params.lark_at:
            changed = {"lark": None, "lark_at": "", "lark_once": False}
            told = (f"calls may have any arguments: {error}",)
        else:
            raise
        asks = tuple(replace(one, params=replace(one.params, **changed)) for one in job.asks)
        job = replace(job, asks=asks, notices=(*job.notices, *told), loosen=None)
        return _compiled(job, asks[0].params, at)


def _trouble(at: Context, lark: str) -> str | None:
    """Return the reason why a Lark grammar cannot be compiled; None where it can."""
    try:
        at.engine.compile(SamplingParams(lark=lark), 1, at.owner)
    except GrammarError as error:
        return str(error)
    return None


def _check_constraints(params: SamplingParams, limits: ServerLimits) -> None:
    """Raise BadField where the bad words, the schema or the grammar of an answer are larger than the limits."""
    num_bytes = sum(len(w.encode()) for w in params.bad_words)
    if num_bytes > limits.max_bad_words:
        raise BadField(
            "bad_words",
            f"bad_words may have {limits.max_bad_words} bytes at most, all together, not {num_bytes}.",
        )
    kinds = [kind for kind in _KINDS if getattr(params, kind) is not None]
    num_bytes = source_bytes(params) if kinds else 0
    if num_bytes > limits.max_grammar:
        raise BadField(
            kinds[0],
            f"The schema or grammar of an answer, made from tools or given, may have {limits.max_grammar} bytes at most, "
            f"not {num_bytes}.",
        )
