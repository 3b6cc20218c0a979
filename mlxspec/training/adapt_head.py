"""Teaches an MTP head its target's distributions on given texts, and judges it on those that were held out.

Distillation: at every position the head's distribution is drawn towards the target's own, at each depth of a draft (EAGLE-3 trains so too:
Li et al. 2025, arXiv 2503.01840). The loss of a depth is the cross entropy with the target's distribution, and counts DEPTHS of it. What
the model says cannot change: its weights are not touched, and drafts are verified.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import AdamW, clip_grad_norm

from mlxspec.training.mtp_network import Head, MtpNetwork
from mlxspec.training.states import Batch, States

DEPTHS = (1.0, 0.7, 0.5)  # weight of the loss at each depth
ROWS, SCORED = 2, 128  # pieces of a step, and drafts of each that are scored
BYTES_A_PARAMETER = 20  # of training: weights, gradients, two moments, the best so far; float32
BYTES_A_WORD = (
    4 * 6 * len(DEPTHS) * ROWS * SCORED
)  # of the vocabulary: logits, distributions, their gradients
_RATE, _WARM = 1e-3, 20  # highest learning rate for 256 hidden numbers, and steps until it is reached
_JUDGEMENTS, _PATIENCE = 12, 4  # in the whole time, and how many may bring nothing before it ends
_JUDGED = 6  # batches of held-out pieces at most that a head is judged on while it is trained


class DepthShares(NamedTuple):
    """Shares of drafted tokens that would be accepted at temperature 1, at depths 1, 2 and 3, each given that those before were."""

    depths: tuple[float, ...]

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
    network: MtpNetwork,
    head: Head,
    states: States,
    seconds: float,
    *,
    own: States | None = None,
    told: Callable[[Judgement], None] = lambda progress: None,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Head:
    """The best head that was found within `seconds`, by the sum of its depths on held-out pieces; `head` itself where none was better.
    own: texts of the model's own: half of each batch, and on those held out depth 1 may lose a point at most. KeyboardInterrupt ends it
    early, with the best so far."""
    began, rng = clock(), random.Random(seed)
    held = states.batches_held_out(ROWS)[:_JUDGED]
    guard = [] if own is None else own.batches_held_out(ROWS)[:_JUDGED]
    kept = judged = accepted(network, head, held)
    floor = accepted(network, head, guard).depths[0] - 0.01 if guard else 0.0
    best, current = head, dict(head)
    rate = _RATE * (256 / head["norm.weight"].size) ** 0.5
    optimizer = AdamW(learning_rate=0.0, betas=[0.9, 0.98], weight_decay=0.0)
    optimizer.init(current)
    loss_of = mx.value_and_grad(lambda weights, batch, places: _loss(network, weights, batch, places))
    batches = _batches(states, own, rng)
    next_look, idle, losses = seconds / _JUDGEMENTS, 0, list[float]()
    step = 0
    try:
        while (spent := clock() - began) < seconds and idle < _PATIENCE:
            batch = next(batches)
            left = 1 - spent / seconds
            optimizer.learning_rate = mx.array(rate * min(1.0, (step + 1) / _WARM) * left)
            loss, gradients = loss_of(current, batch, _places(batch, rng))
            gradients, _ = clip_grad_norm(gradients, 1.0)
            current = optimizer.apply_gradients(gradients, current)
            mx.eval(loss, current, optimizer.state)
            losses.append(float(loss.item()))
            step += 1
            if clock() - began < next_look:
                continue
            next_look += seconds / _JUDGEMENTS
            judged = accepted(network, current, held)
            is_safe = not guard or accepted(network, current, guard).depths[0] >= floor
            if sum(judged.depths) > sum(kept.depths) and is_safe:
                best, kept, idle = dict(current), judged, 0
            else:
                idle += 1
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
    except KeyboardInterrupt:
        pass
    return best


def _batches(states: States, own: States | None, rng: random.Random) -> Iterator[Batch]:
    """Of ROWS pieces; half of them the model's own, where there are some."""
    if own is None or not own.training:
        return states.batches(min(ROWS, len(states.training)), rng)
    half = ROWS // 2
    pairs = zip(states.batches(half, rng), own.batches(half, rng), strict=True)
    return (Batch(*(mx.concatenate(parts) for parts in zip(*pair, strict=True))) for pair in pairs)


def _places(batch: Batch, rng: random.Random) -> mx.array:
    """The first tokens of the drafts that are scored in a step."""
    num = batch.tokens.shape[1] - len(DEPTHS)
    return mx.array(sorted(rng.sample(range(num), min(num, SCORED))))


def _loss(network: MtpNetwork, head: Head, batch: Batch, places: mx.array) -> mx.array:
    total = mx.zeros(())
    for (own, right), weight in zip(_scored(network, head, batch, places), DEPTHS, strict=True):
        wanted = mx.softmax(right, axis=-1)
        total = total - weight * (wanted * nn.log_softmax(own, axis=-1)).sum(axis=-1).mean()
    return total / sum(DEPTHS)


def _scored(
    network: MtpNetwork, head: Head, batch: Batch, places: mx.array
) -> Iterator[tuple[mx.array, mx.array]]:
    """Of each depth the head's and the target's logits (B, places, V) for the same token."""
    cells = network.drafts(head, batch.tokens, batch.hidden, len(DEPTHS))
    for j, cell in enumerate(cells):
        right = mx.stop_gradient(network.logits(batch.hidden[:, places + 1 + j]))
        yield network.logits(cell[:, places].astype(batch.hidden.dtype)), right


def accepted(network: MtpNetwork, head: Head, batches: Sequence[Batch]) -> DepthShares:
    """Means over all positions of the overlap sum_v min(p_v, q_v) of the two distributions, which is what rejection accepts."""
    sums, num = mx.zeros(len(DEPTHS)), 0
    for batch in batches:
        length = batch.tokens.shape[1] - len(DEPTHS)
        for begin in range(0, length, SCORED):
            places = mx.arange(begin, min(length, begin + SCORED))
            scored = _scored(network, head, batch, places)
            overlaps = [mx.minimum(*(mx.softmax(x, axis=-1) for x in pair)).sum() for pair in scored]
            sums = sums + mx.stack(overlaps)
            mx.eval(sums)
        num += batch.tokens.shape[0] * length
    return DepthShares(tuple((sums / max(num, 1)).tolist()))
