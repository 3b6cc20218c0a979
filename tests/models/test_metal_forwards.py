"""What a forward costs a Mac before its GPU computes anything: launches, variants of kernels, compiled shapes, hand-overs.

Counted in graphs with kernels stubbed, so no Metal is needed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from mlxspec.platform import device  # before mlx

# isort: split
import gpu_rounding
import mlx.core as mx
import numpy as np
import pytest
from zoo import Zoo

from mlxspec.kernels import conv_qkv, exactness, gdn_prefill
from mlxspec.kernels.conv_ops import GdnShape
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_round import RowLayout
from mlxspec.loading.weights import read_folder
from mlxspec.models import runners
from mlxspec.models.assemble import assemble
from mlxspec.models.layers import rms_norm
from tests.models import deep
from tests.models.metal_graph import Recorder, Stubs, as_on_metal, blank, launches

BF16 = mx.bfloat16
DEPTH = 24  # layers, as in the 0.8B and 2B


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stubs, Recorder]]:
    with as_on_metal(monkeypatch) as found:
        yield found


# ---- norms


def test_a_norm_is_one_launch(mac: Any) -> None:
    x, weight = blank((4, 64), BF16), blank((64,), BF16)
    assert launches([rms_norm(x, weight, 1e-6)]).total() == 1
    wide = blank((64,), mx.float32)
    assert launches([rms_norm(x, wide, 1e-6)]).total() == 2
    assert rms_norm(x, wide, 1e-6).dtype == BF16


@pytest.mark.skipif(gpu_rounding.IS_PLANTED, reason="the option's products are more operations")
@pytest.mark.parametrize("width", [1, 4])
def test_no_cast_is_launched_around_norms(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Of a checkpoint as mlx-lm converts them: norm weights as factors in the compute dtype."""
    folder = zoo.folder("grouped", "mlx")
    config = json.loads((folder / "config.json").read_text())
    stored = {k: v.astype(BF16) for k, v in read_folder(folder).items()}
    with as_on_metal(monkeypatch):
        model = assemble(config, lambda: stored).model
        cache = deep.filled(model, 64)
        graph = [*deep.forward(model, cache, [width], certain=width == 1)]
        found = launches([graph[0], *graph[1]])
    print(f"\nlaunches of a forward of {width}: {found.total()} {dict(found)}")
    assert found["AsType"] == 0


# ---- variants of kernels


def test_prompts_of_all_lengths_share_four_variants_of_the_convolution(mac: Any) -> None:
    stubs, _ = mac
    shape = GdnShape(2, 4, 64, 32)
    columns = shape.conv_size + 4 * 34
    weights = conv_qkv.ConvWeights(
        blank((4, shape.conv_size), BF16), blank((4,), mx.float32), blank((4,), mx.float32)
    )
    window = blank((1, 3, shape.conv_size), BF16)
    last = conv_qkv.LastInputs(
        blank((4, shape.conv_size), BF16), RowLayout.of(FlatRows((3,))), mx.array([1], mx.int32)
    )
    for length in range(1, 601):
        rows = RowLayout.of(FlatRows((length,)))
        projected = mx.zeros((length, columns), BF16)
        for certain, kept in ((True, None), (True, last), (False, None), (False, last)):
            conv_qkv.conv_qkv(projected, window, weights, shape, rows, kept, certain=certain)
    assert stubs.names["mlxspec_conv_qkv"] == 2400
    assert len(stubs.variants) == 4


def test_no_number_of_tokens_or_rows_is_a_template_argument(mac: Any) -> None:
    """Whatever rounds and prompts come, a model needs so many variants of each kernel."""
    stubs, _ = mac
    model = deep.ours(4)
    rng = np.random.default_rng(0)
    for num_rows in (1, 2, 3, 5):
        cache = deep.filled(model, 300, num_rows)
        for _ in range(12):
            widths = rng.integers(1, 18, num_rows).tolist()
            deep.forward(model, cache, widths)
            cache.commit([int(rng.integers(1, w + 1)) for w in widths])
            deep.cut(cache)
        for widths in ([1] * num_rows, [40] * num_rows, [200] + [1] * (num_rows - 1)):
            deep.forward(model, cache, widths, certain=True)
            cache.commit()
            deep.cut(cache)
    templates = {(name, template) for name, template, _ in stubs.variants}
    found = Counter(name for name, _ in templates)
    print(f"\nvariants: {dict(found)}")
    assert found["mlxspec_conv_qkv"] <= 4  # with and without a last forward, drafts and certain
    assert found["mlxspec_gdn_round"] <= 5  # the same, and a flush
    assert found["mlxspec_gdn_prefill"] == 1


# ---- compiled shapes


