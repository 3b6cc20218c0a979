"""Ollama's API, `/api/chat`, `/api/generate` and `/api/show`: the form of its requests and answers, how a request is read, and how an
answer is written, one object a line or one in all. Sampling, drafting and the fields that all APIs share stand in `options`."""

from __future__ import annotations

import datetime
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from mlxspec.config import MAX_CONTEXT
from mlxspec.server.answer_format import ANY_OBJECT, AnswerFormat, answer_format
from mlxspec.server.answer_writer import LINES, Extras, SingleWriter
from mlxspec.server.blocks import Answer, Block, BlockEnd, BlockEvent, BlockMore
from mlxspec.server.chat_api import ChatMessage
from mlxspec.server.chat_request import ChatRequest, check_same, goes_on_with, template_variables
from mlxspec.server.errors import ApiError, BadField, ollama_error
from mlxspec.server.forms import base as t
from mlxspec.server.forms import shared
from mlxspec.server.forms.shared import Count
from mlxspec.server.job_run import End, Progress
from mlxspec.server.messages import normalize
from mlxspec.server.request_parsing import Job
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


def ollama_name(body: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The model that is asked for: Ollama's clients add a tag to names that have none."""
    asked = body.get("model")
    return asked.removesuffix(":latest") if asked is not None and asked not in names else asked


def ollama_model(name: str, created: int) -> dict[str, Any]:
    """A model as Ollama lists it. What is not known of it is empty; the digest is that of its name."""
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


def ollama_chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """Of a checked body of /api/chat with messages. Raises BadField, GrammarError."""
    messages = _conversation(body["messages"])
    return _request(body, messages, tools=body.get("tools") or ())


def ollama_prompt_request(body: Mapping[str, Any]) -> ChatRequest:
    """Of a checked body of /api/generate with a prompt that is not raw. Raises BadField, GrammarError."""
    system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    return _request(body, [*system, {"role": "user", "content": body["prompt"]}])


def raw_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """A checked body of /api/generate whose prompt is raw, or has a suffix, as one of /v1/completions. Raises BadField."""
    kind, more = ("suffix", ("raw", "images")) if body.get("suffix") else ("raw", ())
    for name in ("system", "think", *more):
        if body.get(name):
            raise BadField(name, f"{name} and {kind} exclude each other: such a prompt has no template.")
    wanted = _format(body)
    formats: dict[str, Any] = {} if wanted is None else {str(wanted.kind): wanted.value}
    return {**options_of(body), **formats, "prompt": body.get("prompt") or "", "suffix": body.get("suffix")}


def options_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a checked body, under the names of all APIs."""
    options = dict(body.get("options") or {})
    num = options.pop("num_predict", None)
    return {**options, "max_tokens": {0: None, -2: -1}.get(num, num)}


def unloads(body: Mapping[str, Any]) -> bool:
    """Whether the model is to leave memory behind a request: a `keep_alive` of no time."""
    given = body.get("keep_alive")
    text = given.rstrip("hmnsu") if isinstance(given, str) else str(given)
    return text in ("0", "0.0")


def context_notice(body: Mapping[str, Any], max_context: int) -> tuple[str, ...]:
    """Return the notice on a request for another context than there is."""
    asked = (body.get("options") or {}).get("num_ctx") or max_context
    if asked == max_context:
        return ()
    if asked < max_context:
        return (f"options.num_ctx is {asked} and was ignored: the context has {max_context} tokens",)
    return (f"options.num_ctx is {asked}, and this model's context ends at {max_context} tokens",)


def _request(
    body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> ChatRequest:
    return ChatRequest(
        messages=messages,
        tools=[{**tool, "type": "function"} for tool in tools],
        goes_on=goes_on_with(messages, f"messages[{len(body.get('messages') or messages) - 1}]"),
        template=_template(body),
        wanted=_format(body),
        options=options_of(body),
    )


def _conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """In this API calls have no ids, and a result names its tool. Raises BadField."""
    named = []
    for message in messages:
        calls = [
            {**c, "function": {"arguments": {}, **_without_null(c["function"])}}
            for c in message.get("tool_calls") or ()
        ]
        out = {**message, "tool_calls": calls or None, "reasoning_content": message.get("thinking")}
        if message["role"] == "tool":
            out["name"] = message.get("tool_name")
        named.append(out)
    return normalize(named)


def _without_null(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: member for name, member in value.items() if member is not None}


def _template(body: Mapping[str, Any]) -> dict[str, Any]:
    found = template_variables(body)
    think = body.get("think")
    if think is None:
        return found
    found["enable_thinking"] = think is not False
    check_same(body, "enable_thinking", found["enable_thinking"], "think")
    return found if isinstance(think, bool) else {**found, "reasoning_effort": think}


def _format(body: Mapping[str, Any]) -> AnswerFormat | None:
    """Raises BadField."""
    options, wanted = body.get("options") or {}, body.get("format")
    if wanted is None or wanted == "":
        return answer_format(options, under="options.")
    own = AnswerFormat(field="format", kind="json_schema", value=ANY_OBJECT if wanted == "json" else wanted)
    return answer_format(options, own, "options.")


class OllamaChatWriter(SingleWriter):
    """One answer. Its stream is objects with pieces of text or thinking or a whole call, and a last one with `done` true and what it
    took. Extensions: `timings` and `mlxspec` in the last object, `prompt_progress` in one of its own."""

    wire = LINES

    def __init__(self, model: str, body: Mapping[str, Any], job: Job) -> None:
        super().__init__(model, body, job)
        self._wanted = Extras.of(options_of(body))
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
        """The members of an object that hold what the model has said. more: beside its text."""
        return {"message": {"role": "assistant", "content": text, **more}}

    @classmethod
    def loaded(cls, model: str, *, is_unloaded: bool = False) -> dict[str, Any]:
        """The answer to a request that asks for nothing but the model."""
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
