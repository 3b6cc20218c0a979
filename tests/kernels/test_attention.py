"""Attention of one row against float64, and MLX's own kernel, which is used where it was found right only.

There is no kernel to be wrong on a CPU, so a GPU is played: `has_fused_attention` says yes, and what MLX attends with is replaced.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from typing import Any

from mlxspec.platform import device  # before mlx  # isort: skip

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.cli import checkup, stats_line
from mlxspec.kernels import attention, launch
from mlxspec.kernels.attention import Heads, attend, has_kernel
from mlxspec.kernels.flat import FlatRows
from tests import tiny_models
from tests.rounding import of_attention, of_model

HEADS = Heads(4, 2, 32, mx.float32)
MLX_ATTENDS = mx.fast.scaled_dot_product_attention


def draw(width: int, length: int, heads: Heads = HEADS) -> tuple[mx.array, mx.array, mx.array]:
    rng = np.random.default_rng(width * 1000 + length)
    shapes = (heads.num, width), (heads.num_kv, length), (heads.num_kv, length)
    q, k, v = (
        mx.array(rng.standard_normal((1, *s, heads.dim), np.float32)).astype(heads.dtype) for s in shapes
    )
    return q, k, v


def exact(q: mx.array, k: mx.array, v: mx.array, scale: float, sees: np.ndarray) -> np.ndarray:
    """In float64, head by head. sees (w, L) bool."""
    found = []
    groups = q.shape[1] // k.shape[1]
    for h in range(q.shape[1]):
        own, keys, values = (
            np.asarray(x[0, i]).astype(np.float64) for x, i in ((q, h), (k, h // groups), (v, h // groups))
        )
        scores = np.where(sees, own @ keys.T * scale, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        found.append(weights / weights.sum(-1, keepdims=True) @ values)
    return np.stack(found)[None]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """A device with an attention kernel, which is the function given."""
    monkeypatch.setattr(launch, "_reports", {})
    monkeypatch.setattr(device, "has_fused_attention", lambda: True)
    attention._is_right.cache_clear()

    def play(kernel: Any) -> None:
        monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", kernel)

    yield play
    attention._is_right.cache_clear()


def check(got: mx.array, q: mx.array, k: mx.array, v: mx.array, scale: float, sees: np.ndarray) -> None:
    """Against float64."""
    off = np.abs(np.asarray(got) - exact(q, k, v, scale, sees))
    assert (off <= of_attention(q, k, v, scale, sees)).all()


def zeros(queries: mx.array, *rest: Any, **options: Any) -> mx.array:
    """A launch that never ran."""
    return mx.zeros_like(queries)


def raises(*rest: Any, **options: Any) -> mx.array:
    raise ValueError(
        "Thread group size (1024) is greater than the maximum allowed threads per threadgroup (832).\nmore"
    )


def never(*rest: Any, **options: Any) -> mx.array:
    raise AssertionError("a kernel that is not to be used was used")


def wrong_behind(length: int) -> Callable[..., mx.array]:
    def kernel(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
        good = MLX_ATTENDS(queries, keys, values, **options)
        return good if keys.shape[2] < length else good + 1.0

    return kernel


def deaf_to_masks(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
    return MLX_ATTENDS(queries, keys, values, scale=options["scale"])


def one_too_many(queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: Any) -> mx.array:
    """Causal from the wrong end: a query sees its successor as well."""
    if isinstance(mask, str):
        width, length = queries.shape[2], keys.shape[2]
        mask = mx.array(np.tri(width, length, length - width + 1, dtype=np.bool_))
    return MLX_ATTENDS(queries, keys, values, scale=scale, mask=mask)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    width=st.sampled_from([1, 2, 5, 16, 17, 255, 256, 257, 600]),
    behind=st.integers(0, 40),
    played=st.booleans(),
)
def test_a_query_sees_what_stands_before_it(width: int, behind: int, played: bool) -> None:
    q, k, v = draw(width, width + behind)
    sees = np.tri(width, width + behind, behind, dtype=np.bool_)
    with pytest.MonkeyPatch.context() as patch:
        if played:
            patch.setattr(device, "has_fused_attention", lambda: True)
            patch.setattr(attention, "_is_right", lambda heads: False)
            patch.setattr(mx.fast, "scaled_dot_product_attention", never)
        got = attend(q, k, v, 0.2)
    check(got, q, k, v, 0.2, sees)


@pytest.mark.parametrize("width", [1, 5, 6, 8, 9, 64])
def test_keys_are_read_once_where_scores_are_written_out(width: int, on_gpu: Callable[[Any], None]) -> None:
    """Up to 5 queries of 6 heads a key are MLX's kernel's, more are folded."""
    heads = Heads(12, 2, 256, mx.float32)
    on_gpu(MLX_ATTENDS)
    assert has_kernel(heads)
    q, k, v = draw(width, width + 30, heads)
    sees = np.tri(width, width + 30, 30, dtype=np.bool_)
    on_gpu(MLX_ATTENDS if width <= 5 else never)
    check(attend(q, k, v, 0.06), q, k, v, 0.06, sees)
    products: list[tuple[int, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        real = mx.softmax
        patch.setattr(mx, "softmax", lambda x, **rest: (products.append(x.shape), real(x, **rest))[1])
        attend(q, k, v, 0.06)
    assert products == ([] if width <= 5 else [(1, 2, 6 * width, width + 30)])


@pytest.mark.parametrize("width", [1, 4, 300])
def test_a_mask_says_what_is_seen(width: int, on_gpu: Callable[[Any], None]) -> None:
    q, k, v = draw(width, 310)
    sees = np.random.default_rng(0).random((width, 310)) < 0.3
    sees[:, 0] = True
    for kernel in (MLX_ATTENDS, zeros):
        attention._is_right.cache_clear()
        on_gpu(kernel)
        check(attend(q, k, v, 0.2, mx.array(sees)), q, k, v, 0.2, sees)


def test_on_a_cpu_there_is_no_kernel_and_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    if device.has_gpu():
        pytest.skip("needs a machine without a GPU")
    monkeypatch.setattr(attention, "_largest_error", never)
    assert not has_kernel(HEADS)


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((4, 2, 32), "float32"), ((4, 2, 32), "float16"), ((8, 2, 256), "bfloat16"), ((8, 1, 512), "float16")],
)
def test_a_right_kernel_is_used(
    sizes: tuple[int, int, int], dtype: str, on_gpu: Callable[[Any], None]
) -> None:
    heads = Heads(*sizes, getattr(mx, dtype))
    assert has_kernel(heads)
    assert not launch.needed()[len(launch._checks) :]
    fused = Heads(4, 2, 64, mx.float32)
    assert has_kernel(fused)
    q, k, v = draw(3, 9, fused)
    on_gpu(zeros)  # asked once: it goes on being used
    assert not attend(q, k, v, 1.0).any().item()


@pytest.mark.parametrize(
    "kernel", [zeros, wrong_behind(1024), wrong_behind(4096), deaf_to_masks, one_too_many]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_kernel_is_not_used_and_reported(
    kernel: Any, dtype: str, on_gpu: Callable[[Any], None]
) -> None:
    on_gpu(kernel)
    heads = HEADS._replace(dtype=getattr(mx, dtype))
    assert not has_kernel(heads)
    (report,) = launch.needed()[len(launch._checks) :]
    assert report.failed
    assert not report.in_use
    assert "differs from plain operations" in report.reason
    said = stats_line.notices([])
    assert sum("MLX's attention (4 heads of 32, 2 of keys) is switched off" in n for n in said) == 1


def test_a_kernel_that_cannot_run_costs_only_itself(on_gpu: Callable[[Any], None]) -> None:
    on_gpu(raises)
    model, tokens = tiny_models.target(), mx.array([3, 1, 4, 1, 5], mx.int32)

    def logits() -> np.ndarray:
        cache = model.make_cache(1)
        prompt = model.forward(tokens, FlatRows((5,)), cache, certain=True)
        cache.commit()
        step = model.forward(tokens[:1], FlatRows((1,)), cache, certain=True)
        cache.commit()
        verify = model.forward(tokens[:3], FlatRows((3,)), cache)
        return np.concatenate([np.asarray(out.logits) for out in (prompt, step, verify)])

    got = logits()
    (report,) = launch.needed()[len(launch._checks) :]
    assert report.reason == (
        "cannot run on this device: Thread group size (1024) is greater than the maximum allowed threads per threadgroup (832)."
    )
    on_gpu(MLX_ATTENDS)
    attention._is_right.cache_clear()
    wanted = logits()
    assert np.abs(got - wanted).max() <= of_model(3, 128) * np.abs(wanted).max()


def test_the_doctor_asks_for_common_heads(
    on_gpu: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(zeros)
    monkeypatch.setattr(attention, "COMMON", (Heads(8, 2, 256, mx.bfloat16), Heads(4, 1, 64, mx.bfloat16)))
    found = [f for f in checkup._kernels() if "MLX's attention" in f.name]
    assert [f.status for f in found] == ["wrong", "wrong"]
    assert "8 heads of 256, 2 of keys" in " ".join(f.name for f in found)


def test_scores_that_are_written_out_are_counted_and_bounded(on_gpu: Callable[[Any], None]) -> None:
    """By what MLX holds, on the CPU, which writes all of them out."""
    on_gpu(MLX_ATTENDS)
    fused, half, split = (HEADS._replace(dim=dim) for dim in (128, 32, 256))
    assert attention.score_bytes(fused, 512, 1 << 17) == 0
    assert attention.score_bytes(split, 8, 1 << 17) == 0
    assert attention.score_bytes(split._replace(num=24, num_kv=4), 5, 1 << 17) == 0
    assert attention.score_bytes(split._replace(num=24, num_kv=4), 6, 1 << 17) > 0  # 36 queries a key
    assert attention.score_bytes(half, 512, 1000) == 4 * 4 * 4 * 256 * 1000
    long = attention.score_bytes(split._replace(num=24, dtype=mx.bfloat16), 512, 1 << 17)
    assert long == 4 * 2 * 24 * attention._NARROWEST_BLOCK << 17


@pytest.mark.parametrize("length", [600, 2000])
def test_blocks_change_nothing_and_keep_to_what_is_counted(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_SCORES", 5 << 20)
    width = 300
    q, k, v = draw(width, length)
    mx.eval(q, k, v)
    sees = np.tri(width, length, length - width, dtype=np.bool_)
    for mask in (None, mx.array(sees)):
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        got = attend(q, k, v, 0.2, mask)
        mx.eval(got)
        held = mx.get_peak_memory() - before - 2 * got.nbytes
        assert device.has_gpu() or held <= 1.25 * attention.score_bytes(HEADS, width, length)
        check(got, q, k, v, 0.2, sees)


def test_a_round_goes_one_way_at_all_widths_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain step and verify alike, however many heads share keys; only prompts have softmax spelled out."""
    monkeypatch.setattr(device, "has_fused_attention", lambda: False)
    monkeypatch.setattr(device, "compile_enabled", lambda: True)
    found = []
    monkeypatch.setattr(attention, "_folded", lambda q, *_: found.append(q.shape[2]) or q)
    for width in (1, 4, 17, attention._FOLDED, attention._FOLDED + 1):
        attend(*draw(width, 2000), 0.2)
    assert found == [attention._FOLDED + 1]


