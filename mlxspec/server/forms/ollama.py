"""Ollama's API: `/api/chat`, `/api/generate`, `/api/show`.

Sampling, drafting and the fields that all APIs share stand in `options`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from mlxspec.config import MAX_CONTEXT
from mlxspec.server.forms import base as t
from mlxspec.server.forms import shared
from mlxspec.server.forms.chat import ChatMessage
from mlxspec.server.forms.shared import Count

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
    refused = ChatMessage.refused
    harmless = ChatMessage.harmless


class OllamaFunction(t.Fields):
    name: t.ToolName
    description: t.Text | None = None
    parameters: t.Object | None = None


class OllamaTool(t.Fields):
    type: Literal["function"] | None = None
    function: OllamaFunction


class OllamaOptions(shared.Generation):
    stop: shared.Word | shared.Words | None = None
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
        **t.harmless("keep_alive", "--idle-unload of the server says how long a model stays"),
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
    "model": str, "created_at": str, "done": bool, "done_reason": Literal["stop", "length", "load"],
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
