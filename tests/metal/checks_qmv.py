"""Data for qmv_rows and qmm_few and the comparison that must hold; used by their tests and by the planted faults."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from checks_gdn import assert_close, numpy_of, same_bits

from mlxspec.kernels.qmv_rows import KERNEL
from mlxspec.kernels.quantized_weight import MICROSCALING, ProductKernel, QuantizedWeight

ROUNDING = {mx.float32: 2e-6, mx.float16: 6e-4, mx.bfloat16: 5e-3}
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])


def e4m3(code: int) -> float:
    """As the OCP specification of 8-bit floats has it: bias 7, subnormals, no infinity."""
    sign, exponent, fraction = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if (exponent, fraction) == (15, 7):
        return float("nan")
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array([e4m3(code) for code in range(256)])
E8M0 = 2.0 ** (
    np.arange(255) - 127
)  # 255 is no number, MLX takes it for infinity: products are infinite or no numbers
ONE = {"mxfp4": (2, 127), "nvfp4": (2, 0x38), "mxfp8": (0x38, 127)}  # as a code and as a scale
PLACES = (0, 5, 15, 16, 23, 300, 511)  # in both words of a lane, in several groups and in the last


def draw(
    num_rows: int,
    out: int,
    size: int,
    *,
    dtype: mx.Dtype = mx.float32,
    group: int = 64,
    bits: int = 4,
    mode: str = "affine",
    seed: int = 0,
) -> tuple[mx.array, QuantizedWeight]:
    """group and bits: of affine formats; a microscaling one has its own."""
    rng = np.random.default_rng(seed)
    x, w = (
        mx.array(rng.standard_normal((n, size)).astype(np.float32)).astype(dtype) for n in (num_rows, out)
    )
    return x, QuantizedWeight.of(w, *MICROSCALING.get(mode, (group, bits)), mode)


def unpacked(weight: QuantizedWeight) -> np.ndarray:
    """The weight (N, K) in float64, by tables: no arithmetic is shared with the kernel or with MLX."""
    codes = np.array(weight.codes).view(np.uint8)
    if weight.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1)
    codes, scales = codes.reshape(weight.shape[0], -1, weight.group_size), numpy_of(weight.scales)[..., None]
    if weight.biases is None:
        numbers = (E2M1 if weight.bits == 4 else E4M3)[codes]
        plain = numbers * (E4M3 if weight.mode == "nvfp4" else E8M0)[scales]
    else:
        plain = codes.astype(np.float64) * scales + numpy_of(weight.biases)[..., None].astype(np.float64)
    return plain.reshape(weight.shape)


def check_rows(x: mx.array, weight: QuantizedWeight, kernel: ProductKernel = KERNEL) -> mx.array:
    """Against float64, and each row bit for bit that row alone."""
    got = kernel.run(x, weight)
    wanted = numpy_of(x).astype(np.float64) @ unpacked(weight).T
    assert_close(got, wanted, "y", ROUNDING[x.dtype])
    for i in range(x.shape[0]):
        assert same_bits(kernel.run(x[i : i + 1], weight), got[i : i + 1]), (
            f"row {i} is not bitwise what it is alone"
        )
    return got


# ---- microscaling formats, number by number


def check_codes(mode: str, place: int, kernel: ProductKernel = KERNEL) -> None:
    """All 16 or 256 codes, those included that are not numbers, are what the table and MLX's own unpacking have."""
    table = E2M1 if MICROSCALING[mode][1] == 4 else E4M3
    check_lone(mode, np.arange(len(table)), np.full(len(table), ONE[mode][1]), place, table, kernel)


def check_scales(mode: str, kernel: ProductKernel = KERNEL) -> None:
    """All scales, likewise."""
    table = E4M3 if mode == "nvfp4" else E8M0
    check_lone(mode, np.full(len(table), ONE[mode][0]), np.arange(len(table)), 7, table, kernel)


def check_lone(
    mode: str, codes: np.ndarray, scales: np.ndarray, place: int, wanted: np.ndarray, kernel: ProductKernel
) -> None:
    """Of 512 weights of an output all are zero but the one at `place`; output n has codes[n] there, and scales[n] in its group."""
    group, bits = MICROSCALING[mode]
    packed = np.zeros((len(codes), 512 * bits // 32), np.uint32)
    packed[:, place * bits // 32] = codes.astype(np.uint32) << np.uint32(place * bits % 32)
    stored = np.full((len(scales), 512 // group), ONE[mode][1], np.uint8)
    stored[:, place // group] = scales
    weight = QuantizedWeight(mx.array(packed), mx.array(stored), None, group, bits, mode)
    x = np.zeros((1, 512), np.float32)
    x[0, place] = 1
    got = numpy_of(kernel.run(mx.array(x), weight))[0]
    for other in (wanted.astype(np.float32), np.array(weight.values(mx.float32))[:, place]):
        wrong = np.flatnonzero((got != other) & ~(np.isnan(got) & np.isnan(other)))
        assert not wrong.size, f"{mode} differs at {wrong[:8]}: {got[wrong[:8]]}, not {other[wrong[:8]]}"
