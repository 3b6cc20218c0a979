"""Ollama's API, `/api/chat`, `/api/generate` and `/api/show`: the form of its requests and answers, how a request is read, and how an
answer is written, one object a line or one in all. Sampling, drafting and the fields that all APIs share are members of `options`."""

from __future__ import annotations

import datetime
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from mlxspec.config import MAX_CONTEXT
from mlxspec.server.answer_format import ANY_OBJECT, AnswerFormat, answer_format
from mlxspec.server.answer_writer import LINES, Read, SingleWriter
from mlxspec.server.blocks import Answer, Block, BlockEnd, BlockEvent, BlockMore
from mlxspec.server.completions_api import Text, text_prompts
from mlxspec.server.errors import ApiError, BadField, ollama_error
from mlxspec.server.forms import base as t
from mlxspec.server.forms import shared
from mlxspec.server.forms.chat import CalledFunction, ChatMessage, ToolCall
from mlxspec.server.forms.shared import Count
from mlxspec.server.job import ChatRequest, Job, goes_on_with
from mlxspec.server.job_run import End, Progress
from mlxspec.server.messages import normalize
from mlxspec.server.params import Own, chat_job, check_same, formats_of, job_of, template_variables
from mlxspec.server.prompt import Context, chat_prompt
from mlxspec.server.usage import progress

if TYPE_CHECKING:
    from mlxspec.engine.stats import RequestStats

# --- the form

_ONE_ANSWER = t.refuse("n n_cmpl", "an answer of this API is one message", 1)


class OllamaFunctionCall(t.Fields):
    name: t.Name
    arguments: t.Object | None = None


class OllamaCall(t.Fields):
    id: t.Id | None = None
    function: OllamaFunctionCall
    harmless = t.harmless("index", "the place of a streamed call, sent back")


class OllamaMessage(t.Fields):
    role: Literal["system", "user", "assistant", "tool"]
    content: t.Text | None = None
    images: t.Many[shared.Base64] | None = None
    thinking: t.Text | None = None
    tool_calls: t.Tools[OllamaCall] | None = None
    tool_name: t.Id | None = None
    tool_call_id: t.Id | None = None
    harmless = ChatMessage.harmless


class OllamaFunction(t.Fields):
    name: t.ToolName
    description: t.Text | None = None
    parameters: t.Object | None = None
    strict: t.Flag = None


class OllamaTool(t.Fields):
    type: Literal["function"] | None = None
    function: OllamaFunction


class OllamaOptions(shared.Generation):
    stop: t.Word | shared.Words | None = None
    num_predict: Annotated[int, t.Range(1, MAX_CONTEXT, also=(-1, -2, 0))] | None = t.optional(
        "-1 and -2: to the context's end; 0: as if it were left out"
    )
    num_ctx: Annotated[int, t.Range(0, 1 << 30)] | None = None
    refused: ClassVar = {
        **shared.REFUSED,
        **_ONE_ANSWER,
        **t.refuse("max_tokens n_predict", "use num_predict"),
        **t.refuse("tfs_z", shared.NO_SAMPLER, 1),
    }
    harmless: ClassVar = {
        **shared.HARMLESS,
        **t.harmless(
            "numa num_batch num_gpu main_gpu low_vram f16_kv logits_all vocab_only use_mmap use_mlock embedding_only num_thread",
            "about how a model is loaded, which was done when the server was started",
        ),
        **t.harmless("num_keep", "the context is not shifted"),
        **t.harmless("penalize_newline", "llama.cpp does not honour it any more either"),
    }


