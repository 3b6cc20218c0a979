"""Keys and values of tokens in 8 or 4 bits, and matrix products with them.

A number is scale * code + bias, with one scale and one bias for each 64 numbers of a head: what `mx.quantize` makes of it. A group lies
within one token, so tokens can be cut off, joined and written over one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from mlxspec.platform import device

GROUP = 64  # numbers of a head that share a scale and a bias
KV_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class QuantizedTokens:
    """The quantized keys, or values, of `length` tokens: the first entries of three buffers. codes (1, Hkv, capacity, D * bits / 32)
    uint32; scales and biases (1, Hkv, capacity, D / 64) in the dtype of the unquantized numbers. Entries of the buffers after these
    tokens are scratch."""

    codes: mx.array
    scales: mx.array
    biases: mx.array
    length: int

    @classmethod
    def of(cls, x: mx.array, bits: int) -> QuantizedTokens:
        """Quantize x (1, Hkv, n, D) and return its tokens."""
        return cls(*quantize(x, bits), x.shape[2])

    @property
    def bits(self) -> int:
        return 32 * self.codes.shape[3] // (GROUP * self.scales.shape[3])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return the shape of the unpacked numbers, (1, Hkv, length, D)."""
        _, num_heads, _, num_groups = self.scales.shape
        return 1, num_heads, self.length, GROUP * num_groups

    @property
    def nbytes(self) -> int:
        """Return the bytes of these tokens, without the rest of the buffers."""
        return sum(
            x.nbytes // max(1, x.shape[2]) * self.length for x in (self.codes, self.scales, self.biases)
        )

    def first(self, num: int) -> QuantizedTokens:
        """Return the first `num` of these tokens."""
        return QuantizedTokens(self.codes, self.scales, self.biases, num)

    @property
    def parts(self) -> tuple[mx.array, mx.array, mx.array]:
        """Return the codes, scales and biases of these tokens, without the rest of the buffers."""
        codes, scales, biases = (x[:, :, : self.length] for x in (self.codes, self.scales, self.biases))
        return codes, scales, biases

    def unpacked(self) -> mx.array:
        """Return the unpacked numbers (1, Hkv, length, D) in the dtype of the scales."""
        return mx.dequantize(*self.parts, group_size=GROUP, bits=self.bits)


# of each number, bytes that are alive beside it where MLX unpacks by plain operations, as without a GPU: code and number in 32 bits
_UNPACKING = 8
Stored: TypeAlias = mx.array | QuantizedTokens  # keys, or values, of a row's tokens: (1, Hkv, n, D)


def quantize(x: mx.array, bits: int) -> tuple[mx.array, mx.array, mx.array]:
    """Quantize x (..., D), each token and head independently, and return codes (..., D * bits / 32) uint32, scales and biases (..., D /
    64)."""
    codes, scales, biases = mx.quantize(x, group_size=GROUP, bits=bits)
    return codes, scales, biases


def token_bytes(head_dim: int, dtype: mx.Dtype, bits: int) -> int:
    """Return the bytes of one head's keys, or values, of one token."""
    if bits not in KV_BITS:
        return head_dim * dtype.size
    return head_dim * bits // 8 + 2 * (head_dim // GROUP) * dtype.size


def unpacking_bytes(size: int, dtype: mx.Dtype) -> int:
    """Return the bytes that unpacking `size` numbers takes while it runs, the numbers themselves included."""
    return size * (dtype.size if has_products() else _UNPACKING + dtype.size)


def first(tokens: Stored, num: int) -> Stored:
    """Return the first `num` of these tokens, quantized or not."""
    return tokens[:, :, :num] if isinstance(tokens, mx.array) else tokens.first(num)


def unpacked(tokens: Stored) -> mx.array:
    """Return the numbers (1, Hkv, n, D) of stored tokens, unpacked where they are quantized."""
    return tokens if isinstance(tokens, mx.array) else tokens.unpacked()


def products(queries: mx.array, keys: Stored) -> mx.array:
    """Return the inner products (1, Hkv, m, n) of queries (1, Hkv, m, D) with the keys of n tokens."""
    if isinstance(keys, mx.array):
        return queries @ keys.swapaxes(-1, -2)
    if not has_products():
        return queries @ keys.unpacked().swapaxes(-1, -2)
    return mx.quantized_matmul(queries, *keys.parts, transpose=True, group_size=GROUP, bits=keys.bits)


def sums(weights: mx.array, values: Stored) -> mx.array:
    """Return the sums (1, Hkv, m, D) of the values of n tokens, weighted by weights (1, Hkv, m, n)."""
    if isinstance(values, mx.array):
        return weights @ values
    if not has_products():
        return weights @ values.unpacked()
    return mx.quantized_matmul(weights, *values.parts, transpose=False, group_size=GROUP, bits=values.bits)


def has_products() -> bool:
    """Return whether MLX's products with quantized matrices are faster on this device than unpacking them: without a GPU they take up to
    ten times as long in 16 bits."""
    return device.has_gpu()
