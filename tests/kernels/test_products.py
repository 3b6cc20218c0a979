"""Which kernel multiplies few rows with a quantized weight: by races, by bits, and by what each takes.

MLX's operation stands in for kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import pytest
from planting import catches

from mlxspec.kernels import launch, products, qmm_few, qmv_rows
from mlxspec.kernels.quantized_weight import QuantizedWeight, product_ops, race_key

ROWS, FEW = "qmv_rows", "qmm_few"


def draw(num_rows: int, size: int = 512, mode: str = "affine") -> tuple[mx.array, QuantizedWeight]:
    form = {"affine": (64, 4)}.get(mode, (32, 4))
    x, w = (mx.random.normal((n, size), key=mx.random.key(n)) for n in (num_rows, 8))
    return x, QuantizedWeight.of(w, *form, mode)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """Launches of kernels with their numbers of rows; all kernels are in use."""
    calls: list[tuple[str, int]] = []

    def stand_in(name: str):
        def run(x: mx.array, weight: QuantizedWeight) -> mx.array:
            calls.append((name, x.shape[0]))
            return product_ops(x, weight)

        return run

    kernels = tuple(replace(k, run=stand_in(k.name)) for k in (qmv_rows.KERNEL, qmm_few.KERNEL))
    monkeypatch.setattr(products, "KERNELS", kernels)
    monkeypatch.setattr(launch, "in_use", lambda name: True)
    launch.forget()
    yield calls
    launch.forget()


def won(kernel: str, num_rows: int, weight: QuantizedWeight, ratio: float) -> None:
    launch.set_speedup(kernel, race_key(num_rows, weight, mx.float32), ratio)


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_without_a_won_race_mlx_multiplies(ran: list[tuple[str, int]], mode: str) -> None:
    x, weight = draw(6, mode=mode)
    names = [k.name_of(weight) for k in products.KERNELS]
    products.product(x, weight)
    for name in names:
        won(name, 6, weight, 0.9)
    products.product(x, weight)
    assert ran == []
    won(names[0], 6, weight, 1.3)
    products.product(x, weight)
    assert ran == [(ROWS, 6)]


@catches(
    "the first kernel that won is taken, not the fastest",
    "mlxspec.kernels.launch:speedup",
    lambda right: lambda name, width: -right(name, width),
)
def test_the_fastest_of_two_is_taken(ran: list[tuple[str, int]]) -> None:
    x, weight = draw(8)
    won(ROWS, 8, weight, 1.2)
    won(FEW, 8, weight, 1.6)
    products.product(x, weight)
    assert ran == [(FEW, 8)]


def test_numbers_of_rows_between_races_go_by_the_next_larger_one(ran: list[tuple[str, int]]) -> None:
    weight = draw(1)[1]
    won(FEW, 16, weight, 1.4)
    for num_rows in (12, 13, 16, 17, 33):
        products.product(draw(num_rows)[0], weight)
    assert ran == [(FEW, 13), (FEW, 16)]


@catches(
    "a kernel with other bits does exact rounds",
    "mlxspec.kernels.products:chosen",
    lambda right: lambda *given, exact=False: right(*given),
)
def test_exact_rounds_have_the_bits_of_single_rows(ran: list[tuple[str, int]]) -> None:
    x, weight = draw(8)
    won(FEW, 8, weight, 2.0)
    products.product(x, weight, exact=True)
    assert ran == [(ROWS, 8)]


def test_what_no_kernel_takes_goes_to_mlx(ran: list[tuple[str, int]]) -> None:
    """Too many rows, widths that MLX adds in another order, another dtype, other bits."""
    odd = draw(2, 576)
    two_bits = odd[0], QuantizedWeight.of(mx.random.normal((8, 576)), 64, 2)
    for x, weight in (draw(9), odd, two_bits, (odd[0].astype(mx.float16), odd[1])):
        assert products.product(x, weight, exact=True).shape == (x.shape[0], 8)
    assert ran == []


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_rows_of_any_dtype_are_taken_by_microscaling_formats(dtype: mx.Dtype) -> None:
    """Their scales are bytes, so rows of any dtype fit."""
    weight = draw(1, mode="mxfp4")[1]
    assert qmv_rows.KERNEL.supports(2, weight, dtype)
    assert qmm_few.KERNEL.supports(9, weight, dtype)


def test_tune_races_what_each_kernel_takes(
    ran: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "has_bits_of_single_rows", lambda got, x, weight: x.shape[0] < 5)
    monkeypatch.setattr(launch, "may_mix", lambda name: False)
    weight = draw(1)[1]
    found = products.tune(weight)
    said = "512 to 8, float32, 4 bit, group 64"
    assert list(found[ROWS]) == [f"{said}, {n} rows" for n in range(1, 9)]
    assert list(found[FEW]) == [f"{said}, {n} rows" for n in (5, 6, 7, 8, 12, 16, 24)]  # 32 in 16 bits only
    assert launch.speedups() == found
    monkeypatch.setattr(launch, "may_mix", lambda name: True)
    assert products.unraced(weight, mx.float32) == []
    launch.forget()
    assert products.unraced(weight, mx.float32) == list(products.RACED_ROWS)[:-1]


@pytest.mark.parametrize(("mixes", "lost"), [(True, True), (False, False)])
def test_a_race_is_lost_where_bits_differ_at_the_weights_own_shape(
    ran: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, mixes: bool, lost: bool
) -> None:
    """By a last bit of one number. Where the self-check has seen that already, a race only says which is faster."""
    monkeypatch.setattr(launch, "may_mix", lambda name: mixes)
    off = [
        replace(k, run=lambda *given: product_ops(*given).at[0, 3].multiply(1 + 2**-22))
        for k in products.KERNELS
    ]
    monkeypatch.setattr(products, "KERNELS", off)
    ratios = products.race(3, draw(1)[1], mx.float32)
    assert (ratios[ROWS] == launch.LOST) == lost


@pytest.mark.parametrize("alike", [True, False])
def test_a_kernel_with_other_bits_competes_only_where_mlx_has_other_bits_too(
    ran: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    """Where MLX's own product of so many rows has the bits of single rows, drafted text is plain text bit by bit, and stays so."""
    monkeypatch.setattr(products, "has_bits_of_single_rows", lambda *_: alike)
    ratios = products.race(8, draw(1)[1], mx.float32)
    assert (ratios[FEW] == launch.LOST) == alike


