"""The limits on the work that one client may cause, by a request and by a connection.

The bounds are published at /limits, set with `mlxspec serve --limit NAME=VALUE`, and described in docs/server.md.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from mlxspec.option import check_options, option

_BYTES, _COUNT, _SECONDS = 1 << 34, 1 << 30, 86_400


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """The limits of the server in bytes, counts and seconds, each set by --limit. Raises ConfigError for a value out of range."""

    # fmt: off
    max_body: int = option("bytes", 32 << 20, "a request's body; above it the answer is a 413", 1, _BYTES, flag="")
    # Python's own parser and our walks recurse
    max_depth: int = option(int, 100, "levels of a body's JSON", 1, 200, flag="")
    max_values: int = option(int, 400_000, "values in a body: members of objects and items of lists", 1, _COUNT, flag="")
    max_answers: int = option(int, 128, "answers of one request: prompts times n", 1, _COUNT, flag="")
    max_grammar: int = option(
        "bytes", 256 << 10, "a schema, a regular expression or a Lark grammar, also one that is made from tools", 1, _BYTES, flag=""
    )
    max_bad_words: int = option("bytes", 32 << 10, "all bad words of a request", 1, _BYTES, flag="")
    max_requests: int = option(
        int, 256, "open requests with a body, of which one client may have half; above it a 503", 1, _COUNT, flag=""
    )
    max_bodies: int = option("bytes", 64 << 20, "the bodies of open requests together; above it a 503", 1, _BYTES, flag="")
    max_connections: int = option(
        int, 512, "open connections; a new one replaces an idle one of the address with most, one that has sent a valid key last", 1,
        _COUNT, flag="",
    )
    header_seconds: float = option(float, 10.0, "until a connection's next request has sent its headers", 0.1, _SECONDS, flag="")
    body_seconds: float = option(float, 30.0, "until it has sent its body", 0.1, _SECONDS, flag="")
    send_seconds: float = option(float, 60.0, "how long a client may read nothing of an answer", 0.1, _SECONDS, flag="")
    prepare_seconds: float = option(float, 60.0, "template, tokenizing, images and grammar of a request together", 0.1, _SECONDS, flag="")
    max_images: int = option(int, 16, "images of one request", 1, _COUNT, flag="")
    max_image_pixels: int = option(
        int, 4 << 20, "pixels of an image after it has been resized for the model, whatever the request asks for", 1, _COUNT, flag=""
    )
    # fmt: on

    def __post_init__(self) -> None:
        check_options(self)

    def published(self) -> dict[str, int | float]:
        """Return the value of each limit by its name, as GET /limits sends them."""
        return asdict(self)
