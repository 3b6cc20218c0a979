"""Reads a tokenizer.json and uses it once. A helper process loads this file by itself (platform/helper.py): the library that reads it can
panic, run for ever or abort the process on a crafted file.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_TEXT = "Hello, wörld! 12345\n\n\tdef f(x):  return 'é' + \"中文\" # \U0001f600\u0301 " + "a" * 300 + " " * 40
_MOST = 64  # tokens of each kind that are decoded


def run(ask: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """ask: `path`. Returns {}, or {"refused": why}."""
    try:
        made = Tokenizer.from_file(ask["path"])
    except MemoryError:
        raise
    except BaseException as error:  # a panic of the library's is no Exception
        return {"refused": _reason(error)}, b""
    try:
        with suppress(Exception):  # a text that it cannot encode is refused when somebody sends it
            _use(made)
    except BaseException as error:
        return {"refused": _reason(error)}, b""
    return {}, b""


def _use(made: Tokenizer) -> None:
    made.no_truncation()
    made.no_padding()
    added = made.get_added_tokens_decoder()
    names = [token.content for token in list(added.values())[:_MOST]]
    tokens = list(added)[:_MOST]
    for text in ("", "a", _TEXT, "\n".join(names)):
        for special in (False, True):
            with suppress(Exception):
                tokens += made.encode_batch([text], add_special_tokens=special)[0].ids[:_MOST]
    made.decode(tokens, skip_special_tokens=False)
    stream = DecodeStream(skip_special_tokens=False)
    for token in tokens:
        with suppress(Exception):
            stream.step(made, token)


def _reason(error: BaseException) -> str:
    return str(error).split("\n")[0].rstrip(".")[:300] or type(error).__name__