@pytest.mark.parametrize(
    ("heads", "units", "whole"),
    [
        (Heads(2, 1, 256, mx.bfloat16), False, [2048]),
        (Heads(2, 1, 256, mx.bfloat16), True, [2048, 1024, 1024]),
        (Heads(2, 1, 256, mx.float32), False, []),
        (Heads(2, 1, 256, mx.float32), True, []),
        (Heads(16, 2, 512, mx.bfloat16), False, []),
        (Heads(16, 2, 512, mx.bfloat16), True, [2048]),
        (Heads(8, 1, 512, mx.bfloat16), True, []),
    ],
)
def test_some_pieces_of_a_prompt_are_attended_whole(
    on_gpu: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
    heads: Heads,
    units: bool,
    whole: list[int],
) -> None:
    """Where MLX fuses heads of 256: a first piece of 2,048 tokens, or any piece of 1,024 on an M5, masked ones too; and heads of 512 there,
    where there are enough of them. What memory counts stays: the last piece of a prompt is a narrow one."""
    monkeypatch.setattr(device, "has_matrix_units", lambda: units)
    monkeypatch.setattr(attention, "has_kernel", lambda heads: True)
    seen: list[int] = []

    def kernel(queries: mx.array, *_: Any, **__: Any) -> mx.array:
        seen.append(queries.shape[2])
        return queries

    on_gpu(kernel)
    for width, mask in ((2048, None), (1024, None), (1023, None), (1024, mx.ones((1024, 1024), mx.bool_))):
        q, k, v = draw(width, width, heads)
        attend(q, k, v, 1.0, mask)
    q, k, v = draw(1, 1100, heads)
    attend(q, k, v, 1.0)
    assert [n for n in seen if n >= 1024] == whole
    assert max(n for n in seen if n < 1024) <= 256
    assert (1 in seen) == (heads.dim == 256)  # a plain step of heads of 512 goes a verify's way
    assert attention.score_bytes(heads, 2048, 1 << 17) >= attention.score_bytes(heads, 100, 1 << 17) > 0


