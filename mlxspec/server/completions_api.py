"""Continuing texts with OpenAI's `/v1/completions` and llama.cpp's `/completion` and `/infill`, and `/tokenize` and `/detokenize`: the
forms of requests and answers, how a request is read, and how an answer is written, streamed or whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, RootModel

from mlxspec.config import MAX_CONTEXT
from mlxspec.events import TokenLogprob
from mlxspec.loading.fill_in import FillIn
from mlxspec.parsers.pieces import Content
from mlxspec.server import chat_api
from mlxspec.server.answer_format import AnswerFormat, answer_format, held_schema
from mlxspec.server.answer_writer import DATA_WITHOUT_DONE, AnswerWriter, ChoicesWriter, Read
from mlxspec.server.blocks import Answer
from mlxspec.server.chat_api import finite
from mlxspec.server.errors import BadField
from mlxspec.server.forms import base as t
from mlxspec.server.forms import shared
from mlxspec.server.forms.base import TokenId
from mlxspec.server.forms.chat import ChatMessage
from mlxspec.server.forms.shared import Count, has_several
from mlxspec.server.http.fairness import check_wanted
from mlxspec.server.images import holds_images
from mlxspec.server.job import Job
from mlxspec.server.job_run import Delta, End, Progress
from mlxspec.server.params import Own, Prepared, check_number, formats_of, job_of
from mlxspec.server.prompt import Context, ids_of, rendered, token_ids, tokenizer_of
from mlxspec.server.usage import drafting, progress, timings

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine
    from mlxspec.engine.stats import RequestStats

_LengthOrNone = Annotated[int, t.Range(0, MAX_CONTEXT, also=(-1,))]


class WithPrompt(shared.Continued):
    prompt: shared.prompts(64)  # type: ignore[valid-type]


class CompletionRequest(WithPrompt):
    stream_options: shared.StreamOptions | None = None
    logprobs: Annotated[int, t.option("top_logprobs")] | None = t.optional(
        "so many likeliest tokens at each place"
    )
    echo: t.Flag = t.optional(
        "the text begins with the prompt; with logprobs, and not streamed, its tokens have theirs"
    )
    max_tokens: _LengthOrNone | None = t.optional("-1: to the context's end; 0: with echo, the prompt alone")
    return_token_ids: t.Flag = t.optional("token ids beside each answer")
    suffix: t.Text | None = t.optional("each answer stands between its prompt and this")
    refused: ClassVar = {name: why for name, why in shared.REFUSED.items() if name != "suffix"}


class Native(shared.Continued):
    """Fields that the requests of llama.cpp's own API share."""

    max_tokens: _LengthOrNone | None = t.optional("-1: to the context's end; 0: the prompt is read and kept")
    n_predict: _LengthOrNone | None = t.optional("llama.cpp's name of max_tokens", same_as="max_tokens")
    return_tokens: t.Flag = t.optional("token ids beside the text")
    n_probs: Annotated[int, t.option("top_logprobs")] | None = t.optional(
        "so many likeliest tokens at each place, in completion_probabilities"
    )
    refused: ClassVar = {
        **{name: why for name, why in shared.REFUSED.items() if name not in ("n_probs", "return_tokens")},
        **t.refuse("return_token_ids", "use return_tokens", *t.OFF),
    }


class NativeRequest(Native, WithPrompt):
    """A request to continue a text, in llama.cpp's form."""


class NearbyFile(t.Fields):
    text: t.Text
    filename: Annotated[str, Field(max_length=1000)] | None = None
    harmless = t.harmless("time", "when an editor read it")


class InfillRequest(Native):
    """A request to fill a gap in a text. Fields that editors always send and this server cannot honour are ignored, with a notice."""

    input_prefix: t.Text
    input_suffix: t.Text
    input_extra: t.Turns[NearbyFile] | None = t.optional("other texts of the project")
    prompt: t.Text | None = t.optional("goes on with input_prefix")
    refused: ClassVar = {
        name: why
        for name, why in Native.refused.items()
        if name not in ("samplers", "n_indent", "t_max_predict_ms", "response_fields")
    }
    harmless: ClassVar = {**shared.HARMLESS, **t.harmless("response_fields", "an answer has all its fields")}