class OllamaBody(shared.Body, shared.ThinkingFields):
    stream: t.Flag = t.optional("a stream unless this is false")
    format: Literal["", "json"] | t.Object | None = t.optional("json, or a JSON schema")
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: t.Id | float | None = t.optional(
        "0: the model is unloaded behind this request, unless others use it; --idle-unload says how long it stays else"
    )
    options: OllamaOptions | None = None
    refused: ClassVar = {
        **shared.one_answer("message", shared.NO_LOGPROBS, "message"),
        **t.refuse(" ".join(f.alias or name for name, f in OllamaOptions.model_fields.items()), "it is one of the options"),
        **t.refuse("context", "use /api/chat and send the conversation", *t.OFF),
        **t.refuse("template", "templates come with the model", *t.OFF),
        **t.refuse("tool_choice", "this API has no such field; /v1/chat/completions has", "auto"),
        **t.refuse("parallel_tool_calls", "/v1/chat/completions has it", True),
        **t.refuse("response_format", "use format"),
        **t.refuse("truncate", "a prompt is read whole or refused", False),
        **t.refuse("shift", "the context is not shifted", False),
        **t.refuse("stream_options", "usage always comes", *t.OFF),
        **t.refuse("max_completion_tokens max_tokens n_predict", "use options.num_predict"),
    }  # fmt: skip
    harmless: ClassVar = {
        **shared.HARMLESS,
        **t.harmless("dimensions", "about embeddings"),
    }


class OllamaChatRequest(OllamaBody):
    messages: t.Turns[OllamaMessage] | None = None
    tools: t.Tools[OllamaTool] | None = None


class OllamaGenerateRequest(OllamaBody):
    prompt: t.Text | None = None
    images: t.Many[shared.Base64] | None = None
    system: t.Text | None = None
    raw: t.Flag = t.optional("the prompt is continued as it stands, without the chat template")
    suffix: t.Text | None = t.optional("the answer stands between the prompt and this")
    refused: ClassVar = {name: why for name, why in OllamaBody.refused.items() if name != "suffix"}


class OllamaShowRequest(shared.Body):
    name: shared.ModelName | None = None
    verbose: t.Flag = None


# --- answers

_MEASURED = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration")  # fmt: skip
_LAST: dict[str, Any] = {
    "model": str, "created_at": str, "done": bool, "done_reason": Literal["stop", "length", "load", "unload"],
    **dict.fromkeys(_MEASURED, Count), **shared.MEASURED,
}  # fmt: skip
_MAY_LACK = " ".join((*_MEASURED, *shared.MEASURED))
_Call = t.answer(
    "OllamaAnsweredCall", id=str, function=t.answer("OllamaAnsweredFunction", name=str, arguments=dict[str, Any])
)  # fmt: skip
_Message = t.answer(
    "OllamaAnsweredMessage", "thinking tool_calls",
    role=Literal["assistant"], content=str, thinking=str, tool_calls=t.many(_Call),
)  # fmt: skip
OllamaChatAnswer = t.answer("OllamaChatAnswer", _MAY_LACK, **_LAST, message=_Message)
OllamaGenerateAnswer = t.answer(
    "OllamaGenerateAnswer", f"thinking {_MAY_LACK}", **_LAST, response=str, thinking=str
)
_NAMED: dict[str, Any] = {
    "name": str, "model": str, "modified_at": str, "size": Count, "digest": str, "details": dict[str, Any]
}  # fmt: skip
OllamaTags = t.answer("OllamaTags", models=t.many(t.answer("OllamaModel", **_NAMED)))
OllamaShown = t.answer(
    "OllamaShown", **_NAMED, capabilities=list[str], model_info=dict[str, Any], modelfile=str, parameters=str, template=str
)  # fmt: skip
OllamaRunning = t.answer(
    "OllamaRunning", models=t.many(t.answer("OllamaLoaded", **_NAMED, size_vram=Count, context_length=Count))
)
OllamaVersion = t.answer("OllamaVersion", version=str)
OllamaError = t.answer("OllamaError", error=str)


# --- reading and writing

_NANO = 10**9


def ollama_name(asked: str | None, names: Sequence[str]) -> str | None:
    """Return the model that a request names, without the tag `:latest` that Ollama's clients add. names: the models that exist, which
    keep their tag."""
    return asked.removesuffix(":latest") if asked is not None and asked not in names else asked


def ollama_model(name: str, created: int) -> dict[str, Any]:
    """Return a model in the form of Ollama's lists. Unknown details are empty; the digest is that of the name. created: seconds since
    1970."""
    when = datetime.datetime.fromtimestamp(created, datetime.UTC).isoformat()
    details = {
        "parent_model": "",
        "format": "safetensors",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }
    digest = hashlib.sha256(name.encode()).hexdigest()
    return {"name": name, "model": name, "modified_at": when, "size": 0, "digest": digest, "details": details}


