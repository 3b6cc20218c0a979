"""The gated delta rule over many certain tokens, such as a prompt: chunks of matrix products, in one launch for all rows.

`gdn_prefill` picks the Metal kernel unless it has lost its race (`race`) against MLX's own `gated_delta_update`, which is then used where
it was found right; else the chunked form in plain mx (the twin). Rows too narrow for chunks belong to `gdn_advance`. The state must have
no tape pending (`gdn_flush` applies one). Shapes as in `gdn_round`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import mlx.core as mx

from mlxspec.kernels import launch
from mlxspec.kernels.conv_ops import GdnInputs, GdnShape
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_ops import chunks
from mlxspec.kernels.gdn_round import drawn
from mlxspec.kernels.gdn_round import supports as steps_support
from mlxspec.platform import device

_NAME = "gdn_prefill"
_kernel = launch.MetalKernel(
    _NAME, inputs=[*GdnInputs._fields, "state", "starts"], outputs=["y", "state_out"]
)
_EXAMPLE = GdnShape(2, 4, 128, 64)
_MOST_KEY_DIM = 160  # a thread of wider heads needs more than 96 registers
RACED_TOKENS = (64, 512, 2048)  # a prompt's rest, and whole pieces
_SIMDGROUPS = 4  # as in the kernel's threadgroup memory


def gdn_prefill(
    inputs: GdnInputs, state: mx.array, rows: FlatRows, starts: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Run the gated delta rule over prompts, and return y (N, Hv, Dv) float32 and the state (B, Hv, Dv, Dk) after all tokens. starts (B
    + 1,) int32: the rows' starts as an input of a compiled function, which may not use the array of `rows`."""
    key_dim, value_dim = inputs.q.shape[-1], inputs.v.shape[-1]
    is_ours = supports(inputs.q.dtype, key_dim, value_dim) and launch.in_use(_NAME)
    if is_ours and launch.wins(_NAME, _race_key(*_form(inputs), inputs.q.shape[0])):
        return gdn_prefill_metal(inputs, state, rows, starts)
    return _otherwise(inputs)(inputs, state, rows)


def supports(dtype: mx.Dtype, key_dim: int, value_dim: int) -> bool:
    """Return whether the Metal kernel takes this dtype and these head sizes."""
    return steps_support(dtype, key_dim, value_dim) and key_dim <= _MOST_KEY_DIM


def _otherwise(inputs: GdnInputs) -> Callable[..., tuple[mx.array, mx.array]]:
    """Return the function that does the kernel's work where the kernel is not used."""
    is_theirs = device.backend() == "metal" and mlx_agrees(*_form(inputs))
    return gdn_prefill_mlx if is_theirs else gdn_prefill_ops


def gdn_prefill_ops(inputs: GdnInputs, state: mx.array, rows: FlatRows) -> tuple[mx.array, mx.array]:
    """Compute what `gdn_prefill` does in plain mx operations, row by row."""
    return _by_row(chunks, inputs, state, rows)


def gdn_prefill_mlx(inputs: GdnInputs, state: mx.array, rows: FlatRows) -> tuple[mx.array, mx.array]:
    """Compute what `gdn_prefill` does with MLX's own operation, row by row. MLX returns y in q's dtype, so y is rounded to it before it
    is widened to float32."""
    return _by_row(_mlx_update, inputs, state, rows)


def _by_row(
    rule: Callable[..., tuple[mx.array, mx.array]], inputs: GdnInputs, state: mx.array, rows: FlatRows
) -> tuple[mx.array, mx.array]:
    ys, states = [], []
    for r, (begin, end) in enumerate(zip(rows.starts, rows.starts[1:], strict=False)):
        after = state[r : r + 1]
        if end > begin:
            q, k, v, log_g, beta = (x[begin:end] for x in inputs)
            y, after = rule(q, k, v, log_g, beta, after)
            ys.append(y)
        states.append(after)
    return (ys[0], states[0]) if len(states) == 1 else (mx.concatenate(ys), mx.concatenate(states))