class TokenizeRequest(shared.Body):
    """A request for the token ids of a text, in llama.cpp's form with `content` or in vLLM's with `prompt`, or of a conversation."""

    content: t.Tokenized | None = None
    prompt: t.Tokenized | None = None
    messages: Annotated[t.Turns[ChatMessage], Field(min_length=1)] | None = None
    tools: t.Tools[chat_api.Tool] | None = None
    chat_template_kwargs: shared.TemplateVariables | None = None
    add_special: t.Flag = t.optional("what the tokenizer puts around a plain text")
    add_special_tokens: t.Flag = t.optional("the same of `prompt`, true unless it is given")
    with_pieces: t.Flag = None
    return_token_strs: t.Flag = None


class DetokenizeRequest(shared.Body):
    tokens: t.Many[TokenId]


# --- answers

_Logprobs = t.answer(
    "CompletionLogprobs", tokens=list[str], token_logprobs=list[float | None], top_logprobs=list[dict[str, float] | None],
    text_offset=list[Count]
)  # fmt: skip
_Choice = t.answer(
    "CompletionChoice", "token_ids prompt_token_ids", token_ids=list[Count], prompt_token_ids=list[Count],
    index=Count, text=str, logprobs=t.either(_Logprobs, None), finish_reason=Literal["stop", "length"]
)  # fmt: skip
CompletionAnswer = t.answer(
    "CompletionAnswer", **shared.HEAD, object=Literal["text_completion"], choices=t.many(_Choice), usage=shared.Usage, **shared.MEASURED
)  # fmt: skip
_Probable = t.answer(
    "Probable", "top_logprobs", id=Count, token=str, bytes=list[Count], logprob=float, top_logprobs=list[Any]
)
NativeAnswer = t.answer(
    "NativeAnswer", "completion_probabilities", completion_probabilities=t.many(_Probable),
    index=Count, content=str, tokens=list[Count], stop=bool, model=str, tokens_predicted=Count, tokens_evaluated=Count,
    tokens_cached=Count, generation_settings=dict[str, Any], prompt=str, has_new_line=bool, truncated=bool,
    stop_type=Literal["eos", "word", "limit"], **shared.MEASURED,
)  # fmt: skip


class NativeAnswers(RootModel[NativeAnswer | list[NativeAnswer]]):  # type: ignore[valid-type]
    """One answer as an object, or several in a list."""


TokenizeAnswer = t.answer(
    "TokenizeAnswer", "token_strs", tokens=t.many(t.either(Count, t.answer("Piece", id=Count, piece=str | None))), count=Count,
    max_model_len=Count, token_strs=list[str | None]
)  # fmt: skip


# --- reading

Prompts = Any  # as shared.prompts describes them: one or several, each a text, or ids with texts between them


@dataclass(frozen=True, kw_only=True)
class Text:
    """The prompts of a request to continue texts. given: one or several; an answer continues its prompt, or fills the gap between the
    prompt and `suffix`. files: (name, text) of other files, for the gap. logprobs: the number of most probable tokens to return at
    each place; None without log-probabilities. echo: the answer begins with its prompt. shows_prompts: the response has the prompt in
    a member of its own."""

    given: Prompts
    own: Own
    suffix: str | None = None
    files: Sequence[tuple[str, str]] = ()
    wanted: AnswerFormat | None = None
    logprobs: int | None = None
    echo: bool = False
    shows_prompts: bool = False


def read(form: CompletionRequest, at: Context) -> Read:
    """Return the job of a request, and the function that makes the writer of its answers from the model's name and the job. Raises
    subclasses of MlxspecError for a request that cannot be honoured."""
    own = _own(form, stream_options=form.stream_options, returns_ids=bool(form.return_token_ids))
    text = Text(
        given=form.prompt,
        own=own,
        suffix=form.suffix,
        wanted=answer_format(formats_of(form)),
        logprobs=form.logprobs,
        echo=bool(form.echo),
    )
    write = partial(CompletionWriter, echo=text.echo, is_wanted=form.max_tokens != 0)
    return _with_prompts(job_of(form, at, text_prompts(text, at)), text, at), write


def read_native(form: NativeRequest, at: Context) -> Read:
    """Return the job of a request of llama.cpp's /completion, and the function that makes the writer of its answers from the model's
    name and the job. Raises subclasses of MlxspecError."""
    return _native(form, at, Text(given=form.prompt, own=_own(form)))


def read_infill(form: InfillRequest, at: Context) -> Read:
    """Return the job of a request of llama.cpp's /infill, and the function that makes the writer of its answers from the model's name
    and the job. Raises subclasses of MlxspecError."""
    before = form.input_prefix + (form.prompt or "")
    files = [(f.filename or "file", f.text) for f in form.input_extra or ()]
    text = Text(given=before, own=_own(form), suffix=form.input_suffix, files=files)
    return _native(form, at, text, has_gap=True)


