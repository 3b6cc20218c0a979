"""The limits on the work that one client may cause, by a request and by a connection.

The bounds are published at /limits, set with `mlxspec serve --limit NAME=VALUE`, and described in docs/server.md.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from mlxspec.errors import ConfigError
from mlxspec.option import check_number

_MOST = {"bytes": 1 << 34, "count": 1 << 30, "seconds": 86_400.0}


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Bytes, counts and seconds. Raises ConfigError for values that make no sense.

    max_body: bytes of a request's body. max_depth, max_values: levels of its JSON, and values in it (members of objects and items of
    lists). max_answers: answers of one request, prompts times n. max_grammar: bytes of a schema, a regular expression or a Lark grammar,
    also of one made from tools. max_bad_words: bytes of all bad words together. max_requests: requests with a body that are open at the
    same time; one client has at most half of them. max_bodies: bytes of their bodies together. max_connections: open connections.
    header_seconds: until a connection's next request has sent its headers. body_seconds: until it has sent its body. send_seconds: how
    long a client may read nothing of an answer. prepare_seconds: until the engine gets the request. max_images: images of one request.
    max_image_pixels: pixels of an image after it has been resized for the model, whatever the request asks for.
    """

    max_body: int = 32 << 20
    max_depth: int = 100
    max_values: int = 400_000
    max_answers: int = 128
    max_grammar: int = 256 << 10
    max_bad_words: int = 32 << 10
    max_requests: int = 256
    max_bodies: int = 64 << 20
    max_connections: int = 512
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    send_seconds: float = 60.0
    prepare_seconds: float = 60.0
    max_images: int = 16
    max_image_pixels: int = 4 << 20

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            seconds = kind == "seconds"
            check_number(name, getattr(self, name), 0.1 if seconds else 1, _MOST[kind], integer=not seconds)
        if self.max_depth > 200:  # Python's own parser and our walks recurse
            raise ConfigError(f"max_depth must be at most 200, not {self.max_depth}.")

    def published(self) -> dict[str, int | float]:
        """Name -> number."""
        return asdict(self)


KINDS = {
    f.name: "seconds"
    if f.name.endswith("_seconds")
    else "bytes"
    if f.name in ("max_body", "max_bodies", "max_grammar", "max_bad_words")
    else "count"
    for f in fields(ServerLimits)
}
