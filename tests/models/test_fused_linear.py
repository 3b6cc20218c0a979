"""Quantized projections: one path through `product`, which takes a kernel of ours only where it won, in every format that it knows."""

from __future__ import annotations

from dataclasses import replace

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import gpu_rounding
import mlx.core as mx
import mlx.nn as nn
import pytest
from planting import catches, rewritten

from mlxspec.kernels import launch, products, qmv_rows, wide
from mlxspec.kernels.quantized_weight import MICROSCALING, product_ops, race_key
from mlxspec.models import layers, tune
from mlxspec.models.layers import FusedLinear

pytestmark = pytest.mark.smoke

SIZE = 512


def linear(out: int, *, seed: int = 0, bias: bool = False, mode: str = "affine", bits: int = 4) -> nn.Module:
    module = nn.Linear(SIZE, out, bias=bias)
    module.weight = mx.random.normal((out, SIZE), key=mx.random.key(seed)) * SIZE**-0.5
    group, bits = MICROSCALING.get(mode, (64, bits))
    return nn.QuantizedLinear.from_linear(module, group_size=group, bits=bits, mode=mode)


@pytest.fixture
def kernel_calls(monkeypatch):
    """Widths for which the kernel was launched; it is said to be in use, and MLX's operation stands in for it."""
    calls: list[int] = []

    def metal(x, weight):
        calls.append(x.shape[0])
        return product_ops(x, weight)

    monkeypatch.setattr(launch, "in_use", lambda name: True)
    monkeypatch.setattr(products, "KERNELS", (replace(qmv_rows.KERNEL, run=metal),))
    launch.forget()
    yield calls
    launch.forget()


def inputs(num_rows: int) -> mx.array:
    return mx.random.normal((num_rows, SIZE), key=mx.random.key(7))


@pytest.mark.parametrize("mode", ["affine", *MICROSCALING])
def test_the_kernel_runs_only_where_it_won(kernel_calls, mode):
    parts = [linear(24, mode=mode), linear(8, seed=1, mode=mode)]
    plain = mx.concatenate([part(inputs(3)) for part in parts], axis=-1)
    fused = FusedLinear(parts)
    assert mx.array_equal(fused(inputs(3)), plain)
    assert kernel_calls == []
    (weight,) = layers.multiplied_weights(fused)
    assert (weight.shape, weight.mode) == ((32, SIZE), mode)
    launch.set_speedup(qmv_rows.KERNEL.name_of(weight), race_key(3, weight, inputs(3).dtype), 1.2)
    launch.set_speedup(qmv_rows.KERNEL.name_of(weight), race_key(4, weight, inputs(4).dtype), 0.9)
    for num_rows in (1, 3, 4, 9):
        fused(inputs(num_rows))
    assert kernel_calls == [3]


def test_formats_side_by_side_each_have_their_own_way(kernel_calls):
    parts = [linear(8), linear(8, mode="mxfp4"), linear(8, bits=8), linear(8, bias=True)]
    fused = FusedLinear(parts)
    formats = {w.format for w in layers.multiplied_weights(fused)}
    assert formats == {"4 bit, group 64", "mxfp4", "8 bit, group 64"}
    for weight in layers.multiplied_weights(fused):
        launch.set_speedup(qmv_rows.KERNEL.name_of(weight), race_key(2, weight, inputs(2).dtype), 1.2)
    outs = [p(inputs(2)) for p in parts]
    assert mx.allclose(fused(inputs(2)), mx.concatenate(outs, axis=-1))
    assert kernel_calls == [2, 2, 2, 2]  # a bias is added to what the kernel gives


def test_float_weights_have_nothing_to_race():
    assert not list(layers.multiplied_weights(FusedLinear([nn.Linear(SIZE, 8, bias=False)])))


class Pair(nn.Module):
    """Two equal shapes, of which one is raced, and the same shape in a microscaling format."""

    dtype = mx.float32

    def __init__(self) -> None:
        super().__init__()
        self.layers = [FusedLinear([linear(8, seed=i)]) for i in range(2)]
        self.other = FusedLinear([linear(16)])
        self.bytes = FusedLinear([linear(8, mode="mxfp4")])


@pytest.mark.skipif(gpu_rounding.IS_PLANTED, reason="the stubbed kernel does not have the option's bits")
def test_tune_races_each_shape_once_and_keeps_what_it_found(kernel_calls, monkeypatch, tmp_path):
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    raced = []

    def race(name, width, ours, theirs, *, num_bytes):
        raced.append(width)
        launch.set_speedup(name, width, 1.5)
        return 1.5

    monkeypatch.setattr(launch, "race", race)
    found = tune.tune(Pair())
    assert len(raced) == len(set(raced)) == 3 * (qmv_rows.MAX_ROWS + len(wide.RACED_ROWS))
    assert set(found) == {"qmv_rows", "qmv_rows_fp", wide.NAME}
    assert list(found["qmv_rows_fp"])[1] == "512 to 8, float32, mxfp4, 2 rows"
    launch.forget()
    tune.races.restore()
    assert launch.speedups() == found


@catches(
    "what is not to be kept is written",
    "mlxspec.models.tune:tune",
    rewritten("if found and keep:", "if found:"),
    case="False",
)
@catches(
    "what is to be kept is not written",
    "mlxspec.models.tune:tune",
    rewritten("if found and keep:", "if False:"),
    case="True",
)
@pytest.mark.skipif(gpu_rounding.IS_PLANTED, reason="the stubbed kernel does not have the option's bits")
@pytest.mark.parametrize("keep", [True, False])
def test_tune_writes_for_later_processes_if_it_is_asked_to(kernel_calls, monkeypatch, keep):
    saved = []
    monkeypatch.setattr(tune.races, "save", lambda: saved.append(keep))
    monkeypatch.setattr(launch, "race", lambda name, width, ours, theirs, *, num_bytes: 1.5)
    assert tune.tune(Pair(), keep=keep)
    assert saved == [True] * keep


def test_tune_without_metal_finds_nothing_and_writes_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(launch, "in_use", lambda name: False)
    assert tune.tune(Pair()) == {}
    assert list(tmp_path.iterdir()) == []
