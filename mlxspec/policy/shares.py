"""Shares out the drafted tokens of a round among rows that decode together.

All rows wait for a round, so its tokens go to the rows whose next one is likeliest to be accepted, whoever drafted it, and there are as
many as gain most for the round as a whole. The first tokens of a wide round can be dear and the next ones nearly free: no row pays for a
step of the curve alone. Their number is one of the ladder, so that few shapes of rounds are compiled. Plain numbers; knows no costs and no
drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlxspec.kernels.flat import LADDER

Longer = Callable[[int, float], float]  # (drafted tokens, those expected to be accepted) -> seconds


def share_out(reaches: Sequence[Sequence[float]], rates: Sequence[float], longer: Longer) -> list[int]:
    """How many tokens of each row's draft to verify.

    reaches: by row, for each token of its draft the chance that it and all before it are accepted, which never rises. rates: by row, tokens
    a second that the group gets without drafts; the mean of those that draft counts. longer: what a round of so many drafted tokens takes
    beyond a plain one, infinite where it may not be run."""
    drafting = [rate for rate, reach in zip(rates, reaches, strict=True) if reach]
    shares = [0] * len(reaches)
    if not drafting:
        return shares
    rate, total, best, num_best = sum(drafting) / len(drafting), 0.0, 0.0, 0
    order = sorted(
        (-chance, depth, row) for row, reach in enumerate(reaches) for depth, chance in enumerate(reach)
    )
    for num, (chance, _, _) in enumerate(order, 1):
        total -= chance
        if num not in LADDER:
            continue
        gain = total - rate * longer(num, total)
        if gain > best:
            best, num_best = gain, num
    for _, _, row in order[:num_best]:
        shares[row] += 1
    return shares
