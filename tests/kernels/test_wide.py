"""Products of many rows that unpack a weight once: their numbers, when they are chosen, and how many unpacked weights are alive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import pytest
from planting import catches

from mlxspec.kernels import launch, products, wide
from mlxspec.kernels.flat import LADDER
from mlxspec.kernels.quantized_weight import MICROSCALING, QuantizedWeight, product_ops, race_key, random_rows
from mlxspec.models.runners import COMPILE_ALL_AT_MOST

FORMATS = [(64, bits, "affine") for bits in (2, 3, 4, 5, 6, 8)] + [(*f, m) for m, f in MICROSCALING.items()]
FEWEST = wide.RACED_ROWS[0]


@pytest.fixture
def in_use(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    launch.forget()
    monkeypatch.setattr(launch, "in_use", lambda name: name == wide.NAME)
    yield
    launch.forget()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows of the products that unpack once."""
    found: list[int] = []

    def noted(x: mx.array, weight: QuantizedWeight) -> mx.array:
        found.append(x.shape[0])
        return product_ops(x, weight)

    monkeypatch.setattr(wide, "wide_product", noted)
    return found


def won(num_rows: int, weight: QuantizedWeight, ratio: float) -> None:
    launch.set_speedup(wide.NAME, race_key(num_rows, weight, mx.float32), ratio)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_its_numbers_are_those_of_mlxs_product_but_for_the_order_of_sums(form: tuple[int, int, str]) -> None:
    weight = QuantizedWeight.of(mx.random.normal((24, 512), key=mx.random.key(1)), *form)
    x = random_rows(40, weight, mx.float32)
    summed = mx.abs(x) @ mx.abs(weight.values(mx.float32)).T
    apart = mx.abs(wide.wide_product(x, weight) - product_ops(x, weight))
    assert mx.all(apart <= 2 * 512 * 2**-24 * summed).item()


def without_its_last_group(right: Any) -> Any:
    """Return a wide_product that leaves out the last 32 numbers of each row."""
    return lambda x, weight: x[:, :-32] @ weight.values(x.dtype)[:, :-32].T


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=str)
@catches("a part of each row is left out", "mlxspec.kernels.wide:wide_product", without_its_last_group)
def test_in_16_bits_it_is_a_float32_product_to_roundings(form: tuple[int, int, str], dtype: mx.Dtype) -> None:
    """Unpacking rounds each number once, and the product once. MLX's own operation on a CPU also adds in 16 bits, so it is no measure."""
    weight = QuantizedWeight.of(mx.random.normal((24, 512), key=mx.random.key(1)).astype(dtype), *form)
    x = random_rows(40, weight, dtype)
    wide_x, values = x.astype(mx.float32), weight.values(mx.float32)
    summed = mx.abs(wide_x) @ mx.abs(values).T
    got = wide.wide_product(x, weight)
    assert got.dtype == dtype
    assert mx.all(mx.abs(got - wide_x @ values.T) <= 2 * mx.finfo(dtype).eps * summed).item()


@catches(
    "a lost race counts",
    "mlxspec.kernels.launch:wins",
    lambda right: lambda name, width: launch.speedup(name, width) > 0,
)
@catches(
    "rows between races go by the next larger one",
    "mlxspec.kernels.wide:RACED_ROWS",
    lambda right: (right[0] // 2, right[1]),
)
def test_races_decide_and_rows_between_them_go_by_the_next_smaller_one(in_use: None, ran: list[int]) -> None:
    weight = QuantizedWeight.of(mx.ones((8, 64)))
    for num_rows, ratio in ((512, 1.3), (2048, 0.9)):
        won(num_rows, weight, ratio)
    for num_rows in (1, 511, 512, 2047, 2048, 3000):
        products.product(mx.ones((num_rows, 64)), weight)
    products.product(mx.ones((512, 64)), weight, exact=True)
    assert ran == [512, 2047]


def test_verifies_and_compiled_forwards_have_fewer_rows() -> None:
    """A verify has a width of the ladder. A product that is handed over by itself can be no part of a compiled function."""
    assert max(LADDER[-1], COMPILE_ALL_AT_MOST) < FEWEST


class _Never:
    """Never remembers a product."""

    ends = property(lambda self: None, lambda self, value: None)


@catches("no product waits", "mlxspec.kernels.wide:_handed", lambda right: _Never())
def test_a_product_waits_for_the_last_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of hand-overs and waits, which is the bound on any device."""
    weight = QuantizedWeight.of(mx.ones((8, 64)))
    evaluate, start = mx.eval, mx.async_eval
    seen: list[Any] = []
    monkeypatch.setattr(mx, "async_eval", lambda *given: (seen.append(given[1]), start(*given)))
    monkeypatch.setattr(mx, "eval", lambda *given: (seen.append(given[0]), evaluate(*given)))
    wide.wide_product(mx.ones((2, 64)), weight)
    seen.clear()
    before = wide._handed.ends
    for _ in range(3):
        wide.wide_product(mx.ones((2, 64)), weight)
    assert len(seen) == 6
    one, two, three = seen[::2]
    assert [id(x) for x in seen[1::2]] == [id(x) for x in (before, one, two)]
    assert wide._handed.ends is three


def lazily(x: mx.array, weight: QuantizedWeight) -> mx.array:
    return x @ weight.values(x.dtype).T


@catches("products are left to MLX's order", "mlxspec.kernels.wide:wide_product", lambda right: lazily)
def test_unpacked_weights_do_not_add_up() -> None:
    """Bytes of a chain of products, as MLX counts them: at most those of two products on their way, with what unpacking takes on this
    device, and three of the chain's own arrays."""
    size, rows, num = 256, 32, 24
    weights = [
        QuantizedWeight.of(mx.random.normal((size, size), key=mx.random.key(i)) / 16) for i in range(num)
    ]
    x = mx.random.normal((rows, size))
    mx.eval(x, *(part for w in weights for part in (w.codes, w.scales, w.biases)))

    def peak(*chain: QuantizedWeight, only_unpacks: bool = False) -> int:
        mx.synchronize()
        mx.clear_cache()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        y = x
        for weight in chain:
            y = weight.values(x.dtype) if only_unpacks else wide.wide_product(y, weight)
        mx.eval(y)
        return mx.get_peak_memory() - held

    unpacking = peak(weights[0], only_unpacks=True)
    assert unpacking >= 4 * size * size
    assert peak(*weights) <= 2 * unpacking + 3 * x.nbytes + (1 << 16)


def test_races_that_are_not_on_record_are_run(in_use: None) -> None:
    weight = QuantizedWeight.of(mx.random.normal((16, 64), key=mx.random.key(3)))
    assert wide.unraced(weight, mx.float32) == list(wide.RACED_ROWS)
    found = products.tune(weight, mx.float32, wide.RACED_ROWS)
    assert found == {wide.NAME: launch.speedups()[wide.NAME]}
    assert min(found[wide.NAME].values()) > launch.LOST  # the same numbers
    assert wide.unraced(weight, mx.float32) == []


def test_without_a_gpu_nothing_is_raced_or_unpacked() -> None:
    launch.forget()
    weight = QuantizedWeight.of(mx.ones((8, 64)))
    won(FEWEST, weight, 9.0)
    assert not wide.is_chosen(FEWEST, weight, mx.float32)
    assert wide.race(FEWEST, weight, mx.float32) == {}
    assert wide.unraced(weight, mx.float32) == []
    assert wide.scratch_bytes(weight, mx.float32) == 0
    launch.forget()
