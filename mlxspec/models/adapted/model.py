"""A module of mlx-lm as a model of ours: a forward over the flat token axis, a factory of caches, a size.

All rows run in one forward where the module has seams for it (models/seams.py). Else parts of it run row by row over mlx-lm's own caches
(parts.py), or all of it, and only the head runs once for all rows. Knows the contract; knows no architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.quantized import PLAIN
from mlxspec.errors import CacheError, ModelError
from mlxspec.kernels.attention import Heads
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.adapted.cache import AdaptedCache
from mlxspec.models.adapted.calls import find_calls
from mlxspec.models.adapted.parts import find_parts
from mlxspec.models.adapted.sizes import LeafForm, measured
from mlxspec.models.adapted.split import (
    Product,
    behind_product,
    find_layers,
    find_product,
    find_trunk,
    first_input,
    run_head,
    run_trunk,
    tapped,
)
from mlxspec.models.adapted.stand_in import Place, standing_in
from mlxspec.models.adapted.stepwise import watch
from mlxspec.models.base import LogitsAt, Output
from mlxspec.models.cut_layers import piece_before, piece_behind
from mlxspec.models.gate import AdapterGate
from mlxspec.models.image_rows import ImageInput
from mlxspec.models.seams import FlatLayer, SeamError, Seams, attending_by_row, blank_layers, find_seams
from mlxspec.models.segments import SegmentRun, Segments
from mlxspec.models.sizes import bytes_of


@dataclass(frozen=True, kw_only=True)
class AdaptedConfig:
    """The facts on a model that runs by mlx-lm's code. made_by: mlx-lm and its version, or "mlxspec". told: config.json as text. num_heads:
    query heads of an attention layer; hidden_size: of the residual stream; 0 where they are unknown. experts_share: the share of the
    experts that a token uses."""

    model_type: str
    made_by: str
    told: str
    max_context: int
    num_heads: int = 0
    hidden_size: int = 0
    experts_share: float = 1.0


class AdaptedModel:
    """A module of mlx-lm with mlxspec's interface of models (models.base.Model). Its construction builds lazy forwards and reads no
    weights.

    module: mlx-lm's module. seams: how all rows run in one forward; None where they cannot, and by_rows then has the reason in half a
    sentence. parts: where seams is None, the submodules that run row by row; None where the whole module does. hidden_size: of the hidden
    states; the vocabulary size where the module has no trunk, as logits are then used as hidden states. notices: sentences on how the
    weights were read. unread: keys of config.json that nothing uses. gate: the adapters of the rows of a forward.
    """

    def __init__(self, module: nn.Module, config: AdaptedConfig) -> None:
        self.module, self.config = module, config
        watch(module)
        self.notices: tuple[str, ...] = ()
        self.unread: tuple[str, ...] = ()
        self.gate = AdapterGate()
        self.max_context = config.max_context
        caches = self.new_caches()
        logits: mx.array = module(mx.ones((1, 2), mx.int32), cache=caches)
        self._trunk = find_trunk(module, self.new_caches)
        self._layers = find_layers(module if self._trunk is None else self._trunk.owner[self._trunk.name])
        hidden = logits if self._trunk is None else self._trunk.hidden
        self.vocab_size, self.hidden_size, self.dtype = logits.shape[-1], hidden.shape[-1], hidden.dtype
        self.seams: Seams | None = None
        self.parts: list[Place] | None = None
        self.by_rows = ""
        self.cut: Segments | None = None
        try:
            self.seams = find_seams(self.new_caches(), self._run)
            self._find_cut()
        except SeamError as error:
            self.by_rows = str(error)
            self._find_parts()

    def _find_cut(self) -> None:
        """Find out whether layers can be cut at their attention. Where they can, set `cut`, by which the parts between attentions are
        compiled."""
        tokens, num, layers = mx.zeros((3, 1), mx.int32), len(self.new_caches()), list(self._layers)
        try:
            self._calls = find_calls(self._layers, num, lambda caches: self._run(tokens, caches))
        except SeamError:
            return
        self._pieces = [(piece_before(call), piece_behind(call)) for call in self._calls]
        self.cut = Segments(layers, self.gate.held)

    def _find_parts(self) -> None:
        try:
            self.parts = find_parts(self.module, self.new_caches, self._run)
        except SeamError as error:
            self.by_rows = f"{self.by_rows}, and {error}"

    def stop_sharing(self, why: str) -> None:
        """Run less of a forward for all rows together from now on: only the parts between states, or nothing. why: the reason, half a
        sentence."""
        if self.seams is not None:
            self.seams, self.by_rows = None, why
            self._find_parts()
        elif self.parts is not None:
            self.parts, self.by_rows = None, f"{self.by_rows}, and by parts {why}"

    @cached_property
    def forms(self) -> Sequence[LeafForm]:
        """Return the form of each leaf of mlx-lm's prompt cache of one row."""
        return measured(self.new_caches, self._run)

    def _run(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        """Run tokens (B, n) over mlx-lm's caches, and return the hidden states (B, n, H)."""
        if self._trunk is None:
            logits: mx.array = self.module(tokens, cache=caches)
            return logits
        return run_trunk(self.module, self._trunk, tokens, caches)

    def new_caches(self) -> list[Any]:
        """Return mlx-lm's empty prompt cache of one row."""
        return list(make_prompt_cache(self.module))

    def body(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        """Run one row's tokens (n,) int32 by the module alone, and return their hidden states (n, H). The caches advance."""
        return self._run(tokens[None], caches)[0]

    @property
    def share_by_rows(self) -> float:
        """Return the share of the weights' bytes that a forward reads once for each row, in place of once for all rows."""
        if self.seams is not None or self._trunk is None:
            return float(self.seams is None)
        parts = [(self._trunk.owner, self._trunk.name)] if self.parts is None else self.parts
        return bytes_of(*(owner[name] for owner, name in parts)) / max(1, bytes_of(self.module))

    @property
    def num_layers(self) -> int:
        """Return the number of layers that `taps` can name: 0 where rows do not share all of a forward."""
        return 0 if self.seams is None else len(self._layers)

    @property
    def residual_size(self) -> int:
        """Return the size of the residual stream, also where logits are used as hidden states."""
        return self.hidden_size if self._trunk is not None else self.config.hidden_size or self.hidden_size

    def parameters(self) -> Any:
        """Return the parameters of mlx-lm's module, nested as in mlx.nn."""
        return self.module.parameters()

    @property
    def attention_heads(self) -> Sequence[Heads]:
        """Return the shapes of the attention heads of layers that attend to the whole context."""
        if self.seams is not None:
            return self.seams.attention_heads
        found = {
            Heads(
                self.config.num_heads or form.shapes[0][1], form.shapes[0][1], form.shapes[0][3], self.dtype
            )
            for form in self.forms
            if form.is_per_token
        }
        return sorted(found, key=str)

    def make_cache(self, num_rows: int, *, kv_bits: int = PLAIN) -> ModelCache:
        """Return an empty cache of `num_rows` rows. kv_bits: as in models.base.Model. Raises CacheError where the caches cannot quantize
        keys and values to this number of bits."""
        if self.seams is not None:
            return self.seams.make_cache(num_rows, kv_bits=kv_bits)
        if kv_bits != PLAIN:
            raise CacheError("mlx-lm's caches keep keys and values as they are computed.")
        return AdaptedCache(self.new_caches, self.forms, num_rows)

    def forward(
        self,
        tokens: mx.array,
        rows: FlatRows,
        cache: ModelCache,
        *,
        certain: bool = False,
        logits_at: LogitsAt = "all",
        taps: Sequence[int] = (),
        images: ImageInput | None = None,
    ) -> Output:
        """Run a forward as in models.base.Model.forward, and return its Output. Raises ModelError where images are given, and for taps
        where `num_layers` is 0."""
        if images is not None:
            raise ModelError("Models that run by mlx-lm's code read no images.")
        if taps and self.seams is None:
            raise ModelError(
                f"This model shows no layers, since its rows do not share all of a forward: {self.by_rows}."
            )
        places, found = cache.begin(rows, certain=certain), dict[int, mx.array]()
        run = None if self.cut is None else self.cut.begin(rows, taps)
        if self.seams is not None:
            self.gate.open(cache.scales, rows)
            caches = self.seams.layers(cache, places)
            if run is not None:
                hidden, found = self._run_cut(run, tokens, caches), run.taps
            else:
                with attending_by_row(), tapped(self._layers, taps) as found:
                    hidden = self._run(tokens[:, None], caches)[:, 0]
        elif isinstance(cache, AdaptedCache):
            forward = cache.forward()
            caches = forward.stand_ins(cache.nest)
            if self.parts is None:
                hidden = forward.answer(0, self._run, tokens[None], caches)[0]
            else:
                with standing_in(self.parts, forward.answer):
                    hidden = self._run(tokens[None], caches)[0]
        else:
            raise CacheError("This cache is another model's.")
        hidden = rows.last(hidden) if logits_at == "end" else hidden
        logits = None
        if logits_at in ("all", "last"):
            logits = self.head(rows.last(hidden) if logits_at == "last" else hidden)
        taken = {i: x[:, 0] for i, x in found.items()}
        return Output(logits=logits, hidden=hidden, taps=taken, is_warm=run is None or run.is_warm)

    def _run_cut(self, run: SegmentRun, tokens: mx.array, caches: Sequence[FlatLayer]) -> mx.array:
        """Run a forward whose layers are cut at their attention, and return the hidden states (N, H). The call of the first layer runs all
        layers."""

        def answer(i: int, _: Any, x: mx.array, *__: Any, **___: Any) -> mx.array:
            return x if i else through(x)

        def through(x: mx.array) -> mx.array:
            offset = caches[0].offset
            for i, (call, (before, behind)) in enumerate(zip(self._calls, self._pieces, strict=True)):
                run.add(i, before, offset)
                x, asked = run.through(x)
                held, _ = caches[call.place].update_and_fetch(asked.keys, asked.values)
                attended = held.attend(asked.queries, call.scale, None, asked.sinks)
                run.add(i, behind, attended, offset)
            return run.through(x)[0]

        with attending_by_row(), standing_in([(self._layers, i) for i in range(len(self._layers))], answer):
            return self._run(tokens[:, None], list(caches))[:, 0]

    @property
    def embedding(self) -> Any:
        """Return the embedding module, without the factor by which some models multiply its output. Raises ModelError where there is none
        with rows for the whole vocabulary."""
        for part in self.module.modules():
            if (
                isinstance(part, nn.Embedding | nn.QuantizedEmbedding)
                and part.weight.shape[0] >= self.vocab_size
            ):
                return part
        raise ModelError("This model has no embedding that a drafter could read.")

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the input (N, H) of the first decoder layer for tokens (N,) int32."""
        return first_input(
            self._layers, lambda: self._run(tokens[:, None], blank_layers(len(self.new_caches())))
        )[:, 0]

    @cached_property
    def _product(self) -> Product | None:
        return None if self._trunk is None else find_product(self.module, self._trunk, self.vocab_size)

    @property
    def head_module(self) -> nn.Module | None:
        """Return the module whose weight turns hidden states into logits; None where its rows cannot be used one by one."""
        return None if self._product is None else self._product.module

    def capped(self, logits: mx.array) -> mx.array:
        """Return the model's logits (n, R) from products (n, R) with rows of its language-model head: scaled and capped as the model
        does."""
        if self._trunk is None or self._product is None:
            return logits
        return behind_product(self.module, self._trunk, self._product, logits)

    def head(self, hidden: mx.array) -> mx.array:
        """Return the logits (n, V) of hidden states (n, H)."""
        return hidden if self._trunk is None else run_head(self.module, self._trunk, hidden[None])[0]
