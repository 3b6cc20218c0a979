"""Parts that architectures share: norms, fused projections, rotary positions.

Knows arrays and modules; knows no checkpoint names and no layer order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxspec.kernels import exactness
from mlxspec.kernels.products import product
from mlxspec.kernels.quantized_weight import QuantizedWeight
from mlxspec.models.gate import AdapterGate
from mlxspec.models.rotary_scaling import UNSCALED, Scaling


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """Return the RMS norm of x, in x's dtype. On a GPU this takes one launch where the weight has x's dtype, and two where the weight is
    float32 and x is not: MLX itself would convert x to float32, and its result would have to be converted back."""
    if weight is None or weight.dtype == x.dtype:
        return mx.fast.rms_norm(x, weight, eps)
    return _weighted(mx.fast.rms_norm(x, None, eps), weight)


@partial(mx.compile, shapeless=True)
def _weighted(normed: mx.array, weight: mx.array) -> mx.array:
    return (normed * weight).astype(normed.dtype)


class Parts(nn.Module):
    """A module that holds modules and arrays under their names in a checkpoint, for another module to call."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            self[name] = part


class FusedLinear(nn.Module):
    """Several projections of the same input as one product.

    It is made from loaded nn.Linear or nn.QuantizedLinear modules without biases. Quantized ones are joined where bits, group size and mode
    agree, else they are multiplied one by one. Their products use `product`, which for few rows uses one of mlxspec's kernels where it was
    faster than MLX on this device.
    """

    def __init__(self, parts: Sequence[nn.Module], sizes: Sequence[int] | None = None) -> None:
        """Join these modules. sizes: numbers of columns of the arrays that `split` returns; None: one array for each module."""
        super().__init__()
        self._sizes = [_out_features(p) for p in parts] if sizes is None else list(sizes)
        self._splits = [int(s) for s in np.cumsum(self._sizes)[:-1]]
        if all(type(p) is nn.Linear for p in parts):
            self.weight = parts[0].weight if len(parts) == 1 else mx.concatenate([p.weight for p in parts])
        elif _same_format(parts):
            self.parts = [_concat_quantized(parts)] if len(parts) > 1 else list(parts)
        else:
            self.parts = list(parts)

    def __call__(self, x: mx.array) -> mx.array:
        """Return the outputs (N, sum of the modules' outputs) of all projections for x (N, in)."""
        if "weight" in self:
            return x @ self.weight.T
        outs = [project(p, x) for p in self.parts]
        return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=-1)

    def split(self, x: mx.array, *shapes: Sequence[int]) -> list[mx.array]:
        """Return the outputs for x (N, in) as one array (N, size) for each size. shapes: the outputs are reshaped to (N, *shape); a shape
        that contains -1 is used as it is."""
        shapes = shapes or tuple((size,) for size in self._sizes)
        parts = mx.split(self(x), self._splits, axis=-1)
        return [
            part if len(s) == 1 else part.reshape(s if -1 in s else (-1, *s))
            for part, s in zip(parts, shapes, strict=True)
        ]


class AdaptedLinear(nn.Module):
    """A linear layer with low-rank changes that are computed in addition to it: gain * (W x) + b^T (s * a^T x) + bias.

    weight and bias, and scales and biases where the layer is quantized: as in nn.Linear and nn.QuantizedLinear. lora_a (in, r), lora_b (r,
    out) float32. gain (out,) float32; None means 1. gate: has the factors s (N, r) of the current forward; None means 1. owner (r,) int32:
    the adapter of each column of lora_a.
    """

    def __init__(
        self,
        base: nn.Module,
        a: mx.array,
        b: mx.array,
        gain: mx.array | None = None,
        *,
        gate: AdapterGate | None = None,
        owner: mx.array | None = None,
    ) -> None:
        super().__init__()
        if "scales" in base:
            self.group_size, self.bits, self.mode = base.group_size, base.bits, base.mode
        for name in ("weight", "scales", "biases", "bias"):
            if base.get(name) is not None:
                self[name] = base[name]
        self.lora_a, self.lora_b = a, b
        if gain is not None:
            self.gain = gain
        self.gate = gate
        if owner is not None:
            self.owner = owner

    @property
    def base(self) -> nn.Module:
        if "scales" not in self:
            return _linear(self.weight)
        return quantized_linear(self.weight, self.scales, self.get("biases"), **_form(self))

    def __call__(self, x: mx.array) -> mx.array:
        """Return the outputs (N, ..., out) for x (N, ..., in), in x's dtype."""
        out = project(self.base, x)
        if self.gate is None or self.gate.held:
            whole = out.astype(mx.float32)
            whole = whole * self.gain if "gain" in self else whole
            low = x.astype(mx.float32) @ self.lora_a
            if self.gate is not None:
                scales = self.gate.held["scales"][:, self.owner]
                low = low * scales.reshape(-1, *(1,) * (low.ndim - 2), scales.shape[1])
            out = (whole + low @ self.lora_b).astype(x.dtype)
        return out + self.bias if "bias" in self else out

    def rows(self, shape: Sequence[int], places: Any) -> AdaptedLinear:
        """Return a layer with only some of this layer's outputs. shape, places: as in `rows_of`."""
        gain = self.gain.reshape(*shape)[places].reshape(-1) if "gain" in self else None
        rank = self.lora_b.shape[0]
        b = self.lora_b.T.reshape(*shape, rank)[places].reshape(-1, rank).T
        base = rows_of(self.base, shape, places)
        return AdaptedLinear(base, self.lora_a, b, gain, gate=self.gate, owner=self.get("owner"))


