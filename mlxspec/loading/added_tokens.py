"""Finds the tokens that a folder's other files add to the vocabulary of tokenizer.json, as transformers does, and the vocabulary itself
where vocab.json and merges.txt hold it. tokenizer.py reads the files.

tokenizer_config.json counts first: where its `added_tokens_decoder` lists tokens by id, no other file adds any. Else added_tokens.json
does, and special_tokens_map.json goes over the settings. Tokens with a role (`eos_token`) and extra special tokens are added in both cases.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlxspec.errors import TokenizerError
from mlxspec.loading.names import printable

_FLAGS = ("lstrip", "rstrip", "normalized", "single_word")
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"))  # files of which one form is needed
_LONGEST = 4096  # characters of a token
SPLITS = {"Qwen2Tokenizer": "qwen2", "GPT2Tokenizer": "gpt2"}  # how a class of transformers cuts texts
_PLAIN = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
_ROLES_OF = {
    "Qwen2Tokenizer": {
        "unk_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    },
    "GPT2Tokenizer": _PLAIN,
}  # where the folder names none
Token = dict[str, Any]  # content, special, the flags; and the id that a file declares for it, if one does


def has_vocabulary(folder: Path) -> bool:
    """Return whether a folder holds a vocabulary in a form that mlxspec reads: tokenizer.json, or vocab.json with merges.txt."""
    return any(all((folder / name).is_file() for name in names) for names in VOCABULARIES)


def class_of(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the name of transformers' class for a folder's tokenizer, without the suffix `Fast`; "" where no file names it. settings:
    tokenizer_config.json; config: config.json."""
    kind = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if isinstance(kind, str):
        return kind.removesuffix("Fast")
    return "Qwen2Tokenizer" if str(config.get("model_type")).startswith("qwen") else ""


def declared(
    settings: Mapping[str, Any],
    beside: Mapping[str, Any],
    listed: Mapping[str, Any],
    kind: str = "",
) -> list[Token]:
    """Return the tokens that a folder's files add to its vocabulary, in the order in which they take ids. settings:
    tokenizer_config.json; beside: special_tokens_map.json; listed: added_tokens.json; kind: transformers' class for a tokenizer
    without a tokenizer.json, else "". Raises TokenizerError for a damaged list."""
    by_id = settings.get("added_tokens_decoder")
    told = {**_ROLES_OF.get(kind, {}), **settings, **({} if by_id is not None else beside)}
    main = [told.get(name) for name in _ROLES]
    roles = [told[name] for name in told if name.endswith("_token") and name not in _ROLES]
    extra: Any = next((told[name] for name in _EXTRA if told.get(name)), [])
    if by_id is None and beside:
        first: Any = next((settings[name] for name in _EXTRA if settings.get(name)), [])
        extra = [*first, *extra] if isinstance(first, list) and isinstance(extra, list) else extra
    if isinstance(extra, Mapping):
        roles, extra = [*roles, *extra.values()], []
    extra = extra if isinstance(extra, list) else []
    special = {content_of(value) for value in (*main, *extra)} - {None}
    roles = [*main, *roles]
    found = sorted(_numbered(by_id, listed, special), key=lambda token: token["id"])
    numbered = {token["content"]: token for token in found}
    for value in roles:
        content = content_of(value)
        if content is None:
            continue
        if content in numbered:
            numbered[content]["special"] = True
        else:
            flags = value if isinstance(value, Mapping) else {}
            found.append(_token(content, flags, special=True))
    contents = [content for content in map(content_of, extra) if content is not None]
    found += [_token(content, {}, special=True) for content in contents if content not in numbered]
    return found


def _numbered(by_id: Any, listed: Mapping[str, Any], special: Collection[str | None]) -> Iterator[Token]:
    """Yield the tokens that the files list with ids. by_id: `added_tokens_decoder` of tokenizer_config.json, None where there is none;
    listed: added_tokens.json, which is read only then; special: the texts of special tokens. Raises TokenizerError for a damaged
    list."""
    if by_id is None:
        for content, number in listed.items():
            is_special = content in special
            flags = {"normalized": not is_special}
            yield _token(content, flags, special=is_special, number=number, may_go=True)
        return
    for number, value in by_id.items() if isinstance(by_id, Mapping) else [("", None)]:
        name = content_of(value)
        if name is None or not isinstance(value, Mapping) or not number.isdecimal():
            raise TokenizerError("added_tokens_decoder in tokenizer_config.json is no list of tokens by id.")
        yield _token(name, value, special=value.get("special") is True, number=int(number))


def _token(
    content: str, flags: Mapping[str, Any], *, special: bool, number: Any = None, may_go: bool = False
) -> Token:
    """Return the description of one added token. flags: its settings, such as `lstrip`; number: its declared id, None for the next free
    one; may_go: whether the token is dropped where tokenizer.json adds a token of this id. Raises TokenizerError for a wrong id or an
    overlong text."""
    if len(content) > _LONGEST or not (number is None or (type(number) is int and 0 <= number < 1 << 31)):
        raise TokenizerError(f"The added token {printable(content, 40)} is too long, or its id is none.")
    kept = {name: flags[name] for name in _FLAGS if isinstance(flags.get(name), bool)}
    kept = {"normalized": not special} | kept
    return {"content": content, "id": number, "special": special, "may_go": may_go, **kept}


def content_of(value: Any) -> str | None:
    """Return the text of an added token, which a file writes as a string or as an object with `content`; None where there is no text."""
    found = value.get("content") if isinstance(value, Mapping) else value
    return found if isinstance(found, str) and found else None
