"""/openapi.json: every route, with the schemas of its requests and of its answers."""

from __future__ import annotations

from typing import Any

from mlxspec import __version__
from mlxspec.server import schemas
from mlxspec.server.messages_fields import COUNT_TOKENS, MESSAGES
from mlxspec.server.ollama_fields import OLLAMA_CHAT, OLLAMA_GENERATE, OLLAMA_SHOW, OPTIONS
from mlxspec.server.responses_fields import RESPONSES
from mlxspec.server.schemas import Schema

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_NULLABLE_TEXT: Schema = {"type": ["string", "null"]}


def _object(properties: dict[str, Schema], *optional: str) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_ENTRY = {
    "token": _TEXT,
    "logprob": _NUMBER,
    "bytes": _list({"type": "integer", "minimum": 0, "maximum": 255}),
}
_LOGPROBS = _object(
    {
        "content": _list(_object({**_ENTRY, "top_logprobs": _list(_object(_ENTRY))})),
        "refusal": {"type": "null"},
    }
)
_CALLS = _list(
    _object(
        {"id": _TEXT, "type": {"const": "function"}, "function": _object({"name": _TEXT, "arguments": _TEXT})}
    )
)
_MESSAGE = _object(
    {
        "role": {"const": "assistant"},
        "content": _NULLABLE_TEXT,
        "refusal": {"type": "null"},
        "reasoning_content": _TEXT,
        "reasoning": _TEXT,
        "tool_calls": _CALLS,
    },
    "reasoning_content",
    "reasoning",
    "tool_calls",
)
_REASON: Schema = {"type": "string", "enum": ["stop", "length", "tool_calls"]}
_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
    }
)
_TIMED = (
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
)
_TIMINGS = _object(
    {
        **dict.fromkeys(("cache_n", "prompt_n", "predicted_n"), _COUNT),
        **dict.fromkeys(_TIMED, _NUMBER),
        "draft_n": _COUNT,
        "draft_n_accepted": _COUNT,
    },
    "draft_n",
    "draft_n_accepted",
)
_DRAFTING = _object(
    {
        "drafters": {
            "type": "object",
            "additionalProperties": _object({"drafted": _COUNT, "accepted": _COUNT}),
        },
        "rounds": _COUNT,
        "tokens_per_round": _NUMBER,
        "seeds": _list({"type": "integer"}),
        "notices": _list(_TEXT),
    }
)
_EXTRAS = {"usage": _USAGE, "timings": _TIMINGS, "mlxspec": _DRAFTING}
_HEAD = {"id": _TEXT, "created": {"type": "integer"}, "model": _TEXT, "system_fingerprint": _TEXT}
_CHAT = _object(
    {
        **_HEAD,
        "object": {"const": "chat.completion"},
        "choices": _list(
            _object(
                {
                    "index": _COUNT,
                    "message": _MESSAGE,
                    "logprobs": {"anyOf": [_LOGPROBS, {"type": "null"}]},
                    "finish_reason": _REASON,
                }
            )
        ),
        **_EXTRAS,
    }
)
_OLD_LOGPROBS = _object(
    {
        "tokens": _list(_TEXT),
        "token_logprobs": _list(_NUMBER),
        "top_logprobs": _list({"type": "object", "additionalProperties": _NUMBER}),
        "text_offset": _list(_COUNT),
    }
)
_COMPLETION = _object(
    {
        **_HEAD,
        "object": {"const": "text_completion"},
        "choices": _list(
            _object(
                {
                    "index": _COUNT,
                    "text": _TEXT,
                    "logprobs": {"anyOf": [_OLD_LOGPROBS, {"type": "null"}]},
                    "finish_reason": {"type": "string", "enum": ["stop", "length"]},
                }
            )
        ),
        **_EXTRAS,
    }
)
_NATIVE = _object(
    {
        "index": _COUNT,
        "content": _TEXT,
        "tokens": _list(_COUNT),
        "stop": {"type": "boolean"},
        "model": _TEXT,
        "tokens_predicted": _COUNT,
        "tokens_evaluated": _COUNT,
        "tokens_cached": _COUNT,
        "generation_settings": {"type": "object"},
        "prompt": _TEXT,
        "has_new_line": {"type": "boolean"},
        "truncated": {"type": "boolean"},
        "stop_type": {"type": "string", "enum": ["eos", "word", "limit"]},
        "timings": _TIMINGS,
        "mlxspec": _DRAFTING,
    }
)
_MODEL = _object(
    {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": _TEXT,
        "type": {"const": "model"},
        "display_name": _TEXT,
        "created_at": _TEXT,
        "architecture": _object({"input_modalities": _list(_TEXT), "output_modalities": _list(_TEXT)}),
        "capabilities": _list(_TEXT),
        "context_length": _COUNT,
        "max_model_len": _COUNT,
        "meta": {"type": "object", "properties": {"loaded": {"type": "boolean"}}, "required": ["loaded"]},
    },
    "context_length",
    "max_model_len",
)
_LISTED = _object(
    {
        "object": {"const": "list"},
        "data": _list(_MODEL),
        "has_more": {"type": "boolean"},
        "first_id": _TEXT,
        "last_id": _TEXT,
    }
)
_TOKENIZED = _object(
    {
        "tokens": _list({"anyOf": [_COUNT, _object({"id": _COUNT, "piece": _NULLABLE_TEXT})]}),
        "count": _COUNT,
    }
)
_ERROR = _object(
    {
        "error": _object(
            {"message": _TEXT, "type": _TEXT, "param": _NULLABLE_TEXT, "code": {"type": ["string", "null"]}}
        )
    }
)