def project(part: nn.Module, x: mx.array) -> mx.array:
    """Return the outputs (N, ..., out) for x (N, ..., in) of a linear module, or of an embedding that is also the language-model head."""
    weight = quantized_weight(part)
    if weight is not None:
        flat = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        out = product(flat, weight, exact=exactness.is_demanded)
        out = out if x.ndim == 2 else out.reshape(*x.shape[:-1], out.shape[-1])
        return out + part.bias if "bias" in part else out
    return part.as_linear(x) if isinstance(part, (nn.Embedding, nn.QuantizedEmbedding)) else part(x)


class ProjectedLinear(nn.QuantizedLinear):
    """A quantized linear module of mlx-lm that multiplies as `project` does. An nn.QuantizedLinear becomes one when its class is
    replaced."""

    def __call__(self, x: mx.array) -> mx.array:
        return project(self, x)


def multiply_here(module: nn.Module) -> None:
    """Make all quantized linear modules in `module` multiply as `project` does."""
    for part in module.modules():
        if type(part) is nn.QuantizedLinear and "global_scale" not in part:
            part.__class__ = ProjectedLinear


def quantized_weight(part: nn.Module) -> QuantizedWeight | None:
    """Return the quantized weight with which `project` multiplies for this module; None where the module is not quantized or its format is
    not supported by `product`."""
    if not isinstance(part, (nn.QuantizedLinear, nn.QuantizedEmbedding)) or "global_scale" in part:
        return None
    return QuantizedWeight(
        part.weight, part.scales, part.get("biases"), part.group_size, part.bits, part.mode
    )


def weight_values(module: nn.Module) -> mx.array:
    """Return the weight (out, in) of a linear module or an embedding as floats, dequantized where it is quantized."""
    if "scales" not in module:
        return module.weight
    return mx.dequantize(module.weight, module.scales, module.get("biases"), **_form(module))


def multiplied_weights(module: nn.Module, *, with_head: bool = True) -> Iterator[QuantizedWeight]:
    """Yield the quantized weights with which forwards of a module multiply. An embedding is one of them only where it is the language-model
    head. with_head: False to leave out the head, which does not multiply all tokens of a prompt."""
    head = getattr(module, "head_module", None)
    if isinstance(head, FusedLinear):
        (head,) = head.get("parts", [head])
    for _, part in module.named_modules():
        weight = quantized_weight(part)
        if weight is not None and (
            with_head if part is head else not isinstance(part, nn.QuantizedEmbedding)
        ):
            yield weight


def compute_dtype(part: nn.Module) -> mx.Dtype:
    """Return the dtype of the outputs of a linear module or an embedding, quantized or not."""
    kept: mx.Dtype = (part.scales if "scales" in part else part.weight).dtype
    # the microscaling formats' scales are bytes; MLX unpacks those to bfloat16
    return kept if mx.issubdtype(kept, mx.floating) else mx.bfloat16


def rows_of(module: nn.Module, shape: Sequence[int], places: Any) -> nn.Module:
    """Return a linear module with only some of a module's outputs: the outputs are arranged in the shape `shape`, and `places` indexes
    them."""
    if isinstance(module, AdaptedLinear):
        return module.rows(shape, places)
    found = copy.copy(module)
    for name in ("weight", "scales", "biases"):
        if found.get(name) is not None:
            rows = found[name]
            found[name] = rows.reshape(*shape, rows.shape[-1])[places].reshape(-1, rows.shape[-1])
    return found


def head_rows(head: nn.Module, ids: mx.array) -> nn.Module:
    """Return a linear module with the rows `ids` (R,) of a language-model head, lazily. head: a linear module, a FusedLinear of one module,
    or an embedding used as a head. Quantized rows stay quantized."""
    if "parts" in head:
        (head,) = head.parts
    if "scales" not in head:
        return _linear(head.weight[ids])
    biases = None if head.get("biases") is None else head.biases[ids]
    return quantized_linear(head.weight[ids], head.scales[ids], biases, **_form(head))


def _form(module: nn.Module) -> dict[str, Any]:
    """Return the group size, bits and mode of a quantized module, as keyword arguments of MLX's operations."""
    return {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}