def test_narrower_pieces_are_counted_with_wide_ones(
    on_gpu: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight heads a key: MLX fuses five and more queries only from nine on."""
    monkeypatch.setattr(attention, "has_kernel", lambda heads: True)
    on_gpu(MLX_ATTENDS)
    heads = Heads(64, 8, 128, mx.bfloat16)
    assert attention.score_bytes(heads, 4, 5000) == 0
    assert attention.score_bytes(heads, 512, 5000) == attention.score_bytes(heads, 8, 5000) > 0


def test_what_an_m5_attends_with_is_compared_too(
    on_gpu: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong_when_wide(queries: mx.array, *args: Any, **options: Any) -> mx.array:
        return MLX_ATTENDS(queries, *args, **options) + float(queries.shape[2] >= 1024)

    monkeypatch.setattr(device, "has_matrix_units", lambda: True)
    on_gpu(wrong_when_wide)
    assert not has_kernel(Heads(1, 1, 256, mx.bfloat16))


@pytest.mark.parametrize(
    ("name", "system", "generation", "units"),
    [
        ("applegpu_g13g", "26.2", 13, False),
        ("applegpu_g16s", "26.2", 16, False),
        ("applegpu_g17g", "26.2", 17, True),
        ("applegpu_g17s", "15.6", 17, False),
        ("applegpu_g17p", "26.2", 17, False),
        ("air64_v26", "26.2", None, False),
        ("", "", None, False),
    ],
)
def test_a_gpu_says_which_generation_it_is(
    name: str, system: str, generation: int | None, units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "backend", lambda: "metal")
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": name})
    monkeypatch.setattr(platform, "mac_ver", lambda: (system, ("", "", ""), ""))
    for asked in (device.gpu_generation, device.has_matrix_units):
        asked.cache_clear()
    try:
        assert device.gpu_generation() == generation
        assert device.has_matrix_units() == units
    finally:
        for asked in (device.gpu_generation, device.has_matrix_units):
            asked.cache_clear()
