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

    Attributes: eos_ids (ids that end an answer), num_ordinary (tokens of the vocabulary itself, without those that were added to it as
    they are spelled), vocab_size (one more than the highest id), template (None without a chat template), special (the tokens that its
    files name, such as `eos_token`). A model may have more rows than
    there are ids (padding), or fewer: then the ids beyond its rows must not be used, and whoever takes ids checks that.
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
        """chat_template: a file that counts instead of the folder's. Raises TokenizerError when the vocabulary is missing or damaged, or an
        added token cannot have its id; ConfigError for a chat_template that cannot be read."""
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

    def encode(self, text: str, *, special: bool = True, most: int | None = None) -> list[int]:
        """`special` adds what the tokenizer puts around a plain text (a beginning-of-text token, say), unless the text begins with it;
        templates write their own.

        most: tokens of the context; a text of as many is refused. Raises ContextOverflowError.
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
        """Refuse a text whose beginning is too long already. The library takes about 150 bytes for each character, so that all of a text of
        32 MiB would take gigabytes. Where the text is cut, other tokens may stand than in the whole text: _CUT of them are not counted."""
        size = _BEGINNING
        while size < len(text):
            num = len(self._ids(self._inner, text[:size])) - _CUT
            if num >= most:
                raise ContextOverflowError(num, most, at_least=True)
            size *= 2

    def _begins_whole(self, text: str) -> bool:
        """Whether a text begins as the tokenizer would begin it, with a token that a template wrote, say."""
        before = self.around[0]
        return bool(before) and text.startswith(self.token_text(before[0]) or MARK)

    def encode_plain(self, text: str, *, most: int | None = None) -> list[int]:
        """Ids of a text in which no control token is meant, whatever it spells. most: as in `encode`."""
        if not self._spellings.are_in(text):
            return self.encode(text, special=False, most=most)
        if most is not None:
            self._check_beginning(text, most)
        return self._fitting(self._ids(self._plain, text), most)

    def _marked_ids(self, text: str, *, special: bool) -> list[int]:
        """Ids of a text with marks: between control tokens it is plain."""
        ids: list[int] = []
        for part, is_token in self._spellings.parts(text):
            ids += [self._inner.token_to_id(part)] if is_token else self.encode_plain(part)
        before, behind = self.around if special else ([], [])
        return [*before, *ids, *behind]

    @cached_property
    def _plain(self) -> _Tokenizer:
        """One that reads the spelling of a control token as any other text. It costs reading the vocabulary once more."""
        plain = _Tokenizer.from_str(self._inner.to_str())
        plain.encode_special_tokens = True
        return plain

    def _fitting(self, ids: list[int], most: int | None) -> list[int]:
        if most is not None and len(ids) >= most:
            raise ContextOverflowError(len(ids), most)
        return ids

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """Ids that stand before and behind a plain text."""
        bare = self._inner.encode("a", add_special_tokens=False).ids
        whole = self._inner.encode("a", add_special_tokens=True).ids
        at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), None)
        return ([], []) if at is None else (whole[:at], whole[at + len(bare) :])

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of whole tokens, special tokens left out but for the chat format's tags."""
        hidden = self._hidden_ids()
        return str(self._inner.decode([t for t in tokens if t not in hidden], skip_special_tokens=False))

    def token_text(self, token: int) -> str | None:
        """The vocabulary's own spelling of an id, None for an id it does not know."""
        return self._inner.id_to_token(token) if 0 <= token <= _LARGEST_ID else None

    def id_of(self, spelling: str) -> int | None:
        """The id of a token that the vocabulary spells so, None where there is none."""
        found = self._inner.token_to_id(spelling)
        return None if found is None else int(found)

    def added_tokens(self) -> dict[int, bool]:
        """Ids that were added to the vocabulary as they are spelled, and whether they are special."""
        return {i: bool(t.special) for i, t in self._inner.get_added_tokens_decoder().items()}

    @property
    def digest(self) -> str:
        """A digest of all that decides which ids a text has: 64 hexadecimal digits."""
        return hashlib.sha256(self._inner.to_str().encode()).hexdigest()

    def decoder_state(self) -> bytes:
        """Return how tokens become text, as JSON; b"{}" where they are text already."""
        decoder = self._inner.decoder
        return b"{}" if decoder is None else bytes(decoder.__getstate__())

    def without_ids_from(self, limit: int) -> Tokenizer:
        """One that reads the spelling of an added token with an id of at least `limit` as any other text. It costs reading the
        vocabulary once more."""
        state = json.loads(self._inner.to_str())
        state["added_tokens"] = [t for t in state["added_tokens"] if t["id"] < limit]
        return Tokenizer(_Tokenizer.from_str(json.dumps(state)), self.eos_ids, self.template)

    def stream(self) -> TextStream:
        return TextStream(self._inner, self._hidden_ids())

    def _hidden_ids(self) -> frozenset[int]:
        """Special tokens that are no text."""
        source = None if self.template is None else self.template.source
        if self._hidden is None or self._hidden[0] != source:
            tags = detect(source).tags
            added = self._inner.get_added_tokens_decoder().items()
            hidden = (i for i, t in added if t.special and not any(t.content in tag for tag in tags))
            self._hidden = source, frozenset(hidden)
        return self._hidden[1]