def quantized_linear(
    weight: mx.array, scales: mx.array, biases: mx.array | None, *, group_size: int, bits: int, mode: str
) -> nn.QuantizedLinear:
    """Return a linear layer with this quantized weight. Unlike MLX's constructor, this function draws no random numbers, whose keys MLX
    would keep until the numbers are used."""
    found: nn.QuantizedLinear = _bare(nn.QuantizedLinear)
    found.group_size, found.bits, found.mode = group_size, bits, mode
    found.weight, found.scales, found.biases = weight, scales, biases
    return found


def _linear(weight: mx.array) -> nn.Linear:
    found: nn.Linear = _bare(nn.Linear)
    found.weight = weight
    return found


def _bare(kind: type[nn.Module]) -> Any:
    """Return a module of this class without parameters."""
    found = nn.Module.__new__(kind)
    nn.Module.__init__(found)
    return found


def _out_features(module: nn.Module) -> int:
    return int(module.weight.shape[0])


def _same_format(parts: Sequence[nn.Module]) -> bool:
    if not all(isinstance(p, nn.QuantizedLinear) for p in parts):
        return len(parts) == 1
    first = parts[0]
    return all((p.bits, p.group_size, p.mode) == (first.bits, first.group_size, first.mode) for p in parts)


def _concat_quantized(parts: Sequence[nn.Module]) -> nn.Module:
    fused = parts[0]
    for name in ("weight", "scales", "biases"):
        if fused.get(name) is not None:
            fused[name] = mx.concatenate([p[name] for p in parts])
    return fused


class Rotary:
    """The angles of rotary positions, for heads in which number i is paired with number i + D / 2. A pair of frequency 0 is not rotated."""

    def __init__(
        self, frequencies: np.ndarray, amplitude: float = 1.0, axes: np.ndarray | None = None
    ) -> None:
        """Prepare the angles. frequencies (D / 2,): radians for each position. amplitude: the factor of the pairs that are rotated. axes (D
        / 2,): which of a position's three axes rotates each pair; None: the first axis for all."""
        axes = np.zeros(len(frequencies), np.int64) if axes is None else axes
        self._axes = np.concatenate([axes, axes])
        self._cos = mx.array(np.concatenate([frequencies, frequencies]).astype(np.float32))
        self._sin = mx.array(np.concatenate([-frequencies, frequencies]).astype(np.float32))
        lengths = np.where(np.concatenate([frequencies, frequencies]) == 0, 1.0, amplitude)
        self._lengths = None if amplitude == 1 else mx.array(lengths.astype(np.float32))

    @classmethod
    def of_first(
        cls,
        dims: int,
        theta: float,
        head_dim: int,
        scaling: Scaling = UNSCALED,
        axes: Sequence[int] | None = None,
    ) -> Rotary:
        """Return the rotary positions of heads in the order of `rotary_order`, of which `dims` numbers are rotated. axes: the axis of each
        rotated pair, as in __init__."""
        frequencies = scaling.apply(theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims), theta)
        num_still = (head_dim - dims) // 2
        turned_by = None if axes is None else np.concatenate([axes, np.zeros(num_still)]).astype(np.int64)
        return cls(np.concatenate([frequencies, np.zeros(num_still)]), scaling.amplitude, turned_by)

    def spread(self, positions: np.ndarray) -> mx.array:
        """Return positions (N, 3) on three axes in the form (N, 1, D) float32 that `table` takes."""
        return mx.array(positions[:, None, self._axes].astype(np.float32))

    def table(self, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Return cosines and sines (N, 1, D) float32 for `rotate`. positions: (N,) int32, or (N, 1, 1) or (N, 1, D) of any dtype. A forward
        makes them once for all layers."""
        at = positions if positions.ndim == 3 else positions[:, None, None]
        cos, sin = _turns(at, self._cos, self._sin)
        return (cos, sin) if self._lengths is None else (cos * self._lengths, sin * self._lengths)


@partial(mx.compile, shapeless=True)
def _turns(positions: mx.array, cos: mx.array, sin: mx.array) -> tuple[mx.array, mx.array]:
    at = positions.astype(mx.float32)
    return mx.cos(at * cos), mx.sin(at * sin)


def rotary_order(head_dim: int, dims: int) -> list[int]:
    """Return the order in which a head's numbers are arranged for `Rotary.of_first`: entry i is the index of number i in the checkpoint,
    which pairs number i of the first `dims` with i + dims / 2. Attention scores do not change, as queries and keys get the same order."""
    half, rest = dims // 2, list(range(dims, head_dim))
    cut = len(rest) // 2
    return [*range(half), *rest[:cut], *range(half, dims), *rest[cut:]]


def swapped(x: mx.array) -> mx.array:
    """Return x (..., D) with the two numbers of each pair i, i + D / 2 exchanged."""
    return mx.concatenate(mx.split(x, 2, axis=-1)[::-1], axis=-1)


def rotate(x: mx.array, other: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Return x (N, heads, D) with its pairs rotated, by one kernel. other: swapped(x). cos, sin: from `Rotary.table`. The result is
    float32."""
    return x * cos + other * sin
