"""Compares a verify of k tokens with k plain steps, bit for bit, on the weights of a loaded model.

Kernels of matrix products and attention are chosen by shape, so the same token may get other bits in a verify than in a plain step, and
at a near tie another token. Knows a model and token ids; knows no requests and no drafters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxspec.cache.model_cache import ModelCache, Snapshot
from mlxspec.cache.quantized import PLAIN
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import Model
from mlxspec.platform import device
from mlxspec.platform.host import numbers

PROMPT = 48  # tokens before the verified ones
PROBE_AT_MOST = 17  # tokens: a wider verify is rare, and each width costs a compilation


@dataclass(frozen=True, kw_only=True)
class WidthVerdict:
    """One width of a round.

    is_bitwise: logits of the verify, and those of a plain step behind it (behind all of it, and behind part of it), have the bits of plain
    steps. same_argmax: each place has the same likeliest token. largest: largest difference of a logit.
    """

    width: int
    is_bitwise: bool
    same_argmax: bool
    largest: float


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """All widths tried, and in how many tokens of context."""

    widths: tuple[WidthVerdict, ...]
    context: int

    @property
    def is_exact(self) -> bool:
        """Every width tried has the bits of plain steps."""
        return all(v.is_bitwise for v in self.widths)

    @property
    def exact_width(self) -> int:
        """The widest round up to which every width has the bits of plain steps; 1 where not even two tokens have."""
        found = 1
        for verdict in sorted(self.widths, key=lambda v: v.width):
            if not verdict.is_bitwise or verdict.width != found + 1:
                break
            found = verdict.width
        return found

    def sentence(self) -> str:
        """The result, in one or two sentences."""
        if not self.widths:
            return "No verify width was tried."
        tried = f"up to {max(v.width for v in self.widths)} tokens"
        if self.is_exact:
            return f"Verifying {tried} gives the same bits as plain steps."
        largest = max(v.largest for v in self.widths)
        flips = [v.width for v in self.widths if not v.same_argmax]
        moved = f"Verifying {tried} moves logits by at most {largest:.1e}"
        if flips:
            return f"{moved} and changed the top token at width {flips[0]}. Greedy text can differ from plain decoding."
        return f"{moved} and never changed the top token. Greedy text matches plain decoding except at near ties."


def probe(model: Model, widths: Sequence[int], *, kv_bits: int = PLAIN) -> ProbeReport:
    """Compare widths (each at least 2). Costs a short prompt, max(widths) + 1 plain steps, and three forwards a width."""
    with device.private_kernels():
        return _probe(model, sorted(set(widths)), kv_bits)


def _probe(model: Model, widths: list[int], kv_bits: int) -> ProbeReport:
    if not widths:
        return ProbeReport(widths=(), context=0)
    longest = widths[-1]
    context = min(PROMPT, model.max_context - longest - 2)
    if context < 1 or widths[0] < 2:
        raise ValueError(f"cannot probe widths {widths} in a context of {model.max_context}")
    text = np.random.default_rng(0).integers(0, model.vocab_size, context + longest + 1).tolist()
    start = _prompt(model, text[:context], kv_bits)
    rest = text[context:]
    plain = _steps(model, start, rest, kv_bits)
    found = []
    for width in widths:
        behind = rest[width : width + 1]
        verified, after = _verify(model, start, rest[:width], width, behind, kv_bits)
        _, after_part = _verify(model, start, rest[:width], 1, rest[1:2], kv_bits)
        pairs = [
            (verified, plain[:width]),
            (after, plain[width : width + 1]),
            (after_part, plain[1:2]),
        ]
        found.append(
            WidthVerdict(
                width=width,
                is_bitwise=all(_same_bits(a, b) for a, b in pairs),
                same_argmax=bool((verified.argmax(-1) == plain[:width].argmax(-1)).all()),
                largest=max(float(np.abs(a - b).max()) for a, b in pairs),
            )
        )
    return ProbeReport(widths=tuple(found), context=context)


def _prompt(model: Model, tokens: list[int], kv_bits: int) -> Snapshot:
    cache = model.make_cache(1, kv_bits=kv_bits)
    _run(model, cache, tokens)
    return cache.snapshot(0)


def _steps(model: Model, start: Snapshot, tokens: list[int], kv_bits: int) -> NDArray[np.float32]:
    """Logits (len(tokens), V) of plain steps."""
    cache = model.make_cache(1, kv_bits=kv_bits)
    cache.restore(start)
    return np.concatenate([_run(model, cache, [token]) for token in tokens])


def _verify(
    model: Model, start: Snapshot, tokens: list[int], kept: int, behind: list[int], kv_bits: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Logits of one wide forward, and of a plain step behind the first `kept` of its tokens."""
    cache = model.make_cache(1, kv_bits=kv_bits)
    cache.restore(start)
    return _run(model, cache, tokens, kept), _run(model, cache, behind)


def _run(model: Model, cache: ModelCache, tokens: list[int], kept: int | None = None) -> NDArray[np.float32]:
    """Logits (len(tokens), V) of a forward of which `kept` tokens are committed, None for all of certain ones."""
    ids = mx.array(np.asarray(tokens, np.int32))
    out = model.forward(ids, FlatRows((len(tokens),)), cache, certain=kept is None)
    cache.commit(*([] if kept is None else [[kept]]))
    if out.logits is None:
        raise ValueError("logits were asked for")
    return numbers(out.logits)


def _same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return bool((a.view(np.uint32) == b.view(np.uint32)).all())