_MESSAGE_USAGE = _object(
    dict.fromkeys(
        (
            "input_tokens",
            "cache_creation_input_tokens",
            "cache_read_input_tokens",
            "output_tokens",
        ),
        _COUNT,
    )
)
_ANTHROPIC_MESSAGE = _object(
    {
        "id": _TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": _TEXT,
        "content": _list(
            {
                "anyOf": [
                    _object({"type": {"const": "text"}, "text": _TEXT}),
                    _object({"type": {"const": "thinking"}, "thinking": _TEXT, "signature": _TEXT}),
                    _object(
                        {
                            "type": {"const": "tool_use"},
                            "id": _TEXT,
                            "name": _TEXT,
                            "input": {"type": "object"},
                        }
                    ),
                ]
            }
        ),
        "stop_reason": {
            "type": "string",
            "enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"],
        },
        "stop_sequence": _NULLABLE_TEXT,
        "stop_details": {"type": "null"},
        "usage": _MESSAGE_USAGE,
        "timings": _TIMINGS,
        "mlxspec": _DRAFTING,
    }
)
_ANTHROPIC_ERROR = _object(
    {
        "type": {"const": "error"},
        "error": _object({"type": _TEXT, "message": _TEXT, "param": _NULLABLE_TEXT, "code": _NULLABLE_TEXT}),
    }
)

