"""How to connect to the server, as text for a terminal and as a small page for a browser."""

from __future__ import annotations

import html as escaping
from collections.abc import Sequence

_QUESTION = "what does os.path.join do?"
_STYLE = (
    "body{font:16px/1.5 system-ui;max-width:46em;margin:3em auto;padding:0 1em}"
    "pre{background:#eee;color:#111;padding:1em;overflow:auto}"
)


def curl(base: str, *, has_key: bool) -> str:
    """A command that can be pasted as it is."""
    key = ' -H "Authorization: Bearer $MLXSPEC_API_KEY"' if has_key else ""
    body = f'{{"messages": [{{"role": "user", "content": "{_QUESTION}"}}]}}'
    return f"curl {base}/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"


def sdk(base: str, *, has_key: bool) -> str:
    """The line that makes a client of OpenAI's Python SDK."""
    key = 'os.environ["MLXSPEC_API_KEY"]' if has_key else '"none"'
    return f'client = openai.OpenAI(base_url="{base}", api_key={key})'


def html(base: str, names: Sequence[str], *, has_key: bool) -> str:
    """The page at /."""

    def block(text: str) -> str:
        return f"<pre>{escaping.escape(text)}</pre>"

    models = ", ".join(f"<code>{escaping.escape(n)}</code>" for n in names)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>mlxspec</title><style>{_STYLE}</style>"
        f"<h1>mlxspec</h1><p>An OpenAI-style server. Base URL: <code>{escaping.escape(base)}</code>. Models: {models}."
        f"{' A key is needed.' if has_key else ''}</p>"
        f"{block(curl(base, has_key=has_key))}{block(sdk(base, has_key=has_key))}"
        "<p><a href=openapi.json>openapi.json</a> describes every route; <a href=metrics>metrics</a>, <a href=health>health</a>.</p></html>"
    )
