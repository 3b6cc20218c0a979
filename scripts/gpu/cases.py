"""Launches of gdn_round, qmv_rows and qmm_few with data, and what they must give in float64.

A launch is what the launchers in mlxspec/kernels hand to Metal (a test holds both together), written without MLX. bfloat16 is kept as
uint16. Knows no GPU and no compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DTYPES = {"float": np.float32, "half": np.float16, "bfloat": np.uint16}
Array = Any  # np.ndarray


@dataclass(frozen=True)
class Launch:
    """One launch: inputs by name and in order, outputs as (shape, dtype), template arguments, grid in threads, threadgroup.

    unread: inputs that stand in for what this mode does not read.
    """

    kernel: str
    inputs: dict[str, Array]
    outputs: dict[str, tuple[tuple[int, ...], Any]]
    template: dict[str, int | str]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    unread: frozenset[str] = field(default_factory=frozenset)

    @property
    def least_bytes(self) -> int:
        """Every input and output once."""
        read = sum(a.nbytes for name, a in self.inputs.items() if name not in self.unread)
        return read + sum(
            int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self.outputs.values()
        )


# ---- numbers


def rounded(x: Array, dtype: str) -> Array:
    """Float values in a kernel's dtype, to the nearest."""
    if dtype != "bfloat":
        return np.ascontiguousarray(x, DTYPES[dtype])
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def exact(x: Array) -> Array:
    """A kernel's floats in float64."""
    if x.dtype != np.uint16:
        return x.astype(np.float64)
    return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


# ---- gdn_round


@dataclass(frozen=True)
class Round:
    """A round of one layer that replays `kept`. mode: "tape" gives a tape, "certain" the state after."""

    widths: tuple[int, ...]
    kept: tuple[int, ...]
    dtype: str = "bfloat"
    mode: str = "tape"
    key_heads: int = 16
    value_heads: int = 48
    key_dim: int = 128
    value_dim: int = 128


