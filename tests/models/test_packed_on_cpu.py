"""Which quantized models are unpacked on a CPU, and what is said of those that are not."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from zoo import Zoo

from mlxspec.kernels.packed import seconds_a_weight
from mlxspec.models import assemble, fill
from mlxspec.models.folder import ModelFolder
from mlxspec.models.registry import architecture
from mlxspec.platform import device

GIB = 1 << 30


def lazily(zoo: Zoo, shape: str, dialect: str) -> assemble.Assembled:
    folder = ModelFolder(zoo.folder(shape, dialect))
    return assemble.assemble_lazily(folder.config(), folder.read)


def is_packed(made: assemble.Assembled) -> bool:
    return any(x.dtype == mx.uint32 for _, x in tree_flatten(made.model.parameters()))


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "backend", lambda: "cpu")


def test_free_memory_decides_whether_weights_are_unpacked(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is unpacked if its float32 numbers leave a quarter of what is free."""
    kind = architecture(ModelFolder(zoo.folder("tied", "mlx-4bit-32")).config())
    plain = kind.build(kind.parse(ModelFolder(zoo.folder("tied", "mlx-4bit-32")).config()))
    size = sum(4 * v.size for _, v in tree_flatten(plain.parameters()))
    for free, packed in ((size * 5 // 4, True), (size * 3 // 2, False), (None, False)):
        monkeypatch.setattr(device, "free_memory", lambda free=free: free)
        made = lazily(zoo, "tied", "mlx-4bit-32")
        assert is_packed(made) == packed, free
        assert any("stay packed" in notice for notice in made.notices) == packed, free


def test_models_that_are_not_read_yet_count_as_taken(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target and its draft model are both assembled before either is read."""
    folder = ModelFolder(zoo.folder("tied", "mlx-4bit-32"))
    size = sum(v.nbytes for _, v in tree_flatten(lazily(zoo, "tied", "mlx-4bit-32").model.parameters()))
    monkeypatch.setattr(device, "free_memory", lambda: 2 * size)
    for beside, packed in ((0, False), (size, True)):
        made = assemble.assemble_lazily(folder.config(), folder.read, beside=beside)
        assert is_packed(made) == packed, beside


def test_at_most_6_gib_of_floats_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "free_memory", lambda: 100 * GIB)
    assert device.floats_fit(6 * GIB)
    assert not device.floats_fit(6 * GIB + 1)


@pytest.mark.parametrize(
    ("shape", "dialect"), [("tied", "mlx-4bit-32"), ("moe", "mlx-4bit-32"), ("tied", "mlx-mxfp4")]
)
def test_a_packed_model_says_how_long_a_token_takes(
    zoo: Zoo, shape: str, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time of a weight in a timed sample, times the weights that a token is multiplied with."""
    monkeypatch.setattr(device, "free_memory", lambda: 0)
    monkeypatch.setattr(fill, "seconds_a_weight", lambda *_: 1.0)
    made = lazily(zoo, shape, dialect)
    plain = dict(tree_flatten(zoo.ours(shape).model.parameters()))
    c = made.config
    share = c.num_experts_per_token / c.num_experts if c.num_experts else 1
    used = sum(
        v.size * (share if ".switch_" in k else 1)
        for k, v in plain.items()
        if v.ndim > 1 and "conv1d" not in k and (c.tied or "embed_tokens" not in k)
    )
    (notice,) = (n for n in made.notices if "stay packed" in n)
    said = re.search(r"about ([\d.e+]+) s\.$", notice)
    assert said is not None
    assert float(said[1]) == pytest.approx(
        used, rel=0.06
    )  # two digits, and matrices too narrow to be quantized


@pytest.mark.parametrize(
    ("bits", "group", "mode"), [(4, 64, "affine"), (8, 32, "affine"), (4, 32, "mxfp4"), (4, 16, "nvfp4")]
)
def test_a_weight_of_every_format_can_be_timed(bits: int, group: int, mode: str) -> None:
    assert 1e-13 < seconds_a_weight(group, bits, mode) < 1e-5


@pytest.mark.skipif(device.free_memory() is None, reason="the system does not say what is free")
def test_free_memory_is_what_a_machine_can_have() -> None:
    free = device.free_memory()
    assert free is not None
    assert 0 < free < 1 << 50
