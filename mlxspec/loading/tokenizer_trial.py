"""Makes the tokenizer that a folder spells, with the tokens that its files add, and uses it once. A helper process loads this file by
itself (platform/helper.py): the library that reads it can panic, run for ever or abort the process on a crafted file.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.decoders import DecodeStream

_TEXT = "Hello, wörld! 12345\n\n\tdef f(x):  return 'é' + \"中文\" # \U0001f600\u0301 " + "a" * 300 + " " * 40
_MOST = 64  # tokens of each kind that are decoded
_WORDS_OF_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def run(ask: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """Make the tokenizer that `body` describes and use it. body: JSON of the description that tokenizer.py makes, with the added
    `tokens`. ask: not used. Returns {} where that works, {"refused": reason} where it fails, and no bytes."""
    try:
        ask = json.loads(body)
        made = made_of(ask)
        add(made, ask["tokens"], ask.get("beginning"))
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


def made_of(ask: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of a description that tokenizer.py makes, without its added tokens. Raises the errors of the `tokenizers`
    library."""
    if "merges" not in ask:
        return Tokenizer.from_file(ask["path"])
    made = Tokenizer(models.BPE.from_file(ask["path"], ask["merges"]))
    is_gpt2 = ask["split"] == "gpt2"
    into_bytes = pre_tokenizers.ByteLevel(add_prefix_space=ask["prefix_space"], use_regex=is_gpt2)
    if is_gpt2:
        made.pre_tokenizer = into_bytes
    else:
        made.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(Regex(_WORDS_OF_QWEN2), behavior="isolated", invert=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([words, into_bytes])
    made.decoder = decoders.ByteLevel()
    return made


def add(made: Tokenizer, tokens: list[dict[str, Any]], beginning: str | None = None) -> None:
    """Add `tokens`, as `added_tokens.declared` returns them, to the tokenizer `made`. A token that the tokenizer has takes the declared
    flags, except that a token without an id whose text was added before is left as it is. A token with `may_go` is skipped where its
    id is taken. beginning: a token to put before every encoded text, None for none. Raises ValueError where a new token would get
    another id than the declared one."""
    there = made.get_added_tokens_decoder()
    contents, same = {token.content for token in there.values()}, set(map(repr, there.values()))
    added, places = [], {}
    for token in tokens:
        has_place = token["id"] is None and token["content"] in contents
        if has_place or (token["may_go"] and token["id"] in there):
            continue
        flags = {name: token[name] for name in token if name not in ("content", "id", "may_go")}
        found = AddedToken(token["content"], **flags)
        if repr(found) not in same:
            added.append(found)
        if made.token_to_id(token["content"]) is None and token["id"] is not None:
            places[token["content"]] = token["id"]
    made.add_tokens(added)
    for content, place in places.items():
        if (got := made.token_to_id(content)) != place:
            raise ValueError(
                f"the added token {content[:40]!r} is declared with id {place}, and the vocabulary goes on at {got}"
            )
    if beginning is not None:
        first = (beginning, made.token_to_id(beginning))
        made.post_processor = processors.TemplateProcessing(single=f"{beginning} $A", special_tokens=[first])


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
