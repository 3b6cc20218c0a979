"""A drafter that is made from nothing: how it begins, what it becomes, its folder, and runs that cannot end well."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from planting import catches
from training import adapt as adapting
from training import kept, new_drafter, teach
from training.adapt import Adapted, adapt
from training.network import ChainNetwork, float_weights
from training.new_drafter import begin, config_for
from training.states import LENGTH, Batch, States

from mlxspec import SamplingParams, SpecConfig, load
from mlxspec.cli.main import main
from mlxspec.errors import ConfigError, MemoryBudgetError, ModelError, StorageError
from mlxspec.models.eagle3 import Eagle3Config, Eagle3Head
from tests import tiny_models

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("SELECT", "name", "price", "FROM", "orders", "WHERE", "amount", ">", "AND", "region", ";\n")
PROMPT = "SELECT name FROM orders WHERE amount > price AND region ;\n SELECT name"
IDS = np.array([95, 3, 40, 41, 7, 60, 61, 62])


def text(seed: int, num: int = 2600) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(num))


TEXTS = [(f"{i}.sql", text(i)) for i in range(8)]


def shorten(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(cache))
    monkeypatch.setattr(adapting, "_OWN", 2)
    monkeypatch.setattr(adapting, "_SHARES", (0.3, 0.05))
    monkeypatch.setattr(adapting, "_HELD_OUT", 4)
    monkeypatch.setattr(teach, "_JUDGEMENTS", 3)
    monkeypatch.setattr(new_drafter, "_WORDS", 512)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, tmp_path / "cache")


class Made(NamedTuple):
    model: str
    folder: Path
    found: Adapted


@pytest.fixture(scope="module", params=["demo", pytest.param("demo-gemma", marks=pytest.mark.slow)])
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made") / "drafter"
    with pytest.MonkeyPatch.context() as monkeypatch:
        shorten(monkeypatch, folder.parent / "cache")
        return Made(request.param, folder, made(folder, request.param))


def ticking() -> Callable[[], float]:
    times = count()
    return lambda: float(next(times))


def made(folder: Path, model: str = "demo", **more: Any) -> Adapted:
    return adapt(model, TEXTS, minutes=1, new=folder, clock=ticking(), **more)


@pytest.mark.slow
def test_it_learns_drafts_and_changes_no_text(drafter: Made, capsys: pytest.CaptureFixture[str]) -> None:
    model, folder, found = drafter
    assert found.is_kept
    assert found.card.after[0] > found.card.before[0] + 0.02
    drafting = load(model, draft=["eagle3"], draft_model=folder, spec=SpecConfig(policy="fixed"))
    accepted = 0
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=32, temperature=temperature, seed=3)
        drafted = drafting.generate(PROMPT, params)
        assert drafted.tokens == load(model, draft="off").generate(PROMPT, params).tokens
        accepted += drafted.stats.num_accepted
    assert accepted > 0
    assert main(["inspect", model, "--draft-model", str(folder)]) == 0
    assert f"made anew: {found.card.told()}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_new_drafter_has_nothing_to_lose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it begins as guessed 35 % of what Gemma 3 270M writes by itself, and 9 % of code: code is not to be given up for that."""
    guards = []

    def train(network: Any, head: Any, *args: Any, guard: Any, **more: Any) -> Any:
        guards.append(guard)
        return head

    texts, own = (
        iter(teach.DepthShares((x,)) for x in xs * 2) for xs in ((0.1, 0.5), (0.4, 0.2))
    )  # before and after
    monkeypatch.setattr(adapting, "train", train)
    monkeypatch.setattr(adapting, "_each", lambda *_: [next(texts)] * 4)
    monkeypatch.setattr(adapting, "accepted", lambda *_: next(own))
    assert made(tmp_path / "drafter").is_kept
    assert not adapt("demo", TEXTS, minutes=1, clock=ticking()).is_kept
    assert [len(guard) > 0 for guard in guards] == [False, True]


@pytest.mark.slow
def test_a_second_run_goes_on_from_it(drafter: Made) -> None:
    model, folder, first = drafter
    second = adapt(model, TEXTS, minutes=1, drafter=str(folder), clock=ticking())
    assert abs(second.card.before[0] - first.card.after[0]) < 0.05  # other pieces are held out
    assert second.is_kept
    notices = load(model, draft_model=folder, draft=["eagle3"]).notices
    assert any("adapted EAGLE-3 drafter drafts" in n for n in notices)


