"""Which quantized models are unpacked on a CPU, and what is said of those that are not."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from zoo import Zoo

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
