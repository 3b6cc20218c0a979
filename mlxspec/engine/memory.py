"""Plans memory: how many bytes the engine may take, and how many a request will. One budget covers weights, rows, drafters, the chunk of a
prompt that is being read, and the prefix cache, which gets what the others leave. Only numbers of bytes are computed here."""

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
_WAITING_SHARE = 8  # prompts that wait get at most 1 / _WAITING_SHARE of what the weights leave
_STORE_SHARE, _STORE_AT_MOST = 4, 8 << 30  # the prefix cache gets at most 1 / 4 of it, and these bytes
# Of each token of a chunk, float32 numbers that are alive at once, in hidden sizes: a feed-forward layer's gate, up and product at three to
# four each, projections of queries, keys and values, a recurrence's inputs, and what the graph has not let go of yet.
_ALIVE = 64


class _Reserved(NamedTuple):
    """The memory that is reserved for one request. nbytes: of its row. length: most tokens of its row. tower: bytes that the vision
    tower needs for its largest image."""

    nbytes: int
    length: int
    tower: int


class EngineMemory:
    """The memory plan of one engine. budget: bytes of all that the engine may take. weights: bytes of the weights. prefix_budget: most
    bytes of the prefix cache. verify: tokens of a row's widest verify. full_chunk: prompt tokens that are read at once where memory
    allows it. config: its kv_bits determines the size of keys and values. watch: limits the pieces of prompts by the time that they
    take."""

    def __init__(
        self,
        model: Model,
        drafters: Iterable[Drafter],
        config: EngineConfig,
        verify: int,
        vision: int = 0,
        tower: VisionTower | None = None,
    ) -> None:
        """Compute the budget and the parts of it that weights and prefix cache take. vision: bytes of the vision tower and of the rows
        that are kept of images. tower: that tower. Raises MemoryBudgetError where the weights alone do not fit."""
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
        """Reserve this number of bytes of the budget for another model. Raises MemoryBudgetError where nothing would be left."""
        self.weights += num_bytes
        check_weights(self.weights, self.config.memory_budget)

    @property
    def left(self) -> int:
        """Return the bytes of the budget that the weights leave."""
        return self.budget - self.weights

    def agree(self, left: int) -> None:
        """Set the budget to the one that all ranks share. left: the least number of bytes that any rank has in addition to its weights.
        Pieces of prompts no longer depend on this rank's clock."""
        self.watch.may_shorten = False
        self.budget = self.weights + left
        if self.config.prefix_budget is None:
            self.prefix_budget = min(left // _STORE_SHARE, _STORE_AT_MOST)

    def close(self) -> None:
        """Release the model and the drafters. No method that takes a request may be called afterwards, except `release`."""
        self._drafters, self._reserved, self.weights, self.prefix_budget = (), {}, 0, 0
        self._tower, self._wide = None, []
        vars(self).pop("_model", None)

    def read_by(self, num_tokens: int) -> None:
        """Set the number of prompt tokens that are read at once from now on, where memory allows it."""
        self.full_chunk = num_tokens
        device.adjust(self, self.scratch)

    @property
    def reserved(self) -> int:
        """Return the bytes that are reserved for all rows, at the longest that they may become."""
        return sum(r.nbytes for r in self._reserved.values())

    def needed(self, request: Request) -> int:
        """Return the bytes of a request's row at its greatest length, with its drafters' state, its images and its data on the host."""
        found = self.row(request.most_tokens, request.spec) + request.host_bytes
        if request.seen is not None:  # the rows of its images
            found += request.seen.images.num_tokens * self._model.hidden_size * self._model.dtype.size
        return found

    def most_tokens(self, spec: SpecConfig) -> int:
        """Return the length, in tokens, of the longest row that fits into memory alone, with the prefix cache at its limit; 0 where no
        row fits."""
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
        """Return the bytes of the arrays of a row of `length` tokens, the target's and those of the drafters in spec."""
        found = row_bytes(
            self._model.make_cache(0, kv_bits=self.config.kv_bits), length, self.full_chunk, self._verify
        )
        found += sum(d.row_bytes(length) for d in self._drafters if d.name in spec.drafters)
        return found

    def check(self, request: Request) -> None:
        """Raise MemoryBudgetError where a request does not fit into memory even alone, or where macOS is critically short of memory."""
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
        """Return whether a request fits into memory in addition to the rows that are reserved. A request that `check` has passed always
        fits alone. While macOS is critically short of memory no second row fits."""
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
        """Reserve the bytes of a request's row."""
        self._reserved[request.number] = _Reserved(
            self.needed(request), request.most_tokens, self._of_tower(request)
        )
        device.adjust(self, self.scratch)

    def grow(self, request: Request) -> None:
        """Reserve memory for the next STEP tokens of a request's answer, if they fit in addition to the other rows; else change nothing."""
        own = self._reserved.pop(request.number)
        request.limit += STEP
        if self._fits(request):
            self.reserve(request)
        else:
            request.limit -= STEP
            self._reserved[request.number] = own

    def may_wait(self, num_tokens: int) -> bool:
        """Return whether prompts of this number of tokens together may wait on the host: they may take a fixed share of the budget that
        the weights leave."""
        return num_tokens * TOKEN_BYTES <= (self.budget - self.weights) // _WAITING_SHARE

    def release(self, request: Request) -> None:
        """Release the bytes that are reserved for a request."""
        self._reserved.pop(request.number, None)
        if hasattr(self, "_model"):  # a closed engine's rows leave too
            device.adjust(self, self.scratch)

    @property
    def chunk(self) -> int:
        """Return the number of prompt tokens to read at a time: fewer than full_chunk where the rows leave little memory, or where
        pieces take too long."""
        chunk = self.watch.limited(self.full_chunk)
        while chunk > self._smallest and self._free < self.activations(chunk, self._longest):
            chunk = max(self._smallest, chunk // 2)
        return chunk

    @property
    def for_store(self) -> int:
        """Return the bytes that the prefix cache may take now: none while macOS is short of memory."""
        if memory_pressure() != "normal":
            return 0
        running = max(self.activations(self.chunk, self._longest), self._largest_tower)
        return max(0, min(self.prefix_budget, self._free - running))

    @property
    def scratch(self) -> int:
        """Return the most bytes that a forward allocates temporarily with the rows that are reserved. The longest context among them is
        rounded up to a power of two, so that the result seldom changes, and is at least DEFAULT_CONTEXT."""
        longest = 1 << max(self._longest - 1, DEFAULT_CONTEXT - 1).bit_length()
        forward = self.activations(self.full_chunk, min(longest, self._model.max_context))
        return max(forward, self._largest_tower)

    def activations(self, chunk: int, context: int, *, rows: int | None = None) -> int:
        """Return the bytes that a forward after `context` tokens allocates while it runs: the larger of reading a chunk of `chunk`
        tokens and of the widest verify of `rows` rows (None: of all reserved rows)."""
        rows = max(1, len(self._reserved)) if rows is None else rows
        reading = self._forward(chunk, chunk, context) + 4 * self._model.vocab_size
        if chunk >= wide.RACED_ROWS[0]:
            reading += max((wide.scratch_bytes(w, dtype) for w, dtype in self._wide), default=0)
        num = rows * self._verify
        logits = 4 * num * self._model.vocab_size
        verifying = self._forward(num, self._verify, context) + logits
        return max(reading, verifying + most_bytes(num, self._model.vocab_size))

    def _forward(self, num: int, width: int, context: int) -> int:
        """Return the bytes, without logits, that a forward of `num` tokens after `context` tokens allocates. width: most of these tokens
        that are in one row."""
        heads = self._model.attention_heads
        scores = max((score_bytes(h, width, context, self.config.kv_bits) for h in heads), default=0)
        # residual streams are alive twice, by themselves and joined
        shown = 2 * len(self._streams.layers)
        hidden_size = self._model.hidden_size
        inner = getattr(self._model, "residual_size", hidden_size)  # logits may replace hidden states
        return 4 * num * (_ALIVE * inner + max(shown, hidden_size > inner) * hidden_size) + scores

    @property
    def _longest(self) -> int:
        return max((r.length for r in self._reserved.values()), default=0)

    @property
    def _largest_tower(self) -> int:
        """Return the bytes that the vision tower needs for the largest image of the reserved rows. Images are read one at a time, and
        not during a forward."""
        return max((r.tower for r in self._reserved.values()), default=0)

    def _of_tower(self, request: Request) -> int:
        """Return the bytes that the vision tower needs for the request's largest image."""
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
    """Return the budget in bytes; None means the default one. Raises MemoryBudgetError where `weights` bytes leave nothing of it."""
    budget = budget or default_budget()
    if weights >= budget:
        raise MemoryBudgetError(
            f"The weights take {_shown(weights)}, drafters included, and memory_budget is {_shown(budget)}: raise it, or "
            "take a smaller model or fewer drafters."
        )
    return budget


def row_bytes(cache: ModelCache, length: int, prefill: int, verify: int) -> int:
    """Return the bytes of a cache's row of `length` tokens, with the second copy of recurrent states that a forward writes. prefill,
    verify: tokens of a row that one forward reads or verifies at most. The cache itself needs no rows."""
    states = sum(layer.bytes_for(length, verify) for layer in cache.layers if layer.is_recurrent)
    return states + cache.bytes_for(length, prefill=prefill, verify=verify)


def _shown(nbytes: int) -> str:
    if nbytes < 1 << 18:
        return f"{nbytes / (1 << 10):.1f} KiB"
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 28 else f"{nbytes / (1 << 20):.1f} MiB"


def default_budget() -> int:
    """Return the bytes that this machine gives to MLX. On a Mac at least 4 GiB and at least 15 % of the memory stay for the system."""
    most = machine_memory()
    total = mx.device_info().get("memory_size") if device.has_gpu() else None
    if isinstance(total, int) and total > 0:
        most = min(most, total - max(4 << 30, total * 15 // 100))
    return max(most, 1 << 30)