def conversation(form: OllamaChatRequest | OllamaGenerateRequest) -> ChatRequest:
    """Return the conversation of a request whose prompt is not raw, in the form that all APIs share. Raises BadField, GrammarError."""
    if isinstance(form, OllamaChatRequest):
        messages, tools = normalize([_message(message) for message in form.messages or ()]), form.tools or ()
        num = len(form.messages or ())
    else:
        messages = [{"role": "system", "content": form.system}] if form.system else []
        messages, tools = [*messages, {"role": "user", "content": form.prompt}], ()
        num = len(messages)
    think = form.think
    if think is not None:
        check_same(form.enable_thinking, "enable_thinking", think is not False, "think")
        form.enable_thinking = think is not False
        form.reasoning_effort = form.reasoning_effort if isinstance(think, bool) else think
    wanted = _wanted(form)
    return ChatRequest(
        messages=messages,
        tools=[{**t.plain(tool), "type": "function"} for tool in tools],
        goes_on=goes_on_with(messages, f"messages[{num - 1}]"),
        template=template_variables(form),
        wanted=wanted,
    )


def read_chat(form: OllamaChatRequest | OllamaGenerateRequest, at: Context) -> Read:
    """Return the job of a request that answers a conversation, or a prompt in the chat template, and the function that makes the writer
    of its answer from the model's name and the job. Raises subclasses of MlxspecError."""
    own, options = _own(form), form.options or OllamaOptions()
    prompt = chat_prompt(conversation(form), at)
    write = OllamaChatWriter if isinstance(form, OllamaChatRequest) else OllamaGenerateWriter
    return chat_job(options, _told(options.num_ctx, at), prompt, own), write


def read_text(form: OllamaGenerateRequest, at: Context) -> Read:
    """Return the job of a request whose prompt is raw or has a suffix, and the function that makes the writer of its answer from the
    model's name and the job. Raises subclasses of MlxspecError."""
    kind, more = ("suffix", ("raw", "images")) if form.suffix else ("raw", ())
    for name in ("system", "think", *more):
        if getattr(form, name):
            raise BadField(name, f"{name} and {kind} exclude each other: such a prompt has no template.")
    options = form.options or OllamaOptions()
    text = Text(given=form.prompt or "", suffix=form.suffix, wanted=_wanted(form), own=_own(form))
    at = _told(options.num_ctx, at)
    return job_of(options, at, text_prompts(text, at)), OllamaGenerateWriter


def read_generate(form: OllamaGenerateRequest, at: Context) -> Read:
    """Return the job of a request of /api/generate, and the function that makes the writer of its answer from the model's name and the
    job. Raises subclasses of MlxspecError."""
    return read_text(form, at) if form.raw or form.suffix else read_chat(form, at)


def _wanted(form: OllamaBody) -> AnswerFormat | None:
    """Return the format that a request sets for its answer; None for free text. Raises BadField, GrammarError."""
    own, given = None, form.format
    if given is not None and given != "":
        own = AnswerFormat(field="format", kind="json_schema", value=ANY_OBJECT if given == "json" else given)
    return answer_format({} if form.options is None else formats_of(form.options), own, "options.")


def unloads(given: str | float | None) -> bool:
    """Return whether a request's `keep_alive` is zero, so that the model is unloaded after the request. Zero may have a unit, as in
    `0s`."""
    text = given.rstrip("hmnsu") if isinstance(given, str) else str(given)
    return text in ("0", "0.0")


def _told(num_ctx: int | None, at: Context) -> Context:
    """Return the context `at` with a notice added where the request sets another length of the model's context than it has. num_ctx: in
    tokens; None and 0 for none."""
    most = at.engine.max_context
    asked = num_ctx or most
    if asked == most:
        return at
    said = f"options.num_ctx is {asked}, and this model's context ends at {most} tokens"
    if asked < most:
        said = f"options.num_ctx is {asked} and was ignored: the context has {most} tokens"
    return replace(at, notices=(*at.notices, said))


