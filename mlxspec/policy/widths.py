"""How many tokens of drafts to verify, given how likely each is to be reached and what rounds cost by width.

`reaches` of a draft: for each token the probability that it and all before it stand. Plain functions of numbers; they know no drafter,
no memory and no arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from mlxspec.policy.cost import MAX_TOKENS, Curve

# lengths that drafts of several rows are cut to: a round's shape is all their widths, so that coarse ones keep its number small
SHARED_DEPTHS = (3, 16, 32, 63)


def best_at(reaches: Sequence[float], curve: Curve, rate: float) -> int:
    """How many tokens of one row's draft give most beyond what their time gives at `rate`."""
    shape, price = curve.shape, rate * curve.scale
    sum_reaches, best, depth = price * shape[1], 0.0, 0
    for length, reached in enumerate(reaches, 1):
        sum_reaches += reached
        value = sum_reaches - price * shape[1 + length]
        if value > best and length in curve.depths:
            best, depth = value, length
    return depth


def best_ratio(reaches: Sequence[float], curve: Curve, prudence: float) -> int:
    """How many tokens of one row's draft give most tokens a second, beside the one that comes anyway."""
    shape = curve.shape
    base = shape[1] * (1.0 - prudence)
    sum_reaches, best, depth = 1.0, 1.0 / shape[1], 0
    for length, reached in enumerate(reaches, 1):
        sum_reaches += reached
        ratio = sum_reaches / (base + prudence * shape[1 + length])
        if ratio > best and length in curve.depths:
            best, depth = ratio, length
    return depth


def payable(num_tokens: int, curve: Curve, num_rows: int, seconds: float) -> int:
    """How many of so many drafted tokens a round of these rows can verify within `seconds` beyond a plain round, if none is accepted."""
    most = curve.seconds(num_rows) + seconds
    while num_tokens > 0 and curve.seconds(num_rows + num_tokens) > most:
        num_tokens -= 1
    return num_tokens


def careful(
    reaches: Sequence[float], curve: Curve, num_rows: int, seconds: float, risk: float
) -> list[float]:
    """A lookup's draft without the end that may cost too much.

    A draft pays for itself if as many of its tokens are accepted as verifying it takes longer, in plain rounds of one row. The chance of
    that decides twice: what the draft is expected to lose must be within `risk` seconds, and its worst case within that share of the
    account's `seconds`, so that a draft that fails leaves enough for the next one.
    """
    plain = curve.seconds(num_rows)
    share = plain / num_rows
    for num in range(payable(len(reaches), curve, num_rows, seconds), 0, -1):
        longer = curve.seconds(num_rows + num) - plain
        back = math.ceil(longer / share)
        pays = reaches[back - 1] if 0 < back <= num else float(back == 0)
        if (1.0 - pays) * longer <= risk and longer <= pays * seconds:
            return list(reaches[:num])
    return []


def steps_of(reaches: Sequence[float]) -> list[tuple[float, int]]:
    """A draft cut at SHARED_DEPTHS, one shorter than all of them left whole: tokens that each part is worth, and its length."""
    cuts = [0, *(d for d in SHARED_DEPTHS if d <= len(reaches) or d == SHARED_DEPTHS[0])]
    cuts[1] = min(cuts[1], len(reaches))
    return [(sum(reaches[a:b]), b - a) for a, b in pairwise(cuts) if b > a]


def best_steps(
    steps: Sequence[tuple[float, int]],
    curve: Curve,
    num_rows: int,
    rate: float | None,
    prudence: float,
    most: int = MAX_TOKENS,
) -> tuple[int, float]:
    """How many of these parts of drafts, best first, give most beyond what their time gives at `rate` or, without one, most tokens a
    second; and how much that is. most: drafted tokens at most."""
    shape, plain = curve.shape, curve.shape[num_rows]
    gained, width, best, number = 0.0, num_rows, 0.0 if rate is not None else num_rows / plain, 0
    for count, (gain, tokens) in enumerate(steps, 1):
        gained, width = gained + gain, width + tokens
        if width > min(MAX_TOKENS, num_rows + most):
            break
        longer = prudence * (shape[width] - plain)
        value = (
            gained - rate * curve.scale * longer
            if rate is not None
            else (num_rows + gained) / (plain + longer)
        )
        if value > best:
            best, number = value, count
    return number, best


def pays_in_turn(reaches: Sequence[float], num_drafted: int, curve: Curve, num_rows: int, rate: float) -> int:
    """The longest of the curve's depths to which a draft of so many tokens pays part by part, by what is known before a part's first token:
    whether a token is verified must not depend on it, nor on those behind it. A part ends at the first depth to which it pays, so that
    it may cross a step of the curve where the plateau behind that is long enough. reaches may end where hardly any token stands."""
    length = 0
    while length < len(reaches):
        before = reaches[length - 1] if length else 1.0
        chance = reaches[length] / before if before > 0.0 else 0.0
        taken = curve.seconds(num_rows + length)
        paying = (
            end
            for end in curve.depths
            if length < end <= num_drafted
            and sum(reaches[length] * chance**i for i in range(end - length))
            >= rate * (curve.seconds(num_rows + end) - taken)
        )
        end = next(paying, None)
        if end is None:
            break
        length = end
    return length
