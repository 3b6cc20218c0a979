"""The form of an error in each API, by the path that a request came to.

OpenAI      {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
Anthropic   {"type": "error", "error": {"type": ..., "message": ..., "param": ..., "code": ...}}     /messages and below
Ollama      {"error": ...}                                                                           below /api
"""

from __future__ import annotations

from typing import Any

from mlxspec.server.errors import ApiError

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """The object to send for an error of a request to `path`."""
    inner = path.removeprefix("/v1")
    if inner == "/messages" or inner.startswith("/messages/"):
        return anthropic_error(error)
    return ollama_error(error) if path.startswith("/api/") else error.body


def anthropic_error(error: ApiError) -> dict[str, Any]:
    message = str(error)
    if error.code == "context_length_exceeded":
        # the words by which clients of this API know that a conversation must be shortened
        counts = f"{error.more['n_prompt_tokens']} tokens > {error.more['n_ctx']} maximum"
        message = f"prompt is too long: {counts}. {message}"
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    return {
        "type": "error",
        "error": {
            "type": kind,
            "message": message,
            "param": error.param,
            "code": error.code,
            **error.more,
        },
    }


def ollama_error(error: ApiError) -> dict[str, Any]:
    return {"error": str(error)}
