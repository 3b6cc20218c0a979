"""Which quantized models are unpacked on a CPU, and what is said of those that are not."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from mlx_lm_families import write
from zoo import Zoo

from mlxspec.kernels.flat import FlatRows
from mlxspec.models import assemble
from mlxspec.models.fill import STAYS_PACKED
from mlxspec.models.folder import ModelFolder
from mlxspec.platform import device, memory

GIB = 1 << 30


def assembled(zoo: Zoo, dialect: str = "mlx-4bit-32") -> assemble.Assembled:
    folder = ModelFolder(zoo.folder("tied", dialect))
    return assemble.assemble_lazily(folder.config(), folder.read)


def parameters(made: assemble.Assembled) -> list[mx.array]:
    return [x for _, x in tree_flatten(made.model.parameters())]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "backend", lambda: "cpu")


def test_the_machines_memory_decides_whether_weights_are_unpacked(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is unpacked if its float32 numbers take no more than half of it."""
    size = sum(x.nbytes for x in parameters(assembled(zoo)))
    for whole, packed in ((size * 3 // 2, True), (size * 5 // 2, False)):
        monkeypatch.setattr(memory, "machine_memory", lambda whole=whole: whole)
        made = assembled(zoo)
        assert any(x.dtype == mx.uint32 for x in parameters(made)) == packed, whole
        assert (STAYS_PACKED in made.notices) == packed, whole


def test_at_most_6_gib_of_floats_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "machine_memory", lambda: 100 * GIB)
    assert memory.floats_fit(6 * GIB)
    assert not memory.floats_fit(6 * GIB + 1)
    assert f"{memory.UNPACKED_AT_MOST // GIB} GiB" in STAYS_PACKED


@pytest.mark.parametrize("fits", [True, False], ids=["unpacked", "packed"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_moe"])
@pytest.mark.parametrize("bits", [1, 2])
def test_one_bit_and_two(
    bits: int, family: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of models in so few bits are mlx-lm's."""
    monkeypatch.setattr(memory, "floats_fit", lambda _: fits)
    folder = ModelFolder(write(tmp_path / "model", family, bits))
    made = assemble.assemble(folder.config(), folder.read)
    assert any(x.dtype == mx.uint32 for x in parameters(made)) != fits
    tokens = list(range(5, 29))
    cache, rows = made.model.make_cache(1), FlatRows((len(tokens),))
    ours = np.array(made.model.forward(mx.array(tokens), rows, cache, certain=True).logits)
    theirs = np.array(load_model(folder.path)[0](mx.array([tokens]))[0].astype(mx.float32))
    assert np.abs(ours - theirs).max() < 2e-3 * np.abs(theirs).max()