@pytest.mark.slow
def test_the_folder_has_the_layout_that_others_read(drafter: Made) -> None:
    held = mx.load(str(drafter.folder / "model.safetensors"))
    assert {name for name in held if "." in name} == {
        "fc.weight",
        "input_norm.weight",
        "lm_head.weight",
        "norm.weight",
        *(f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
        *(f"midlayer.{x}.weight" for x in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
    }
    assert held["lm_head.weight"].dtype == mx.bfloat16
    assert held["d2t"].dtype == mx.int64
    ids = np.array(held["d2t"]) + np.arange(512)
    assert np.array_equal(ids, np.flatnonzero(np.array(held["t2d"])))
    tokenizer = load(drafter.model, draft="off").tokenizer
    assert tokenizer is not None
    assert tokenizer.eos_ids <= set(ids.tolist())
    assert set(tokenizer.encode(TEXTS[0][1])) <= set(ids.tolist())


def begun(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Eagle3Head, Batch]:
    monkeypatch.setattr(new_drafter, "_WORDS", len(IDS))
    target = tiny_models.target()
    head = Eagle3Head(Eagle3Config.from_dict(config_for(target)), target, {"d2t"})
    batch = Batch.of(target, head.layers_read, [[3 + 7 * i * i % 80 for i in range(24)]])
    assert batch.streams is not None
    begin(head, IDS, batch.streams[0])
    return target, head, batch


@catches(
    "the stream goes through in another order",
    "mlx.core:eye",
    lambda right: lambda num: mx.roll(right(num), 1, axis=0),
)
def test_it_begins_with_the_targets_own_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stream that it reads, by the target's final norm and head, but for a factor of each token."""
    target, head, batch = begun(monkeypatch)
    streams = batch.streams[0]
    last = streams[:, -target.hidden_size :]
    right = target.head(mx.fast.rms_norm(last, target.language_model.model.norm.weight, 1e-6))
    weights, fixed = float_weights(head)
    new = lambda: Eagle3Head(head.config, target, {"d2t"})  # noqa: E731
    head.fuse()
    network = ChainNetwork(target, new, fixed, head)
    module = network.module(weights)
    found = np.array(module.head(network.drafts(module, batch, 1)[0][0]))
    right = np.array(right)[:-1, np.sort(IDS)]
    factors = (found * right).sum(1, keepdims=True) / (right * right).sum(1, keepdims=True)
    assert factors.min() > 0
    np.testing.assert_allclose(found, factors * right, atol=2e-3 * np.abs(found).max())


@catches(
    "the other tokens are not in the sum",
    "training.states:Batch._replace",
    lambda right: lambda self, **more: self,
)
def test_its_tokens_have_the_targets_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    target, head, batch = begun(monkeypatch)
    head.fuse()
    network = ChainNetwork(target, lambda: head, {}, head)
    places = mx.array([0, 5, 22])
    right = mx.softmax(target.head(batch.hidden[0]), axis=-1)[places][:, network.ids]
    np.testing.assert_allclose(np.array(mx.exp(network.right(batch, places)[0])), np.array(right), atol=1e-5)
    assert network.num_words == len(IDS)


def test_a_folder_that_holds_something_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        adapt("no/such-model", TEXTS, minutes=1, new=tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["kept"]


def test_one_run_at_a_time_makes_a_drafter(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    folder.mkdir()
    with kept.only_one(folder), pytest.raises(ConfigError, match="Another run adapts"):
        made(folder)
    assert not list(folder.iterdir())


def test_too_little_memory_is_said_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapting, "BYTES_A_PARAMETER", 1 << 30)
    lines = list[str]()
    with pytest.raises(MemoryBudgetError, match="Adapting this drafter needs"):
        made(tmp_path / "drafter", told=lines.append)
    assert not any("read" in line for line in lines)


@pytest.mark.slow
def test_what_learns_nothing_leaves_no_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapting, "train", lambda network, head, *rest, **more: head)
    assert not made(tmp_path / "drafter").is_kept
    assert not (tmp_path / "drafter").exists()


@pytest.mark.slow
def test_ctrl_c_keeps_the_best_so_far(tmp_path: Path) -> None:
    def told(line: str) -> None:
        if "step" in line:
            raise KeyboardInterrupt

    assert made(tmp_path / "drafter", told=told).is_kept
    assert load("demo", draft=["eagle3"], draft_model=tmp_path / "drafter")


def test_a_model_that_shows_no_streams_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_drafter, "Trunk", nn.Linear)
    with pytest.raises(ModelError, match="No new drafter can be made"):
        made(tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


KILLED = """
import os, signal, sys
from training import adapt, command, new_drafter
new_drafter._WORDS, adapt._OWN, adapt._HELD_OUT = 512, 2, 4
adapt._SHARES, adapt._STATES = (0.5, 0.0), 20 << 20  # what ends reading is the room, on machines of any speed
adapt.train = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
command.main(["demo", "--texts", sys.argv[1], "--minutes", "60", *sys.argv[2:]])
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["new", "eagle3", "dflash", "draft"])
@catches(
    "what a killed process has left stays",
    "training.states:_sweep",
    lambda right: lambda: None,
)
def test_a_killed_run_loses_nothing_and_its_states_go_with_the_next(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL while states lie on the disk, before anything is kept."""
    folder, scratch, texts = tmp_path / "drafter", tmp_path / "scratch", tmp_path / "texts"
    scratch.mkdir()
    texts.mkdir()
    for name, content in TEXTS:
        (texts / name).write_text(content)
    more = ["--new", str(folder)] if kind == "new" else ["--draft-model", f"demo-{kind}"]
    env = {**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": str(ROOT / "scripts")}
    ran = subprocess.run([sys.executable, "-c", KILLED, str(texts), *more], env=env, timeout=600)
    assert ran.returncode == -signal.SIGKILL
    left = list(scratch.glob("mlxspec-adapt-*/"))
    assert list(scratch.rglob("*.safetensors"))
    assert not folder.exists() or not list(folder.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    target = tiny_models.target()
    with States(target, (), 1 << 30) as ours:
        assert not any(path.exists() for path in left)
        ours.add([3] * LENGTH, "training")
        with States(target, (), 1 << 30):  # of a run beside it
            assert ours.training[0].exists()
    assert not list(scratch.iterdir())


def test_a_full_disk_leaves_no_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageError, match="is full"):
        made(tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()
