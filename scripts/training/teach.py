"""Teaches a drafter its target's distributions on given texts, and judges it on those that were held out.

Distillation: at every position the drafter's distribution is drawn towards the target's own, at each depth of a draft (EAGLE-3 trains so
too: Li et al. 2025, arXiv 2503.01840). The loss of a depth is the cross entropy with the target's distribution over the tokens that the
drafter has, by the weights of its network. What the model says cannot change: its weights are not touched, and drafts are verified.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from statistics import fmean, stdev
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import AdamW, clip_grad_norm

from training.network import Head, Network, Scored
from training.states import Batch, States

ROWS, SCORED = 2, 384  # pieces of a step, and logits of each that are scored, of all depths together
BYTES_A_PARAMETER = 20  # of training: weights, gradients, two moments, the best so far; float32
BYTES_A_WORD = 4 * 6 * ROWS * SCORED  # of the vocabulary: logits, distributions, their gradients
_ALONE = 0.2  # weight of a block drafter's loss without what it knows of the token before
_RATE, _WARM = 1e-3, 20  # highest learning rate for 256 hidden numbers, and steps until it is reached
_JUDGEMENTS, _PATIENCE = 12, 4  # in the whole time, and how many may bring nothing before it ends
_LEAST_GAIN = 0.01  # of the length of a draft that is accepted
_JUDGED = 6  # batches of held-out pieces at most that a head is judged on while it is trained


class DepthShares(NamedTuple):
    """Shares of drafted tokens that would be accepted at temperature 1, at depths 1, 2 and so on, each given that those before were."""

    depths: tuple[float, ...]

    @property
    def length(self) -> float:
        """Tokens of a draft that are accepted, expected."""
        return float(sum(accumulate(self.depths, mul)))

    def __str__(self) -> str:
        return " · ".join(f"{100 * share:.1f} %" for share in self.depths)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What is known after a judgement. seconds: since training began."""

    step: int
    loss: float
    held_out: DepthShares
    best: DepthShares
    seconds: float


