"""Costs that a loaded model begins with: nothing is timed, guesses come from bytes and layers, and what rounds taught is read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
import write_checkpoint
from planting import catches

from mlxspec.config import EngineConfig, SamplingParams
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine import measure
from mlxspec.engine.load import load
from mlxspec.models.qwen3_5 import Qwen35
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.models.reads import drafted_reads, reads
from mlxspec.models.registry import architecture
from mlxspec.policy.controller import PROBE_COST, PROBE_DEPTH
from mlxspec.policy.cost_file import CostFile, write_followed
from mlxspec.policy.costs import DraftCall, likely
from tests import tiny_models


@pytest.fixture(scope="module")
def parts() -> tuple:
    target = tiny_models.target()
    return target, {"mtp": Mtp(tiny_models.mtp_head(), target.max_context)}, EngineConfig()


def published(size: str, layers: int | None = None) -> tuple[Qwen35, Mtp]:
    """A model and its head, not allocated."""
    config = write_checkpoint.cut(write_checkpoint.SIZES[size], layers, None)
    parsed = architecture(config).parse(config)
    model = Qwen35(parsed)
    return model, Mtp(Qwen35Mtp(parsed, model), 4096)


@pytest.mark.parametrize(
    ("size", "layers", "least", "most"),
    [("qwen3.5-0.8b", None, 0.36, 0.46), ("qwen3.5-0.8b", 4, 0.8, 1.05), ("qwen3.6-27b", None, 0.04, 0.1)],
)
def test_a_draft_is_guessed_from_bytes(size: str, layers: int | None, least: float, most: float) -> None:
    """In plain rounds: a large vocabulary makes drafts of a small model dear."""
    model, head = published(size, layers)
    assert least < measure.likely_draft(head, model).seconds(1, 1) < most


def test_where_the_host_is_what_takes_time_a_draft_is_guessed_from_layers(parts: tuple) -> None:
    model, head = parts[0], parts[1]["mtp"]
    assert measure.likely_draft(head, model).step >= 2 / (reads(model).layers + 1)


class Table(nn.Module):
    """A drafter's module that looks up which token follows, and has no head."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.following = nn.Embedding(vocab_size, 4096)


class Tied(Table):
    def head(self, hidden: mx.array) -> mx.array:
        return self.following.as_linear(hidden)


def test_a_table_that_is_looked_up_is_not_guessed_as_a_head() -> None:
    """Else policy auto would hold a probe of it for too dear, and never ask it."""
    model, _ = published("qwen3.5-0.8b")
    plain, tied = (
        measure.likely_draft(
            SimpleNamespace(reads=drafted_reads(module(model.vocab_size)), drafts_at_once=False),  # type: ignore[arg-type]
            model,
        ).seconds(PROBE_DEPTH, 1)
        for module in (Table, Tied)
    )
    assert plain < 0.5 < PROBE_COST < tied


def test_wide_rounds_of_a_mixture_are_guessed_dearer() -> None:
    dense, mixture = (measure.likely_rounds(published(s, 8)[0]) for s in ("qwen3.6-27b", "qwen3.6-35b-a3b"))
    assert dense[4] == pytest.approx(likely(4))
    assert mixture[4] > 1.1 * dense[4]


@catches(
    "a load times rounds",
    "mlxspec.engine.measure:guessed_costs",
    lambda right: (
        lambda model, drafters: (
            model.head(mx.zeros((1, model.hidden_size), model.dtype)),
            right(model, drafters),
        )[1]
    ),
)
def test_a_load_runs_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow a machine is: nothing is timed before somebody asks."""
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    ran: list[str] = []
    monkeypatch.setattr(Qwen35, "forward", _told(ran, "forward", Qwen35.forward))
    monkeypatch.setattr(Qwen35, "head", _told(ran, "head", Qwen35.head))
    monkeypatch.setattr(Mtp, "draft", _told(ran, "draft", Mtp.draft))
    monkeypatch.setattr("mlxspec.engine.load.check_head", lambda *_: None)  # reads texts to judge a head
    engine = load("demo")
    assert ran == []
    assert engine.policies.costs.is_guess("mtp", "greedy")
    engine.generate([1, 2, 3], SamplingParams(max_tokens=4))
    assert "forward" in ran


def _told(ran: list[str], name: str, right: Callable) -> Callable:
    def told(*args, **more):  # type: ignore[no-untyped-def]
        ran.append(name)
        return right(*args, **more)

    return told


def test_what_rounds_taught_is_where_the_next_process_begins(
    parts: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    target, drafters, config = parts

    def begun() -> measure.CostModel:
        file = CostFile.of(target, drafters, config, "tiny")
        costs = measure.kept_costs(target, drafters, file.data())
        file.follow(costs)
        return costs

    costs = begun()
    assert costs.is_guess("mtp", "greedy")
    for _ in range(20):
        costs.curve(0).refine(1, 0.01)
        costs.curve(0).refine(4, 0.03)
        costs.drafted(costs.curve(0), 1, [DraftCall("mtp", "greedy", 3, 1, 1)], 0.014)
    write_followed()
    again = begun()
    assert not again.is_guess("mtp", "greedy")
    assert again.curve(0).seconds(4) == pytest.approx(costs.curve(0).seconds(4))
    assert again.draft("mtp", "greedy", 0.01) == costs.draft("mtp", "greedy", 0.01)


def test_costs_of_another_version_are_as_good_as_none(
    parts: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    target, drafters, config = parts
    file = CostFile.of(target, drafters, config, "tiny")
    file.path.parent.mkdir(parents=True, exist_ok=True)
    for text in ('{"format": 8}', "not JSON", '{"format": 9, "curves": 7}'):
        file.path.write_text(text)
        assert measure.kept_costs(target, drafters, file.data()).is_guess("mtp", "greedy")


def test_ranks_take_what_rank_0_keeps(parts: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    target, drafters, config = parts
    file = CostFile.of(target, drafters, config, "tiny", 2)
    first = measure.kept_costs(target, drafters, file.data())
    for _ in range(20):
        first.curve(0).refine(1, 0.01)
    file.write(first)
    other = measure.kept_costs(target, drafters, json.loads(json.dumps(file.data())))
    assert other.curve(0).plain == pytest.approx(first.curve(0).plain)


def test_drafters_of_one_name_and_different_sizes_keep_costs_apart(
    parts: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Heavy(Mtp):
        weight_bytes = 10**9  # type: ignore[assignment]

    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    target, light, config = parts
    heavy = {"mtp": Heavy(tiny_models.mtp_head(), target.max_context)}
    paths = {CostFile.of(target, drafters, config, "tiny").path for drafters in (light, heavy)}
    assert len(paths) == 2
