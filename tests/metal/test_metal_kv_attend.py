"""kv_attend.metal and kv_join.metal against float64 over the numbers that codes stand for, all sizes, dtypes, orders; what they read."""

from __future__ import annotations

import emulator
import mlx.core as mx
import numpy as np
import pytest
from checks_gdn import numpy_of
from checks_kv import check_attention, check_far, draw, exact
from planting import catches

from mlxspec.kernels import attention, launch, quantized_kv
from mlxspec.kernels import kv_attend as kernel
from mlxspec.kernels.quantized_kv import QuantizedTokens

FLOATS = [mx.float32, mx.float16, mx.bfloat16]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_dtypes(metal, dtype, bits):
    with metal(order="random"):
        check_attention(3, 100, dtype=dtype, bits=bits)


@pytest.mark.parametrize("contract", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_sizes_of_heads(metal, dim, bits, contract):
    with metal(order="reverse", contract=contract):
        check_attention(2, 70, dim=dim, bits=bits, heads=6, kv=2, dtype=mx.bfloat16)


@pytest.mark.parametrize(
    ("heads", "kv", "width", "dim"),
    [
        (1, 1, 1, 64),  # one query
        (4, 4, 1, 64),  # no group
        (6, 1, 1, 256),  # a plain step of a 27B model's heads
        (3, 1, 3, 64),  # 9 queries in room for 16
        (8, 2, 5, 128),  # 20 in room for 32
        (4, 1, 16, 64),  # 64
        pytest.param(6, 1, 4, 256, marks=pytest.mark.slow),
        pytest.param(6, 1, 10, 256, marks=pytest.mark.slow),
        pytest.param(8, 1, 17, 64, marks=pytest.mark.slow),  # 136, in three tiles
        pytest.param(8, 1, 17, 128, marks=pytest.mark.slow),
    ],
)
def test_numbers_of_queries(metal, heads, kv, width, dim):
    with metal(order="random"):
        check_attention(width, 90, heads=heads, kv=kv, dim=dim)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 257, 700])
def test_lengths(metal, length):
    """Fewer than a block, whole blocks, and one more."""
    with metal(order="random"):
        check_attention(1, length, heads=2, kv=1)


@pytest.mark.parametrize("parts", [1, 2, 5, 9])
def test_parts_of_a_row(metal, parts, monkeypatch):
    """More of them than there are blocks too: the last ones see nothing."""
    monkeypatch.setattr(kernel, "num_parts", lambda *_: parts)
    with metal(order="random"):
        check_attention(3, 300, heads=4, kv=2)
        check_attention(2, 40, heads=4, kv=2, dim=128, bits=4)


def test_each_query_sees_up_to_its_own_end(metal, monkeypatch):
    """Ends that lie far apart, so that whole parts are seen by some queries only; and a bound that is longer than the row, as behind a
    round that nobody has read."""
    with metal(order="random"):
        for ends in ([1, 40, 299], [5, 5, 5], [300, 300, 300], [298, 299, 300]):
            for parts in (1, 4):
                monkeypatch.setattr(kernel, "num_parts", lambda *_, n=parts: n)
                check_attention(3, 300, ends=np.array(ends))


@pytest.mark.parametrize("widths", [(1, 4, 2), (5, 1, 3)])
def test_ragged_rows(metal, widths):
    """One launch a row, each with a length of its own, from buffers of rows of a cache."""
    with metal(order="random"):
        for seed, width in enumerate(widths):
            check_attention(width, 37 * (seed + 1) + width, seed=seed, heads=6, kv=2, bits=4)


def test_scores_far_from_zero(metal):
    """Weights are taken against the largest score so far: exponentials neither overflow nor vanish."""
    with metal():
        q, keys, values = draw(2, 200, heads=2, kv=1)
        for factor in (1e-3, 30.0):
            got = numpy_of(kernel.kv_attend_metal(q * factor, keys, values, 1.0))[0]
            wanted = exact(q * factor, keys, values, 1.0, np.array([199, 200]))
            assert np.abs(got - wanted).max() <= 1e-4 * np.abs(wanted).max()
        for parts in (1, 3):
            check_far(parts)


