"""Maps our exceptions to HTTP statuses, and writes errors in the form of the API to which a request's path belongs.

OpenAI      {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
Anthropic   {"type": "error", "error": {"type": ..., "message": ..., "param": ..., "code": ...}}     /messages and below
Ollama      {"error": ...}                                                                           below /api
"""

from __future__ import annotations

from typing import Any

from mlxspec import errors
from mlxspec.errors import ConfigError, ContextOverflowError, MlxspecError

RETRY_SECONDS = 2
INVALID, SERVER, BUSY = "invalid_request_error", "server_error", "overloaded_error"
AUTHENTICATION = "authentication_error"

# (exception, status, type, code), the first that fits. What is not in here is a bug: 500.
_TABLE: tuple[tuple[type[BaseException], int, str, str | None], ...] = (
    (errors.ContextOverflowError, 400, INVALID, "context_length_exceeded"),
    (errors.GrammarError, 400, INVALID, "invalid_grammar"),
    (errors.ImageError, 400, INVALID, "invalid_image"),
    (errors.ConfigError, 400, INVALID, None),
    (errors.HelperError, 400, INVALID, "overrun"),
    (errors.QueueFullError, 503, BUSY, "queue_full"),
    (errors.MemoryBudgetError, 503, BUSY, "out_of_memory_budget"),
    (errors.EngineStoppedError, 503, BUSY, "stopping"),
    (errors.CancelledError, 503, BUSY, "cancelled"),
    (errors.ModelError, 500, SERVER, "model_error"),
    (RecursionError, 400, INVALID, None),
)


class ApiError(MlxspecError):
    """An error that is sent to the client as the response. status: its HTTP status; kind, param, code: members of OpenAI's error object;
    more: further members."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        **more: Any,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code, self.more = status, kind, param, code, more

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
                **self.more,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(RETRY_SECONDS)} if self.status == 503 else {}


class BadField(ConfigError):
    """An error of a field of a request that cannot be honoured. param: the field's place in the body, like `messages[0].role`."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def to_api_error(error: BaseException) -> ApiError:
    """Return the error that a client receives for an exception. For an unexpected exception it has no details, which only the log has."""
    if isinstance(error, ApiError):
        return error
    for kind, status, name, code in _TABLE:
        if isinstance(error, kind):
            more: dict[str, Any] = {}
            if isinstance(error, ContextOverflowError):
                more = {"n_prompt_tokens": error.num_prompt, "n_ctx": error.limit}
            text = "This is nested too deeply." if kind is RecursionError else str(error)
            param = getattr(error, "param", None)
            return ApiError(text, status=status, kind=name, param=param, code=code, **more)
    return ApiError(
        "Something unexpected happened in the server; its log says more.",
        status=500,
        kind=SERVER,
        code="internal_error",
    )


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
    """Return the JSON object of an error in the form of the API that `path`, the request's path, belongs to."""
    inner = path.removeprefix("/v1")
    if inner == "/messages" or inner.startswith("/messages/"):
        return anthropic_error(error)
    return ollama_error(error) if is_ollamas(path) else error.body


def is_ollamas(path: str) -> bool:
    """Return whether errors of a path have Ollama's form. Paths of LM Studio's API are also below /api, but their errors have OpenAI's
    form."""
    return path.startswith("/api/") and not path.startswith(("/api/v0/", "/api/v1/"))


def anthropic_error(error: ApiError) -> dict[str, Any]:
    message = str(error)
    if error.code == "context_length_exceeded":
        # the words by which clients of this API know that a conversation must be shortened
        counts = f"{error.more['n_prompt_tokens']} tokens > {error.more['n_ctx']} maximum"
        message = f"prompt is too long: {counts}. {message}"
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": message, "param": error.param, "code": error.code, **error.more},
    }


def ollama_error(error: ApiError) -> dict[str, Any]:
    return {"error": str(error)}