def _native(form: Native, at: Context, text: Text, *, has_gap: bool = False) -> Read:
    wanted = answer_format(formats_of(form))
    text = replace(text, wanted=wanted, logprobs=form.n_probs or None, shows_prompts=True)
    write = partial(LlamaWriter, is_wanted=form.max_tokens != 0, returns_tokens=bool(form.return_tokens))
    return _with_prompts(job_of(form, at, text_prompts(text, at, has_gap=has_gap)), text, at), write


def _own(form: shared.Continued, **more: Any) -> Own:
    return Own(max_tokens=form.max_tokens, stop=form.stop, num=form.n or 1, streams=bool(form.stream), **more)


def text_prompts(text: Text, at: Context, *, has_gap: bool = False) -> Prepared:
    """Return the prompts of a request as token ids, with the parameters of their answers. has_gap: the answers fill a gap, even where
    the suffix is empty. Raises subclasses of MlxspecError."""
    engine, own = at.engine, text.own
    several = text.given if has_several(text.given) else [text.given]
    check_number(own.num, len(several), at.limits)
    rules: dict[str, Any] = {"logprobs": text.logprobs is not None, "top_logprobs": text.logprobs or 0}
    if has_gap or text.suffix:
        prompts, ends = _gaps(several, text, engine)
        own = replace(own, ends=ends)
    else:
        prompts = _prompts(several, engine)
    if text.echo and text.logprobs is not None:
        if own.streams:
            raise BadField("echo", "echo and logprobs together are not streamed: leave stream out.")
        rules["prompt_logprobs"] = True
    if own.max_tokens == 0:
        if not (text.echo or text.shows_prompts):
            raise BadField("max_tokens", "max_tokens 0 needs echo.")
        own = replace(own, max_tokens=1)  # which is sampled with the prompt's last forward, and left out
    notices: list[str] = []
    if text.wanted is not None and text.wanted.kind == "json_schema":
        rules["json_schema"], notices = held_schema(text.wanted)
    elif text.wanted is not None:
        rules[text.wanted.kind] = text.wanted.value
    return Prepared(tokens=prompts, own=own, rules=rules, notices=notices)


def _with_prompts(job: Job, text: Text, at: Context) -> Job:
    """Return the job with the texts of its prompts, and of their first tokens, where the answers contain them."""
    decode = tokenizer_of(at.engine).decode
    shown = job.asks if text.shows_prompts or text.echo else ()
    first = job.asks if job.asks[0].params.prompt_logprobs else ()
    return replace(
        job,
        prompts=tuple(decode(token_ids(a.prompt)) for a in shown),
        first_tokens=tuple(decode(token_ids(a.prompt)[:1]) for a in first),
    )


def _prompts(several: Sequence[Any], engine: Engine) -> list[list[int]]:
    tokenizer = tokenizer_of(engine)
    encode = partial(tokenizer.encode, most=engine.max_context)
    out = []
    for place, prompt in enumerate(several):
        check_wanted()
        if holds_images(prompt):
            raise BadField("images", "A raw prompt holds no images; use the chat format.")
        out.append(ids_of(prompt, encode))
        if not out[-1]:
            raise BadField(f"prompt[{place}]", "The prompt is empty.")
    return out


def form_of(engine: Engine) -> FillIn | None:
    """Return how the model's vocabulary writes a gap in a text; None where it has no tokens for a gap."""
    return None if engine.tokenizer is None else FillIn.of(engine.tokenizer, engine.model.vocab_size)


def _gaps(several: Sequence[Any], text: Text, engine: Engine) -> tuple[list[list[int]], Sequence[int]]:
    """Return the token ids of a prompt for each of these texts before a gap, and the ids that end the text in the gap. Raises BadField,
    ContextOverflowError, ConfigError."""
    form = form_of(engine)
    if form is None:
        raise BadField(
            "suffix", f"{engine.name} cannot fill in: its vocabulary has no tokens around a gap in a text."
        )
    if text.echo:
        raise BadField(
            "echo", "echo and suffix exclude each other: the text before an answer is not all of its prompt."
        )
    made = []
    for before in several:
        check_wanted()
        made.append(form.prompt(before, text.suffix or "", text.files, most=engine.max_context))
    return made, form.ends


