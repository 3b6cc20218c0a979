"""`--draft-model` with an EAGLE-3 drafter's folder: found out, used or refused in one sentence, inspected, and fetched without a check of
memory."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

import mlxspec
import mlxspec.demo
from mlxspec.checkpoints.inspect import DrafterReport, InspectReport, inspect
from mlxspec.checkpoints.pull import memory_of
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.errors import ConfigError, ModelError, VocabularyError
from mlxspec.loading.download import File, Plan
from tests.drafters.eagle3_checkpoints import KINDS, Kind, write

VOCAB, SIZE, LAYERS = 2048, 192, (1, 3, 5)  # the demo target's
PROMPT = "def add(a, b):"
FEW = SamplingParams(max_tokens=16, ignore_eos=True)
FIXED = SpecConfig(policy="fixed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eagle3")
    write(path, Kind(layout="SafeAILab", rows=512, own_embedding=False), VOCAB, SIZE, LAYERS)
    return path


def test_it_is_used_beside_a_head_and_says_so(folder: Path) -> None:
    plain = mlxspec.load("demo", draft="off").generate(PROMPT, FEW)
    engine = mlxspec.load("demo", draft_model=str(folder), spec=FIXED)
    assert list(engine.drafts.drafters) == ["ngram-simple", "eagle3"]
    assert any("--draft mtp,eagle3 uses both" in n for n in engine.notices)
    got = engine.generate(PROMPT, FEW, spec=SpecConfig(drafters=("eagle3",), policy="fixed"))
    assert got.tokens == plain.tokens
    assert got.stats.drafters["eagle3"].num_drafted > 0
    assert not got.stats.notices
    both = mlxspec.load("demo", draft="mtp,eagle3", draft_model=str(folder), spec=FIXED)
    assert list(both.drafts.drafters) == ["mtp", "eagle3"]


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"draft": "mtp"}, ConfigError, "would not be used: add eagle3 to the drafters"),
        ({"draft": "draft-model"}, ConfigError, "its drafts are asked for as `eagle3`"),
        ({"model": "demo-gemma"}, ModelError, r"another model: its target.s (hidden size|vocabulary)"),
    ],
)
def test_what_is_refused(folder: Path, how: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        mlxspec.load(how.pop("model", "demo"), draft_model=str(folder), **how)


def test_without_a_folder_of_its_kind() -> None:
    with pytest.raises(ConfigError, match="The drafter eagle3 needs an EAGLE-3 drafter made for this model"):
        mlxspec.load("demo", draft="eagle3")


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    write(tmp_path, KINDS["SafeAILab"], VOCAB, SIZE, LAYERS)
    held = dict(mx.load(str(tmp_path / "model.safetensors")))
    held["fc.weight"] = mx.full(held["fc.weight"].shape, mx.nan)
    mx.eval(list(held.values()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), held)
    with pytest.raises(ModelError, match="The EAGLE-3 drafter cannot be used"):
        mlxspec.load("demo", draft_model=str(tmp_path))


def test_a_tokenizer_of_its_own_must_be_the_targets(tmp_path: Path) -> None:
    write(tmp_path, KINDS["SafeAILab"], VOCAB, SIZE, LAYERS)
    tokenizer = json.loads((mlxspec.demo.TARGET / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    mlxspec.load("demo", draft_model=str(tmp_path))
    words = tokenizer["model"]["vocab"]
    first, second = (next(k for k, v in words.items() if v == i) for i in (300, 301))
    words[first], words[second] = 301, 300
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(VocabularyError, match="token ids mean different things"):
        mlxspec.load("demo", draft_model=str(tmp_path))


def test_keys_that_nobody_reads_and_options_that_do_not_apply_are_said(tmp_path: Path) -> None:
    write(tmp_path, Kind(layout="SafeAILab", rows=512, more={"new_kind_of_norm": 3}), VOCAB, SIZE, LAYERS)
    engine = mlxspec.load("demo", draft_model=str(tmp_path), spec=SpecConfig(draft_vocab=700))
    assert any("new_kind_of_norm" in n for n in engine.notices)
    assert any("proposes over 512 tokens of its own" in n for n in engine.notices)


def test_inspect_knows_it(folder: Path) -> None:
    alone = inspect(str(folder))
    assert isinstance(alone, DrafterReport)
    assert alone.kind == "an EAGLE-3 drafter"
    whole = inspect("demo", draft_model=str(folder))
    assert isinstance(whole, InspectReport)
    usable = {u.name: u for u in whole.drafters}
    assert usable["eagle3"].usable
    assert "reads layers 1, 3, 5 and proposes over 512 tokens" in usable["eagle3"].why
    assert usable["mtp"].usable
    assert not usable["draft-model"].usable
    bare = inspect("demo")
    assert isinstance(bare, InspectReport)
    assert not {u.name: u for u in bare.drafters}["eagle3"].usable
    assert whole.memory.drafter_weights > bare.memory.drafter_weights
    assert whole.memory.drafter_state > bare.memory.drafter_state


@pytest.mark.parametrize("layout", ["SafeAILab", "speculators"])
def test_fetching_one_asks_for_no_memory(tmp_path: Path, layout: str) -> None:
    write(tmp_path, Kind(layout=layout), VOCAB, SIZE, LAYERS)
    file = File("model.safetensors", 1, False)
    assert memory_of(Plan("owner/name", None, "0" * 40, tmp_path, (file,))) is None