_OLLAMA_LAST = {
    "model": _TEXT,
    "created_at": _TEXT,
    "done": {"type": "boolean"},
    "done_reason": {"type": "string", "enum": ["stop", "length", "load"]},
    **dict.fromkeys(
        (
            "total_duration",
            "load_duration",
            "prompt_eval_count",
            "prompt_eval_duration",
            "eval_count",
            "eval_duration",
        ),
        _COUNT,
    ),
    "timings": _TIMINGS,
    "mlxspec": _DRAFTING,
}
_OLLAMA_MEASURED = tuple(n for n in _OLLAMA_LAST if n not in ("model", "created_at", "done", "done_reason"))
_OLLAMA_CALLS = _list(
    _object({"id": _TEXT, "function": _object({"name": _TEXT, "arguments": {"type": "object"}})})
)
_OLLAMA_MESSAGE = _object(
    {
        "role": {"const": "assistant"},
        "content": _TEXT,
        "thinking": _TEXT,
        "tool_calls": _OLLAMA_CALLS,
    },
    "thinking",
    "tool_calls",
)
_OLLAMA_CHAT = _object({**_OLLAMA_LAST, "message": _OLLAMA_MESSAGE}, *_OLLAMA_MEASURED)
_OLLAMA_TEXT = _object({**_OLLAMA_LAST, "response": _TEXT, "thinking": _TEXT}, "thinking", *_OLLAMA_MEASURED)
_OLLAMA_NAMED = {
    "name": _TEXT,
    "model": _TEXT,
    "modified_at": _TEXT,
    "size": _COUNT,
    "digest": _TEXT,
    "details": {"type": "object"},
}
_OLLAMA_SHOWN = _object(
    {
        **_OLLAMA_NAMED,
        "capabilities": _list(_TEXT),
        "model_info": {"type": "object"},
        **dict.fromkeys(("modelfile", "parameters", "template"), _TEXT),
    }
)
_OLLAMA_ERROR = _object({"error": _TEXT})
_STATUS: Schema = {"type": "string", "enum": ["completed", "incomplete"]}
_STATED = {"id": _TEXT, "status": _STATUS}
_PART = {"text": _TEXT, "annotations": _list({"type": "object"}), "logprobs": _list({"type": "object"})}
_RESPONSE = _object(
    {
        "id": _TEXT,
        "object": {"const": "response"},
        "created_at": _COUNT,
        "completed_at": {"type": ["integer", "null"]},
        "model": _TEXT,
        "status": _STATUS,
        "error": {"type": "null"},
        "incomplete_details": {"type": ["object", "null"], "properties": {"reason": _TEXT}},
        "output": _list(
            {
                "anyOf": [
                    _object(
                        {
                            **_STATED,
                            "type": {"const": "message"},
                            "role": {"const": "assistant"},
                            "content": _list(_object({"type": {"const": "output_text"}, **_PART})),
                        }
                    ),
                    _object(
                        {
                            **_STATED,
                            "type": {"const": "reasoning"},
                            "summary": _list({"type": "object"}),
                            "content": _list(_object({"type": {"const": "reasoning_text"}, "text": _TEXT})),
                            "encrypted_content": _TEXT,
                        },
                        "encrypted_content",
                    ),
                    _object(
                        {
                            **_STATED,
                            "type": {"const": "function_call"},
                            "call_id": _TEXT,
                            "name": _TEXT,
                            "arguments": _TEXT,
                        }
                    ),
                    _object(
                        {
                            **_STATED,
                            "type": {"const": "custom_tool_call"},
                            "call_id": _TEXT,
                            "name": _TEXT,
                            "input": _TEXT,
                        }
                    ),
                ]
            }
        ),
        "usage": _object(
            {
                "input_tokens": _COUNT,
                "input_tokens_details": _object({"cached_tokens": _COUNT, "cache_write_tokens": _COUNT}),
                "output_tokens": _COUNT,
                "output_tokens_details": _object({"reasoning_tokens": _COUNT}),
                "total_tokens": _COUNT,
            }
        ),
        "background": {"const": False},
        "instructions": _NULLABLE_TEXT,
        "max_output_tokens": {"type": ["integer", "null"]},
        "metadata": {"type": "object"},
        "parallel_tool_calls": {"type": "boolean"},
        "previous_response_id": _NULLABLE_TEXT,
        "reasoning": {"type": "object"},
        "store": {"type": "boolean"},
        "temperature": _NUMBER,
        "text": {"type": "object"},
        "tool_choice": {"type": ["string", "object"]},
        "tools": _list({"type": "object"}),
        "top_p": _NUMBER,
        "truncation": {"const": "disabled"},
        "timings": _TIMINGS,
        "mlxspec": _DRAFTING,
    }
)
_DELETED = _object({"id": _TEXT, "object": {"const": "response"}, "deleted": {"type": "boolean"}})

_STATUSES = {
    "400": "The request cannot be honoured; the sentence says why.",
    "401": "The key is missing or wrong.",
    "403": "The request came from a page or under a name that is not allowed.",
    "404": "There is no such model or response.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "500": "The answer failed.",
    "503": "Busy, loading or stopping: try again after Retry-After seconds.",
}


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _answers(content: dict[str, Any], statuses: tuple[str, ...], error: str = "Error") -> dict[str, Any]:
    wrong = {
        s: {"description": _STATUSES[s], "content": _json({"$ref": f"#/components/schemas/{error}"})}
        for s in statuses
    }
    return {"200": {"description": "The answer.", "content": content}, **wrong}


def _post(
    name: str, what: str, request: str, content: dict[str, Any], error: str = "Error"
) -> dict[str, Any]:
    """error: the schema of its errors."""
    body = {"required": True, "content": _json({"$ref": f"#/components/schemas/{request}"})}
    return {
        "post": {
            "operationId": name,
            "summary": what,
            "requestBody": body,
            "responses": _answers(content, tuple(_STATUSES), error),
        }
    }


def _get(name: str, what: str, content: dict[str, Any], *more: str, error: str = "Error") -> dict[str, Any]:
    answers = _answers(content, ("401", "403", *more), error)
    return {"get": {"operationId": name, "summary": what, "responses": answers}}


def _with_options(schema: Schema) -> Schema:
    """A schema of Ollama's with what its `options` may be."""
    options = {**OPTIONS, "type": [OPTIONS["type"], "null"]}
    return {**schema, "properties": {**schema["properties"], "options": options}}