def tokenized(form: TokenizeRequest, engine: Engine) -> dict[str, Any]:
    """Return the answer of /tokenize. Raises BadField, and ConfigError for a model without a tokenizer."""
    if sum(given is not None for given in (form.content, form.prompt, form.messages)) != 1:
        raise BadField("content", "Give one of content, prompt and messages.")
    tokenizer = tokenizer_of(engine)
    if form.messages is not None:
        talk = chat_api.conversation(
            chat_api.ChatCompletionRequest(
                messages=form.messages, tools=form.tools, chat_template_kwargs=form.chat_template_kwargs
            )
        )
        tokens = token_ids(rendered(talk, engine)[1])
    elif form.prompt is not None:
        tokens = tokenizer.encode(form.prompt, special=form.add_special_tokens is not False)
    else:
        tokens = tokenizer.encode(form.content or "", special=bool(form.add_special))
    found: dict[str, Any] = {"count": len(tokens), "max_model_len": engine.max_context}
    wants_texts = form.with_pieces or form.return_token_strs
    texts = [tokenizer.token_text(token) for token in tokens] if wants_texts else []
    pieces = [{"id": i, "piece": piece} for i, piece in zip(tokens, texts, strict=bool(texts))]
    found["tokens"] = pieces if form.with_pieces else tokens
    return found | ({"token_strs": texts} if form.return_token_strs else {})


def detokenized(form: DetokenizeRequest, engine: Engine) -> dict[str, Any]:
    """Return the answer of /detokenize. Raises BadField, and ConfigError for a model without a tokenizer."""
    tokenizer = tokenizer_of(engine)
    if any(token >= engine.model.vocab_size for token in form.tokens):
        raise BadField(
            "tokens", f"tokens holds an id that is not there; ids end at {engine.model.vocab_size - 1}."
        )
    text = tokenizer.decode(form.tokens)
    return {"content": text, "prompt": text}


# --- writing

_STOP_TYPES = {"end": "eos", "stop_string": "word", "limit": "limit", "context": "limit"}
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "stop", "ignore_eos")


class CompletionWriter(ChoicesWriter):
    """A writer of OpenAI's completions. With `echo` each choice's text begins with its prompt."""

    id_prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"
    nothing: Mapping[str, Any] = {"text": ""}

    def __init__(self, model: str, job: Job, *, echo: bool, is_wanted: bool) -> None:
        """Make the writer of a job's answers. is_wanted: False where the request has max_tokens 0, so that the sampled token is left
        out."""
        super().__init__(model, job)
        self._is_wanted = is_wanted
        self._echo = job.prompts if echo else ("",) * len(job.asks)
        self._offsets = [len(text) for text in self._echo]  # of the next token

    def begin(self) -> Iterator[dict[str, Any]]:
        for number, text in enumerate(self._echo):
            if text:
                yield self._chunk(number, {"text": text})

    def _grown(self, answer: Answer, update: Delta) -> Iterator[dict[str, Any]]:
        if not self._is_wanted:
            return
        text = _text(update)
        if text or update.logprobs or self._ids(answer.number, update.tokens):
            logprobs = _logprobs(update.logprobs, self._offsets[answer.number])
            self._offsets[answer.number] += sum(len(_shown(t.data)) for t in update.logprobs)
            chunk = self._chunk(answer.number, {"text": text}, logprobs=logprobs, tokens=update.tokens)
            yield chunk | self._beside(update)

    def _said(self, answer: Answer) -> dict[str, Any]:
        echo = self._echo[answer.number]
        text, own = (answer.text("text"), answer.logprobs) if self._is_wanted else ("", [])
        if not self._job.first_tokens:
            return {"text": echo + text, "logprobs": _logprobs(own, len(echo))}
        told = () if answer.end is None else answer.end.prompt_logprobs
        first = self._job.first_tokens[answer.number]
        return {"text": echo + text, "logprobs": _with_first(first, _logprobs([*told, *own], len(first)))}

    def _ids(self, number: int, tokens: Sequence[int], *, has_prompt: bool = False) -> dict[str, Any]:
        return super()._ids(number, tokens if self._is_wanted else (), has_prompt=has_prompt)

    def _used(self) -> dict[str, Any]:
        used = super()._used()
        if not self._is_wanted:
            used["usage"] |= {"completion_tokens": 0, "total_tokens": used["usage"]["prompt_tokens"]}
        return used

    def _reason(self, end: End | None) -> str | None:
        return "stop" if end is not None and end.reason == "tool_calls" else super()._reason(end)


def _text(update: Delta) -> str:
    return "".join(p.text for p in update.pieces if isinstance(p, Content))


