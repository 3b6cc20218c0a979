"""/openapi.json: every route, with the forms of its requests and of its answers."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from mlxspec import __version__
from mlxspec.server.forms import chat, completions, messages, models, ollama, responses, shared

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
_TEXT = {"schema": {"type": "string"}}
_EVENTS, _LINES = "text/event-stream", "application/x-ndjson"

# path, operation, summary, request, answer, form of a stream. Routes of Ollama's have no twin under /v1.
_POSTS: tuple[tuple[str, str, str, Any, Any, str], ...] = (
    ("/chat/completions", "chat", "Answer a conversation.", chat.ChatCompletionRequest, chat.ChatAnswer, _EVENTS),
    ("/completions", "complete", "Continue a text.", completions.CompletionRequest, completions.CompletionAnswer, _EVENTS),
    ("/tokenize", "tokenize", "Token ids of a text or a conversation.", completions.TokenizeRequest, completions.TokenizeAnswer, ""),
    ("/detokenize", "detokenize", "Text of token ids.", completions.DetokenizeRequest, models.ContentAnswer, ""),
    ("/apply-template", "template", "The prompt that a conversation becomes.", chat.ChatCompletionRequest, models.PromptAnswer, ""),
    ("/chat/completions/input_tokens", "count", "How many tokens that prompt has.", chat.ChatCompletionRequest, shared.Counted, ""),
    ("/completion", "native", "Continue a text, in llama.cpp's form.", completions.NativeRequest, completions.NativeAnswer, _EVENTS),
    ("/messages", "message", "Answer a conversation, in Anthropic's form.", messages.MessagesRequest, messages.MessagesAnswer, _EVENTS),
    ("/messages/count_tokens", "count_message", "How many tokens its prompt has.", messages.CountTokensRequest, messages.CountAnswer, ""),
    ("/responses", "respond", "Answer a conversation, in the form of OpenAI's Responses.", responses.ResponsesRequest,
     responses.ResponsesAnswer, _EVENTS),
    ("/responses/input_tokens", "count_response", "How many tokens its prompt has.", responses.ResponsesRequest, shared.Counted, ""),
    ("/api/chat", "ollama_chat", "Answer a conversation, in Ollama's form.", ollama.OllamaChatRequest, ollama.OllamaChatAnswer, _LINES),
    ("/api/generate", "ollama_generate", "Answer a prompt.", ollama.OllamaGenerateRequest, ollama.OllamaGenerateAnswer, _LINES),
    ("/api/show", "ollama_show", "What a model can do.", ollama.OllamaShowRequest, ollama.OllamaShown, ""),
)  # fmt: skip
# path, operation, summary, answer (or its media type), statuses that are errors beside 401 and 403
_GETS: tuple[tuple[str, str, str, Any, tuple[str, ...]], ...] = (
    ("/", "page", "A page to chat on.", "text/html", ()),
    ("/page/{name}", "page_file", "A file of the page.", ("text/*", "image/svg+xml"), ("404",)),
    ("/responses/{name}", "response", "A stored response.", responses.ResponsesAnswer, ("404",)),
    ("/models", "models", "The models of this server.", models.ModelsAnswer, ()),
    ("/models/{name}", "model", "One of them.", models.ModelAnswer, ("404",)),
    ("/health", "health", "Whether it answers.", models.HealthAnswer, ("503",)),
    ("/metrics", "metrics", "Counters for Prometheus.", "text/plain", ()),
    ("/openapi.json", "openapi", "This description.", {"type": "object"}, ()),
    ("/api/tags", "ollama_tags", "The models of this server.", ollama.OllamaTags, ()),
    ("/api/version", "ollama_version", "Its version.", ollama.OllamaVersion, ()),
)
_DELETE = (
    "/responses/{name}",
    "delete_response",
    "Drop a stored response.",
    responses.DeletedResponse,
    ("404",),
)
_ERRORS = (shared.Error, messages.AnthropicError, ollama.OllamaError)
_NAMED = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]


class _Schemas(GenerateJsonSchema):
    """Without titles, which only repeat names, and without defaults, which are all null."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])


@cache
def document() -> dict[str, Any]:
    """The whole description, OpenAPI 3.1. The first call takes long, and need not be made in the event loop."""
    forms = {form for post in _POSTS for form in post[3:5]} | {
        get[3] for get in (*_GETS, _DELETE) if isinstance(get[3], type)
    }
    ordered = sorted(forms | {*_ERRORS}, key=lambda form: form.__name__)
    _, found = models_json_schema(
        [(form, "validation") for form in ordered],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Schemas,
    )
    paths: dict[str, Any] = {}
    for path, name, what, request, answer, stream in _POSTS:
        content = _json(answer)
        if answer is completions.NativeAnswer:
            content = _json({"anyOf": [_ref(answer), {"type": "array", "items": _ref(answer)}]})
        post = _operation(path, name, what, content | ({stream: _TEXT} if stream else {}), tuple(_STATUSES))
        post["requestBody"] = {"required": True, "content": _json(request)}
        paths[path] = {"post": post}
    for method, gets in (("get", _GETS), ("delete", (_DELETE,))):
        for path, name, what, answer, statuses in gets:
            kinds = (answer,) if isinstance(answer, str) else answer
            content = dict.fromkeys(kinds, _TEXT) if isinstance(kinds, tuple) else _json(answer)
            item = paths.setdefault(path, {"parameters": _NAMED} if "{" in path else {})
            item[method] = _operation(path, name, what, content, ("401", "403", *statuses))
    own = {path: item for path, item in paths.items() if path.startswith(("/api/", "/page/")) or path == "/"}
    both = {path: item for path, item in paths.items() if path not in own}
    about = (
        "Chats in the forms of OpenAI, Anthropic and Ollama; routes of the first two with and without /v1."
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlxspec", "version": __version__, "description": about},
        "paths": own | {f"/v1{p}": i for p, i in both.items()} | {p: _at_root(i) for p, i in both.items()},
        "components": {
            "schemas": found["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _ref(form: Any) -> dict[str, Any]:
    return form if isinstance(form, dict) else {"$ref": f"#/components/schemas/{form.__name__}"}


def _json(form: Any) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(form)}}


def _operation(
    path: str, name: str, what: str, content: dict[str, Any], statuses: tuple[str, ...]
) -> dict[str, Any]:
    error = shared.Error
    if path.startswith("/api/"):
        error = ollama.OllamaError
    elif path.startswith("/messages"):
        error = messages.AnthropicError
    wrong = {status: {"description": _STATUSES[status], "content": _json(error)} for status in statuses}
    right = {"200": {"description": "The answer.", "content": content}}
    return {"operationId": name, "summary": what, "responses": right | wrong}


def _at_root(item: dict[str, Any]) -> dict[str, Any]:
    """The operations of a path once more, for its twin without /v1: operations have names of their own."""
    return {
        method: part if method == "parameters" else {**part, "operationId": part["operationId"] + "_root"}
        for method, part in item.items()
    }