def compiled_shapes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how often a function of a model is traced."""
    traced: Counter[str] = Counter()
    real = mx.compile

    def counting(function: Any, *args: Any, **options: Any) -> Any:
        def traces(*arrays: Any) -> Any:
            traced["all"] += 1
            return function(*arrays)

        return real(traces, *args, **options)

    monkeypatch.setattr(runners.mx, "compile", counting)
    return traced


@pytest.mark.parametrize(("num_rows", "most"), [(1, 150), (4, 400)])
def test_a_mixed_conversation_compiles_few_shapes(
    mac: Any, monkeypatch: pytest.MonkeyPatch, num_rows: int, most: int
) -> None:
    """A thousand rounds whose drafts have any length up to 16, partly accepted; rows come and go."""
    traced = compiled_shapes(monkeypatch)
    model, rng = deep.ours(4), np.random.default_rng(1)
    cache, first = deep.filled(model, 300), 0
    for i in range(1000):
        if i % 50 == 0:
            cache = deep.filled(model, 300, int(rng.integers(1, num_rows + 1)))
        if i == 500:
            first = traced["all"]
        widths = (1 + rng.geometric(0.25, cache.num_rows).clip(0, 17) - 1).tolist()
        plain = max(widths) == 1
        deep.forward(model, cache, widths, certain=plain)
        cache.commit(None if plain else [int(rng.integers(1, w + 1)) for w in widths])
        cache.lengths = [300] * cache.num_rows
        deep.cut(cache)
    print(
        f"\ntraced for up to {num_rows} rows: {traced['all']}, {traced['all'] - first} of them in the second half"
    )
    assert traced["all"] <= most


# ---- prompts


@pytest.mark.skipif(gpu_rounding.IS_PLANTED, reason="the option's products are more operations")
def test_a_prompt_launches_few_kernels_a_layer(mac: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep.ours(DEPTH)
    found = {}
    for name, chunk in (("kernels", 512), ("long", 2048)):
        cache = deep.filled(model, 512)
        logits, left = deep.forward(model, cache, [chunk], certain=True)
        found[name] = launches([logits, *left]).total() / DEPTH
    monkeypatch.setattr(gdn_prefill, "mlx_agrees", lambda *_: False)
    with as_on_metal(monkeypatch, without=["gdn_prefill"]):
        cache = deep.filled(model, 512)
        logits, left = deep.forward(model, cache, [512], certain=True)
        found["twin"] = launches([logits, *left]).total() / DEPTH
    print(f"\nlaunches a layer of a prompt's piece: {found}")
    assert found["kernels"] <= 40
    assert found["twin"] > 100  # what a failed self-check costs where MLX's own operation is wrong too


def test_the_prefill_kernel_needs_no_race(mac: Any) -> None:
    stubs, _ = mac
    model = deep.ours(4)
    deep.forward(model, deep.filled(model, 0), [512], certain=True)
    assert stubs.names["mlxspec_gdn_prefill"] == 3


# ---- hand-overs


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("depth", [24, 64])
def test_a_round_that_waits_is_handed_over_in_parts(mac: Any, width: int, depth: int) -> None:
    _, recorder = mac
    model = deep.ours(depth)
    cache = deep.filled(model, 64)
    with device.idle():
        logits, left = deep.forward(model, cache, [width], certain=width == 1)
    seen, parts = 0, []
    for arrays in [*recorder.handed, [logits, *left]]:
        total = launches(arrays).total()
        parts.append(total - seen)
        seen = total
    print(f"\nlaunches handed over together: {parts}")
    assert len(recorder.handed) >= launches([logits, *left]).total() // 160
    assert max(parts) <= 160
    assert parts[0] <= 60  # the device has something to do while the host builds on


def test_a_round_behind_another_is_handed_over_whole(mac: Any) -> None:
    _, recorder = mac
    model = deep.ours(DEPTH)
    deep.forward(model, deep.filled(model, 64), [4])
    assert not recorder.handed


# ---- products that add up alike


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("alike", [False, True])
def test_exact_rounds_multiply_by_one_kernel_at_every_width(
    mac: Any, monkeypatch: pytest.MonkeyPatch, width: int, alike: bool
) -> None:
    """MLX's kernels for 2 to 12 rows add up in another order than its kernel for one row, the head's among them."""
    stubs, _ = mac
    monkeypatch.setattr(exactness, "is_demanded", alike)
    model = deep.ours(4, 512)
    logits, left = deep.forward(model, deep.filled(model, 64), [width], certain=width == 1)
    num = launches([logits, *left])["QuantizedMatmul"]
    # a projection and an output a mixer, two matrices a feed-forward layer, the head; the embedding is looked up
    assert (num, stubs.names["mlxspec_qmv_rows"] > 0) == ((0, True) if alike else (17, False))