def tile(width: float, key_dim: int, value_dim: int) -> tuple[int, int]:
    """State rows a lane, simdgroups a threadgroup; as mlxspec.kernels.gdn_round.tile."""
    share = max(1, min(4, 256 // key_dim))
    while value_dim % (4 * share):
        share //= 2
    wanted = 4 if width <= 4 else 8 if width <= 16 else 16
    return share, max(n for n in range(1, wanted + 1) if value_dim // (4 * share) % n == 0)


def starts_of(widths: Sequence[int]) -> Array:
    return np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)


def _tokens(rng: Any, n: int, r: Round) -> list[Array]:
    """q, k, v, log_g, beta of n tokens."""
    keys = rng.standard_normal((2, n, r.key_heads, r.key_dim))
    q, k = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    v = rng.standard_normal((n, r.value_heads, r.value_dim))
    log_g = -np.abs(rng.standard_normal((n, r.value_heads))).astype(np.float32) * np.float32(0.3)
    beta = rng.uniform(0.05, 0.95, (n, r.value_heads)).astype(np.float32)
    return [rounded(q * r.key_dim**-0.5, r.dtype), rounded(k, r.dtype), rounded(v, r.dtype), log_g, beta]


def gdn_round(r: Round, seed: int = 0) -> Launch:
    """The tape is as wide as the round."""
    rng, certain = np.random.default_rng(seed), r.mode == "certain"
    num_rows, n, starts = len(r.widths), sum(r.widths), starts_of(r.widths)
    q, k, v, log_g, beta = _tokens(rng, n, r)
    one = r.value_heads, r.value_dim, r.key_dim
    state = rng.standard_normal((num_rows, *one)).astype(np.float32)
    _, tape_k, tape_delta, tape_log_g, _ = _tokens(rng, n, r)
    tape = [tape_k, exact(tape_delta).astype(np.float32), tape_log_g]
    rows = [starts, np.asarray(r.kept, np.int32)]  # tape_starts, kept
    names = ("q", "k", "v", "log_g", "beta", "state", "tape_k", "tape_delta", "tape_log_g", "starts")
    span = np.asarray([n, n], np.int32)
    arrays = [q, k, v, log_g, beta, state, *tape, starts, *rows, span]
    share, simdgroups = tile(n / num_rows, r.key_dim, r.value_dim)
    return Launch(
        kernel="gdn_round",
        inputs=dict(zip((*names, "tape_starts", "kept", "span"), arrays, strict=True)),
        outputs={
            "y": (v.shape, np.float32),
            "state_out": (state.shape, np.float32),
            "delta": ((1,) if certain else v.shape, np.float32),
        },
        template={
            "T": r.dtype,
            "Hk": r.key_heads,
            "Hv": r.value_heads,
            "Dk": r.key_dim,
            "Dv": r.value_dim,
            "ADVANCES": int(certain),
            "REPLAY": 1,
            "FLUSH": 0,
            "ROWS": share,
        },
        grid=(32, r.value_dim // (4 * share), num_rows * r.value_heads),
        threadgroup=(32, simdgroups, 1),
    )


def gdn_round_wanted(launch: Launch, r: Round) -> dict[str, Array]:
    """The launch's outputs in float64; a mode's unused delta is one zero."""
    given = {name: exact(a) if a.dtype != np.int32 else a for name, a in launch.inputs.items()}
    group = r.value_heads // r.key_heads
    q, k, tape_k = (np.repeat(given[name], group, axis=1) for name in ("q", "k", "tape_k"))
    starts, certain = given["starts"], r.mode == "certain"
    y, delta = np.zeros(given["v"].shape), np.zeros(given["v"].shape)
    states = np.zeros(launch.outputs["state_out"][0])
    for b in range(len(r.widths)):
        s = given["state"][b].copy()
        for t in range(starts[b], starts[b] + r.kept[b]):
            s *= np.exp(given["tape_log_g"][t])[:, None, None]
            s += given["tape_delta"][t][:, :, None] * tape_k[t][:, None, :]
        states[b] = s
        for t in range(starts[b], starts[b + 1]):
            s *= np.exp(given["log_g"][t])[:, None, None]
            delta[t] = given["beta"][t][:, None] * (given["v"][t] - np.einsum("hvk,hk->hv", s, k[t]))
            s += delta[t][:, :, None] * k[t][:, None, :]
            y[t] = np.einsum("hvk,hk->hv", s, q[t])
        if certain:
            states[b] = s
    return {"y": y, "state_out": states, "delta": np.zeros(1) if certain else delta}


# ---- qmv_rows and qmm_few


@dataclass(frozen=True)
class Product:
    """y = x W^T for num_rows rows, in one of MLX's formats: "affine", "mxfp4" (4 bits, groups of 32), "nvfp4" (4, 16), "mxfp8" (8, 32); by
    "qmv_rows" (1 to 8 rows) or "qmm_few" (to 32)."""

    num_rows: int
    out_features: int = 17408
    in_features: int = 5120
    bits: int = 4
    group: int = 64
    dtype: str = "bfloat"
    mode: str = "affine"
    kernel: str = "qmv_rows"


def product(p: Product, seed: int = 0) -> Launch:
    """Every code is drawn, so no value of a code is left untried, but those that are not numbers. Products of the same weight share it,
    whatever num_rows is."""
    rng, n, size = np.random.default_rng(seed), p.out_features, p.in_features
    codes = rng.integers(0, 1 << 32, (n, size * p.bits // 32), np.uint32)
    if p.mode == "affine":
        factors = rng.uniform(0.5, 1.5, (n, size // p.group)) / (size**0.5 * (1 << p.bits) / 4)
        scales, biases = (rounded(a, p.dtype) for a in (factors, -factors * ((1 << p.bits) - 1) / 2))
    else:
        if p.bits == 8:
            as_bytes = codes.view(np.uint8)
            as_bytes[(as_bytes & 0x7F) == 0x7F] = 0x7E
        about_one_half = 0x30 if p.mode == "nvfp4" else 126
        scales = biases = rng.integers(about_one_half - 8, about_one_half, (n, size // p.group), np.uint8)
    x = rng.standard_normal((32, size))[: p.num_rows]
    inputs = {"w": codes, "scales": scales, "biases": biases}
    format_ = {"T": p.dtype, "GROUP": p.group, "BITS": p.bits, "AFFINE": int(p.mode == "affine")}
    tiles = -(-p.num_rows // 8)
    blocks = 4 if tiles <= 2 else 2
    template: dict[str, int | str]
    if p.kernel == "qmv_rows":
        template, grid, simdgroups = {"M": p.num_rows}, (32, -(-n // 4), 1), 2 if p.num_rows == 1 else 4
    else:
        template, grid, simdgroups = {"TILES": tiles, "BLOCKS": blocks}, (32, 8 * -(-n // (8 * blocks)), 1), 8
    return Launch(
        kernel=p.kernel,
        inputs={**inputs, "x": rounded(x, p.dtype)},
        outputs={"y": ((p.num_rows, n), DTYPES[p.dtype])},
        template={**template, **format_},
        grid=grid,
        threadgroup=(32, simdgroups, 1),
        unread=frozenset() if p.mode == "affine" else frozenset({"biases"}),
    )


def _e2m1(codes: Array) -> Array:
    return np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1, 1)


def _e4m3(codes: Array) -> Array:
    exponent, fraction = (codes >> 3 & 15).astype(np.float64), (codes & 7).astype(np.float64)
    size = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10))
    return np.where(codes & 128, -size, size)


def _e8m0(codes: Array) -> Array:
    return 2.0 ** (codes.astype(np.float64) - 127)


def product_wanted(launch: Launch, p: Product) -> dict[str, Array]:
    """In float64, some outputs at a time: the whole weight would take a gigabyte."""
    x = exact(launch.inputs["x"])
    y = np.zeros((p.num_rows, p.out_features))
    shifts = np.arange(0, 32, p.bits, dtype=np.uint32)
    for begin in range(0, p.out_features, 1024):
        part = slice(begin, begin + 1024)
        codes = (launch.inputs["w"][part, :, None] >> shifts) & np.uint32((1 << p.bits) - 1)
        groups = codes.reshape(len(codes), -1, p.group)
        scales, biases = (launch.inputs[name][part][:, :, None] for name in ("scales", "biases"))
        if p.mode == "affine":
            weights = groups.astype(np.float64) * exact(scales) + exact(biases)
        else:
            weights = (_e2m1 if p.bits == 4 else _e4m3)(groups) * (_e4m3 if p.group == 16 else _e8m0)(scales)
        y[:, part] = x @ weights.reshape(len(codes), -1).T
    return {"y": y}


def error(got: Array, wanted: Array) -> float:
    """Largest difference in units of the largest wanted value; infinite where anything is not a number."""
    found = exact(got)
    if found.shape != wanted.shape or not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-3))