def test_numbers_behind_the_row_are_not_looked_at(metal):
    """Scratch may hold anything, also what is no number."""
    with metal():
        q, keys, values = draw(2, 50)
        wanted = kernel.kv_attend_metal(q, keys, values, 0.125)
        poisoned = []
        for x in (keys, values):
            scales = mx.array(np.array(x.scales))
            scales[:, :, 50:] = mx.nan
            poisoned.append(QuantizedTokens(x.codes, scales, x.biases, 50))
        assert mx.array_equal(kernel.kv_attend_metal(q, *poisoned, 0.125), wanted).item()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_keys_and_values_are_read_once_for_all_queries(emulated, dim, bits):
    """Codes, scales and biases of the row's tokens, each byte once, for one token or eight; of the room behind them nothing."""
    heads, kv, length = 6, 2, 300
    for width in (1, 8):
        q, keys, values = draw(width, length, heads=heads, kv=kv, dim=dim, bits=bits, dtype=mx.bfloat16)
        emulator.runs.clear()
        with emulated():
            kernel.kv_attend_metal(q, keys, values, 1.0)
        attend, _ = emulator.runs
        for name, of in (("key", keys), ("value", values)):
            read = {part: attend.bytes_read[f"{name}_{part}"] for part in ("codes", "scales", "biases")}
            held = {part: x.nbytes for part, x in zip(("codes", "scales", "biases"), of.parts, strict=True)}
            assert read == held


def each_lane_loads(right):
    shared, own = (
        "simd_shuffle(words, SHARED * (v - u) + lane / PER_WORD)",
        "value_codes[(tokens + at + t + v) * WORDS + own / PER_WORD]",
    )
    assert shared in right("kv_attend")
    return lambda name: right(name).replace(shared, own)


@catches(
    "each lane loads the words that it shares with others",
    "mlxspec.kernels.launch:metal_source",
    each_lane_loads,
)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_what_lanes_share_is_loaded_once(emulated, monkeypatch, dim, bits):
    """A word of a value is loaded by one lane, its scale by two, and queries once for each block of tokens. A load takes time even where a
    cache holds the number."""
    monkeypatch.setattr(kernel._attend, "_built", {})
    heads, length = 6, 512
    q, keys, values = draw(1, length, heads=heads, kv=1, dim=dim, bits=bits, dtype=mx.bfloat16, room=0)
    emulator.runs.clear()
    with emulated():
        kernel.kv_attend_metal(q, keys, values, 1.0)
    loaded = emulator.runs[0].bytes_loaded
    assert loaded["value_codes"] == values.codes.nbytes
    assert loaded["value_scales"] == loaded["value_biases"] == 2 * values.scales.nbytes
    assert loaded["key_codes"] == keys.codes.nbytes
    num_blocks = length // dim  # with up to 8 queries all simdgroups are along tokens, 32 each
    assert loaded["q"] == num_blocks * q.nbytes


@pytest.mark.parametrize(
    ("dim", "bits", "heads", "width", "length"),
    [
        (64, 8, 2, 1, 8192),
        (64, 4, 2, 2, 16384),
        pytest.param(128, 8, 4, 4, 16384, marks=pytest.mark.slow),
        pytest.param(256, 8, 6, 1, 16384, marks=pytest.mark.slow),
        pytest.param(256, 4, 6, 4, 32768, marks=pytest.mark.slow),
    ],
)
def test_bytes_of_a_long_row(emulated, monkeypatch, dim, bits, heads, width, length):
    """At most 1.05 of the least: keys, values and queries read once, the result written once. One of four key heads, in as many parts
    as all four have: heads share nothing."""
    q, keys, values = draw(width, length, heads=heads, kv=1, dim=dim, bits=bits, dtype=mx.bfloat16, room=0)
    least = keys.nbytes + values.nbytes + 2 * q.nbytes
    parts = kernel.num_parts(heads * width, 4, length, keys)
    monkeypatch.setattr(kernel, "num_parts", lambda *_: parts)
    emulator.runs.clear()
    with emulated():
        kernel.kv_attend_metal(q, keys, values, 1.0)
    moved = sum(run.num_bytes for run in emulator.runs)
    print(
        f"\nheads of {dim}, {bits} bits, {heads * width} queries, {length} tokens: {moved / least:.3f} of {least / 1e6:.2f} MB"
    )
    assert moved <= 1.05 * least


