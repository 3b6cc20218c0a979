"""The page at /: its files, how they are sent, and how else to connect, as text for a terminal.

The page is static: it requests everything else from this server's routes. The policy below bounds what it may do: scripts, styles and
requests of its own origin, images of the user's own, nothing inline, nothing from elsewhere, no markup made from text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from mlxspec.server.errors import ApiError
from mlxspec.server.http.endpoint import Reply

INDEX = "index.html"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # kept, and asked for again by its tag
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_QUESTION = "what does os.path.join do?"


@dataclass(frozen=True, kw_only=True)
class PageFile:
    """A file of the server's page. kind: the value of Content-Type. tag: the value of ETag."""

    text: str
    kind: str
    tag: str


@cache
def files() -> dict[str, PageFile]:
    """Return the page's files by name, read from the installed package."""
    found = {}
    for path in (resources.files("mlxspec.server") / "web").iterdir():
        kind = _TYPES.get(path.name.rpartition(".")[2])
        if kind is not None:
            text = path.read_text(encoding="utf-8")
            tag = f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
            found[path.name] = PageFile(text=text, kind=f"{kind}; charset=utf-8", tag=tag)
    return found


async def send(request: Request, reply: Reply, name: str) -> None:
    """Answer with a file of the page, or with status 304 where the browser has the same version. Raises ApiError for an unknown name."""
    file = files().get(name)
    if file is None:
        raise ApiError(f"The page has no file {name[:100]!r}.", status=404, code="not_found")
    headers = {**HEADERS, "etag": file.tag}
    known = request.headers.get("if-none-match", "").split(",")
    if file.tag in (tag.strip().removeprefix("W/") for tag in known):
        await reply.send(Response(status_code=304, headers=headers))
    else:
        await reply.send(Response(file.text, headers=headers, media_type=file.kind))


def curl(base: str, *, has_key: bool) -> str:
    """Return a shell command that requests an answer from the server. base: its base URL; has_key: the server requires an API key, which
    the command reads from the environment."""
    key = ' -H "Authorization: Bearer $MLXSPEC_API_KEY"' if has_key else ""
    body = f'{{"messages": [{{"role": "user", "content": "{_QUESTION}"}}]}}'
    return f"curl {base}/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"


def sdk(base: str, *, has_key: bool) -> str:
    """Return the line of Python that makes a client of OpenAI's SDK. base: the base URL; has_key: the server requires an API key."""
    key = 'os.environ["MLXSPEC_API_KEY"]' if has_key else '"none"'
    return f'client = openai.OpenAI(base_url="{base}", api_key={key})'
