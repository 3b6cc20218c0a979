"""Keys and values of one attention layer in 8 or 4 bits, each row in growing buffers of its own.

Tokens are quantized when they are written, a token and a head at a time. So what a forward sees of a token depends on that token alone:
rollback stays a length, forks share buffers, and pieces of a text can be cut, kept and joined as they are. Forwards see the quantized
keys and values of their own tokens too, so a verify of several tokens sees what single steps would have seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxspec.cache.attention import KV, AttentionLayerCache, Form
from mlxspec.cache.windowed import WindowedLayerCache
from mlxspec.errors import CacheError, ConfigError
from mlxspec.kernels.quantized_kv import GROUP as GROUP  # for whoever names it
from mlxspec.kernels.quantized_kv import KV_BITS, QuantizedTokens, Stored, quantize

PLAIN = 16  # what stands for keys and values as they are computed, in whatever dtype that is


class QuantizedLayerCache(AttentionLayerCache):
    """The keys and values of one attention layer, quantized to 8 or 4 bits. The parts are codes, scales and biases, each for keys and then
    for values. dtype: dtype of the keys and values that are appended."""

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        dtype: mx.Dtype,
        bits: int,
        num_rows: int = 0,
        value_dim: int | None = None,
    ) -> None:
        """Make empty buffers for `num_rows` rows. head_dim and value_dim: as in AttentionLayerCache. Raises CacheError where `bits` is
        neither 4 nor 8, or where the size of a head is not a multiple of 64."""
        for dim in (head_dim, head_dim if value_dim is None else value_dim):
            if bits not in KV_BITS or dim % GROUP:
                raise CacheError(f"Heads of {dim} cannot be kept in {bits} bits in groups of {GROUP}.")
        self.bits = bits
        super().__init__(num_kv_heads, head_dim, dtype, num_rows, value_dim)

    @property
    def _forms(self) -> tuple[Form, ...]:
        dims = self.shape[1], self.value_dim
        codes = [Form(dim * self.bits // 32, mx.uint32) for dim in dims]
        others = [Form(dim // GROUP, self.dtype) for dim in dims]
        return (*codes, *others, *others)

    def _stored(self, keys: mx.array, values: mx.array) -> KV:
        pairs = zip(quantize(keys, self.bits), quantize(values, self.bits), strict=True)
        return tuple(x for pair in pairs for x in pair)

    def _view(self, arrays: Sequence[mx.array], length: int) -> tuple[Stored, Stored]:
        codes, scales, biases = (arrays[i : i + 2] for i in (0, 2, 4))
        keys, values = zip(codes, scales, biases, strict=True)
        return QuantizedTokens(*keys, length), QuantizedTokens(*values, length)


def attention_cache(
    num_kv_heads: int,
    head_dim: int,
    dtype: mx.Dtype,
    num_rows: int,
    kv_bits: int = PLAIN,
    value_dim: int | None = None,
) -> AttentionLayerCache:
    """Return the cache of a layer that attends to the whole context. kv_bits: 4 or 8 to quantize keys and values, 16 to keep them as they
    are computed. Raises CacheError where heads of this size cannot be kept in this number of bits."""
    if kv_bits == PLAIN:
        return AttentionLayerCache(num_kv_heads, head_dim, dtype, num_rows, value_dim)
    return QuantizedLayerCache(num_kv_heads, head_dim, dtype, kv_bits, num_rows, value_dim)


def check_kv_bits(layers: Sequence[object], kv_bits: int, whose: str, option: str) -> None:
    """Check that the keys and values of these layers can be kept in `kv_bits` bits. layers: the layers of a cache that was made without
    kv_bits. whose: how the message names the model, such as "This model". option: how it names the option, such as "kv_bits". Raises
    ConfigError with one sentence where they cannot."""
    if kv_bits == PLAIN:
        return
    if any(getattr(layer, "is_foreign", False) for layer in layers):
        raise ConfigError(
            f"{whose} runs by mlx-lm's code, which keeps keys and values as they are computed; leave {option} at 16."
        )
    whole = [
        x for x in layers if isinstance(x, AttentionLayerCache) and not isinstance(x, WindowedLayerCache)
    ]
    if not whole:
        raise ConfigError(
            f"{whose} has no layer that attends to the whole context, so {option} {kv_bits} would quantize nothing; leave it at 16."
        )
    odd = [n for layer in whole for n in (layer.shape[1], layer.value_dim) if n % GROUP]
    if odd:
        raise ConfigError(
            f"{whose} has attention heads of {odd[0]} numbers, which groups of {GROUP} do not divide, so {option} {kv_bits} cannot be "
            "had; leave it at 16."
        )
