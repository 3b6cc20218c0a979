"""Plans memory: how much the engine may take, and how much a request will. There is one budget over weights, rows, drafters, a chunk of a
prompt being read, and the prefix store, which gets what the others leave. Estimates of bytes; knows no order and no arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import mlx.core as mx

from mlxspec.cache.model_cache import ModelCache
from mlxspec.checkpoints.memory import DEFAULT_CONTEXT, chunk_of
from mlxspec.config import EngineConfig, SpecConfig
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.streams import Streams
from mlxspec.engine.request import STEP, TOKEN_BYTES, Request, text_bytes
from mlxspec.errors import MemoryBudgetError
from mlxspec.kernels import wide
from mlxspec.kernels.attention import score_bytes
from mlxspec.kernels.quantized_weight import dtype_of_rows
from mlxspec.models.base import Model
from mlxspec.models.sizes import bytes_of
from mlxspec.models.tune import wide_weights
from mlxspec.models.vision.base import VisionTower
from mlxspec.platform import device
from mlxspec.platform.macos import memory_pressure
from mlxspec.platform.memory import machine_memory
from mlxspec.platform.watchdog import PromptWatch
from mlxspec.sampling.blocks import most_bytes

SMALLEST_CHUNK = 32  # tokens
_WAITING_SHARE = 8  # of what the weights leave, one part of so many
_STORE_SHARE, _STORE_AT_MOST = 4, 8 << 30  # of what the weights leave, one part of so many; bytes
# Of each token of a chunk, float32 numbers that are alive at once, in hidden sizes: a feed-forward layer's gate, up and product at three to
# four each, projections of queries, keys and values, a recurrence's inputs, and what the graph has not let go of yet.
_ALIVE = 64


class _Reserved(NamedTuple):
    """The memory of one request. nbytes: of its row; length: tokens it may come to have; tower: bytes that reading its largest image
    takes."""

    nbytes: int
    length: int
    tower: int


class EngineMemory:
    """One engine's. budget, weights, prefix_budget in bytes; verify: tokens of the widest verify of a row; full_chunk: tokens of prompts
    that are read at once where memory allows it; config: of it kv_bits says what keys and values take. watch: over the pieces that are
    read."""

    def __init__(
        self,
        model: Model,
        drafters: Iterable[Drafter],
        config: EngineConfig,
        verify: int,
        vision: int = 0,
        tower: VisionTower | None = None,
    ) -> None:
        """vision: bytes of a vision tower and of the rows that are kept of images. tower: that tower. Raises MemoryBudgetError where the
        weights alone do not fit: no request ever would."""
        self._model, self._drafters, self._verify = model, tuple(drafters), verify
        self.config = config
        self._streams = Streams.of(self._drafters, model.hidden_size)
        self.full_chunk = chunk_of(config)
        self.watch = PromptWatch()
        self.weights = bytes_of(model) + sum(d.weight_bytes for d in self._drafters) + vision
        self.budget = check_weights(self.weights, config.memory_budget)
        left = self.budget - self.weights
        default = min(left // _STORE_SHARE, _STORE_AT_MOST)
        self.prefix_budget = default if config.prefix_budget is None else config.prefix_budget
        self._tower = tower
        self._wide = [(w, dtype_of_rows(w, model.dtype)) for w in wide_weights(model, self._drafters)]
        self._reserved: dict[int, _Reserved] = {}  # by request

    def hold(self, num_bytes: int) -> None:
        """Reserve these bytes of the budget for another model. Raises MemoryBudgetError where nothing would be left."""
        self.weights += num_bytes
        check_weights(self.weights, self.config.memory_budget)

    @property
    def left(self) -> int:
        """Bytes that the weights leave of the budget."""
        return self.budget - self.weights

    def agree(self, left: int) -> None:
        """Plan for ranks: as the rank does that has least memory in addition to its weights, `left` bytes. Pieces of prompts do not
        depend on one rank's clock then."""
        self.watch.may_shorten = False
        self.budget = self.weights + left
        if self.config.prefix_budget is None:
            self.prefix_budget = min(left // _STORE_SHARE, _STORE_AT_MOST)

    def close(self) -> None:
        """Let go of model and drafters. Nothing can be asked about requests any more."""
        self._drafters, self._reserved, self.weights, self.prefix_budget = (), {}, 0, 0
        self._tower, self._wide = None, []
        vars(self).pop("_model", None)

    def read_by(self, num_tokens: int) -> None:
        """Set how many tokens of prompts are read at once from now on, where memory allows it."""
        self.full_chunk = num_tokens
        device.adjust(self, self.scratch)

    @property
    def reserved(self) -> int:
        """Bytes of the rows that are here, as long as they may still grow."""
        return sum(r.nbytes for r in self._reserved.values())

    def needed(self, request: Request) -> int:
        """Bytes of a row for all tokens the request may come to have, its drafters', its images and what it keeps on the host included."""
        found = self.row(request.most_tokens, request.spec) + request.host_bytes
        if request.seen is not None:  # the rows of its images
            found += request.seen.images.num_tokens * self._model.hidden_size * self._model.dtype.size
        return found

    def most_tokens(self, spec: SpecConfig) -> int:
        """The longest row that has room alone, beside all that the prefix store may take; 0 where none has."""
        left = self.budget - self.weights - self.prefix_budget
        fits, too_long = 0, self._model.max_context + 1
        while too_long - fits > 1:
            length = (fits + too_long) // 2
            needed = (
                self.row(length, spec) + text_bytes(length) + self.activations(self._smallest, length, rows=1)
            )
            fits, too_long = (length, too_long) if needed <= left else (fits, length)
        return fits

    def row(self, length: int, spec: SpecConfig) -> int:
        """Bytes of arrays of a row of so many tokens."""
        found = row_bytes(
            self._model.make_cache(0, kv_bits=self.config.kv_bits), length, self.full_chunk, self._verify
        )
        found += sum(d.row_bytes(length) for d in self._drafters if d.name in spec.drafters)
        return found

    def check(self, request: Request) -> None:
        """Raise MemoryBudgetError where a request does not fit even alone, or where macOS itself is critically short of memory."""
        if memory_pressure() == "critical":
            raise MemoryBudgetError(
                "This Mac is critically short of memory, so no new request is taken now: close other programs and ask again."
            )
        length = request.most_tokens
        running = max(self.activations(self._smallest, length, rows=1), self._of_tower(request))
        needed = self.weights + self.needed(request) + running
        if needed > self.budget:
            raise MemoryBudgetError(
                f"{length} tokens (the prompt and max_tokens) need {_shown(needed)} with this model, and memory_budget is "
                f"{_shown(self.budget)}: ask for fewer, or raise it."
            )

    def has_room(self, request: Request) -> bool:
        """Whether a request's bytes fit beside the rows that are here; alone they always do, having been checked. None has room beside
        others while macOS is critically short of memory."""
        return not self._reserved or self._fits(request)

    def _fits(self, request: Request) -> bool:
        if memory_pressure() == "critical":
            return False
        longest = max(self._longest, request.most_tokens)
        tower = max(self._of_tower(request), self._largest_tower)
        running = max(self.activations(self._smallest, longest, rows=len(self._reserved) + 1), tower)
        wanted = self.weights + self.reserved + self.needed(request) + running
        return wanted <= self.budget

    def reserve(self, request: Request) -> None:
        """Take its bytes."""
        self._reserved[request.number] = _Reserved(
            self.needed(request), request.most_tokens, self._of_tower(request)
        )
        device.adjust(self, self.scratch)

    def grow(self, request: Request) -> None:
        """Reserve the next STEP tokens of an answer where they fit beside the rows that are here; else change nothing."""
        own = self._reserved.pop(request.number)
        request.limit += STEP
        if self._fits(request):
            self.reserve(request)
        else:
            request.limit -= STEP
            self._reserved[request.number] = own

    def may_wait(self, num_tokens: int) -> bool:
        """Whether prompts of so many tokens may wait on the host: a part of what the weights leave is for them."""
        return num_tokens * TOKEN_BYTES <= (self.budget - self.weights) // _WAITING_SHARE

    def release(self, request: Request) -> None:
        """Release the bytes of a request."""
        self._reserved.pop(request.number, None)
        if hasattr(self, "_model"):  # a closed engine's rows leave too
            device.adjust(self, self.scratch)

    @property
    def chunk(self) -> int:
        """Tokens of prompts to read at a time: fewer where the rows leave little room, or where the watch requires it."""
        chunk = self.watch.limited(self.full_chunk)
        while chunk > self._smallest and self._free < self.activations(chunk, self._longest):
            chunk = max(self._smallest, chunk // 2)
        return chunk

    @property
    def for_store(self) -> int:
        """Bytes that the prefix store may have now: none while macOS is short of memory."""
        if memory_pressure() != "normal":
            return 0
        running = max(self.activations(self.chunk, self._longest), self._largest_tower)
        return max(0, min(self.prefix_budget, self._free - running))

    @property
    def scratch(self) -> int:
        """Bytes that one forward after another needs for itself, at most, with the rows that are here: their longest context, rounded up
        to a power of two so that it seldom changes, and not below DEFAULT_CONTEXT."""
        longest = 1 << max(self._longest - 1, DEFAULT_CONTEXT - 1).bit_length()
        forward = self.activations(self.full_chunk, min(longest, self._model.max_context))
        return max(forward, self._largest_tower)

    def activations(self, chunk: int, context: int, *, rows: int | None = None) -> int:
        """Bytes that a forward behind `context` tokens takes while it runs: reading a chunk of so many, or the widest verify of `rows` rows
        (None: of those that are here), whichever takes more."""
        rows = max(1, len(self._reserved)) if rows is None else rows
        reading = self._forward(chunk, chunk, context) + 4 * self._model.vocab_size
        if chunk >= wide.RACED_ROWS[0]:
            reading += max((wide.scratch_bytes(w, dtype) for w, dtype in self._wide), default=0)
        num = rows * self._verify
        logits = 4 * num * self._model.vocab_size
        verifying = self._forward(num, self._verify, context) + logits
        return max(reading, verifying + most_bytes(num, self._model.vocab_size))

    def _forward(self, num: int, width: int, context: int) -> int:
        """Bytes of a forward of num tokens, up to `width` of a row, without logits."""
        heads = self._model.attention_heads
        scores = max((score_bytes(h, width, context, self.config.kv_bits) for h in heads), default=0)
        # residual streams are alive twice, by themselves and joined
        shown = 2 * len(self._streams.layers)
        hidden_size = self._model.hidden_size
        inner = getattr(self._model, "residual_size", hidden_size)  # where logits stand for hiddens
        return 4 * num * (_ALIVE * inner + max(shown, hidden_size > inner) * hidden_size) + scores

    @property
    def _longest(self) -> int:
        return max((r.length for r in self._reserved.values()), default=0)

    @property
    def _largest_tower(self) -> int:
        """Bytes that reading one image of the rows that are here takes; images are read one at a time, and not during a forward."""
        return max((r.tower for r in self._reserved.values()), default=0)

    def _of_tower(self, request: Request) -> int:
        """Bytes that reading the request's largest image takes."""
        if request.seen is None or self._tower is None:
            return 0
        most = max((len(span.places) for span in request.seen.images.spans), default=0)
        return self._tower.scratch_bytes(most) if most else 0

    @property
    def _free(self) -> int:
        return self.budget - self.weights - self.reserved

    @property
    def _smallest(self) -> int:
        return min(SMALLEST_CHUNK, self.full_chunk)


def check_weights(weights: int, budget: int | None) -> int:
    """The budget in bytes, the default one for None. Raises MemoryBudgetError where `weights` bytes leave nothing of it."""
    budget = budget or default_budget()
    if weights >= budget:
        raise MemoryBudgetError(
            f"The weights take {_shown(weights)}, drafters included, and memory_budget is {_shown(budget)}: raise it, or "
            "take a smaller model or fewer drafters."
        )
    return budget


def row_bytes(cache: ModelCache, length: int, prefill: int, verify: int) -> int:
    """A row of a cache of `length` tokens, with the recurrent states that a forward writes beside those it reads. It needs no rows."""
    states = sum(layer.bytes_for(length, verify) for layer in cache.layers if layer.is_recurrent)
    return states + cache.bytes_for(length, prefill=prefill, verify=verify)


def _shown(nbytes: int) -> str:
    if nbytes < 1 << 18:
        return f"{nbytes / (1 << 10):.1f} KiB"
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 28 else f"{nbytes / (1 << 20):.1f} MiB"


def default_budget() -> int:
    """The bytes that this machine gives to MLX, and on a Mac never so much that the system has less than 4 GiB, or 15 %, of it."""
    most = machine_memory()
    total = mx.device_info().get("memory_size") if device.has_gpu() else None
    if isinstance(total, int) and total > 0:
        most = min(most, total - max(4 << 30, total * 15 // 100))
    return max(most, 1 << 30)
