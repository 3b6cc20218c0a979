"""Races our kernels against MLX's own operations at the shapes of one loaded model, and keeps the results for later processes.

Takes seconds to a minute on a GPU and is never done unasked. Run it before the model's first forward: forwards already compiled keep the
operations they were traced with. Knows modules; knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
import mlx.nn as nn

from mlxspec.kernels import gdn_prefill, gdn_round, kv_attend, launch, products, races, wide
from mlxspec.kernels.conv_ops import GdnShape
from mlxspec.kernels.quantized_kv import KV_BITS
from mlxspec.kernels.quantized_weight import QuantizedWeight
from mlxspec.models.layers import multiplied_weights
from mlxspec.models.qwen3_5_layers import GatedDeltaNet


def tune(model: nn.Module, *, keep: bool = True) -> dict[str, dict[str, float]]:
    """Measure mlxspec's kernels against MLX's operations at the shapes of this model: quantized projections of 1 to 32 rows and of prompts,
    the prefill of the recurrence, and attention to quantized keys and values.

    Return the quotient of MLX's time and the kernel's, by kernel and by what was measured; empty where no kernel can be used. keep: whether
    the results are written to a file for later processes.
    """
    found: dict[str, dict[str, float]] = {}
    dtype = getattr(model, "dtype", None)  # a head has none of its own
    for weight in raced_weights(model):
        for name, ratios in products.tune(weight, dtype).items():
            found.setdefault(name, {}).update(ratios)
    for weight in wide_weights(model):
        for name, ratios in products.tune(weight, dtype, wide.RACED_ROWS).items():
            found.setdefault(name, {}).update(ratios)
    for shape, dtype in recurrences(model):
        for num_tokens in gdn_prefill.RACED_TOKENS:
            found.setdefault("gdn_prefill", {}).update(gdn_prefill.race(shape, dtype, num_tokens))
    for heads in getattr(model, "attention_heads", ()):
        for bits in KV_BITS:
            raced = kv_attend.tune(heads.num, heads.num_kv, heads.dim, heads.dtype, bits)
            found.setdefault(kv_attend.NAME, {}).update(raced)
    found = {name: ratios for name, ratios in found.items() if ratios}
    if found and keep:
        races.save()
    return found


def check_kernels(modules: Iterable[nn.Module]) -> None:
    """Run the self-checks of the recurrence's kernels with the shapes and dtypes of forwards of these modules."""
    for module in modules:
        for shape, dtype in recurrences(module):
            if gdn_round.supports(dtype, shape.k_dim, shape.v_dim):
                launch.check_for(shape, dtype)


def raced_weights(*modules: nn.Module) -> list[QuantizedWeight]:
    """Return the quantized weights that forwards of these modules multiply with few rows, one of each shape and format."""
    return _distinct(modules, with_head=True)


def wide_weights(model: object, drafters: Iterable[object] = ()) -> list[QuantizedWeight]:
    """Return the quantized weights that the model and its drafters multiply with all tokens of a prompt, one of each shape and format."""
    modules = [model, *(part for d in drafters for part in getattr(d, "modules", None) or ())]
    return _distinct((getattr(m, "module", m) for m in modules), with_head=False)


def _distinct(modules: Iterable[object], *, with_head: bool) -> list[QuantizedWeight]:
    found: dict[tuple[object, ...], QuantizedWeight] = {}
    for module in modules:
        for weight in (
            multiplied_weights(module, with_head=with_head) if isinstance(module, nn.Module) else ()
        ):
            found.setdefault((weight.shape, weight.format, str(weight.scales.dtype)), weight)
    return list(found.values())


def recurrences(model: object) -> set[tuple[GdnShape, mx.Dtype]]:
    """Return the shapes and dtypes of the model's Gated DeltaNet layers; none for a model that runs mlx-lm's code."""
    if not isinstance(model, nn.Module):  # mlx-lm's code behind an adapter runs kernels of its own
        return set()
    mixers = [m for _, m in model.named_modules() if isinstance(m, GatedDeltaNet)]
    return {(m._shape, m.conv_weight.dtype) for m in mixers}
