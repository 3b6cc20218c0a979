"""MTP heads in the conventions that are published: as many drafts are accepted as with the right head. A head that is of no use costs a
notice and its drafts, never the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from planting import catches

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx

import mlxspec
from mlxspec.checkpoints.convert import Wish, convert
from mlxspec.checkpoints.quantize import Format
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.demo import TARGET
from mlxspec.engine import head_check
from mlxspec.errors import ModelError
from mlxspec.loading import qwen_weights
from mlxspec.models import head_norms
from mlxspec.models.qwen3_5_mtp import NORMS
from tests import tiny_models

PROMPT = "<|im_start|>user\nwhat does os.path.join do?<|im_end|>\n<|im_start|>assistant\n"
SIZE = SamplingParams(max_tokens=60)
FIXED = SpecConfig(drafters=("mtp",), policy="fixed", draft_bits=16)
TRUNK_NORMS = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)
Tensors = dict[str, mx.array]
Stored = Callable[[str], float]  # a norm's name -> what is added to a zero-centred weight

CONVENTIONS: dict[str, tuple[Stored, str]] = {
    "raw": (lambda k: 0, "mtp."),
    "raw, bare names": (lambda k: 0, ""),
    "converted": (lambda k: 1, "mtp."),
    "converted, bare names": (lambda k: 1, ""),
    "queries, keys and last": (lambda k: k.endswith(qwen_weights.QK_NORMS) or k == "norm.weight", "mtp."),
    "all but before fc": (lambda k: "pre_fc" not in k, "mtp."),
    "only the layer's": (lambda k: k.startswith("layers."), "mtp."),
    "only the last": (lambda k: k == "norm.weight", ""),
    "only layer norms": (lambda k: k.endswith("layernorm.weight"), "model.mtp."),
}


def demo_tensors() -> tuple[Tensors, Tensors]:
    """The trunk's tensors and the head's, whose norms are zero-centred in both."""
    return qwen_weights.split_mtp(dict(mx.load(str(TARGET / "model.safetensors"))))


def head(stored: Stored, prefix: str = "mtp.") -> Tensors:
    found = demo_tensors()[1]
    norms = {k for k, v in found.items() if "norm" in k and v.ndim == 1}
    return {prefix + k: v.astype(mx.float32) + stored(k) if k in norms else v for k, v in found.items()}


def save(path: Path, tensors: Tensors) -> None:
    mx.eval(tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new.safetensors")
    mx.save_safetensors(str(beside), tensors, metadata={"format": "mlx"})
    beside.replace(path)


@pytest.fixture(scope="module")
def trunks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders without a head: floats as mlx-lm converts them (shifted norms), and 4 bits as `mlxspec convert` does (raw norms)."""
    root = tmp_path_factory.mktemp("trunks")
    floats = Path(shutil.copytree(TARGET, root / "float"))
    converted: Tensors = {}
    for name, value in demo_tensors()[0].items():
        turned = mx.moveaxis(value, 2, 1) if "conv1d.weight" in name and value.ndim == 3 else value
        shifted = name.endswith(TRUNK_NORMS)
        converted["language_model." + name] = turned.astype(mx.float32) + 1 if shifted else turned
    save(floats / "model.safetensors", converted)
    convert("demo", root / "4-bit", Wish(trunk=Format(bits=4)))
    (root / "4-bit" / "mtp.safetensors").unlink()
    return {"float": floats, "4-bit": root / "4-bit"}


def placed(trunk: Path, tensors: Tensors, place: str, root: Path) -> tuple[Path, dict[str, Any]]:
    """A folder with this head in a place, and what `load` is told of it."""
    folder = Path(shutil.copytree(trunk, root / "model"))
    if place == "alone":
        save(root / "head" / "model.safetensors", tensors)
        config = {
            "model_type": "qwen3_5_mtp",
            "text_config": json.loads((TARGET / "config.json").read_text()),
        }
        (root / "head" / "config.json").write_text(json.dumps(config))
        return folder, {"draft_model": str(root / "head")}
    if place == "beside":
        save(folder / "mtp.safetensors", tensors)
        return folder, {}
    (shard,) = folder.glob("model*.safetensors")
    named = {k if "mtp." in k else "language_model.mtp." + k: v for k, v in tensors.items()}
    save(shard, dict(mx.load(str(shard))) | named)
    for index in folder.glob("*.index.json"):
        index.unlink()
    return folder, {}


