"""Errors in the form that OpenAI's clients read, and the table from our exceptions to HTTP statuses.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
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
    (errors.QueueFullError, 503, BUSY, "queue_full"),
    (errors.MemoryBudgetError, 503, BUSY, "out_of_memory_budget"),
    (errors.EngineStoppedError, 503, BUSY, "stopping"),
    (errors.CancelledError, 503, BUSY, "cancelled"),
    (errors.ModelError, 500, SERVER, "model_error"),
    (RecursionError, 400, INVALID, None),
)


class ApiError(MlxspecError):
    """An answer that is an error, with its status."""

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
    """A field of a request that cannot be honoured. param: where it stands, like `messages[0].role`."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def to_api_error(error: BaseException) -> ApiError:
    """Any exception as what a client is told. Of what we did not expect it is told no more than that."""
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