def document() -> dict[str, Any]:
    """The whole description, OpenAPI 3.1."""
    events = {"text/event-stream": {"schema": _TEXT}}
    text = {"schema": _TEXT}
    counted = _json(_object({"object": _TEXT, "input_tokens": _COUNT}))
    native = _json({"anyOf": [_NATIVE, _list(_NATIVE)]})
    response = {**_json(_RESPONSE), **events}
    named = {
        "parameters": [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    }
    delete = _get("delete_response", "Drop a stored response.", _json(_DELETED), "404")["get"]
    message = {**_json(_ANTHROPIC_MESSAGE), **events}
    tokens = _json(_object({"input_tokens": _COUNT}))
    parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    paths = {
        "/chat/completions": _post("chat", "Answer a conversation.", "ChatRequest", {**_json(_CHAT), **events}),
        "/completions": _post("complete", "Continue a text.", "CompletionRequest", {**_json(_COMPLETION), **events}),
        "/tokenize": _post("tokenize", "Token ids of a text or a conversation.", "TokenizeRequest", _json(_TOKENIZED)),
        "/detokenize": _post("detokenize", "Text of token ids.", "DetokenizeRequest", _json(_object({"content": _TEXT}))),
        "/apply-template": _post("template", "The prompt that a conversation becomes.", "ChatRequest", _json(_object({"prompt": _TEXT}))),
        "/chat/completions/input_tokens": _post("count", "How many tokens that prompt has.", "ChatRequest", counted),
        "/completion": _post("native", "Continue a text, in llama.cpp's form.", "NativeRequest", {**native, **events}),
        "/messages": _post("message", "Answer a conversation, in Anthropic's form.", "MessagesRequest", message, "AnthropicError"),
        "/messages/count_tokens": _post("count_message", "How many tokens its prompt has.", "CountTokensRequest", tokens, "AnthropicError"),
        "/responses": _post("respond", "Answer a conversation, in the form of OpenAI's Responses.", "ResponsesRequest", response),
        "/responses/input_tokens": _post("count_response", "How many tokens its prompt has.", "ResponsesRequest", counted),
        "/responses/{name}": _get("response", "A stored response.", _json(_RESPONSE), "404") | {"delete": delete} | named,
        "/models": _get("models", "The models of this server.", _json(_LISTED)),
        "/models/{name}": _get("model", "One of them.", _json(_MODEL), "404") | {"parameters": [parameter]},
        "/health": _get("health", "Whether it answers.", _json(_object({"status": _TEXT, "model": _TEXT})), "503"),
        "/metrics": _get("metrics", "Counters for Prometheus.", {"text/plain": text}),
        "/openapi.json": _get("openapi", "This description.", _json({"type": "object"})),
    }  # fmt: skip
    page = _get("page_file", "A file of the page.", {"text/*": text, "image/svg+xml": text}, "404")
    lines = {"application/x-ndjson": {"schema": _TEXT}}
    chat, generated = ({**_json(s), **lines} for s in (_OLLAMA_CHAT, _OLLAMA_TEXT))
    tags = _json(_object({"models": _list(_object(_OLLAMA_NAMED))}))
    wrong = "OllamaError"
    both: dict[str, Any] = {
        "/": _get("page", "A page to chat on.", {"text/html": text}),
        "/page/{name}": page | {"parameters": [parameter]},
        "/api/chat": _post("ollama_chat", "Answer a conversation, in Ollama's form.", "OllamaChatRequest", chat, wrong),
        "/api/generate": _post("ollama_generate", "Answer a prompt.", "OllamaGenerateRequest", generated, wrong),
        "/api/show": _post("ollama_show", "What a model can do.", "OllamaShowRequest", _json(_OLLAMA_SHOWN), wrong),
        "/api/tags": _get("ollama_tags", "The models of this server.", tags, error=wrong),
        "/api/version": _get("ollama_version", "Its version.", _json(_object({"version": _TEXT})), error=wrong),
    }  # fmt: skip
    for prefix, suffix in (("/v1", ""), ("", "_root")):
        for path, item in paths.items():
            both[prefix + path] = {
                method: part
                if method == "parameters"
                else {**part, "operationId": part["operationId"] + suffix}
                for method, part in item.items()
            }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mlxspec",
            "version": __version__,
            "description": "Chats in the forms of OpenAI, Anthropic and Ollama; routes of the first two with and without /v1.",
        },
        "paths": both,
        "components": {
            "schemas": {
                "ChatRequest": schemas.CHAT,
                "CompletionRequest": schemas.COMPLETION,
                "NativeRequest": schemas.NATIVE,
                "TokenizeRequest": schemas.TOKENIZE,
                "DetokenizeRequest": schemas.DETOKENIZE,
                "MessagesRequest": MESSAGES,
                "CountTokensRequest": COUNT_TOKENS,
                "ResponsesRequest": RESPONSES,
                "OllamaChatRequest": _with_options(OLLAMA_CHAT),
                "OllamaGenerateRequest": _with_options(OLLAMA_GENERATE),
                "OllamaShowRequest": OLLAMA_SHOW,
                "OllamaError": _OLLAMA_ERROR,
                "Error": _ERROR,
                "AnthropicError": _ANTHROPIC_ERROR,
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }
