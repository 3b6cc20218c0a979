"""Block drafters in their published layout, through `load`, `inspect` and the command line: the same text with and without, what they are
is found out by their tensors; what cannot draft is one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny
import tiny_dflash
from test_bad_checkpoints import one_sentence
from test_load_pairs import FIXED, add_tokenizer
from tiny_dflash import Arrays, Config
from zoo import Zoo

import mlxspec
from mlxspec.cli.main import main
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.engine.measure import likely_draft
from mlxspec.errors import ConfigError, MlxspecError, ModelError
from mlxspec.models.folder import drafter_in
from tests.rounding import of_sum

Hurt = Callable[[Config, Arrays], object]
ANSWER = SamplingParams(max_tokens=30, ignore_eos=True)
PROMPTS = [[5, 9, 12, 9, 12, 9], [7]]


def target_of(zoo: Zoo, dialect: str = "text") -> Path:
    folder = zoo.folder("untied", dialect)
    return folder if (folder / "tokenizer.json").exists() else add_tokenizer(folder, tiny.VOCAB)


def sizes(**more: Any) -> dict[str, Any]:
    found = {"hidden": 64, "vocab": tiny.VOCAB, "target_layers": 6, "layer_ids": (1, 3, 5), "mask_id": 3}
    return found | more


def write(folder: Path, kind: str, *, dtype: mx.Dtype = mx.float32, own_ends: bool = False) -> Path:
    c = tiny_dflash.config(kind, **sizes())
    return tiny_dflash.write(folder, c, tiny_dflash.weights(kind, c, own_ends=own_ends), dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "dialect"),
    [
        ("DFlash", mx.bfloat16, "text"),
        ("DFlash", mx.float32, "mlx-4bit-64"),
        ("DFlash2", mx.bfloat16, "text"),
        ("DSpark", mx.float16, "text"),
    ],
)
def test_published_layouts(zoo: Zoo, kind: str, dtype: mx.Dtype, dialect: str, tmp_path: Path) -> None:
    target, drafter = target_of(zoo, dialect), write(tmp_path / "drafter", kind, dtype=dtype)
    plain = mlxspec.load(str(target), draft="off").generate(PROMPTS, ANSWER)
    made = mlxspec.load(str(target), draft_model=str(drafter), spec=FIXED)
    assert made.spec.drafters == ("suffix", "ngram-simple", "dflash")
    assert any(f"drafter is a {kind} drafter: it drafts up to" in n for n in made.notices)
    drafted = made.generate(PROMPTS, ANSWER)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert all(r.stats.drafters["dflash"].num_drafted > 0 for r in drafted)
    # random drafters are hardly ever right, of which there is a notice
    assert not [n for r in drafted for n in r.stats.notices if "hardly ever right" not in n]
    # what a draft costs does not grow with its length, until it has been measured
    cost = likely_draft(made.drafts.drafters["dflash"], made.model)
    assert 0 < cost.seconds(1, 1) == cost.seconds(8, 1)
    auto = mlxspec.load(str(target), draft="dflash", draft_model=str(drafter))
    assert [r.tokens for r in auto.generate(PROMPTS, ANSWER)] == [r.tokens for r in plain]


@pytest.mark.parametrize("kind", ["DFlash", "DSpark"])
@pytest.mark.parametrize("num_rows", [None, 150])
def test_the_speculators_layout(zoo: Zoo, num_rows: int | None, kind: str, tmp_path: Path) -> None:
    """The same drafter, with and without a vocabulary of its own: its logits are those rows of the same logits, and texts are the same."""
    c = tiny_dflash.config(kind, **sizes(), window=None)
    arrays = tiny_dflash.weights(kind, c, own_ends=True)
    rows = None if num_rows is None else np.sort(np.random.default_rng(1).permutation(tiny.VOCAB)[:num_rows])
    folders = [
        tiny_dflash.write(tmp_path / "authors", c, arrays),
        tiny_dflash.write(tmp_path / "speculators", *tiny_dflash.as_speculators(c, arrays, rows)),
    ]
    target = str(target_of(zoo))
    made = [mlxspec.load(target, draft="dflash", draft_model=str(f), spec=FIXED) for f in folders]
    one, two = (e.drafts.drafters["dflash"].model for e in made)
    assert not any("not known here" in n for n in made[1].notices)
    assert (two.config.layer_ids, two.config.num_drafts) == (one.config.layer_ids, one.config.num_drafts)
    hidden = mx.random.normal((3, 64))
    wanted = one.head(hidden)
    wanted = wanted if rows is None else wanted[:, mx.array(rows)]
    # a matrix of fewer rows may be multiplied in another order
    bound = 0.0 if rows is None else of_sum(64) * float((mx.abs(hidden) @ mx.abs(one.head(mx.eye(64)))).max())
    assert mx.abs(two.head(hidden) - wanted).max() <= bound
    if kind == "DSpark":
        logits, before = one.head(hidden), mx.array([3, 190, 8])
        both = one.follow(hidden, logits, before), two.follow(hidden, two.head(hidden), before)
        assert mx.allclose(both[1], both[0] if rows is None else both[0][:, mx.array(rows)], atol=1e-5)
    assert (two.ids is None) == (rows is None)
    assert rows is None or two.ids.tolist() == rows.tolist()
    plain, *drafted = (e.generate(PROMPTS, ANSWER) for e in (mlxspec.load(target, draft="off"), *made))
    for results in drafted:
        assert [r.tokens for r in results] == [r.tokens for r in plain]
        assert all(r.stats.drafters["dflash"].num_drafted > 0 for r in results)


ROWS = np.arange(0, tiny.VOCAB, 2)
BAD_SPECULATORS: dict[str, tuple[Hurt, str]] = {
    "d2t out of range": (lambda c, a: a["d2t"].__setitem__(3, 999), "d2t names token 1002, and the target has tokens 0 to 196"),
    "d2t below 0": (lambda c, a: a["d2t"].__setitem__(0, -1), "d2t names token -1"),
    "d2t names a token twice": (lambda c, a: a["d2t"].__setitem__(1, -1), "d2t names a token twice"),
    "no head for its vocabulary": (lambda c, a: a.pop("lm_head.weight"), "no language-model head .lm_head. for it"),
    "a window that is none": (
        lambda c, a: c["transformer_layer_config"].update(layer_types=["full_attention", "sliding_attention"], sliding_window="wide"),
        "sliding_window",
    ),
    "layer ids that are none": (lambda c, a: c.update(aux_hidden_state_layer_ids="all"), "target_layer_ids is 'all'"),
    "layer 0, the embedding": (lambda c, a: c.update(aux_hidden_state_layer_ids=[0, 2, 4]), "no rising list"),
    "another hidden size of the target": (lambda c, a: c.update(target_hidden_size=128), "target_hidden_size differs"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_SPECULATORS)
def test_bad_speculators_folders_are_one_sentence(zoo: Zoo, name: str, tmp_path: Path) -> None:
    hurt, says = BAD_SPECULATORS[name]
    c = tiny_dflash.config("DFlash", **sizes(), window=None)
    c, arrays = tiny_dflash.as_speculators(c, tiny_dflash.weights("DFlash", c, own_ends=True), ROWS)
    hurt(c, arrays)
    drafter = tiny_dflash.write(tmp_path / "drafter", c, arrays)
    with pytest.raises(ModelError, match=says) as caught:
        mlxspec.load(str(target_of(zoo)), draft="dflash", draft_model=str(drafter))
    one_sentence(caught.value)


def test_never_computed_in_float16(zoo: Zoo, tmp_path: Path) -> None:
    """Sums of several layers' outputs do not fit there."""
    drafter = write(tmp_path / "drafter", "DFlash", dtype=mx.float16)
    made = mlxspec.load(str(target_of(zoo)), draft="dflash", draft_model=str(drafter), dtype="float16")
    model = made.drafts.drafters["dflash"].model
    assert made.model.dtype == mx.float16
    assert model.dtype == mx.bfloat16
    assert made.generate(PROMPTS[0], ANSWER, spec=SpecConfig(drafters=("dflash",), policy="fixed")).tokens


def test_a_drafter_beside_an_mtp_head(zoo: Zoo, tmp_path: Path) -> None:
    """What was named is used, or refused; the head only with it if both are asked for."""
    target, drafter = str(target_of(zoo)), str(write(tmp_path / "drafter", "DFlash"))
    made = mlxspec.load(target, draft_model=drafter, spec=FIXED)
    assert any("--draft mtp,dflash uses both" in n for n in made.notices)
    both = mlxspec.load(target, draft="mtp,dflash", draft_model=drafter, spec=FIXED)
    assert both.spec.drafters == ("mtp", "dflash")
    for draft in ("mtp", "ngram-simple"):
        with pytest.raises(ConfigError, match="would not be used: add dflash"):
            mlxspec.load(target, draft=draft, draft_model=drafter)
    with pytest.raises(ConfigError, match="asked for as `dflash`"):
        mlxspec.load(target, draft="draft-model", draft_model=drafter)
    with pytest.raises(ConfigError, match=": name it with --draft-model"):
        mlxspec.load(target, draft="dflash")


def test_inspect(zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter = str(target_of(zoo)), str(write(tmp_path / "drafter", "DSpark"))
    assert main(["inspect", drafter]) == 0
    assert "a DSpark drafter" in capsys.readouterr().out
    assert main(["inspect", target, "--draft-model", drafter, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (dflash,) = [d for d in found["drafters"] if d["name"] == "dflash"]
    assert dflash["usable"]
    assert "DSpark drafter, drafts up to 8 tokens at once" in dflash["why"]
    assert found["memory"]["drafter_weights"] > 0
    assert main(["inspect", target]) == 0
    assert "no dflash: needs --draft-model" in capsys.readouterr().out
    assert drafter_in(json.loads((Path(drafter) / "config.json").read_text())) == "dflash"


INNER = "dflash_config"
BAD: dict[str, tuple[str, Hurt, str]] = {
    "a larger target": ("DFlash", lambda c, a: c.update(num_target_layers=8), "its target's number of layers is 8, and this model's 6"),
    "another vocabulary": ("DFlash", lambda c, a: c.update(vocab_size=300), "its target's vocabulary is 300, and this model's 197"),
    "a wider target": ("DFlash", lambda c, a: c.update(hidden_size=80), "its target's hidden size is 80, and this model's 64"),
    "a layer beyond": (
        "DFlash", lambda c, a: (c.pop("num_target_layers"), c[INNER].update(target_layer_ids=[1, 3, 6])),
        "reads layer 6 of its target, which has layers 0 to 5",
    ),
    "no layers": ("DFlash", lambda c, a: c[INNER].pop("target_layer_ids"), "target_layer_ids is None"),
    "layers twice": ("DFlash", lambda c, a: c[INNER].update(target_layer_ids=[1, 1, 3]), "no rising list"),
    "layers that are no list": ("DFlash", lambda c, a: c[INNER].update(target_layer_ids={"a": 1}), "no rising list"),
    "no mask": ("DFlash", lambda c, a: c[INNER].pop("mask_token_id"), "mask_token_id is None"),
    "a mask beyond": ("DFlash", lambda c, a: c[INNER].update(mask_token_id=197), "mask_token_id 197 is no token"),
    "blocks of one": ("DFlash", lambda c, a: c.update(block_size=1), "block_size must leave"),
    "capped logits": ("DFlash", lambda c, a: c[INNER].update(final_logit_softcapping=30.0), "its target caps logits at 30"),
    "half a checkpoint": (
        "DFlash", lambda c, a: [a.pop(k) for k in list(a) if k.startswith("layers.1.")],
        "The DFlash drafter cannot be loaded: tensors are missing",
    ),
    "half a layer": ("DSpark", lambda c, a: a.pop("layers.1.mlp.up_proj.weight"), "DSpark drafter cannot .* missing .layers.1.mlp.up"),
    "half a selector": (
        "DFlash2", lambda c, a: a.pop("candidate_selector.hidden_projection.weight"), "DFlash2 drafter cannot be loaded: tensors are",
    ),
    "tensors of something else": ("DFlash", lambda c, a: a.update(x=np.zeros(3, np.float32)), "tensors are unknown .x"),
    "a wrong shape": ("DFlash", lambda c, a: a.update({"fc.weight": a["fc.weight"][:, :-1]}), "fc.weight has shape"),
    "fewer layers than it reads": ("DFlash", lambda c, a: c[INNER].update(target_layer_ids=[1, 3]), "fc.weight has shape"),
    "NaN": ("DFlash", lambda c, a: a["norm.weight"].fill(np.nan), "holds values that are no numbers"),
    "infinity": ("DSpark", lambda c, a: a["fc.weight"].fill(np.inf), "holds values that are no numbers"),
    "a sink": ("DFlash", lambda c, a: c[INNER].update(attention_sink_bias=True), "attention_sink_bias True is not supported"),
    "causal, perhaps": ("DFlash", lambda c, a: c[INNER].update(is_causal="maybe"), "is_causal is 'maybe', which is neither true nor false"),
    "another Markov head": ("DSpark", lambda c, a: c[INNER].update(markov_head_type="gated"), "markov_head_type 'gated' is not supported"),
    "no window": ("DFlash", lambda c, a: c.pop("sliding_window"), "sliding_window is None"),
    "unknown layers": ("DFlash", lambda c, a: c.update(layer_types=["mamba"] * 2), "layer_types must name"),
    "another activation": ("DFlash", lambda c, a: c.update(hidden_act="gelu"), "hidden_act 'gelu'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(zoo: Zoo, name: str, tmp_path: Path) -> None:
    kind, hurt, says = BAD[name]
    c = tiny_dflash.config(kind, **sizes())
    arrays = tiny_dflash.weights(kind, c)
    hurt(c, arrays)
    drafter = tiny_dflash.write(tmp_path / "drafter", c, arrays)
    with pytest.raises(MlxspecError, match=says) as caught:
        mlxspec.load(str(target_of(zoo)), draft="dflash", draft_model=str(drafter))
    assert isinstance(caught.value, ModelError)
    one_sentence(caught.value)


def test_keys_that_nobody_reads_are_named(zoo: Zoo, tmp_path: Path) -> None:
    c = tiny_dflash.config("DFlash", **sizes(), new_gate="tanh")
    c["dflash_config"]["new_scale"] = 0.5
    drafter = tiny_dflash.write(tmp_path / "drafter", c, tiny_dflash.weights("DFlash", c))
    made = mlxspec.load(str(target_of(zoo)), draft="dflash", draft_model=str(drafter))
    assert any("new_gate, new_scale" in n for n in made.notices)
    config = EngineConfig(memory_budget=1)
    with pytest.raises(MlxspecError):
        mlxspec.load(str(target_of(zoo)), draft="dflash", draft_model=str(drafter), config=config)