@pytest.mark.parametrize(
    ("num_rows", "rows", "few", "mixes", "wanted"),
    [
        (4, 0.99, 0.0, True, ROWS),  # as fast as MLX's own, within the doubt of a race
        (4, 0.97, 0.0, True, None),
        (1, 0.99, 0.0, True, None),  # the bits of one row are MLX's own already
        (6, 1.5, 1.52, True, ROWS),
        (6, 1.5, 1.54, True, FEW),
        (6, 1.5, 1.52, False, FEW),
    ],
)
def test_a_rows_own_bits_are_kept_where_that_costs_nothing(
    ran: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    num_rows: int,
    rows: float,
    few: float,
    mixes: bool,
    wanted: str | None,
) -> None:
    monkeypatch.setattr(launch, "may_mix", lambda name: mixes)
    x, weight = draw(num_rows)
    for name, ratio in ((ROWS, rows), (FEW, few)):
        if ratio:
            won(name, num_rows, weight, ratio)
    products.product(x, weight)
    assert ran == ([] if wanted is None else [(wanted, num_rows)])


@catches(
    "a tie is kept as one",
    "mlxspec.kernels.launch:set_speedup",
    lambda right: lambda name, key, ratio: right(name, key, max(ratio, 0.99)),
    case="True-0.99",
)
@pytest.mark.parametrize(
    ("alike", "ratio", "wanted"), [(True, 0.99, None), (False, 0.99, ROWS), (True, 1.03, ROWS)]
)
def test_a_tie_is_mlx_own_where_it_keeps_the_bits_too(
    ran: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    alike: bool,
    ratio: float,
    wanted: str | None,
) -> None:
    """A kernel of ours that is no faster has nothing to give there."""
    monkeypatch.setattr(launch, "may_mix", lambda name: True)
    monkeypatch.setattr(launch, "race", lambda *_, **__: ratio)
    monkeypatch.setattr(products, "_loses_by_bits", lambda kernel, x, weight: kernel.name == FEW)
    monkeypatch.setattr(products, "has_bits_of_single_rows", lambda *_: alike)
    x, weight = draw(4)
    products.race(4, weight, mx.float32)
    products.product(x, weight)
    assert ran == ([] if wanted is None else [(wanted, 4)])