# ---- where it is used


def test_self_check(metal):
    with metal():
        found = kernel._self_check()
    assert found.error <= found.limit


@pytest.fixture
def won(monkeypatch):
    """A device with products of quantized matrices on which every race was won."""
    for module in (quantized_kv, attention):
        monkeypatch.setattr(module, "has_products", lambda: True)
    monkeypatch.setattr(launch, "wins", lambda name, width: True)
    monkeypatch.setattr(launch, "in_use", lambda name: True)


def launches(run) -> int:
    emulator.runs.clear()
    run()
    return sum(r.kernel == "mlxspec_kv_attend" for r in emulator.runs)


def test_attend_launches_it_where_it_has_won(emulated, won):
    q, keys, values = draw(3, 60)
    sees = mx.arange(60)[None] < mx.array([58, 59, 60])[:, None]
    with emulated():
        found = []

        def run(*more) -> None:
            found.append(attention.attend(q, keys, values, 0.125, *more))

        assert launches(run) == 1
        assert launches(lambda: run(sees)) == 0  # a mask alone may be any
        assert launches(lambda: run(sees, mx.array([58, 59, 60], mx.int32))) == 1
        for other in found[1:]:
            assert launch.largest_error([other], [found[0]]) <= 1e-5


def test_what_it_does_not_take_goes_to_the_twin(emulated, won):
    for how in ({"dim": 512, "heads": 2, "kv": 1}, {"dtype": mx.bfloat16}):
        q, keys, values = draw(2, 40, **how)
        if "dtype" in how:
            q = q.astype(mx.float32)  # of another dtype than the scales
        with emulated():
            assert launches(lambda q=q, k=keys, v=values: attention.attend(q, k, v, 0.1)) == 0
    q, keys, values = draw(attention._FOLDED + 1, 100)
    with emulated():
        assert launches(lambda: attention.attend(q, keys, values, 0.1)) == 0


def test_unmeasured_means_the_twin(emulated, monkeypatch):
    """The kernel runs only where it has won its race for these heads and as many queries."""
    monkeypatch.setattr(attention, "has_products", lambda: True)
    q, keys, values = draw(1, 40)
    launch.forget()
    with emulated():
        assert launch.in_use("kv_attend")  # the self-check launches it too
        assert launches(lambda: attention.attend(q, keys, values, 0.1)) == 0
        launch.set_speedup("kv_attend", kernel._race_key(q, keys), 1.5)
        assert launches(lambda: attention.attend(q, keys, values, 0.1)) == 1
        wider, *_ = draw(9, 40)
        assert launches(lambda: attention.attend(wider, keys, values, 0.1)) == 0
    launch.forget()


def test_a_kernel_that_fails_its_self_check_is_not_used(emulated, monkeypatch):
    text = launch.metal_source
    monkeypatch.setattr(
        launch, "metal_source", lambda name: text(name).replace("token < min(end,", "token < max(end,")
    )
    monkeypatch.setattr(kernel._attend, "_built", {})
    launch.forget()
    with emulated():
        assert not launch.in_use("kv_attend")
        (report,) = (r for r in launch._all_reports() if r.name == "kv_attend")
        assert report.failed
    launch.forget()


def test_tune_races_each_number_of_queries(monkeypatch):
    monkeypatch.setattr(launch, "in_use", lambda name: True)
    monkeypatch.setattr(kernel, "kv_attend_metal", kernel.kv_attend_ops)
    monkeypatch.setattr(kernel, "_LONGEST", 40)
    monkeypatch.setattr(quantized_kv, "has_products", lambda: True)
    found = kernel.tune(6, 2, 64, mx.float32, 8)
    said = "2 heads of 64, float32, 8 bit, up to {} queries each"
    assert list(found) == [said.format(n) for n in (8, 16, 32, 64)]
    assert kernel.tune(6, 2, 80, mx.float32, 8) == {}
    launch.forget()