def _own(form: OllamaBody) -> Own:
    options = form.options or OllamaOptions()
    num = options.num_predict
    return Own(
        max_tokens=None if num in (None, 0) else -1 if num == -2 else num,
        stop=options.stop,
        streams=form.stream is not False,
    )


def _message(message: OllamaMessage) -> ChatMessage:
    """Return a message in the form of OpenAI's chat completions. In Ollama's API calls may lack ids, and a tool's result names its tool."""
    calls = [
        ToolCall(
            id=call.id or "",
            function=CalledFunction(name=call.function.name, arguments=call.function.arguments or {}),
        )
        for call in message.tool_calls or ()
    ]
    return ChatMessage(
        role=message.role,
        content=message.content,
        reasoning_content=message.thinking,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
        name=message.tool_name if message.role == "tool" else None,
    )


class OllamaChatWriter(SingleWriter):
    """A writer of one answer of Ollama's API. Its stream is objects with a piece of text, a piece of thinking or a whole call, and a
    last one with `done` true, counts and durations. Extensions: `timings` and `mlxspec` in the last object, `prompt_progress` in
    objects of its own."""

    wire = LINES

    def __init__(self, model: str, job: Job) -> None:
        super().__init__(model, job)
        self._started = time.monotonic()

    def pause(self) -> dict[str, Any]:
        return self._object("", done=False)

    def failed(self, error: ApiError) -> Iterator[dict[str, Any]]:
        yield ollama_error(error)

    def _progressed(self, update: Progress) -> dict[str, Any]:
        return self._object("", done=False) | {"prompt_progress": progress(update)}

    def _ended(self, answer: Answer, end: End) -> Iterator[dict[str, Any]]:
        yield self._object("", done=True) | self._last(end)

    def _whole(self, end: End) -> dict[str, Any]:
        answer = self._answer
        text, thinking = answer.text("text"), answer.text("thinking")
        return self._object(text, thinking=thinking, calls=answer.calls, done=True) | self._last(end)

    def _written(self, event: BlockEvent, beside: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        block = event.block
        if block.kind == "call":
            if isinstance(event, BlockEnd):
                yield self._object("", calls=[block], done=False)
        elif isinstance(event, BlockMore):
            if block.kind == "text":
                yield self._object(event.text, done=False) | dict(beside)
            else:
                yield self._object("", thinking=event.text, done=False) | dict(beside)

    def _object(
        self, text: str, *, thinking: str = "", calls: Sequence[Block] = (), done: bool
    ) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls:
            more["tool_calls"] = [
                {"id": c.call_id, "function": {"name": c.name, "arguments": c.arguments()}} for c in calls
            ]
        return {**_now(self._model), **self.said(text, more), "done": done}

    @staticmethod
    def said(text: str, more: Mapping[str, Any]) -> dict[str, Any]:
        """Return the members of an object that hold the model's text. more: members to add next to the text."""
        return {"message": {"role": "assistant", "content": text, **more}}

    @classmethod
    def loaded(cls, model: str, *, is_unloaded: bool = False) -> dict[str, Any]:
        """Return the answer to a request that only loads a model, or only unloads it (is_unloaded)."""
        reason = "unload" if is_unloaded else "load"
        return {**_now(model), **cls.said("", {}), "done": True, "done_reason": reason}

    def _last(self, end: End) -> dict[str, Any]:
        stats: RequestStats = end.stats
        return {
            "done_reason": "length" if end.reason == "length" else "stop",
            "total_duration": int((time.monotonic() - self._started) * _NANO),
            "load_duration": 0,
            "prompt_eval_count": stats.num_prompt,
            "prompt_eval_duration": int(stats.prefill_seconds * _NANO),
            "eval_count": stats.num_generated,
            "eval_duration": int(stats.decode_seconds * _NANO),
            **self._measured(),
        }


class OllamaGenerateWriter(OllamaChatWriter):
    @staticmethod
    def said(text: str, more: Mapping[str, Any]) -> dict[str, Any]:
        return {"response": text, **more}


def _now(model: str) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC)
    return {"model": model, "created_at": now.isoformat(timespec="microseconds")}