def _logprobs(found: Sequence[TokenLogprob], offset: int) -> dict[str, list[Any]] | None:
    """Return log-probabilities in the form of OpenAI's completions, as parallel lists; None where there are none. offset: the characters
    of the text before the first token."""
    if not found:
        return None
    texts = [_shown(entry.data) for entry in found]
    return {
        "tokens": texts,
        "token_logprobs": [finite(entry.logprob) for entry in found],
        "top_logprobs": [{_shown(o.data): finite(o.logprob) for o in reversed(e.top)} for e in found],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)),
    }


def _with_first(first: str, found: dict[str, list[Any]] | None) -> dict[str, list[Any]]:
    """Return these log-probabilities with a prompt's first token before them, which has none of its own. first: the token's text."""
    lead = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {name: [own, *(found or {}).get(name, [])] for name, own in lead.items()}


def _shown(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


class LlamaWriter(AnswerWriter):
    """A writer of llama.cpp's completions. Several answers are a list of objects, distinguished by `index`. llama.cpp's fields about
    slots are left out, because this server has no slots."""

    wire = DATA_WITHOUT_DONE  # the object with `stop` is the last

    def __init__(self, model: str, job: Job, *, is_wanted: bool, returns_tokens: bool) -> None:
        """Make the writer of a job's answers. is_wanted: False where the request has max_tokens 0, so that the sampled token is left
        out. returns_tokens: whole answers have token ids."""
        super().__init__(model, job)
        self._is_wanted, self._returns_tokens = is_wanted, returns_tokens

    def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        found = [self._whole(answer, answer.end) for answer in self._answers if answer.end is not None]
        return found[0] if len(found) == 1 else found

    def _progressed(self, update: Progress) -> dict[str, Any]:
        head = {"index": update.choice, "content": "", "tokens": [], "stop": False}
        return {**head, "prompt_progress": progress(update)}

    def _grown(self, answer: Answer, update: Delta) -> Iterator[dict[str, Any]]:
        answer.take(update)
        if not self._is_wanted:
            return
        said = {"content": _text(update), "tokens": list(update.tokens), "stop": False}
        said |= _probabilities(update.logprobs)
        yield {**_counted(answer, update.stats), **said, **self._beside(update)}

    def _ended(self, answer: Answer, end: End) -> Iterator[dict[str, Any]]:
        last = self._whole(answer, end)
        last.pop("completion_probabilities", None)  # each chunk had its own
        yield {**last, "content": "", "tokens": []}

    def _tokens(self, tokens: Sequence[int]) -> list[int]:
        return list(tokens) if self._is_wanted and self._returns_tokens else []

    def _whole(self, answer: Answer, end: End) -> dict[str, Any]:
        stats, params = end.stats, self._job.asks[answer.number].params
        text = answer.text("text") if self._is_wanted else ""
        settings = {name: getattr(params, name) for name in _SETTINGS}
        longest = -1 if params.max_tokens == MAX_CONTEXT else params.max_tokens
        return {
            **_counted(answer, stats),
            "content": text,
            **(_probabilities(answer.logprobs) if self._is_wanted else {"tokens_predicted": 0}),
            "tokens": self._tokens(answer.tokens),
            "stop": True,
            "model": self._model,
            "generation_settings": {**settings, "n_predict": longest, "seed": stats.seed},
            "prompt": self._job.prompts[answer.number],
            "has_new_line": "\n" in text,
            "truncated": end.cause == "context",
            "stop_type": _STOP_TYPES[end.cause],
            "tokens_cached": stats.num_cached,
            "timings": timings([stats]),
            "mlxspec": drafting([stats], self._job.notices, [end.receipt] if end.receipt else []),
        }


def _probabilities(found: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return log-probabilities as llama.cpp's member `completion_probabilities`; empty where there are none."""

    def entry(token: int, data: bytes, logprob: float) -> dict[str, Any]:
        return {"id": token, "token": _shown(data), "bytes": list(data), "logprob": finite(logprob)}

    told = [
        {
            **entry(t.token, t.data, t.logprob),
            "top_logprobs": [entry(o.token, o.data, o.logprob) for o in t.top],
        }
        for t in found
    ]
    return {"completion_probabilities": told} if told else {}


def _counted(answer: Answer, stats: RequestStats) -> dict[str, Any]:
    return {
        "index": answer.number,
        "tokens_predicted": stats.num_generated,
        "tokens_evaluated": stats.num_prompt,
    }
