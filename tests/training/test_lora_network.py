"""A draft model that is adapted by low-rank changes: they mean the same while it is taught and when it drafts, and they are kept apart."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from planting import catches
from training import adapt as adapting
from training import command, kept, pupil, teach
from training.adapt import adapt
from training.lora_network import LoraNetwork
from training.states import Batch

from mlxspec import SamplingParams, SpecConfig, load
from mlxspec.checkpoints import adapted_head
from mlxspec.cli.main import main
from mlxspec.errors import ModelError
from mlxspec.kernels.flat import FlatRows
from mlxspec.loading import hub
from mlxspec.models.assemble import assemble_folder
from mlxspec.models.folder import ModelFolder

WORDS = ("SELECT", "name", "price", "FROM", "orders", "WHERE", "amount", ">", "AND", "region", ";\n")
PROMPT = "SELECT name FROM orders WHERE amount > price AND region ;\n SELECT name"
CARD = adapted_head.Card(model="m", made="2026-01-01", before=(0.1,), after=(0.2,), tokens=9)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(adapting, "_OWN", 2)
    monkeypatch.setattr(adapting, "_SHARES", (0.3, 0.05))
    monkeypatch.setattr(adapting, "_HELD_OUT", 4)
    monkeypatch.setattr(teach, "_JUDGEMENTS", 3)


def texts() -> list[tuple[str, str]]:
    rng = random.Random(0)
    return [(f"{i}.sql", " ".join(rng.choice(WORDS) for _ in range(2600))) for i in range(8)]


def ticking() -> Callable[[], float]:
    times = count()
    return lambda: float(next(times))


def folder(name: str) -> ModelFolder:
    return ModelFolder(hub.resolve(name))


@pytest.mark.parametrize("name", ["draft", "gemma"])
@catches(
    "the halves of a change lie the other way round",
    "mlxspec.models.adapter_files:_pair",
    lambda right: lambda *given: tuple(-x for x in right(*given))[:1] + right(*given)[1:],
)
def test_changes_mean_the_same_where_it_is_taught_and_where_it_drafts(name: str, tmp_path: Path) -> None:
    where, tokens = folder(f"demo-{name}"), [5 + 11 * i * i % 900 for i in range(20)]
    target = assemble_folder(where).model
    network = LoraNetwork(target, where, target)
    batch = Batch.of(target, (), [tokens])
    rng = np.random.default_rng(0)
    changed = {
        n: mx.array(0.3 * x.shape[0] ** -0.5 * rng.standard_normal(x.shape), mx.float32)
        for n, x in network.begun.items()
    }
    mx.save_safetensors(str(tmp_path / "changes.safetensors"), changed)
    adapted = assemble_folder(where, adapter=tmp_path / "changes.safetensors").model
    places, found = mx.arange(len(tokens)), []
    for weights, model in ((network.begun, target), (changed, adapted)):
        (scored,) = network.scored(weights, batch, places, is_drafting=True)
        cache = model.make_cache(1)
        right = model.forward(batch.tokens[0], FlatRows((len(tokens),)), cache, certain=True).logits
        assert right is not None
        bound = 1e-3 * mx.abs(right).max().item()  # float32, by two implementations
        np.testing.assert_allclose(np.array(scored.own[0]), np.array(right), atol=bound)
        found.append(np.array(right))
    assert np.abs(found[0] - found[1]).max() > 0.1


@pytest.mark.slow
def test_a_draft_model_learns_is_found_and_can_be_left_or_removed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = adapt("demo", texts(), minutes=3, drafter="demo-draft", clock=ticking())
    assert made.is_kept
    spec = SpecConfig(policy="fixed")
    drafting = load("demo", draft=["draft-model"], draft_model="demo-draft", spec=spec)
    assert any(f"The adapted draft model drafts: {made.card.told()}" in n for n in drafting.notices)
    base = load("demo", draft=["draft-model"], draft_model="demo-draft", spec=spec, head="base")
    assert not any("adapted" in n for n in base.notices)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=24, temperature=temperature, seed=3)
        drafted = drafting.generate(PROMPT, params)
        assert drafted.tokens == load("demo", draft="off").generate(PROMPT, params).tokens
        assert drafted.stats.num_accepted > 0
    again = adapt("demo", texts(), minutes=1, drafter="demo-draft", clock=ticking())
    assert again.card.before == pytest.approx(made.card.before, abs=0.05)
    assert main(["inspect", "demo", "--draft-model", "demo-draft"]) == 0
    assert "adapted: " in capsys.readouterr().out
    assert command.main(["demo", "--remove"]) == 0
    assert adapted_head.find(folder("demo"), folder("demo-draft")) is None


@pytest.mark.parametrize("names", [("norm.weight",), ("model.layers.0.mlp.up_proj.lora_a",)])
def test_damaged_changes_cost_a_notice(names: tuple[str, ...]) -> None:
    changes = {name: mx.zeros((3, 3)) for name in names}
    kept.keep(folder("demo"), changes, CARD, folder("demo-draft"))
    notices = load("demo", draft=["draft-model"], draft_model="demo-draft").notices
    assert any(n.startswith("The adapted draft model is not used: ") for n in notices)


def test_changes_of_another_model_are_not_gone_on_from() -> None:
    where = folder("demo-draft")
    model = assemble_folder(where).model
    network = LoraNetwork(model, where, model)
    assert network.filled(network.begun).parameters()
    with pytest.raises(ModelError, match="changes of another model"):
        network.filled({"norm.weight": mx.zeros(3)})


def test_a_draft_model_of_mlx_lms_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pupil,
        "_draft_model",
        lambda target, where, loaded, right=pupil._draft_model: right(target, where, object()),
    )
    with pytest.raises(ModelError, match="cannot be adapted"):
        adapt("demo", texts(), minutes=1, drafter="demo-draft", clock=ticking())
