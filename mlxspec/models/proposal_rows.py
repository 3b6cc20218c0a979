"""Decides over how many tokens a model's drafters propose (`--draft-vocab`), and selects those rows of its head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.nn as nn
import numpy as np

from mlxspec.errors import ModelError
from mlxspec.loading.progress import amount
from mlxspec.loading.row_lists import most_frequent
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.models.drafter_module import DrafterModule
from mlxspec.models.fill import is_packed
from mlxspec.models.gemma4_assistant import Gemma4Assistant
from mlxspec.models.head_rows import HeadRows
from mlxspec.models.reads import Reads, drafted_reads
from mlxspec.models.shard import GatheredHead
from mlxspec.models.sizes import bytes_of
from mlxspec.models.text_model import TextModel

DEFAULT_ROWS = 32_768
LEAST_VOCABULARY = 100_000  # tokens; smaller ones are proposed from whole
LEAST_SHARE = 0.3  # of the bytes that a drafted token reads, which the head must be
_SOURCES = {
    "own texts": "counted from your own texts",
    "package": "counted for this vocabulary",
    "merges": "taken in the order of the tokenizer's merges",
}
Drafting = DrafterModule | Gemma4Assistant | TextModel


@dataclass(frozen=True, kw_only=True)
class Proposing:
    """The bytes that a drafted token reads: `whole` with the whole language-model head, `reduced` with the copied rows. num_rows: how many
    rows are copied, 0 for the whole head. row_bytes: bytes of the copied rows, which are in memory in addition to the head."""

    num_rows: int
    vocab_size: int
    whole: int
    reduced: int
    row_bytes: int

    @property
    def sentence(self) -> str:
        """Return a clause on the choice and its bytes, such as "proposes over all N tokens; ...", without a subject and a full stop."""
        if not self.num_rows:
            return f"proposes over all {self.vocab_size} tokens; a drafted token reads {amount(self.whole)}"
        return (
            f"proposes over {self.num_rows} of {self.vocab_size} tokens and those of the text; a drafted token reads "
            f"{amount(self.reduced)} instead of {amount(self.whole)}"
        )


def num_rows(asked: int | None, vocab_size: int, whole: Reads) -> int:
    """Return how many rows of the head a drafter reads for a proposal, 0 for all. asked: the setting SpecConfig.draft_vocab, None where it
    is not set. whole: the bytes that the drafter reads with the whole head."""
    if asked is not None:
        return 0 if asked >= vocab_size else asked
    if vocab_size < LEAST_VOCABULARY or whole.head < LEAST_SHARE * whole.bytes():
        return 0
    return DEFAULT_ROWS


def _owner(drafter: Drafting) -> Any:
    """Return the model whose language-model head gives a drafter's proposals."""
    return drafter.target if isinstance(drafter, DrafterModule) else drafter


def rows_of(
    drafter: Drafting, target: nn.Module, ids: np.ndarray, draft_bits: int, vocab_size: int | None = None
) -> HeadRows | None:
    """Return the rows `ids` of the head that `drafter` proposes with, lazily; None where the drafter has its own vocabulary or scores
    clusters of tokens. vocab_size: tokens that may be proposed, None for all of the head."""
    bits = draft_bits if draft_bits < 16 and is_packed(target) else None
    if isinstance(drafter, DrafterModule) and drafter.proposes_all:
        return None
    owner = _owner(drafter)
    head = owner.head_module
    if head is None:
        return None
    if isinstance(head, GatheredHead):
        raise ModelError(
            "The rows of a head that is divided among ranks cannot be chosen; use --draft-vocab 0."
        )
    if isinstance(owner, Gemma4Assistant):
        return HeadRows(head, ids, vocab_size or owner.vocab_size, bits=bits)
    return HeadRows(head, ids, vocab_size or owner.vocab_size, bits=bits, capped=owner.capped)


def proposing(drafter: Drafting, target: nn.Module, asked: int | None, draft_bits: int) -> Proposing | None:
    """Return what a drafted token reads; None where rows of the head cannot be chosen for this drafter. asked: the setting
    SpecConfig.draft_vocab."""
    whole, vocab_size = drafted_reads(drafter), _owner(drafter).vocab_size
    num = num_rows(asked, vocab_size, whole)
    made = rows_of(drafter, target, np.arange(num or 1), draft_bits)
    if made is None:
        return None
    every, rows = int(whole.bytes()), bytes_of(made) if num else 0
    return Proposing(
        num_rows=num,
        vocab_size=vocab_size,
        whole=every,
        reduced=every - whole.head + rows if num else every,
        row_bytes=rows,
    )


def choose_rows(
    name: str,
    drafter: Drafting,
    target: TextModel,
    tokenizer: Tokenizer,
    asked: int | None,
    draft_bits: int,
) -> tuple[HeadRows | None, list[str]]:
    """Return the rows of the head that the drafter `name` proposes from, None for the whole head, and sentences on the choice for the user.
    asked: the setting SpecConfig.draft_vocab. A head that is divided among ranks is used whole unless rows were requested."""
    if not asked and isinstance(_owner(drafter).head_module, GatheredHead):
        return None, []
    found = proposing(drafter, target, asked, draft_bits)
    if found is None:
        unused = "--draft-vocab is not used: the assistant scores clusters of tokens, not all of them."
        if not isinstance(drafter, Gemma4Assistant):
            title = drafter.title if isinstance(drafter, DrafterModule) else "draft model"
            unused = f"--draft-vocab is not used: the {title} proposes over the whole vocabulary."
        return None, [unused] if asked else []
    if not found.num_rows:
        return None, []
    vocab_size = min(found.vocab_size, target.vocab_size)
    listed = most_frequent(tokenizer, vocab_size, found.num_rows)
    made = rows_of(drafter, target, listed.ids, draft_bits, vocab_size)
    found = replace(found, num_rows=len(listed.ids))
    return made, [
        f"The drafter {name} {found.sentence} ({_SOURCES[listed.source]}); --draft-vocab 0 takes all."
    ]
