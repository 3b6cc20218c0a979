"""Compares a verify of k tokens with k plain steps, bit for bit, on the weights of a loaded model.

Kernels of matrix products and attention are chosen by shape, so the same token may get other bits in a verify than in a plain step, and at
a near tie another token. This module uses a model and token ids, and neither requests nor drafters.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.quantized import PLAIN
from mlxspec.cache.snapshot import Snapshot
from mlxspec.cache.unread import UnreadCommit
from mlxspec.kernels import exactness
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.products import keeps_bits
from mlxspec.kernels.quantized_weight import dtype_of_rows
from mlxspec.models.base import Model
from mlxspec.models.tune import raced_weights
from mlxspec.platform import device
from mlxspec.platform.host import numbers

PROMPT = 48  # tokens before the verified ones
PROBE_AT_MOST = 17  # tokens: a wider verify is rare, and each width costs a compilation


@dataclass(frozen=True, kw_only=True)
class WidthVerdict:
    """The result of the exactness probe for one width, in tokens, of a round. Plain steps are forwards of one token.

    is_bitwise: whether logits have the bits of plain steps in a verify of this width, in a round of two rows with this number of tokens
    together, in a verify launched before the one in front of it is read, and in a plain step after a verify that was committed whole or
    in part. Because a short test may give equal bits by chance, it is also False where a quantized product of this width is computed in
    another order than in a plain step. same_argmax: whether each place has the same likeliest token. largest: largest difference of a
    logit.
    """

    width: int
    is_bitwise: bool
    same_argmax: bool
    largest: float


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """The results of an exactness probe. widths: one for each width tried. context: number of tokens in front of the verified ones."""

    widths: tuple[WidthVerdict, ...]
    context: int

    @property
    def is_exact(self) -> bool:
        """Return whether every width that was tried has the bits of plain steps."""
        return all(v.is_bitwise for v in self.widths)

    @property
    def exact_width(self) -> int:
        """Return the largest width such that it and every smaller one has the bits of plain steps; 1 where not even two tokens have
        them."""
        found = 1
        for verdict in sorted(self.widths, key=lambda v: v.width):
            if not verdict.is_bitwise or verdict.width != found + 1:
                break
            found = verdict.width
        return found

    def sentence(self) -> str:
        """Return one or two sentences for a person: whether verifies give the bits of plain steps, up to which width, and by how much
        logits differ."""
        if not self.widths:
            return "No verify width was tried."
        tried = f"up to {max(v.width for v in self.widths)} tokens"
        if self.is_exact:
            return f"Verifying {tried} gives the same bits as plain steps: such rounds are bit-exact."
        largest = max(v.largest for v in self.widths)
        flips = [v.width for v in self.widths if not v.same_argmax]
        exact = f"Rounds of up to {self.exact_width} tokens are bit-exact. " if self.exact_width > 1 else ""
        moved = f"{exact}Verifying {tried} moves logits by at most {largest:.1e}"
        if flips:
            return f"{moved} and changed the top token at width {flips[0]}. Greedy text can differ from plain decoding."
        return f"{moved} and never changed the top token. Greedy text matches plain decoding except at near ties."

    @classmethod
    def read(cls, data: Any) -> ProbeReport | None:
        """Return the report in plain objects, which `dataclasses.asdict` made; None where they are not a report."""
        try:
            return cls(widths=tuple(WidthVerdict(**each) for each in data["widths"]), context=data["context"])
        except (TypeError, KeyError):
            return None


def probe(model: Model, widths: Sequence[int], *, kv_bits: int = PLAIN) -> ProbeReport:
    """Compare a verify of each width (at least 2) with plain steps over the same tokens, bit for bit, and return a verdict for each
    width. This runs a short prompt, max(widths) + 1 plain steps, and at most seven forwards for each width. kv_bits: of the caches,
    as in EngineConfig."""
    pieces = probing(model, widths, kv_bits=kv_bits)
    while True:
        try:
            next(pieces)
        except StopIteration as done:
            found: ProbeReport = done.value
            return found


def probing(
    model: Model, widths: Sequence[int], *, kv_bits: int = PLAIN
) -> Generator[None, None, ProbeReport]:
    """Run the comparison of `probe` as a generator, which yields after each forward and returns the report. Arguments are those of
    `probe`."""
    widths = sorted(set(widths))
    if not widths:
        return ProbeReport(widths=(), context=0)
    longest = widths[-1]
    context = min(PROMPT, model.max_context - longest - 2)
    if context < 1 or widths[0] < 2:
        raise ValueError(f"cannot probe widths {widths} in a context of {model.max_context}")
    text = np.random.default_rng(0).integers(0, model.vocab_size, context + longest + 1).tolist()
    cache, rest, steps = model.make_cache(1, kv_bits=kv_bits), text[context:], list[NDArray[np.float32]]()
    _run(model, cache, text[:context])
    start = cache.snapshot(0)
    for token in rest:
        steps.append(_run(model, cache, [token]))
        yield
    plain, found = np.concatenate(steps), list[WidthVerdict]()
    module = getattr(model, "module", model)  # of a model by mlx-lm's code
    weights = [(w, dtype_of_rows(w, model.dtype)) for w in raced_weights(module)]
    for width in widths:
        largest, same_argmax = 0.0, True
        is_bitwise = all(keeps_bits(width, w, dtype, exact=exactness.is_demanded) for w, dtype in weights)
        for logits, places in _forwards(model, start, rest, width, kv_bits):
            wanted = plain[places]
            is_bitwise = is_bitwise and bool((logits.view(np.uint32) == wanted.view(np.uint32)).all())
            same_argmax = same_argmax and bool((logits.argmax(-1) == wanted.argmax(-1)).all())
            largest = max(largest, float(np.abs(logits - wanted).max()))
            yield
        found.append(
            WidthVerdict(width=width, is_bitwise=is_bitwise, same_argmax=same_argmax, largest=largest)
        )
    return ProbeReport(widths=tuple(found), context=context)


def _forwards(
    model: Model, start: Snapshot, rest: Sequence[int], width: int, kv_bits: int
) -> Iterator[tuple[NDArray[np.float32], list[int]]]:
    """Yield the logits (n, V) of each forward that tests this width, and for each of its n places how many tokens of `rest` come before
    the token there. start: the state before `rest`."""

    def restored() -> ModelCache:
        cache = model.make_cache(1, kv_bits=kv_bits)
        cache.restore(start)
        return cache

    verified = list(range(width))
    for kept in (width, 1):
        cache = restored()
        yield _run(model, cache, rest[:width], kept), verified
        yield _run(model, cache, rest[kept : kept + 1]), [kept]
    cache = restored()
    cache.join(restored())
    rows = FlatRows((1, width - 1))
    yield _run(model, cache, [rest[0], *rest[: width - 1]], [1, 1], rows), [0, *verified[:-1]]
    cache = restored()
    if not cache.needs_lengths:
        yield _run(model, cache, rest[:width], mx.array([1], mx.int32)), verified
        yield _run(model, cache, rest[1 : width + 1], [1]), [1 + i for i in verified]


def _run(
    model: Model,
    cache: ModelCache,
    tokens: Sequence[int],
    kept: int | Sequence[int] | mx.array | None = None,
    rows: FlatRows | None = None,
) -> NDArray[np.float32]:
    """Run a forward over `tokens` and return its logits (len(tokens), V). kept: how many tokens of each row are committed; None: all, as
    certain tokens. As an array it stays on the device, and the commit is an unread one. A forward after an unread commit is aborted
    instead of committed."""
    rows, is_unread = rows or FlatRows((len(tokens),)), cache.exact is not None
    with device.private_kernels():
        ids = mx.array(np.asarray(tokens, np.int32))
        out = model.forward(ids, rows, cache, certain=kept is None)
        if is_unread:
            cache.abort()
        elif isinstance(kept, mx.array):
            UnreadCommit(cache, kept)
        else:
            cache.commit([kept] if isinstance(kept, int) else kept)
        if out.logits is None:
            raise ValueError("logits were asked for")
        return numbers(out.logits)
