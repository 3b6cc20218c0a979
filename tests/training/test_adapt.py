"""Adapting a head: what is learned, kept and found again, and what happens to runs that cannot end well."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from planting import catches
from training import adapt as adapting
from training import command, kept, states, teach
from training.adapt import Adapted, adapt
from training.network import ChainNetwork, float_weights
from training.states import LENGTH, States, pieces_of
from training.teach import DepthShares, Judgement, is_better, train

from mlxspec import SamplingParams, SpecConfig, load
from mlxspec.checkpoints import adapted_head
from mlxspec.checkpoints.adapted_head import Card
from mlxspec.cli.main import main
from mlxspec.errors import ConfigError, MemoryBudgetError, StorageError
from mlxspec.loading import hub
from mlxspec.loading.weights import read_file
from mlxspec.models.folder import ModelFolder
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from tests import tiny_models

WORDS = (
    "SELECT",
    "name",
    "price",
    "FROM",
    "orders",
    "WHERE",
    "amount",
    ">",
    "<",
    "AND",
    "region",
    "JOIN",
    "ON",
    "id",
    ";\n",
)
USES = ("training", "choosing", "reporting")
PROMPT = "SELECT name FROM"


def text(seed: int, num: int = 2600) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(num))


TEXTS = [(f"{i}.sql", text(i)) for i in range(8)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(adapting, "_OWN", 2)
    monkeypatch.setattr(adapting, "_SHARES", (0.3, 0.05))
    monkeypatch.setattr(adapting, "_HELD_OUT", 4)  # judging takes most of a short run
    monkeypatch.setattr(teach, "_JUDGEMENTS", 3)


def ticking(tick: float = 1.0) -> Callable[[], float]:
    """A clock that goes on by a tick each time it is asked, so that machines of any speed take as many steps."""
    times = count()
    return lambda: tick * next(times)


def short(texts: Sequence[tuple[str, str]] = TEXTS, **more: Any) -> Adapted:
    return adapt("demo", texts, minutes=1, clock=ticking(), **more)


def demo() -> ModelFolder:
    return adapted_head.folder_of("demo")


def is_adapted(**more: Any) -> bool:
    return any("adapted MTP head drafts" in n for n in load("demo", draft=["mtp"], **more).notices)


def test_a_head_learns_is_found_and_can_be_left_or_removed() -> None:
    made = short()
    assert made.is_kept
    assert made.card.after[0] > made.card.before[0] + 0.02
    engine = load("demo", draft=["mtp"], spec=SpecConfig(policy="fixed"))
    assert any(made.card.told() in notice for notice in engine.notices)
    assert not is_adapted(head="base")
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=24, temperature=temperature, seed=3)
        plain = load("demo", draft="off").generate(PROMPT, params)
        drafted = engine.generate(PROMPT, params)
        assert drafted.tokens == plain.tokens
        assert drafted.stats.num_drafted > 0
    with pytest.raises(ConfigError, match="head must be adapted or base"):
        load("demo", head="other")  # type: ignore[arg-type]
    assert command.main(["demo", "--remove"]) == 0
    assert adapted_head.find(demo()) is None
    assert not is_adapted()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_head_in_16_bits_learns_and_changes_no_text(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapting, "load", partial(load, dtype=dtype))
    assert short().is_kept
    drafting = load("demo", draft=["mtp"], dtype=dtype, spec=SpecConfig(policy="fixed"))
    plain, prompts = load("demo", draft="off", dtype=dtype), [PROMPT, "def mean(values):", "what is a list?"]
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=32, temperature=temperature, seed=3, stop=["FROM"])
        found = [r.tokens for r in drafting.generate(prompts, params)]
        assert found == [r.tokens for r in plain.generate(prompts, params)]


@pytest.mark.slow
def test_a_second_run_goes_on_and_a_fresh_one_does_not() -> None:
    lines: list[list[str]] = []
    for more in ({}, {}, {"is_fresh": True}):
        lines.append([])
        short(told=lines[-1].append, **more)
    first, second, fresh = (next(line for line in told if "held-out text" in line) for told in lines)
    assert first == fresh
    assert second > first


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_a_drafter_beside_learns_is_found_and_can_be_left_or_removed(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        adapting, "_OWN", 6
    )  # one text of the model's own is learned by heart: others are lost then
    made = short(drafter=f"demo-{name}")
    assert made.is_kept
    drafter, spec = ModelFolder(hub.resolve(f"demo-{name}")), SpecConfig(policy="fixed")
    paired = {"draft_model": f"demo-{name}", "draft": [name], "spec": spec}
    engine, base = load("demo", **paired), load("demo", head="base", **paired)
    assert any(f"{made.card.told()}. --head base" in notice for notice in engine.notices)
    assert not any("adapted" in notice for notice in base.notices)
    assert not is_adapted()  # the model's own head is as it was
    plain = load("demo", draft="off")
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=24, temperature=temperature, seed=3)
        drafted, right = engine.generate(PROMPT, params), plain.generate(PROMPT, params)
        assert drafted.tokens == right.tokens
        assert drafted.stats.num_drafted > 0
    assert main(["inspect", "demo", "--draft-model", f"demo-{name}"]) == 0
    assert made.card.told() in " ".join(capsys.readouterr().out.split())
    assert adapted_head.files_of(drafter) == adapted_head.files_of(demo())
    assert command.main(["demo", "--remove"]) == 0
    assert adapted_head.find(demo(), drafter) is None
    assert not any("adapted" in notice for notice in load("demo", **paired).notices)


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_a_damaged_drafter_beside_costs_a_notice(name: str) -> None:
    card = adapted_head.Card(model="m", made="2026-01-01", before=(0.1,), after=(0.2,), tokens=9)
    beside = ModelFolder(hub.resolve(f"demo-{name}"))
    kept.keep(demo(), {"norm.weight": mx.zeros(3)}, card, beside)
    notices = load("demo", draft_model=f"demo-{name}").notices
    assert any(n.startswith("The adapted") and "is not used" in n for n in notices)


def test_a_head_of_another_version_is_not_found(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo().path, folder)
    own = {name: mx.zeros(1) for name in ("norm.weight",)}
    card = adapted_head.Card(model="m", made="2026-01-01", before=(0.1,), after=(0.2,), tokens=9)
    kept.keep(ModelFolder(folder), own, card)
    found = adapted_head.find(ModelFolder(folder))
    assert found is not None
    assert found.card == card
    path = next(folder.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert adapted_head.find(ModelFolder(folder)) is None


def test_a_damaged_head_costs_a_notice_or_nothing() -> None:
    card = adapted_head.Card(model="m", made="2026-01-01", before=(0.1,), after=(0.2,), tokens=9)
    path = kept.keep(demo(), {"norm.weight": mx.zeros(3)}, card)
    assert any("The adapted MTP head is not used" in n for n in load("demo", draft=["mtp"]).notices)
    lines: list[str] = []
    with pytest.raises(ConfigError, match="too short"):
        short([], told=lines.append)
    assert "is damaged" in lines[0]
    for damaged in (
        b"",
        path.read_bytes()[:-8],
        b"\xff" * 4096,
        path.read_bytes().replace(b"before", b"befpre"),
    ):
        path.write_bytes(damaged)
        assert not is_adapted()


@pytest.mark.parametrize("texts", [[], [("a", "too short")], [("a", "x " * 400)]])
def test_too_little_text_is_one_sentence(texts: list[tuple[str, str]]) -> None:
    with pytest.raises(ConfigError, match="texts are too short"):
        short(texts)


def test_one_run_at_a_time() -> None:
    with (
        kept.only_one(kept.lock_of(demo())),
        pytest.raises(ConfigError, match="Another run adapts"),
    ):
        short()
    with kept.only_one(kept.lock_of(demo())):  # it is free again
        pass


def test_too_little_memory_is_said_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapting, "BYTES_A_PARAMETER", 1 << 30)
    with pytest.raises(MemoryBudgetError, match="Adapting this drafter needs"):
        short()


def test_a_full_disk_ends_the_run_and_what_was_kept_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    short()
    before = adapted_head.find(demo())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(states.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageError, match="is full"):
        short()
    assert adapted_head.find(demo()) == before
    assert not list(tmp_path.glob("mlxspec-adapt-*"))


def test_ctrl_c_keeps_the_best_so_far() -> None:
    def told(line: str) -> None:
        if "step" in line:
            raise KeyboardInterrupt

    assert short(told=told).is_kept
    assert is_adapted()


def test_early_depths_count_more_since_later_ones_need_them() -> None:
    assert DepthShares((0.5, 0.5, 0.0)).length == 0.75
    assert DepthShares((0.45, 0.19, 0.13)).length > DepthShares((0.43, 0.18, 0.17)).length


_calls = count()


@catches(
    "the last head is kept, not the best",
    "training.teach:accepted",
    lambda right: lambda network, head, batches: teach.DepthShares((next(_calls) * 1e-6,) * 3),
)
def test_an_overfit_is_not_kept() -> None:
    """A head that has learned one text is taught another: the loss goes down, and so does what is accepted on the first, held-out one."""
    config, target = tiny_models.config(), tiny_models.target()
    rng = random.Random(0)
    pieces = [[rng.randrange(3, 40) for _ in range(64)] for _ in range(2)]
    mx.random.seed(0)
    like = Qwen35Mtp(config, target)
    head, fixed = float_weights(like)
    network = ChainNetwork(target, lambda: Qwen35Mtp(config, target), fixed, like)
    told = list[Judgement]()
    with States(target, (), 1 << 30) as own:
        for piece in pieces:
            own.add(piece, "training")
        first, other = own.training
        own.training = own.choosing = [first]
        learned = train(network, head, own, 300, clock=ticking())
        assert learned is not head
        own.training = [other]
        assert train(network, learned, own, 200, told=told.append, clock=ticking()) is learned
    assert told[-1].loss < told[0].loss
    assert told[-1].held_out.length < told[-1].best.length


@catches("held-out texts are trained on", "training.states:HELD_OUT", lambda right: 10**9)
def test_pieces_are_held_out_by_text_for_two_uses() -> None:
    texts = [[1000 * i + j for j in range(700)] for i in range(32)]
    found = pieces_of(texts)
    by_use = {use: {t // 1000 for piece in found if piece.use == use for t in piece.tokens} for use in USES}
    assert by_use == {"training": {*range(32)} - {0, 15, 16, 31}, "choosing": {0, 16}, "reporting": {15, 31}}
    one = pieces_of([list(range(32 * LENGTH))])
    assert [piece.use for piece in one] == ["training"] * 28 + ["choosing"] * 2 + ["reporting"] * 2
    assert [t for piece in one for t in piece.tokens] == list(range(32 * LENGTH))


@catches("copies are held out", "training.states:_COPIED", lambda right: 2.0)
def test_copies_of_training_text_are_not_held_out() -> None:
    rng = random.Random(1)
    texts = [[rng.randrange(9999) for _ in range(700)] for _ in range(32)]
    assert {piece.use for piece in pieces_of(texts)} == set(USES)
    changed = [[*text[:-1], i] for i, text in enumerate([*texts[:2] * 20])]  # each differs by one token
    assert {piece.use for piece in pieces_of(changed)} == {"training"}
    assert len(pieces_of(texts[:1] * 40)) == len(pieces_of(texts[:1]))


def test_texts_that_repeat_one_another_are_refused() -> None:
    with pytest.raises(ConfigError, match="repeat one another"):
        short([(f"{i}.sql", TEXTS[0][1]) for i in range(64)])


@catches("any gain is kept", "training.teach:_LEAST_GAIN", lambda right: -1.0, case="tiny")
@pytest.mark.parametrize(
    ("gains", "better"),
    [
        ([0.00002] * 8, False),
        ([0.3, -0.25, 0.28, -0.2, 0.2, -0.22], False),
        ([0.1, 0.15, 0.08, 0.12], True),
        ([-0.1] * 4, False),
    ],
    ids=["tiny", "chance", "gain", "loss"],
)
def test_only_a_gain_beyond_chance_is_kept(gains: list[float], better: bool) -> None:
    before = [DepthShares((0.5 + i / 100,)) for i in range(len(gains))]
    after = [DepthShares((each.depths[0] + gain,)) for each, gain in zip(before, gains, strict=True)]
    assert is_better(before, after) == better


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for arguments, said in (
        ([], "--texts names no file"),
        (["--texts", str(tmp_path / "none")], "cannot be read"),
        (["--texts", str(folder)], "there is no text"),
        (["--texts", str(folder), "--minutes", "0"], "--minutes"),
    ):
        assert command.main(["demo", *arguments]) == 2
        assert said in capsys.readouterr().err
    for name, content in TEXTS:
        (folder / name).write_text(content)
    (folder / "latin.txt").write_bytes("für".encode("latin-1"))
    assert command.main(["demo", "--texts", str(folder), "--minutes", "0.1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "1 files are no UTF-8 text" in err
    data = json.loads(out)
    assert data["card"]["texts"] == [str(folder / name) for name, _ in TEXTS]
    assert command.main(["demo-gemma", "--texts", str(folder)]) == 2
    assert "this model has none of them" in capsys.readouterr().err


def test_training_goes_on_while_held_out_text_gets_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although what was found so far costs too much on the model's own texts: it is not kept, and a later one is."""

    class Counting:
        def __init__(self, *_: object) -> None:
            self.head = {"step": 0}

        def step(self, *_: object) -> float:
            self.head = {"step": self.head["step"] + 1}
            return 0.0

    def accepted(_: object, head: dict[str, int], which: str) -> teach.DepthShares:
        step = head["step"]
        return teach.DepthShares((0.5 + step / 1000 if which == "held" else 0.8 - 0.1 * (0 < step < 90),))

    states = SimpleNamespace(batches=lambda *_: "held")
    monkeypatch.setattr(teach, "_JUDGEMENTS", 20)
    monkeypatch.setattr(teach, "Teacher", Counting)
    monkeypatch.setattr(teach, "accepted", accepted)
    monkeypatch.setattr(teach, "_batches", lambda *_: repeat(None))
    network, times = SimpleNamespace(pace=1.0, target=SimpleNamespace(hidden_size=256)), count()
    found = teach.train(network, {"step": 0}, states, 400.0, guard="guard", clock=lambda: next(times))  # type: ignore[arg-type]
    assert found["step"] >= 90


@catches(
    "the names that a bare head is read by stay",
    "mlxspec.checkpoints.adapted_head:AdaptedHead.weights",
    lambda right: lambda self: read_file(self.path),
    case="mtp",
)
@pytest.mark.parametrize(
    "names",
    [("fc.weight", "pre_fc_norm_hidden.weight", "pre_fc_norm_embedding.weight"), ("fc.weight", "d2t")],
    ids=["mtp", "eagle3"],
)
def test_what_is_kept_is_found_by_the_same_names(names: tuple[str, ...]) -> None:
    folder = adapted_head.folder_of("demo")
    card = Card(model="demo", made="2026-11-26", before=(0.5,), after=(0.6,), tokens=1)
    kept.keep(folder, {name: mx.zeros(4) for name in names}, card)
    found = adapted_head.find(folder)
    assert found is not None
    assert set(found.weights()) == set(names)