def train(
    network: Network,
    head: Head,
    states: States,
    seconds: float,
    *,
    own: States | None = None,
    guard: Sequence[Batch] = (),
    told: Callable[[Judgement], None] = lambda progress: None,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Head:
    """The best head that was found within `seconds`, by the length of its accepted drafts on the pieces for choosing; `head` itself where
    none was better. own: texts of the model's own, half of each batch. guard: pieces on which depth 1 may lose a point at most.
    KeyboardInterrupt ends it early, with the best so far."""
    began, rng = clock(), random.Random(seed)
    held, guard = states.batches("choosing", ROWS)[:_JUDGED], guard[:_JUDGED]
    kept = judged = accepted(network, head, held)
    floor = accepted(network, head, guard).depths[0] - 0.01 if guard else 0.0
    longest = kept.length
    best, teacher = head, Teacher(network, head)
    rate = network.pace * _RATE * (256 / network.target.hidden_size) ** 0.5
    batches = _batches(states, own, rng)
    next_look, idle, losses = seconds / _JUDGEMENTS, 0, list[float]()
    step = 0
    try:
        while (spent := clock() - began) < seconds and idle < _PATIENCE:
            left = 1 - spent / seconds
            losses.append(teacher.step(next(batches), rate * min(1.0, (step + 1) / _WARM) * left, rng))
            step += 1
            if clock() - began < next_look:
                continue
            looked = clock()
            judged = accepted(network, teacher.head, held)
            is_safe = not guard or accepted(network, teacher.head, guard).depths[0] >= floor
            # what costs too much on the model's own texts at first may do so no longer once the learning rate has fallen
            idle = 0 if judged.length > longest else idle + 1
            longest = max(longest, judged.length)
            if judged.length > kept.length and is_safe:
                best, kept = teacher.head, judged
            told(
                Judgement(
                    step=step,
                    loss=sum(losses) / len(losses),
                    held_out=judged,
                    best=kept,
                    seconds=clock() - began,
                )
            )
            losses = []
            # on a slow machine judging takes a quarter of the time, not all of it
            next_look = max(next_look + seconds / _JUDGEMENTS, clock() - began + 3 * (clock() - looked))
    except KeyboardInterrupt:
        pass
    return best


def _batches(states: States, own: States | None, rng: random.Random) -> Iterator[Batch]:
    """Of ROWS pieces; half of them the model's own, where there are some."""
    if own is None or not own.training:
        return map(states.read, states.pieces(min(ROWS, len(states.training)), rng))
    half = ROWS // 2
    pairs = zip(states.pieces(half, rng), own.pieces(half, rng), strict=True)
    return (states.read([*first, *second]) for first, second in pairs)


class Teacher:
    """Goes down the loss step by step. head: as far as it is taught; a new one after each step."""

    def __init__(self, network: Network, head: Head) -> None:
        self.head, self._network = head, network
        self.optimizer = AdamW(learning_rate=0.0, betas=[0.9, 0.98], weight_decay=0.0)
        self.optimizer.init(head)
        self._slopes = mx.value_and_grad(lambda weights, *given: loss(network, weights, *given))

    def step(self, batch: Batch, rate: float, rng: random.Random) -> float:
        """The loss before it."""
        self.optimizer.learning_rate = mx.array(rate)
        value, gradients = self._slopes(self.head, batch, _places(self._network, batch, rng))
        gradients, _ = clip_grad_norm(gradients, 1.0)
        self.head = self.optimizer.apply_gradients(gradients, self.head)
        mx.eval(value, self.head, self.optimizer.state, mx.random.state)  # modules draw their first values
        return float(value.item())


def _places(network: Network, batch: Batch, rng: random.Random) -> mx.array:
    """Where the drafts begin that are scored in a step."""
    num = batch.tokens.shape[1] - len(network.depths)
    return mx.array(sorted(rng.sample(range(num), min(num, SCORED // len(network.depths)))))


def loss(network: Network, head: Head, batch: Batch, places: mx.array) -> mx.array:
    """Mean over the drafts that begin at `places` (n,), weighted by depth and by the chance that a draft is accepted so far."""
    total, weights, reached = mx.zeros(()), mx.zeros(()), mx.ones(())
    scored = network.scored(head, batch, places, is_drafting=False)
    for (own, right, alone), share in zip(scored, network.depths, strict=True):
        wanted = mx.exp(right)
        told = nn.log_softmax(own, axis=-1)
        each = (wanted * told).sum(axis=-1)
        if alone is not None:
            each = each + _ALONE * (wanted * nn.log_softmax(alone, axis=-1)).sum(axis=-1)
        weight = mx.broadcast_to(share + network.reach * reached, each.shape)
        total, weights = total - (weight * each).sum(), weights + weight.sum()
        if network.reach:
            reached = mx.stop_gradient(reached * mx.minimum(wanted, mx.exp(told)).sum(axis=-1))
    return total / weights


def accepted(network: Network, head: Head, batches: Sequence[Batch]) -> DepthShares:
    """Means of the overlap sum_v min(p_v, q_v) of the two distributions, which is what rejection accepts, over the more positions the fewer
    depths there are."""
    depth = len(network.depths)
    sums, num, a_time = mx.zeros(depth), 0, SCORED // depth
    for batch in batches:
        size, length = batch.tokens.shape
        every = range(0, length - depth, max(1, depth // 2))
        for begin in range(0, len(every), a_time):
            scored = network.scored(head, batch, mx.array([*every[begin : begin + a_time]]), is_drafting=True)
            sums = sums + mx.stack([_overlap(pair) for pair in scored])
            mx.eval(sums, mx.random.state)
        num += size * len(every)
    return DepthShares(tuple((sums / max(num, 1)).tolist()))


def is_better(before: Sequence[DepthShares], after: Sequence[DepthShares]) -> bool:
    """Whether more tokens of a draft are accepted, piece by piece: by a share that is worth a drafter of one's own, and by more than pieces
    of text differ by chance (two standard errors of the mean)."""
    gains = [new.length - old.length for old, new in zip(before, after, strict=True)]
    gain, spread = fmean(gains), stdev(gains) / len(gains) ** 0.5
    return gain > max(_LEAST_GAIN * fmean(old.length for old in before), 2 * spread)


def mean(shares: Sequence[DepthShares]) -> DepthShares:
    """The mean over pieces of one length."""
    return DepthShares(tuple(map(fmean, zip(*(each.depths for each in shares), strict=True))))


def _overlap(pair: Scored) -> mx.array:
    return mx.minimum(mx.exp(pair.right), mx.softmax(pair.own, axis=-1)).sum()