def accepted(folder: Path, **options: Any) -> float:
    """The share of drafted tokens that are accepted."""
    with mlxspec.load(str(folder), spec=FIXED, config=EngineConfig(prefix_budget=0), **options) as engine:
        assert not [n for n in engine.notices if "MTP head:" in n]
        work = engine.generate(PROMPT, SIZE).stats.drafters["mtp"]
        return work.num_accepted / work.num_drafted


@pytest.fixture(scope="module")
def right(trunks: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """What is accepted of the right head's drafts: that of a converted one, whose norms are taken as they are stored."""
    found = {}
    for name, trunk in trunks.items():
        stored: Stored = (lambda k: 1) if name == "float" else (lambda k: 0)
        root = tmp_path_factory.mktemp("right")
        found[name] = accepted(placed(trunk, head(stored), "inside", root)[0])
    return found


def as_guessed(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda found, run: ({}, head_norms.score(found, run))


@catches(
    "the norms of an MTP head are taken as they are guessed",
    "mlxspec.models.head_norms:best_shifts",
    as_guessed,
    case="only the layer's",
    errors=(KeyError,),
)
@catches(
    "what was found of an MTP head's norms is not applied",
    "mlxspec.models.qwen3_5_mtp:Qwen35Mtp.set_norms",
    lambda right: lambda self, norms, shifts: None,
    case="all but before fc",
    errors=(KeyError,),
)
@pytest.mark.parametrize(
    ("trunk", "place"),
    [
        ("float", "inside"),
        ("float", "beside"),
        ("float", "alone"),
        pytest.param("4-bit", "inside", marks=pytest.mark.slow),
        pytest.param("4-bit", "beside", marks=pytest.mark.slow),
        ("4-bit", "alone"),
    ],
)
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_drafts_are_accepted(
    convention: str, trunk: str, place: str, trunks: dict[str, Path], right: dict[str, float], tmp_path: Path
) -> None:
    folder, options = placed(trunks[trunk], head(*CONVENTIONS[convention]), place, tmp_path)
    assert right[trunk] > 0.5
    assert accepted(folder, **options) > right[trunk] - 0.02


def test_a_guess_that_shifts_once_more_is_put_right(
    trunks: dict[str, Path], right: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    normalize = qwen_weights.normalize_mtp

    def once_more(*args: Any, **options: Any) -> Tensors:
        found = normalize(*args, **options)
        return {k: v + 1 if "norm" in k else v for k, v in found.items()}

    monkeypatch.setattr(qwen_weights, "normalize_mtp", once_more)
    folder, _ = placed(trunks["float"], head(lambda k: 1), "inside", tmp_path)
    assert accepted(folder) > right["float"] - 0.02


def test_a_head_is_judged_once(
    trunks: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later load knows the answer; a damaged answer is found again, and another head has its own."""
    times: list[int] = []
    search = head_check.best_shifts
    monkeypatch.setattr(head_check, "best_shifts", lambda *args: (times.append(1), search(*args))[1])
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
    folder, _ = placed(trunks["float"], head(lambda k: "pre_fc" not in k), "beside", tmp_path)
    shares = [accepted(folder), accepted(folder)]
    assert shares[0] == shares[1]
    assert len(times) == 1
    for text in ("{", "[]", '{"shifts": {"last": 7}, "score": [1, 0, 0]}', '{"shifts": {}, "score": [1]}'):
        (kept,) = (tmp_path / "cache" / "heads").iterdir()
        kept.write_text(text)
        times.clear()
        assert accepted(folder) == shares[0]
        assert len(times) == 1
    save(folder / "mtp.safetensors", head(lambda k: 1))
    times.clear()
    accepted(folder)
    assert len(times) == 1


def shuffled(tensors: Tensors) -> Tensors:
    order = mx.random.permutation(tensors["mtp.fc.weight"].shape[0], key=mx.random.key(1))
    return tensors | {"mtp.fc.weight": tensors["mtp.fc.weight"][order]}


USELESS: dict[str, Callable[[Tensors], Tensors]] = {
    "another model's": shuffled,
    "no numbers": lambda t: t | {"mtp.fc.weight": t["mtp.fc.weight"] * float("nan")},
    "zeros": lambda t: t | {"mtp.fc.weight": t["mtp.fc.weight"] * 0},
}
DAMAGED: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "a tensor less": (lambda t: {k: v for k, v in t.items() if k != "mtp.fc.weight"}, "tensors are missing"),
    "a tensor more": (lambda t: t | {"mtp.what": t["mtp.fc.weight"]}, "tensors are unknown"),
    "another shape": (lambda t: t | {"mtp.fc.weight": t["mtp.fc.weight"].T}, "fc.weight has shape"),
    "two heads": (lambda t: t | {f"model.{k}": v for k, v in t.items()}, "two MTP heads"),
}


@catches(
    "a head that predicts nothing drafts",
    "mlxspec.models.head_norms:HeadScore.is_useful",
    lambda right: property(lambda self: True),
    errors=(ValueError,),
)
@pytest.mark.parametrize("trunk", ["float", "4-bit"])
@pytest.mark.parametrize("kind", USELESS)
def test_a_head_that_predicts_nothing_costs_a_notice(
    kind: str, trunk: str, trunks: dict[str, Path], tmp_path: Path
) -> None:
    tensors = USELESS[kind](head(lambda k: 0))
    folder, _ = placed(trunks[trunk], tensors, "beside", tmp_path)
    for draft in ("auto", "mtp"):
        with mlxspec.load(str(folder), draft=draft) as engine:
            (notice,) = [n for n in engine.notices if "MTP head" in n]
            assert "damaged, or it was made for another model" in notice
            result = engine.generate(PROMPT, SIZE)
            assert "mtp" not in engine.drafts.drafters
            assert "mtp" not in result.stats.drafters
    with mlxspec.load(str(folder), draft="off") as plain:
        assert plain.generate(PROMPT, SIZE).tokens == result.tokens


@pytest.mark.parametrize("place", ["inside", "beside"])
@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_head_costs_a_notice(
    kind: str, place: str, trunks: dict[str, Path], tmp_path: Path
) -> None:
    damage, says = DAMAGED[kind]
    folder, _ = placed(trunks["float"], damage(head(lambda k: 0)), place, tmp_path)
    for draft in ("off", "auto"):
        with mlxspec.load(str(folder), draft=draft) as engine:
            (notice,) = [n for n in engine.notices if "MTP head" in n]
            assert says in notice
            assert notice.isprintable()
            assert "mtp" not in engine.drafts.drafters
    with pytest.raises(ModelError, match=f"{says}.*leave `mtp` out"):
        mlxspec.load(str(folder), draft="mtp")


def test_a_file_of_a_head_that_is_cut_short_costs_a_notice(trunks: dict[str, Path], tmp_path: Path) -> None:
    folder, _ = placed(trunks["float"], head(lambda k: 0), "beside", tmp_path)
    path = folder / "mtp.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with mlxspec.load(str(folder), draft="off") as engine:
        assert [n for n in engine.notices if "mtp.safetensors was passed over" in n and "cut short" in n]
    with pytest.raises(ModelError, match=r"mtp\.safetensors is cut short"):
        convert(str(folder), tmp_path / "out", Wish())


def test_a_named_head_drafts_for_a_model_whose_own_is_damaged(
    trunks: dict[str, Path], right: dict[str, float], tmp_path: Path
) -> None:
    damaged = DAMAGED["another shape"][0](head(lambda k: 0))
    folder, _ = placed(trunks["float"], damaged, "beside", tmp_path / "a")
    _, options = placed(trunks["float"], head(lambda k: 0), "alone", tmp_path / "b")
    with mlxspec.load(str(folder), spec=FIXED, **options) as engine:
        work = engine.generate(PROMPT, SIZE).stats.drafters["mtp"]
    assert work.num_accepted / work.num_drafted > right["float"] - 0.02


@catches(
    "the answer about a head is kept whatever its norms were as they were loaded",
    "mlxspec.engine.head_check:_path",
    lambda right: (
        lambda head, tokens, files: right(
            SimpleNamespace(parameters=head.parameters, norms=dict), tokens, files
        )
    ),
)
def test_what_is_kept_of_a_head_belongs_to_its_norms_as_loaded() -> None:
    """Shifts are relative to them: the same file, loaded otherwise, is another head."""
    made = tiny_models.make_mtp(tiny_models.config(), tiny_models.target())
    before = head_check._path(made, [1, 2], [])
    assert head_check._path(made, [1, 2], []) == before
    made.set_norms(made.norms(), dict.fromkeys(NORMS, 1.0))
    assert head_check._path(made, [1, 2], []) != before