def template_in(folder: Path) -> ChatTemplate | None:
    """The chat template of a folder, None where it has none. Raises TokenizerError for a file that cannot be read."""
    settings, beside = (
        read_json(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
    given = settings.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    more = (folder / "additional_chat_templates").glob("*.jinja")
    others = sorted(path for path in more if not is_hidden(path))
    special = special_tokens(settings, beside)
    return ChatTemplate.from_files(folder / "chat_template.jinja", others, given, special)


class TextStream:
    """Text of a growing row of tokens; hands out only whole characters."""

    def __init__(self, inner: _Tokenizer, hidden: Set[int]) -> None:
        """hidden: ids that are no text."""
        self._inner, self._hidden = inner, hidden
        self._stream = DecodeStream(skip_special_tokens=False)
        self._tokens: list[int] = []
        self._given: list[str] = []

    def push(self, token: int) -> str:
        """The text this token completes, possibly none."""
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
        """Return what is left when no more tokens come: an incomplete character, shown as the replacement character. cut: the answer ended
        at a limit, inside a character perhaps, which is left out then."""
        whole = str(self._inner.decode(self._tokens, skip_special_tokens=False))
        given = "".join(self._given)
        left = whole[len(given) :] if whole.startswith(given) else ""
        left = left.rstrip("\ufffd") if cut else left
        self._given = [given, left]
        return left


def _spelled(folder: Path, settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tokenizer_trial.made_of needs to make a folder's tokenizer, without its added tokens. settings: tokenizer_config.json.
    Raises TokenizerError, one sentence, where it cannot be made."""
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
    """Have a helper process make a tokenizer first, because crafted files may end the process that reads them. One that was tried is
    known from then on. Raises TokenizerError."""
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
    """Return what a vocabulary's file is called in its folder, which may link to another place."""
    return f"{'vocab.json' if 'merges' in ask else 'tokenizer.json'} in {folder}"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} where the file is absent. Raises TokenizerError when it is damaged."""
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
    """Tokens that close a turn in the chat template: an answer ends with them, though no file may call them an end of text."""
    written = [] if template is None else [name for name in _TURN_ENDS if name in template.source]
    return {i for name in written if (i := inner.token_to_id(name)) is not None}


def _eos_ids(folder: Path, inner: _Tokenizer, special: Mapping[str, str]) -> frozenset[int]:
    """Every id that any of the model's files calls an end of text."""
    found: set[int] = set()
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    sources = [read_json(folder / "generation_config.json"), config, text if isinstance(text, dict) else {}]
    for source in sources:
        ids = source.get("eos_token_id")
        found.update(i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int)
    if "eos_token" in special and inner.token_to_id(special["eos_token"]) is not None:
        found.add(inner.token_to_id(special["eos_token"]))
    return frozenset(found)
