"""The gated delta rule over many certain tokens, such as a prompt: chunks of matrix products, in one launch for all rows.

`gdn_prefill` picks the Metal kernel unless it has lost its race (`tune`), else the chunked form in plain mx (the twin); rows too narrow for
chunks belong to `gdn_advance`. The state must have no tape pending (`gdn_flush` applies one). Shapes as in `gdn_round`.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlxspec.kernels import launch
from mlxspec.kernels.conv_ops import GdnInputs
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_ops import chunks
from mlxspec.kernels.gdn_round import supports

_NAME = "gdn_prefill"
_kernel = launch.MetalKernel(
    _NAME, inputs=[*GdnInputs._fields, "state", "starts"], outputs=["y", "state_out"]
)
_SIMDGROUPS = 4  # as in the kernel's threadgroup memory


def gdn_prefill(
    inputs: GdnInputs, state: mx.array, rows: FlatRows, starts: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """y (N, Hv, Dv) float32 and the state (B, Hv, Dv, Dk) after all tokens. starts (B + 1,) int32: the rows' own, where they are an input
    of a compiled function, which may not use what it is given by another name."""
    key_dim, value_dim = inputs.q.shape[-1], inputs.v.shape[-1]
    if (
        supports(inputs.q.dtype, key_dim, value_dim)
        and launch.wins(_NAME, _race_key(inputs))
        and launch.in_use(_NAME)
    ):
        return gdn_prefill_metal(inputs, state, rows, starts)
    return gdn_prefill_ops(inputs, state, rows)


def gdn_prefill_ops(inputs: GdnInputs, state: mx.array, rows: FlatRows) -> tuple[mx.array, mx.array]:
    """Plain mx, row by row."""
    ys, states = [], []
    for r, (begin, end) in enumerate(zip(rows.starts, rows.starts[1:], strict=False)):
        after = state[r : r + 1]
        if end > begin:
            q, k, v, log_g, beta = (x[begin:end] for x in inputs)
            y, after = chunks(q, k, v, log_g, beta, after)
            ys.append(y)
        states.append(after)
    return (ys[0], states[0]) if len(states) == 1 else (mx.concatenate(ys), mx.concatenate(states))


def gdn_prefill_metal(
    inputs: GdnInputs, state: mx.array, rows: FlatRows, starts: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """The kernel."""
    (_, key_heads, key_dim), (_, value_heads, value_dim) = inputs.q.shape, inputs.v.shape
    y, state_out = _kernel(
        [*inputs, state, rows.starts_array if starts is None else starts],
        outputs=[(inputs.v.shape, mx.float32), (state.shape, mx.float32)],
        template={
            "T": inputs.q.dtype,
            "Hk": key_heads,
            "Hv": value_heads,
            "Dk": key_dim,
            "Dv": value_dim,
            "C": chunk_size(key_dim),
        },
        grid=(32, value_dim // 8, rows.num_rows * value_heads),
        threadgroup=(32, _SIMDGROUPS, 1),
    )
    return y, state_out


def chunk_size(key_dim: int) -> int:
    """Tokens a chunk: what fits 32 KB of threadgroup memory beside keys and queries."""
    return next(
        size for size in (16, 8) if 4 * (2 * size * key_dim + 2 * size * size + 66 * size) <= 32 * 1024
    )


def tune(inputs: GdnInputs, state: mx.array, rows: FlatRows) -> dict[str, float]:
    """Race the kernel against the twin on these arrays; returns the twin's time over ours by what was raced, nothing where the kernel is
    not in use."""
    if not (supports(inputs.q.dtype, inputs.q.shape[-1], inputs.v.shape[-1]) and launch.in_use(_NAME)):
        return {}
    key = _race_key(inputs)
    return {
        key: launch.race(
            _NAME,
            key,
            lambda: gdn_prefill_metal(inputs, state, rows),
            lambda: gdn_prefill_ops(inputs, state, rows),
        )
    }


def _race_key(inputs: GdnInputs) -> str:
    """By dtype, head dims and the power of two of the token count."""
    num_tokens, (_, value_heads, value_dim) = inputs.q.shape[0], inputs.v.shape
    dtype = str(inputs.q.dtype).removeprefix("mlx.core.")
    return f"{dtype}, {value_heads} x {inputs.q.shape[-1]} x {value_dim}, {1 << (num_tokens - 1).bit_length()} tokens"


@launch.self_check(_NAME, raced=True, unless_lost=True)
def _self_check() -> launch.Check:
    """Ragged rows against the twin on the CPU, whose float32 products are never rounded to TF32."""
    rng, rows = np.random.default_rng(0), FlatRows((19, 1, 40))

    def draw(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, np.float32))

    n = rows.num_tokens
    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (draw(n, 2, 128), draw(n, 2, 128)))
    inputs, state = (
        GdnInputs(q, k, draw(n, 4, 64), -mx.abs(draw(n, 4)), mx.sigmoid(draw(n, 4))),
        draw(3, 4, 64, 128),
    )
    got = gdn_prefill_metal(inputs, state, rows)
    with mx.stream(mx.cpu):
        wanted = gdn_prefill_ops(inputs, state, rows)
        mx.eval(wanted)
    return launch.Check(error=launch.largest_error(got, wanted), limit=1e-4)
