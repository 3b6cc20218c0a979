"""Text to token ids and back, by the model's own tokenizer files, whole or token by token.

Special tokens are not text, except those with which the chat format writes thinking and tool calls: a parser must see them, as it sees the
tags of models that spell them with common tokens. The `tokenizers` library does the work. Importing transformers would take a second.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer as _Tokenizer
from tokenizers.decoders import DecodeStream

from mlxspec.errors import ContextOverflowError, HelperError, TokenizerError
from mlxspec.loading import added_tokens, tokenizer_trial
from mlxspec.loading.folder import is_hidden
from mlxspec.loading.names import printable
from mlxspec.loading.spelled_tokens import MARK, Spellings
from mlxspec.loading.template import ChatTemplate, special_tokens
from mlxspec.parsers.formats import detect
from mlxspec.platform import helper, kept_json

_TRIAL = helper.Program(
    file=Path(__file__).with_name("tokenizer_trial.py"),
    what="Its first use",
    seconds=60.0,
    memory=4 << 30,
    most=0,
)
_BEGINNING = 1 << 16  # characters of a text's beginning that are looked at first
_CUT = 64  # tokens
_LARGE = 1 << 20  # bytes of a tokenizer.json
_LARGEST_ID = 2**32 - 1  # that the library can be asked for
_TURN_ENDS = (
    "<|im_end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|eot_id|>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|endofturn|>",
)


class Tokenizer:
    """A model's tokenizer.

    eos_ids: ids that end an answer. num_ordinary: number of tokens of the vocabulary without added ones. vocab_size: one more than the
    highest id. template: the chat template, None where there is none. special: texts of the tokens with a role in the model's files, by
    name, such as `eos_token`. The model's embedding may have more rows than there are ids (padding), or fewer; in the latter case the
    caller must not use the ids without a row.
    """

    def __init__(
        self,
        inner: _Tokenizer,
        eos_ids: frozenset[int],
        template: ChatTemplate | None,
        special: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._inner, self.special = inner, special
        self.eos_ids = eos_ids
        self.template = template
        self.num_ordinary = inner.get_vocab_size(with_added_tokens=False)
        self.vocab_size = max(self.num_ordinary, 1 + max(inner.get_added_tokens_decoder(), default=-1))
        self._hidden: tuple[str | None, frozenset[int]] | None = None
        control = [t.content for t in inner.get_added_tokens_decoder().values() if t.special]
        self._spellings = Spellings(control)
        if template is not None:
            template.spellings = self._spellings

    @classmethod
    def from_folder(cls, folder: Path, *, chat_template: Path | None = None) -> Tokenizer:
        """Return the tokenizer of a model's folder. chat_template: a file to use in place of the folder's template. Raises
        TokenizerError where the vocabulary is missing or damaged, or an added token cannot have its id; ConfigError where
        chat_template cannot be read."""
        settings, beside = (
            read_json(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json")
        )
        config = read_json(folder / "config.json")
        ask = _spelled(folder, settings, config)
        kind = added_tokens.class_of(settings, config) if "merges" in ask else ""
        ask["tokens"] = added_tokens.declared(settings, beside, read_json(folder / "added_tokens.json"), kind)
        _try(ask, folder)
        try:
            inner = tokenizer_trial.made_of(ask)
            tokenizer_trial.add(inner, ask["tokens"], ask.get("beginning"))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{_named(ask, folder)} cannot be read: {error}.") from error
        inner.no_truncation()
        inner.no_padding()
        special = special_tokens(settings, beside)
        ends = _eos_ids(folder, inner, special)
        if chat_template is not None:
            template: ChatTemplate | None = ChatTemplate.from_file(chat_template, special)
        else:
            template = template_in(folder)
        return cls(inner, ends | _turn_ends(inner, template), template, special)

    def check_rows(self, rows: int) -> None:
        """Raise TokenizerError where ordinary text is encoded into ids beyond `rows`, the rows of a model's embedding. Added tokens may lie
        beyond, as `<image_soft_token>` does in Gemma 3's text models; a request that uses one is refused."""
        if self.num_ordinary > rows:
            raise TokenizerError(
                f"The tokenizer beside the model has {self.num_ordinary} tokens for text, the model only {rows} rows."
            )

    def encode(self, text: str, *, special: bool = True, most: int | None = None) -> list[int]:
        """Return the token ids of a text. special: whether to add the tokens that the tokenizer puts around a plain text (a
        beginning-of-text token, for example), unless the text begins with them; texts of templates hold them already.

        most: tokens of the context. Raises ContextOverflowError where the text has `most` tokens or more.
        """
        special = special and not self._begins_whole(text)
        if most is not None:
            self._check_beginning(text, most)
        if MARK in text:
            return self._fitting(self._marked_ids(text, special=special), most)
        return self._fitting(self._ids(self._inner, text, special=special), most)

    def _ids(self, inner: _Tokenizer, text: str, *, special: bool = False) -> list[int]:
        # of several ways to encode this one alone gives up Python's lock
        return list(inner.encode_batch([text], add_special_tokens=special)[0].ids)

    def _check_beginning(self, text: str, most: int) -> None:
        """Raise ContextOverflowError where the beginning of a text already has `most` tokens. The library takes about 150 bytes for each
        character, so that a whole text of 32 MiB would take gigabytes. The last _CUT tokens of a beginning are not counted, because
        the whole text may have others there."""
        size = _BEGINNING
        while size < len(text):
            num = len(self._ids(self._inner, text[:size])) - _CUT
            if num >= most:
                raise ContextOverflowError(num, most, at_least=True)
            size *= 2

    def _begins_whole(self, text: str) -> bool:
        """Return whether a text already begins with the token that the tokenizer would put before it."""
        before = self.around[0]
        return bool(before) and text.startswith(self.token_text(before[0]) or MARK)

    def encode_plain(self, text: str, *, most: int | None = None) -> list[int]:
        """Return the token ids of a text, with spellings of control tokens encoded as plain text. most: as in `encode`."""
        if not self._spellings.are_in(text):
            return self.encode(text, special=False, most=most)
        if most is not None:
            self._check_beginning(text, most)
        return self._fitting(self._ids(self._plain, text), most)

    def _marked_ids(self, text: str, *, special: bool) -> list[int]:
        """Return the token ids of a text with marks (spelled_tokens.py). Unmarked spellings of control tokens become those tokens; all
        other text is plain. special: as in `encode`."""
        ids: list[int] = []
        for part, is_token in self._spellings.parts(text):
            ids += [self._inner.token_to_id(part)] if is_token else self.encode_plain(part)
        before, behind = self.around if special else ([], [])
        return [*before, *ids, *behind]

    @cached_property
    def _plain(self) -> _Tokenizer:
        """Return a tokenizer that encodes spellings of control tokens as plain text. The first access builds the vocabulary once more."""
        plain = _Tokenizer.from_str(self._inner.to_str())
        plain.encode_special_tokens = True
        return plain

    def _fitting(self, ids: list[int], most: int | None) -> list[int]:
        if most is not None and len(ids) >= most:
            raise ContextOverflowError(len(ids), most)
        return ids

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """Return the ids that the tokenizer puts before and after a plain text."""
        bare = self._inner.encode("a", add_special_tokens=False).ids
        whole = self._inner.encode("a", add_special_tokens=True).ids
        at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), None)
        return ([], []) if at is None else (whole[:at], whole[at + len(bare) :])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens. Special tokens are left out, except the chat format's tags of thinking and tool calls."""
        hidden = self._hidden_ids()
        return str(self._inner.decode([t for t in tokens if t not in hidden], skip_special_tokens=False))

    def token_text(self, token: int) -> str | None:
        """Return the vocabulary's spelling of a token id, None for an id that it does not have."""
        return self._inner.id_to_token(token) if 0 <= token <= _LARGEST_ID else None

    def id_of(self, spelling: str) -> int | None:
        """Return the id of the token with this spelling in the vocabulary, None where there is none."""
        found = self._inner.token_to_id(spelling)
        return None if found is None else int(found)

    def added_tokens(self) -> dict[int, bool]:
        """Return, for the id of each token that was added to the vocabulary, whether the token is special."""
        return {i: bool(t.special) for i, t in self._inner.get_added_tokens_decoder().items()}

    @property
    def digest(self) -> str:
        """Return a digest of everything that determines the token ids of a text: 64 hexadecimal digits."""
        return hashlib.sha256(self._inner.to_str().encode()).hexdigest()

    def decoder_state(self) -> bytes:
        """Return the library's description of how tokens become text, as JSON; b"{}" where their spellings are the text."""
        decoder = self._inner.decoder
        return b"{}" if decoder is None else bytes(decoder.__getstate__())

    def without_ids_from(self, limit: int) -> Tokenizer:
        """Return a tokenizer without the added tokens whose ids are at least `limit`; their spellings are encoded as plain text. Builds
        the vocabulary once more."""
        state = json.loads(self._inner.to_str())
        state["added_tokens"] = [t for t in state["added_tokens"] if t["id"] < limit]
        return Tokenizer(_Tokenizer.from_str(json.dumps(state)), self.eos_ids, self.template)

    def stream(self) -> TextStream:
        return TextStream(self._inner, self._hidden_ids())

    def _hidden_ids(self) -> frozenset[int]:
        """Return the ids of special tokens that are not text: all but the chat format's tags of thinking and tool calls."""
        source = None if self.template is None else self.template.source
        if self._hidden is None or self._hidden[0] != source:
            tags = detect(source).tags
            added = self._inner.get_added_tokens_decoder().items()
            hidden = (i for i, t in added if t.special and not any(t.content in tag for tag in tags))
            self._hidden = source, frozenset(hidden)
        return self._hidden[1]


