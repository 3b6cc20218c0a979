"""Decides by use which norms of an MTP head are stored shifted (1 + w): scores the head on a short text under the possible states.

The name of a tensor and the mean of its values do not tell for every published head. Converters shift all norms, none, or some of them.
A wrong state costs nearly every draft and shows nowhere else, so the state is chosen by what the head predicts.
Knows a target and its head, both evaluated; knows no files and no tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlxspec.kernels.flat import FlatRows
from mlxspec.models.qwen3_5 import Qwen35
from mlxspec.models.qwen3_5_mtp import NORMS, Qwen35Mtp

ENOUGH = 24  # tokens of a text by which a head is judged
_GAIN = 0.01  # by which another state must be better than the one that was loaded
_SURE = 3.0  # standard errors by which a head must be better than chance

Shifts = dict[
    str, float
]  # group of norms -> what is added to its weights as they were loaded; groups with 0 are left out


class HeadScore(NamedTuple):
    """The quality of an MTP head's predictions in a text. accepted: the share of its drafts that would be accepted at temperature 1, which
    is the mean overlap sum_v min(p_v, q_v) of the target's distribution p and the head's q. chance: the same with distributions of
    positions that do not belong together. error: standard error of the difference. All are 0 where the head's outputs are not finite."""

    accepted: float
    chance: float
    error: float

    @property
    def is_useful(self) -> bool:
        """Return whether `accepted` exceeds `chance` by more than 3 standard errors."""
        return self.accepted - self.chance > _SURE * self.error


class TargetRun(NamedTuple):
    """A target's forward over one text. tokens (N,) int32; hidden (N, H) after the final norm; chances (N, V) float32: the probabilities of
    the next token."""

    tokens: mx.array
    hidden: mx.array
    chances: mx.array

    @classmethod
    def over(cls, model: Qwen35, tokens: Sequence[int]) -> TargetRun:
        given, rows = mx.array(list(tokens), mx.int32), FlatRows((len(tokens),))
        out = model.forward(given, rows, model.make_cache(1), certain=True)
        if out.logits is None:
            raise ValueError("a target was asked for logits and gave none")
        chances = mx.softmax(out.logits.astype(mx.float32), axis=-1)
        mx.eval(out.hidden, chances)
        return cls(given, out.hidden, chances)

    @property
    def reads(self) -> bool:
        """Return whether the target predicts the text better than chance. A target with random weights does not, and cannot be used to
        judge a head."""
        vocab = self.chances.shape[1]
        of_next = mx.take_along_axis(self.chances[:-1], self.tokens[1:, None], axis=1)[:, 0]
        gained = mx.log(mx.maximum(of_next, 1e-30)) + math.log(vocab)
        mean, error = mx.stack([gained.mean(), mx.std(gained) / math.sqrt(gained.size)]).tolist()
        return mean > _SURE * error


def score(head: Qwen35Mtp, run: TargetRun) -> HeadScore:
    """Return the score of an MTP head along the text. Each of its cells takes the target's true hidden state."""
    num = run.tokens.shape[0] - 1
    out = head.forward(run.tokens[1:], run.hidden[:-1], FlatRows((num,)), head.make_cache(1), logits_at="all")
    if out.logits is None:
        raise ValueError("a head was asked for logits and gave none")
    own, right = mx.softmax(out.logits.astype(mx.float32), axis=-1), run.chances[1:]
    overlap = mx.minimum(own, right).sum(axis=-1)
    foreign = mx.minimum(own, mx.roll(right, num // 2, axis=0)).sum(axis=-1)
    error = mx.std(overlap - foreign) / math.sqrt(num)
    found = HeadScore(*mx.stack([overlap.mean(), foreign.mean(), error]).tolist())
    return found if all(map(math.isfinite, found)) else HeadScore(0.0, 0.0, 0.0)


def best_shifts(head: Qwen35Mtp, run: TargetRun) -> tuple[Shifts, HeadScore]:
    """Return the shifts of the head's norm weights with which it predicts best, and its score with them. The head's weights are left as
    they were loaded.

    The search begins with the best of three states: as loaded, all groups of norms 1 lower, all 1 higher. Then it changes one group at a
    time until no change helps: about a dozen forwards of the head.
    """
    norms = head.norms()
    best: Shifts = {}
    found = score(head, run)

    def is_better(shifts: Shifts) -> bool:
        nonlocal best, found
        head.set_norms(norms, shifts)
        tried = score(head, run)
        if tried.accepted <= found.accepted + _GAIN:
            return False
        best, found = shifts, tried
        return True

    for by in (-1.0, 1.0):
        is_better(dict.fromkeys(NORMS, by))
    changes = True
    while changes:
        changes = False
        for group in NORMS:
            for by in (-1.0, 0.0, 1.0):
                shifts = {g: b for g, b in {**best, group: by}.items() if b}
                changes |= shifts != best and is_better(shifts)
    head.set_norms(norms, {})
    return best, found