def _mlx_update(
    q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    tokens = [x[None] for x in (q, k, v, mx.exp(log_g), beta)]
    y, after = mx.fast.gated_delta_update(*tokens, initial_state=state)
    return y[0].astype(mx.float32), after.astype(mx.float32)


@cache
def mlx_agrees(shape: GdnShape, dtype: mx.Dtype) -> bool:
    """Return whether MLX has the operation and its results on this device agree with the twin's, for a row that is no whole number of
    chunks. The first call for each shape and dtype launches a few kernels."""
    try:
        inputs, state, rows = drawn(shape, dtype, (75,))
        got, wanted = gdn_prefill_mlx(inputs, state, rows), gdn_prefill_ops(inputs, state, rows)
        return launch.largest_error(got, wanted) <= (1e-4 if dtype == mx.float32 else launch.ROUNDED)
    except Exception:  # whatever it is, it must cost only this operation
        return False


def _form(inputs: GdnInputs) -> tuple[GdnShape, mx.Dtype]:
    (_, key_heads, key_dim), (_, value_heads, value_dim) = inputs.q.shape, inputs.v.shape
    return GdnShape(key_heads, value_heads, key_dim, value_dim), inputs.q.dtype


def gdn_prefill_metal(
    inputs: GdnInputs, state: mx.array, rows: FlatRows, starts: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Compute what `gdn_prefill` does with the Metal kernel."""
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
    """Return the number of tokens in a chunk: what fits into 32 KB of threadgroup memory next to keys and queries."""
    return next(
        size for size in (16, 8) if 4 * (2 * size * key_dim + 2 * size * size + 66 * size) <= 32 * 1024
    )


def race(shape: GdnShape, dtype: mx.Dtype, num_tokens: int) -> dict[str, float]:
    """Race the kernel on random inputs against the function that would replace it. Returns, by the race's name, the other's time divided
    by the kernel's; empty where the kernel is not in use."""
    if not _is_raced(shape, dtype):
        return {}
    inputs, state, rows = drawn(shape, dtype, (num_tokens,))
    mx.eval(inputs, state)
    key = _race_key(shape, dtype, num_tokens)
    ours, theirs = (partial(run, inputs, state, rows) for run in (gdn_prefill_metal, _otherwise(inputs)))
    return {key: launch.race(_NAME, key, ours, theirs)}


def unraced(shape: GdnShape, dtype: mx.Dtype) -> list[int]:
    """Return the numbers of tokens in RACED_TOKENS for which no race of this recurrence is on record. Empty where the kernel is not in
    use."""
    if not _is_raced(shape, dtype):
        return []
    known = launch.speedups().get(_NAME, {})
    return [num for num in RACED_TOKENS if _race_key(shape, dtype, num) not in known]


def _is_raced(shape: GdnShape, dtype: mx.Dtype) -> bool:
    return supports(dtype, shape.k_dim, shape.v_dim) and launch.in_use(_NAME)


def _race_key(shape: GdnShape, dtype: mx.Dtype, num_tokens: int) -> str:
    """Return the race's name: dtype, head dims, the power of two of the token count, and the rival."""
    kind, count = str(dtype).removeprefix("mlx.core."), 1 << (num_tokens - 1).bit_length()
    return (
        f"{kind}, {shape.num_v_heads} x {shape.k_dim} x {shape.v_dim}, {count} tokens, against MLX's update"
    )


@launch.self_check(_NAME, raced=True, unless_lost=True, of_models=True)
def _self_check(shape: GdnShape = _EXAMPLE, dtype: mx.Dtype = mx.float32) -> launch.Check:
    """Compare the kernel with its plain twin on ragged rows, and return the check. The twin runs on the CPU, whose float32 products are
    never rounded to TF32."""
    inputs, state, rows = drawn(shape, dtype, (19, 1, 40))
    got = gdn_prefill_metal(inputs, state, rows)
    with mx.stream(mx.cpu):
        wanted = gdn_prefill_ops(inputs, state, rows)
        mx.eval(wanted)
    return launch.Check(error=launch.largest_error(got, wanted), limit=1e-4)
