"""The common part of drafters that run a model: a cache that follows the known tokens, and drafts run ahead on a fork of it.

One cache serves all rows, so each forward is batched over them. Knows queues, rows and forks; subclasses know the forward.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.quantized import PLAIN, check_kv_bits
from mlxspec.cache.snapshot import Snapshot
from mlxspec.drafters.base import NO_DRAFT, Ask, Draft, Drafter, DrafterFailed
from mlxspec.drafters.proposals import Proposals
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import LogitsAt, Output
from mlxspec.models.head_rows import HeadRows
from mlxspec.models.image_rows import ImageInput, RowPiece, SeenImages, image_input
from mlxspec.models.reads import Reads, drafted_reads
from mlxspec.models.sizes import bytes_of
from mlxspec.platform import device
from mlxspec.platform.host import numbers
from mlxspec.sampling.noise import Positions, Shifted
from mlxspec.sampling.sampler import OF_A_DRAW, BatchSampler

QUEUE_AT_MOST = (
    512  # tokens a row may queue before they are run without drafting: bounds what a long prompt holds
)
_LOOKS = (
    3  # tokens that are drafted between two waits for their confidences: each wait lets the device fall idle
)
_FEW = 8  # tokens of a row that a round may leave behind: such forwards repeat, and those of a prompt do not
_OF_A_STEP = 30  # kernels that Metal launches for one forward of a small head, for `device.start`


class _Row:
    """The tokens of a row that the drafter's model has not run yet, with their hidden states. num_skipped: number of the row's first tokens
    that are never run."""

    def __init__(self) -> None:
        self.num_skipped = 0
        self.tokens: list[int] = []
        self.hidden: list[mx.array] = []

    def take(self) -> tuple[list[int], list[mx.array]]:
        taken = self.tokens, self.hidden
        self.tokens, self.hidden = [], []
        return taken

    def take_first(self, num: int) -> tuple[list[int], list[mx.array]]:
        """Remove the first `num` queued tokens and return them with their hidden states."""
        if num == len(self.tokens):
            return self.take()
        tokens, hidden = self.take()
        self.tokens = tokens[num:]
        if not hidden:
            return tokens[:num], []
        joined = _join(hidden)
        self.hidden = [joined[num:]]
        return tokens[:num], [joined[:num]]


class DraftStep(NamedTuple):
    """One forward of a drafter's model over known or drafted tokens.

    tokens (N,) int32, of `rows` in the order of `cache`, whose transaction stays open. hidden (N, H): the hidden state that each token was
    sampled from, None where the drafter needs none. logits_at: the tokens whose logits are computed. images: given where the drafter's
    `sees_images` is true and some of the tokens are image tokens. certain: all tokens are committed.
    """

    tokens: mx.array
    hidden: mx.array | None
    rows: FlatRows
    cache: ModelCache
    logits_at: LogitsAt
    images: ImageInput | None = None
    certain: bool = True


class ModelDrafter(Drafter):
    """A drafter that runs a model: a draft model or a head. Every known token is run once and committed to its cache; drafted tokens are
    run on a fork that is dropped.

    model: the module that drafts. max_context: tokens of a row at which the drafter ends for it. skips: number of a row's first tokens
    without a cell in the cache: they are never run, and cell i belongs to token i + skips. drafts_at_once: whether one forward makes a
    whole draft, so that a further token costs next to nothing. head_rows: rows of the language-model head that drafts are chosen from, in
    addition to those of tokens that the row's text contains; None: the whole head.

    sees_images: whether `_forward` takes images. A drafter that does not ends for rows with images. turns_by_axes: whether the rotary
    positions are the target's, and not indices.

    uses_whole_head: choose drafts from the whole head all the same, to compare the two; changed between rows only.

    kv_bits: bits in which layers that attend to the whole context keep keys and values: 4, 8, or 16 for unquantized.

    is_warm: whether no forward has compiled anything since a caller set it to True.
    """

    skips: ClassVar[int] = 0
    drafts_at_once: ClassVar[bool] = False
    sees_images: ClassVar[bool] = False
    turns_by_axes: ClassVar[bool] = True

    def __init__(
        self, model: Any, max_context: int, head_rows: HeadRows | None = None, *, kv_bits: int = PLAIN
    ) -> None:
        """Draft with `model`, a module of mlxspec's or a Model. head_rows: the rows of the language-model head that drafts are chosen from.
        Raises ConfigError where its keys and values cannot be kept in kv_bits."""
        self.model, self.max_context, self.kv_bits = model, max_context, kv_bits
        self.reduced = None if head_rows is None else Proposals(head_rows)
        self.uses_whole_head = False
        self._cache: ModelCache | None = None
        self._order: list[int] = []  # row names in cache order
        self._rows: dict[int, _Row] = {}
        self.is_warm = True
        self._ended: dict[int, str] = {}  # rows we gave up, and why; told at the next draft
        self._seen: dict[int, SeenImages] = {}  # of rows with images
        if kv_bits != PLAIN:
            whole = self._make_cache(0, PLAIN).layers
            check_kv_bits(whole, kv_bits, f"The drafter {self.name}", "draft_kv_bits")

    def num_queued(self, row: int) -> int:
        """Return the number of known tokens of the row that the next `draft` has to run, the newest included."""
        state = self._rows.get(row)
        return 0 if state is None else len(state.tokens)

    @property
    def proposals(self) -> Proposals | None:
        """Return the rows of the language-model head that the next logits are computed from, None for the whole head."""
        return None if self.uses_whole_head else self.reduced

    @property
    def ids(self) -> mx.array | None:
        """Return the target's token ids (R,) int32 that the columns of the next logits (N, R) belong to; None: all ids in order."""
        return None if self.proposals is None else self.proposals.ids

    def _taken(self, hidden: mx.array) -> mx.array:
        """Return the target's hidden states (N, H) of known tokens in the form that `_forward` takes."""
        return hidden

    @property
    def reads(self) -> Reads:
        """Return the weights that drafting one token reads, the language-model head included. The first guess of the drafter's cost follows
        from their bytes."""
        return drafted_reads(self.model, head=None if self.proposals is None else self.proposals.weight_bytes)

    @property
    def modules(self) -> Sequence[nn.Module] | None:
        return (self.model,)

    @property
    def weight_bytes(self) -> int:
        return bytes_of(self.model) + (0 if self.reduced is None else self.reduced.weight_bytes)

    def _make_cache(self, num_rows: int, kv_bits: int | None = None) -> ModelCache:
        found: ModelCache = self.model.make_cache(
            num_rows, kv_bits=self.kv_bits if kv_bits is None else kv_bits
        )
        return found

    @abstractmethod
    def _forward(self, step: DraftStep) -> Output:
        """Run the step's tokens and return hidden states and logits. Logits have the columns `ids` where these are not all tokens."""

    def _own_head(self, out: Output, step: DraftStep) -> Output:
        """Return `out`, which has no logits, with the logits of each active row's last token over the rows of the head in use."""
        if self.proposals is None or step.logits_at == "none":
            return out
        names = [self._order[i] for i in step.rows.active]
        return replace(out, logits=self.proposals.logits(step.rows.last(out.hidden), names))

    def begin(self, row: int) -> None:
        self._add(row, self._make_cache(1))

    def see(self, row: int, seen: SeenImages) -> None:
        if not self.sees_images:
            raise DrafterFailed("it sees no images, and the prompt has some")
        self._seen[row] = seen

    def _add(self, row: int, cache: ModelCache) -> None:
        if self._cache is None:
            self._cache = cache
        else:
            self._cache.join(cache)
        self._order.append(row)
        self._rows[row] = _Row()

    def hear(self, row: int, tokens: Sequence[int], hidden: mx.array | None) -> None:
        state = self._rows.get(row)
        if state is None:
            return
        skipped = min(self.skips - state.num_skipped, len(tokens))
        state.num_skipped += skipped
        state.tokens += tokens[skipped:]
        if hidden is not None and len(tokens) > skipped:
            state.hidden.append(hidden[skipped:] if skipped else hidden)
        if self._length(row) + len(state.tokens) >= self.max_context:
            self._give_up(row, f"its context of {self.max_context} tokens is full")
        elif len(state.tokens) > QUEUE_AT_MOST:
            self.prime(row)

    def prime(self, row: int) -> None:
        """Run the queued tokens of a row, except the last one: the next draft begins with it."""
        state = self._rows.get(row)
        if state is not None and len(state.tokens) > 1:
            cache = self._run({row: state.take_first(len(state.tokens) - 1)}, "none")[0]
            mx.eval(cache.arrays)

    def draft(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        owners = {a.row: i for i, a in enumerate(asks)}
        # an open row's history is shorter than max_context: there is room for one drafted token at least
        fits = [
            a._replace(limit=min(a.limit, self.max_context - len(a.history)))
            for a in asks
            if a.row in self._rows and self._rows[a.row].tokens
        ]
        done = self._draft(fits, sampler, owners) if fits else {}
        return [done.get(a.row) or NO_DRAFT._replace(ended=self._ended.pop(a.row, None)) for a in asks]

    def snapshot(self, row: int, length: int, start: int) -> Snapshot | None:
        """Return the row's state after its first `length` tokens. Queued tokens among these are run first: they would have to be run before
        the next draft anyway."""
        state = self._rows.get(row)
        if state is None or self._cache is None:
            return None
        missing = length - self._length(row)
        if missing < 0:
            return None  # it has run further: never so where the target's length is asked for
        if missing:
            self._run({row: state.take_first(missing)}, "none")
        skipped = state.num_skipped
        cells = self._cache.snapshot(self._order.index(row), max(0, start - skipped))
        return _of_tokens(cells, start, skipped)

    def resume(self, row: int, tokens: Sequence[int], state: Snapshot | None) -> None:
        """Restore a row's state and run the tokens that it lacks, as a prompt is read: the drafts that follow are those of a request
        without the prefix cache."""
        known = 0 if state is None else state.length
        if len(tokens) >= self.max_context:
            self._give_up(row, f"its context of {self.max_context} tokens is full")
            return
        if state is not None:
            seen = self._seen.get(row)
            self.forget(row)
            cache = self._make_cache(1)
            cache.restore(_of_cells(state, self.skips))
            self._add(row, cache)
            self._rows[row].num_skipped = self.skips
            if seen is not None:
                self._seen[row] = seen
                self._turn(row)
        for begin in range(known, len(tokens), QUEUE_AT_MOST):
            self.hear(row, tokens[begin : begin + QUEUE_AT_MOST], None)
        if len(tokens) - known > QUEUE_AT_MOST:
            self.prime(row)

    def forget(self, row: int) -> None:
        self._ended.pop(row, None)
        if self.reduced is not None:
            self.reduced.forget(row)
        self._seen.pop(row, None)
        if self._rows.pop(row, None) is None:
            return
        place = self._order.index(row)
        self._order.pop(place)
        if not self._order:
            self._cache = None
        elif self._cache is not None:
            self._cache.select([i for i in range(len(self._order) + 1) if i != place])

    @property
    def nbytes(self) -> int:
        return 0 if self._cache is None else self._cache.nbytes

    def row_bytes(self, length: int) -> int:
        """Return the most bytes that a row of `length` tokens takes: its part of the cache; its recurrent states twice more, for a
        fork's own and for those that a forward writes in addition to the ones it reads; and, with a reduced head, the head's rows for
        tokens of the text."""
        cache = self._make_cache(0)
        states = sum(layer.bytes_for(length, 1) for layer in cache.layers if layer.is_recurrent)
        own = 0 if self.reduced is None else self.reduced.own_bytes(length)
        return own + 2 * states + cache.bytes_for(length, prefill=QUEUE_AT_MOST, verify=1)

    def _give_up(self, row: int, why: str) -> None:
        self.forget(row)
        self._ended[row] = why

    def _ids(self, row: int, tokens: list[int]) -> list[int]:
        """Return the tokens as ids that the embedding knows: image tokens are replaced by the id of the model's image placeholder."""
        seen = self._seen.get(row)
        return tokens if seen is None else seen.images.ids(tokens)

    def _turn(self, row: int) -> None:
        """Set the rotary positions of the tokens that follow the row's cache to the target's."""
        seen = self._seen.get(row)
        if seen is not None and self._cache is not None and self.turns_by_axes:
            place = self._order.index(row)
            self._cache.shift(place, seen.images.shift(self._cache.lengths[place]))

    def _length(self, row: int) -> int:
        """Return the number of the row's tokens that have been run or skipped."""
        if self._cache is None:
            return 0
        return self._rows[row].num_skipped + self._cache.lengths[self._order.index(row)]

    def _draft(self, asks: Sequence[Ask], sampler: BatchSampler, owners: dict[int, int]) -> dict[int, Draft]:
        """Return a draft for each row number: one forward runs the queued tokens and drafts the first token, further steps run on a fork of
        the cache. All arrays are lazy."""
        self._open(asks)
        cache, out = self._run({a.row: self._rows[a.row].take() for a in asks}, "last")
        hidden = self._last_rows.last(out.hidden)
        return self._go_on(cache, asks, out.logits, hidden, sampler, owners)

    def _open(self, asks: Sequence[Ask]) -> None:
        """Select the rows of the language-model head for the logits of a draft of these rows."""
        if self.proposals is not None:
            self.proposals.open({a.row: a.history for a in asks})

    def _go_on(
        self,
        cache: ModelCache,
        asks: Sequence[Ask],
        logits: mx.array | None,
        hidden: mx.array,
        sampler: BatchSampler,
        owners: dict[int, int],
        shift: tuple[mx.array, int] | None = None,
    ) -> dict[int, Draft]:
        """Return drafts by row number that follow what `cache` has run. logits and hidden (asks, ...): of each row's last token, in the
        cache's order of rows.

        shift: how many tokens more than their histories the rows have, (asks,) int32 in the cache's order, and the largest of these
        numbers; `cache` is a fork then.
        """
        fork = None if shift is None else cache
        # the order of logits is the cache's
        active = sorted(asks, key=lambda a: self._order.index(a.row))
        tokens: dict[int, list[mx.array]] = {a.row: [] for a in asks}
        sure: dict[int, list[mx.array]] = {a.row: [] for a in asks}
        depth = 0
        while logits is not None:
            first = [len(a.history) + depth for a in active]
            positions: Positions = first if shift is None else Shifted(first, *shift)
            ids = self.ids
            chosen, sureness = sampler.draft(logits, [owners[a.row] for a in active], positions, ids)
            for i, ask in enumerate(active):
                tokens[ask.row].append(chosen[i : i + 1])
                sure[ask.row].append(sureness[i : i + 1])
            # the tokens only: their confidences are read where somebody asks for them
            device.start(chosen, num_launches=_OF_A_STEP + OF_A_DRAW)
            depth += 1
            looks = depth % _LOOKS == 0
            going = [
                i for i, a in enumerate(active) if a.limit > depth and not (looks and _ends(a, sure[a.row]))
            ]
            if not going:
                break
            if len(going) < len(active):
                index = mx.array(going)
                chosen, hidden = chosen[index], hidden[index]
                active = [active[i] for i in going]
                shift = None if shift is None else (shift[0][index], shift[1])
            fork = fork or cache.fork(tails=device.has_gpu())
            names = {a.row for a in active}
            rows = FlatRows(tuple(1 if name in names else 0 for name in self._order))
            out = self._forward(DraftStep(chosen, hidden, rows, fork, "last"))
            self.is_warm = self.is_warm and out.is_warm
            fork.commit()
            logits, hidden = out.logits, out.hidden
        return {a.row: Draft(len(tokens[a.row]), _join(tokens[a.row]), _join(sure[a.row])) for a in asks}

    def _run(
        self,
        work: Mapping[int, tuple[list[int], list[mx.array]]],
        logits_at: LogitsAt,
        coming: Mapping[int, tuple[mx.array, mx.array]] = MappingProxyType({}),
    ) -> tuple[ModelCache, Output]:
        """Run the queued tokens of some rows in one forward and commit them. coming: by row, tokens (n,) that only the device knows,
        with their hidden states (n, H): they are run after the queued ones and not committed. Returns the drafter's cache and the
        output."""
        cache = self._cache
        if cache is None:
            raise RuntimeError("no rows")  # nothing is run before a row has begun
        known = [len(work[name][0]) if name in work else 0 for name in self._order]
        widths = [
            num + (len(coming[name][0]) if name in coming else 0)
            for name, num in zip(self._order, known, strict=True)
        ]
        rows = FlatRows(tuple(widths), is_prompt=max(known) > _FEW)
        images: ImageInput | None = None
        if any(name in self._seen for name in work):
            pieces = map(RowPiece, map(self._seen.get, self._order), cache.lengths, widths)
            images = image_input(list(pieces), skips=self.skips, axes=self.turns_by_axes)
        flat, hiddens = list[Sequence[int] | mx.array](), list[mx.array]()
        for name in self._order:
            if name in work:
                flat.append(self._ids(name, work[name][0]))
                hiddens += work[name][1]
            if name in coming:
                flat.append(coming[name][0])
                hiddens.append(coming[name][1])
        try:
            hidden = self._taken(_join(hiddens)) if hiddens else None
            step = DraftStep(_tokens(flat), hidden, rows, cache, logits_at, images, certain=not coming)
            out = self._forward(step)
        except BaseException:
            cache.abort()
            raise
        cache.commit(known)
        for name in work:
            self._turn(name)
        self.is_warm = self.is_warm and out.is_warm
        self._last_rows = rows
        return cache, out


def _ends(ask: Ask, sure: Sequence[mx.array]) -> bool:
    """Return whether a draft ends after tokens with these confidences, each (1,). Waits for them to be computed."""
    return ask.stops is not None and ask.stops([numbers(s).item() for s in sure])


def _of_tokens(cells: Snapshot, start: int, skipped: int) -> Snapshot:
    """Return a snapshot of a cache's cells as a snapshot of the row's tokens from `start` on, because the prefix cache cuts by tokens.
    Zeros fill the places of tokens that have no cell."""
    missing = max(0, skipped - start)
    segments = cells.segments
    if missing:
        (layers,) = segments
        segments = [[tuple(_shifted(x, missing) for x in kv) for kv in layers]]
    return Snapshot(cells.length + skipped, segments, cells.point, start)


def _shifted(x: mx.array, num: int) -> mx.array:
    """Return x (1, H, n, D) with `num` zeros before it: (1, H, num + n, D)."""
    return mx.pad(x, [(0, 0), (0, 0), (num, 0), (0, 0)])


def _of_cells(tokens: Snapshot, skips: int) -> Snapshot:
    """Return a snapshot of a row's tokens as a snapshot of the cache's cells, without the leading zeros; the inverse of `_of_tokens`. Every
    segment holds at least one token, and `skips` is at most 1."""
    if not skips:
        return tokens
    first, *others = tokens.segments
    cut = [tuple(x[:, :, skips:] for x in kv) for kv in first]
    return Snapshot(tokens.length - skips, [cut, *others], tokens.point)


def _tokens(parts: Sequence[Sequence[int] | mx.array]) -> mx.array:
    """Concatenate known tokens and arrays (n,) of tokens that only the device knows into one array (N,) int32."""
    found, known = list[mx.array](), list[int]()
    for part in parts:
        if isinstance(part, mx.array):
            found += [*([mx.array(np.asarray(known, np.int32))] if known else []), part]
            known = []
        else:
            known += part
    return _join([*found, mx.array(np.asarray(known, np.int32))] if known or not found else found)


def _join(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)
