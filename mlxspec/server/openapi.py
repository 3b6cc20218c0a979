"""/openapi.json: every route, with the forms of its requests and of its answers."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from mlxspec import __version__
from mlxspec.server import messages_api, ollama_api
from mlxspec.server.errors import is_ollamas
from mlxspec.server.forms import shared
from mlxspec.server.routes import ROUTES, RouteForm

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
_ERRORS = (shared.Error, messages_api.AnthropicError, ollama_api.OllamaError)
_NAMED = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]


class _Schemas(GenerateJsonSchema):
    """A generator of JSON schemas without titles, which only repeat names, and without defaults, which are all null."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])


@cache
def document() -> dict[str, Any]:
    """Return the description of all routes, in OpenAPI 3.1. Make the first call outside of the event loop, since it takes long."""
    forms = {form for route in ROUTES for form in (route.form, route.answer) if isinstance(form, type)}
    ordered = sorted(forms | {*_ERRORS}, key=lambda form: form.__name__)
    _, found = models_json_schema(
        [(form, "validation") for form in ordered],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Schemas,
    )
    paths: dict[str, Any] = {}
    for route in ROUTES:
        for number, path in enumerate(route.paths):
            shown = path.replace(":path}", "}")
            item = paths.setdefault(shown, {"parameters": _NAMED} if "{" in path else {})
            # each twin has a name of its own
            name = route.name + ("", "_root", "_also", "_also_root")[number]
            item[route.method.lower()] = _operation(route, path, name)
    about = "Chats in the forms of OpenAI, Anthropic and Ollama; routes of the first two with and without /v1; models in that of LM Studio."
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlxspec", "version": __version__, "description": about},
        "paths": paths,
        "components": {
            "schemas": found["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _json(form: Any) -> dict[str, Any]:
    inner = "/properties/body" if getattr(form, "is_list", False) else ""
    schema = form if isinstance(form, dict) else {"$ref": f"#/components/schemas/{form.__name__}{inner}"}
    return {"application/json": {"schema": schema}}


def _operation(route: RouteForm, path: str, name: str) -> dict[str, Any]:
    error = shared.Error
    if is_ollamas(path):
        error = ollama_api.OllamaError
    elif route.path.startswith("/messages"):
        error = messages_api.AnthropicError
    content = dict.fromkeys(route.answer, _TEXT) if isinstance(route.answer, tuple) else _json(route.answer)
    if route.stream is not None:
        content[route.stream] = {}  # of events, whose data is an object as text, which no schema here says
    wrong = {
        status: {"description": _STATUSES[status], "content": _json(error)}
        for status in sorted({"401", "403", *route.statuses})
    }
    right = {"200": {"description": "The answer.", "content": content}}
    asked = {} if route.form is None else {"requestBody": {"required": True, "content": _json(route.form)}}
    return {"operationId": name, "summary": route.summary, "responses": right | wrong, **asked}