def template_in(folder: Path) -> ChatTemplate | None:
    """Return the chat template of a folder, None where it has none. Raises TokenizerError where a file cannot be read."""
    settings, beside = (
        read_json(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
    given = settings.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    more = (folder / "additional_chat_templates").glob("*.jinja")
    others = sorted(path for path in more if not is_hidden(path))
    special = special_tokens(settings, beside)
    return ChatTemplate.from_files(folder / "chat_template.jinja", others, given, special)


class TextStream:
    """A decoder that receives the tokens of an answer one by one and returns their text in whole characters."""

    def __init__(self, inner: _Tokenizer, hidden: Set[int]) -> None:
        """Create a stream. inner: the library's tokenizer; hidden: ids that are not text."""
        self._inner, self._hidden = inner, hidden
        self._stream = DecodeStream(skip_special_tokens=False)
        self._tokens: list[int] = []
        self._given: list[str] = []

    def push(self, token: int) -> str:
        """Receive the next token; return the text that it completes, possibly ""."""
        if token in self._hidden:
            return ""
        try:
            piece = self._stream.step(self._inner, token) or ""
        except (
            Exception
        ):  # the library's plain one, where a byte changes the text of those before it, which was given
            self._stream = DecodeStream(skip_special_tokens=False)
            self._tokens, self._given = [], []
            piece = self._stream.step(self._inner, token) or ""
        self._tokens.append(token)
        if piece:
            self._given.append(piece)
        return piece

    def rest(self, *, cut: bool = False) -> str:
        """Return the text that is left when no more tokens follow: an incomplete character, as the replacement character. cut: whether
        the answer ended at a limit; its incomplete character is then left out."""
        whole = str(self._inner.decode(self._tokens, skip_special_tokens=False))
        given = "".join(self._given)
        left = whole[len(given) :] if whole.startswith(given) else ""
        left = left.rstrip("\ufffd") if cut else left
        self._given = [given, left]
        return left


def _spelled(folder: Path, settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description of a folder's tokenizer without its added tokens, from which `tokenizer_trial.made_of` makes it. settings:
    tokenizer_config.json; config: config.json. Raises TokenizerError where the folder has no vocabulary that can be read."""
    path, vocab, merges = (folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
    if path.is_file():
        return {"path": str(path.resolve())}
    if not vocab.is_file() or not merges.is_file():
        others = [n for n in ("tokenizer.model", "tiktoken.model", "vocab.json") if (folder / n).is_file()]
        what = f" {others[0]} alone is not read; take a folder that has a tokenizer.json." if others else ""
        raise TokenizerError(f"There is no tokenizer.json in {folder}.{what}")
    kind, splits = added_tokens.class_of(settings, config), added_tokens.SPLITS
    if kind not in splits:
        raise TokenizerError(
            f"There is no tokenizer.json in {folder}, and how texts are cut with its vocab.json and merges.txt is known of "
            f"{' and '.join(splits)} only, not of {printable(kind) or 'an unnamed class'}."
        )
    first = settings.get("bos_token") if settings.get("add_bos_token") is True else None
    return {
        "path": str(vocab.resolve()),
        "merges": str(merges.resolve()),
        "split": splits[kind],
        "prefix_space": settings.get("add_prefix_space") is True,
        "beginning": added_tokens.content_of(first),
    }


def _try(ask: dict[str, Any], folder: Path) -> None:
    """Make and use a tokenizer in a helper process first, because crafted files can crash the process that reads them. ask: the
    description of the tokenizer. Files that have passed are remembered and not tried again. Raises TokenizerError where the trial
    fails."""
    files = [Path(ask[name]) for name in ("path", "merges") if name in ask]
    found = [path.stat() for path in files]
    told = [ask, [(each.st_size, each.st_mtime_ns) for each in found], version("tokenizers")]
    told = json.loads(json.dumps(told))
    kept = kept_json.kept_file("tokenizers", told)
    if kept_json.read(kept) == told:
        return
    try:
        trial = replace(_TRIAL, once=sum(each.st_size for each in found) > _LARGE)
        said, _ = helper.run(trial, {}, json.dumps(ask).encode())
    except HelperError as error:
        raise TokenizerError(f"{_named(ask, folder)} cannot be used. {error}") from error
    if "refused" in said:
        raise TokenizerError(f"{_named(ask, folder)} cannot be read: {said['refused']}.")
    kept_json.write(kept, told)


def _named(ask: Mapping[str, Any], folder: Path) -> str:
    """Return the name of the vocabulary's file and its folder, for errors. The file itself may be a link to another place."""
    return f"{'vocab.json' if 'merges' in ask else 'tokenizer.json'} in {folder}"


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, {} where the file is absent. Raises TokenizerError where it is damaged."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TokenizerError(f"{path.name} in {path.parent} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path.name} in {path.parent} is no valid JSON.") from error
    if not isinstance(found, dict):
        raise TokenizerError(f"{path.name} in {path.parent} is no JSON object.")
    return found


def _turn_ends(inner: _Tokenizer, template: ChatTemplate | None) -> set[int]:
    """Return the ids of the tokens that close a turn in the chat template. An answer ends with them, even where no file lists them as
    end of text."""
    written = [] if template is None else [name for name in _TURN_ENDS if name in template.source]
    return {i for name in written if (i := inner.token_to_id(name)) is not None}


def _eos_ids(folder: Path, inner: _Tokenizer, special: Mapping[str, str]) -> frozenset[int]:
    """Return every id that one of the model's files gives as end of text. special: the tokenizer's `special`. Raises TokenizerError where
    a file gives only ids that neither the vocabulary of config.json nor the tokenizer has."""
    found: set[int] = set()
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}
    rows = [n for n in (text.get("vocab_size"), config.get("vocab_size")) if type(n) is int]
    there = inner.get_added_tokens_decoder()
    sources = {"generation_config.json": read_json(folder / "generation_config.json")}
    for source, values in (sources | {"config.json": config, "text_config of config.json": text}).items():
        given = values.get("eos_token_id")
        ids = {i for i in (given if isinstance(given, list) else [given]) if type(i) is int}
        ids -= {-1}  # how some write that there is none
        known = {i for i in ids if i >= 0 and (not rows or i < max(rows) or i in there)}
        if ids and not known:
            raise TokenizerError(
                f"{source} ends texts with token {min(ids)}, which the model's vocabulary does not have."
            )
        found |= ids
    if "eos_token" in special and inner.token_to_id(special["eos_token"]) is not None:
        found.add(inner.token_to_id(special["eos_token"]))
    return frozenset(found)
