"""Fill-in-the-middle: how a vocabulary writes a text with a gap, so that a model that was trained on it answers with the text of the gap.

    (other files)  PREFIX text before the gap  SUFFIX text after the gap  MIDDLE

Whether a model can do it is read off its vocabulary. Code in the gap's surroundings that spells one of these tokens stays text. The text
behind the gap is part of the prompt, so the n-gram drafters draft from it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mlxspec.errors import ContextOverflowError
from mlxspec.loading.tokenizer import Tokenizer

_BARE = "\u263a"
_PROJECT, _FILE = "project\n", "file\n"  # names that nobody gives

# (prefix, suffix, middle), (what precedes a project's name, a file's name), what ends an answer; "" for what there is not
_FORMS: tuple[tuple[tuple[str, str, str], tuple[str, str], tuple[str, ...]], ...] = (
    (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("<|repo_name|>", "<|file_sep|>"), ("<|fim_pad|>", "<|endoftext|>")),
    (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("", "<|file_separator|>"), ()),
    (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), ("<repo_name>", "<file_sep>"), ("<fim_pad>", "<|endoftext|>")),
    (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), ("<reponame>", "<filename>"), ("<fim_pad>", "<|endoftext|>")),
    (("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), ("", ""), ("<fim-pad>", "<|endoftext|>")),
    (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), ("", ""), ()),
    (("▁<PRE>", "▁<SUF>", "▁<MID>"), ("", ""), ("▁<EOT>",)),
    (("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"), ("", ""), ()),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FillIn:
    """The fill-in-the-middle format of a vocabulary. tokens: ids before the text before the gap, before the text after the gap, and
    before the answer. project, file: ids before the name of a project and of a file, None where there are none. ends: ids that end an
    answer, in addition to the tokenizer's eos_ids."""

    tokenizer: Tokenizer
    tokens: tuple[int, int, int]
    project: int | None
    file: int | None
    ends: tuple[int, ...]
    _spelled: re.Pattern[str] = field(repr=False)

    @classmethod
    def of(cls, tokenizer: Tokenizer, num_rows: int) -> FillIn | None:
        """Return the fill-in-the-middle format of a vocabulary, None where it has no tokens for one. num_rows: number of token ids that
        the model has (rows of its embedding); tokens with higher ids are ignored. Of several formats, the one with most of its tokens
        in the vocabulary is returned."""

        def known(names: Sequence[str]) -> list[int | None]:
            ids = [tokenizer.id_of(name) if name else None for name in names]
            return [i if i is not None and i < num_rows else None for i in ids]

        found = []
        for form in _FORMS:
            (prefix, suffix, middle), (project, file), ends = map(known, form)
            if prefix is not None and suffix is not None and middle is not None:
                there = [i for i in (prefix, suffix, middle, project, file, *ends) if i is not None]
                names = [name for part in form for name in part if tokenizer.id_of(name) in there]
                inside = "|".join(f"(?<={re.escape(n[0])})(?={re.escape(n[1:])})" for n in names)
                found.append(
                    cls(
                        tokenizer=tokenizer,
                        tokens=(prefix, suffix, middle),
                        project=project,
                        file=file,
                        ends=tuple(there),
                        _spelled=re.compile(inside),
                    )
                )
        return max(found, key=lambda f: len(f.ends), default=None)

    def prompt(
        self,
        before: str | Sequence[int | str],
        behind: str,
        files: Sequence[tuple[str, str]] = (),
        *,
        most: int | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt whose answer fills the gap between two texts. before, behind: the texts before and after the
        gap; ids in `before` are kept as they are. files: (name, text) of other files of the project. most: tokens of the context.
        Raises ContextOverflowError where the prompt has `most` tokens or more."""
        ids = list(self.tokenizer.around[0])

        def add(*parts: int | str | None, is_bare: bool = False) -> None:
            for part in parts:
                ids.extend(
                    self._ids(part, is_bare, most)
                    if isinstance(part, str)
                    else []
                    if part is None
                    else [part]
                )
                if most is not None and len(ids) >= most:
                    raise ContextOverflowError(len(ids), most, at_least=True)

        if files and self.project is not None:
            add(self.project, _PROJECT)
        for name, text in files:
            add(self.file, f"{name}\n", text if text.endswith("\n") else text + "\n")
        if files and self.file is not None:
            add(self.file, _FILE)
        prefix, suffix, middle = self.tokens
        add(prefix, *([before] if isinstance(before, str) else before), suffix)
        add(behind, is_bare=True)
        add(middle)
        return ids

    def _ids(self, text: str, is_bare: bool, most: int | None) -> list[int]:
        """Return the ids of a text, with spellings of special tokens read as plain text. is_bare: whether the tokenizer is kept from
        putting a space before the text. most: as in `Tokenizer.encode`."""
        ids: list[int] = []
        for part in self._spelled.split(text):
            lead = self._lead if is_bare or ids else []
            found = self.tokenizer.encode_plain(_BARE + part if lead else part, most=most)
            if found[: len(lead)] != lead:
                found, lead = self.tokenizer.encode_plain(part, most=most), []
            ids += found[len(lead) :]
        return ids

    @cached_property
    def _lead(self) -> list[int]:
        """Return the ids of a character that, put before a text, keeps a tokenizer of SentencePiece's kind from adding a space; [] for a
        tokenizer that adds none."""
        first = self.tokenizer.token_text(self.tokenizer.encode_plain("a")[0]) or ""
        return self.tokenizer.encode_plain(_BARE) if first.startswith("\u2581") else []
