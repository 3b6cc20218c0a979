"""Runs a chat template. A helper process loads this file by itself (platform/helper.py) and bounds the time and memory that it takes.

Jinja's sandbox keeps a template away from Python's internals, and so from files and the network. The dialect is that of transformers.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_LONGEST_REASON = 500  # characters


class GenerationTag(Extension):
    """A Jinja extension for `{% generation %}...{% endgeneration %}`, which marks an answer's text for training. The tag renders as its
    content. As in transformers, variables that are set inside are not visible outside."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("text_of"), [], [], body).set_lineno(line)

    def text_of(self, caller: Callable[[], str]) -> str:
        return caller()


class Refusal(TemplateError):
    """An error that a template raises about its messages (`raise_exception`)."""


class PublicNamespace(Namespace):
    """A Jinja namespace that refuses members whose names begin with an underscore, because those could replace Python's own."""

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def run(ask: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """Compile a chat template, and render it where values are given. ask: `most`, the most characters to render. body: JSON with the
    template's `source`, and optionally the `values` of its variables. Returns {"fault": reason} where the template does not compile,
    {"refused": reason} where it does not render, with `is_own` true where it says so itself, else {} and the text in UTF-8."""
    asked = json.loads(body)
    try:
        template = _compiled(asked["source"])
    except MemoryError:
        raise
    except Exception as error:  # a program of a stranger's fails in any way
        return {"fault": _reason(error)}, b""
    if "values" not in asked:
        return {}, b""
    pieces, size = [], 0
    try:
        for piece in template.generate(asked["values"]):
            size += len(piece)
            if size > ask["most"]:
                return {"refused": "it writes more text than any prompt may have", "is_own": False}, b""
            pieces.append(piece)
        return {}, "".join(pieces).encode()
    except MemoryError:
        raise
    except Exception as error:
        return {"refused": _reason(error), "is_own": isinstance(error, Refusal)}, b""


@functools.lru_cache(maxsize=4)
def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["namespace"] = _namespace
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def _reason(error: Exception) -> str:
    line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
    return line + (str(error).split("\n")[0].rstrip(".")[:_LONGEST_REASON] or type(error).__name__)


def _namespace(*args: Any, **members: Any) -> PublicNamespace:
    made = dict(*args, **members)
    for name in made:
        _check_public(name)
    return PublicNamespace(made)


def _check_public(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"it gives a namespace the member {str(name)[:40]!r}")


def _refuse(message: Any) -> None:
    raise Refusal(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
