"""Prompts whose products unpack each weight once: the same text with and without drafts and after a prefix, and scratch that is planned."""

from __future__ import annotations

from collections.abc import Iterator

from mlxspec.platform import device

# isort: split
import mlx.core as mx
import pytest
from planting import catches

import mlxspec
from mlxspec.checkpoints.convert import Wish, convert
from mlxspec.checkpoints.quantize import Format
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine
from mlxspec.engine.rehearsal import unraced
from mlxspec.kernels import launch, wide
from mlxspec.kernels.quantized_weight import QuantizedWeight
from mlxspec.models.tune import raced_weights, wide_weights

CHUNK, TURN = 64, "def length(items):\n    return len(items)\n\n"
PLAIN, DRAFTED = SpecConfig(drafters=()), SpecConfig(drafters=("mtp", "ngram-simple"), policy="fixed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("packed") / "demo"
    convert("demo", out, Wish(trunk=Format(bits=4), head_bits=4))
    return str(out)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Numbers of rows of the products that unpack once. All have won their races, from half a piece on."""
    found: list[int] = []
    multiply = wide.wide_product

    def noted(x: mx.array, weight: QuantizedWeight) -> mx.array:
        found.append(x.shape[0])
        return multiply(x, weight)

    monkeypatch.setattr(device, "has_gpu", lambda: True)  # weights stay packed
    launch.forget()
    monkeypatch.setattr(wide, "RACED_ROWS", (CHUNK // 2, CHUNK))
    monkeypatch.setattr(wide, "wide_product", noted)
    monkeypatch.setattr(launch, "wins", lambda name, width: name == wide.NAME)
    monkeypatch.setattr(launch, "wins_anything", lambda name: name == wide.NAME)
    monkeypatch.setattr(launch, "in_use", lambda name: name == wide.NAME)
    yield found
    launch.forget()


def load(folder: str) -> Engine:
    return mlxspec.load(
        folder, draft=("mtp", "ngram-simple"), config=EngineConfig(prefill_chunk=CHUNK), dtype="float32"
    )


@catches(
    "rounds unpack weights as well",
    "mlxspec.kernels.wide:is_chosen",
    lambda right: lambda num_rows, weight, dtype: right(max(num_rows, CHUNK), weight, dtype),
)
def test_drafted_is_plain_and_so_is_an_answer_after_a_prefix(folder: str, rows: list[int]) -> None:
    with load(folder) as engine:
        assert engine.tokenizer is not None
        one, more = (engine.tokenizer.encode(TURN * num + "def ") for num in (9, 5))
        prompts = [one, one + more]
        params = SamplingParams(max_tokens=48, ignore_eos=True)
        found = {}
        for name, spec in (("plain", PLAIN), ("drafted", DRAFTED)):
            for is_kept in (False, True):  # the second prompt goes on from the first one where that is kept
                engine.prefix.is_on = is_kept
                found[name, is_kept] = [engine.generate(p, params, spec=spec) for p in prompts]
                engine.prefix.tree.clear()
        texts = [[answer.tokens for answer in answers] for answers in found.values()]
    assert all(text == texts[0] for text in texts)
    assert sum(answer.stats.num_accepted for answer in found["drafted", True]) > 0
    assert found["plain", True][1].stats.num_cached > 0
    assert CHUNK in rows
    assert min(rows) >= wide.RACED_ROWS[0]


@catches(
    "scratch is not planned for", "mlxspec.kernels.wide:scratch_bytes", lambda right: lambda weight, dtype: 0
)
@catches(
    "the head's rows are unpacked for a prompt",
    "mlxspec.models.layers:multiplied_weights",
    lambda right: lambda module, *, with_head=True: right(module),
)
def test_the_plan_counts_unpacked_weights_and_races_leave_the_head_out(
    folder: str, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(folder) as engine:
        memory, weights = engine.memory, wide_weights(engine.model, engine.drafts.drafters.values())
        assert engine.model.vocab_size not in {w.shape[0] for w in weights}
        assert len(wide_weights(engine.model)) < len(raced_weights(engine.model))
        most = max(w.shape[0] * w.shape[1] for w in weights)
        counted = {num: memory.activations(num, 100) for num in (CHUNK // 4, CHUNK)}
        monkeypatch.setattr(launch, "wins_anything", lambda name: False)
        assert counted[CHUNK // 4] == memory.activations(CHUNK // 4, 100)
        assert counted[CHUNK] - memory.activations(CHUNK, 100) == wide.SCRATCH * most * mx.float32.size
        monkeypatch.setattr(device, "gpu_generation", lambda: 15)
        raced = [num for w, _, num in unraced(engine)]
        assert raced == [num for _ in weights for num in wide.RACED_ROWS]
