"""Several adapters beside one model: each row has its own, as if that one had been loaded alone; the weights are there once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm_families import FAMILIES, write
from planting import catches
from test_adapters import DENSE, PROMPT, SIZE, TOKENS, logits_of, random_adapter, write_adapter

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten

import mlxspec
from mlxspec.cache.model_cache import ModelCache
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.demo import TARGET
from mlxspec.engine.engine import Engine
from mlxspec.errors import ConfigError
from mlxspec.kernels.flat import FlatRows
from mlxspec.loading.weights import read_folder
from mlxspec.models.assemble import assemble_lazily
from mlxspec.models.fill import evaluate
from mlxspec.models.gate import AdapterGate
from mlxspec.models.sizes import bytes_of
from mlxspec.platform import memory

MADE = SpecConfig(policy="fixed")
DRAFTED = SpecConfig(policy="fixed", drafters=("ngram-simple", "mtp"))


def asked(name: str | None, **more: object) -> SamplingParams:
    return SamplingParams(
        max_tokens=24, ignore_eos=True, adapters={} if name is None else {name: 1.0}, **more
    )  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = tmp_path_factory.mktemp("adapters")
    return {
        name: str(write_adapter(made / name, TARGET, seed=seed, rank=rank))
        for name, seed, rank in (("a", 1, 4), ("b", 2, 8))
    }


@pytest.fixture(scope="module")
def engine(folders: dict[str, str]) -> Engine:
    return mlxspec.load("demo", adapter=folders, spec=MADE)


@pytest.fixture(scope="module")
def alone(folders: dict[str, str]) -> dict[str | None, list[int]]:
    """The tokens of a model that was loaded with one adapter, or with none."""
    found = {}
    for name in (*folders, None):
        one = mlxspec.load("demo", adapter=name and folders[name], draft="off")
        found[name] = list(one.generate(PROMPT, SIZE).tokens)
    assert len({tuple(tokens) for tokens in found.values()}) == 3
    return found


@catches(
    "adapters of rows are forgotten",
    "mlxspec.models.gate:AdapterGate.open",
    lambda right: lambda self, scales, rows: None,
)
@catches(
    "a row has its neighbour's adapter",
    "mlxspec.models.gate:AdapterGate.open",
    lambda right: lambda self, scales, rows: right(self, scales[::-1], rows),
)
@pytest.mark.parametrize("spec", [SpecConfig(), DRAFTED], ids=["plain", "drafted"])
def test_texts_are_those_of_one_adapter_alone(
    engine: Engine, alone: dict[str | None, list[int]], spec: SpecConfig
) -> None:
    """Three rows decode together: both adapters and the model itself. Then each again by itself."""
    names = ["a", "b", None]
    together = engine.generate([PROMPT] * 3, [asked(n) for n in names], spec=spec)
    assert [list(r.tokens) for r in together] == [alone[n] for n in names]
    if spec.drafters:
        assert all(r.stats.num_drafted > 0 for r in together)
    for name in names:
        assert list(engine.generate(PROMPT, asked(name), spec=spec).tokens) == alone[name]


@catches(
    "texts under adapters share what is kept of their beginnings",
    "mlxspec.engine.prefix.tree:KeyedText.__init__",
    lambda right: lambda self, tokens, owner="", scales=(): right(self, tokens, owner),
)
def test_what_is_kept_of_a_prompt_is_kept_apart(folders: dict[str, str]) -> None:
    engine = mlxspec.load("demo", adapter=folders, spec=MADE)
    prompt = PROMPT * 8
    first = {n: engine.generate(prompt, asked(n)) for n in ("a", "b", None)}
    assert [r.stats.num_cached for r in first.values()] == [0, 0, 0]
    half = engine.generate(prompt, SamplingParams(max_tokens=24, ignore_eos=True, adapters={"a": 0.5}))
    assert half.stats.num_cached == 0
    for name, before in first.items():
        again = engine.generate(prompt, asked(name))
        assert again.stats.num_cached > 0
        assert again.tokens == before.tokens
    engine.prefix.tree.check()


def test_texts_under_adapters_stay_off_the_disk(folders: dict[str, str], tmp_path: Path) -> None:
    """Files are of the weights alone."""
    config = EngineConfig(prefix_disk=1 << 26, prefix_dir=str(tmp_path / "kept"))
    with mlxspec.load("demo", adapter=folders, spec=MADE, config=config) as engine:
        disk = engine.prefix.disk
        assert disk is not None
        engine.generate(PROMPT * 8, asked("a"))
        engine.prefix.flush(5.0)
        assert disk.stats.bytes_written == 0
        engine.generate(PROMPT * 8, asked(None))
        engine.prefix.flush(5.0)
        assert disk.stats.bytes_written > 0


def test_the_weights_are_there_once(folders: dict[str, str], engine: Engine) -> None:
    """Whatever the number of adapters: beside their own arrays there are those of the model, and no byte more."""

    def own(model: Any) -> dict[str, mx.array]:
        held = tree_flatten(model.parameters())
        return {k: v for k, v in held if k.rpartition(".")[2] in ("lora_a", "lora_b", "owner")}

    one = mlxspec.load("demo", adapter={"a": folders["a"]}, draft="off")
    rest = [bytes_of(e.model) - sum(v.nbytes for v in own(e.model).values()) for e in (engine, one)]
    base = bytes_of(mlxspec.load("demo", draft="off").model)
    assert rest[0] == rest[1] == base
    assert {v.shape[1] for k, v in own(engine.model).items() if k.endswith("lora_a")} == {4 + 8}
    assert sum(v.nbytes for v in own(engine.model).values()) < base / 20


def test_a_row_keeps_its_adapter_wherever_it_goes() -> None:
    """Rows that join, are selected and fork; and one that is parked (below)."""
    caches = [ModelCache([], 1) for _ in range(3)]
    for cache, scales in zip(caches, [(1.0, 0.0), (), (0.0, 1.0)], strict=True):
        cache.scales[0] = scales
    first, *others = caches
    for other in others:
        first.join(other)
    assert first.fork().scales == [(1.0, 0.0), (), (0.0, 1.0)]
    first.select([2, 1])
    assert first.scales == [(0.0, 1.0), ()]
    gate = AdapterGate()
    gate.names = ("a", "b")
    gate.open(first.scales, FlatRows((2, 1)))
    assert gate.held["scales"].tolist() == [[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]]
    gate.open([()], FlatRows((2,)))
    assert not gate.held


@catches(
    "a parked row comes back without its adapter",
    "mlxspec.engine.places:Rows.unpark",
    lambda right: lambda self, request, cache: (right(self, request, cache), forget(self))[0],
)
def test_a_parked_row_goes_on_with_its_adapter(
    folders: dict[str, str], alone: dict[str | None, list[int]]
) -> None:
    engine = mlxspec.load("demo", adapter=folders, draft="off", config=EngineConfig(max_rows=2))
    requests = [engine.submit(PROMPT, asked(n)) for n in ("a", "b")]
    while not all(r.num_generated for r in requests):
        list(engine.step())
    for resting in (frozenset({requests[0].number}), frozenset()):
        engine.rest(resting)
        for _ in range(3):
            list(engine.step())
        assert [r in engine.places.rows.parked for r in requests] == [bool(resting), False]
    while not engine.is_idle:
        list(engine.step())
    assert [r.history[len(r.prompt) :] for r in requests] == [alone["a"], alone["b"]]


def forget(rows: object) -> None:
    rows.cache.scales[-1] = ()  # type: ignore[attr-defined]


FAST = ("qwen3_5", "gemma3_text")


@pytest.mark.parametrize("kept", ["packed", "floats"])
@pytest.mark.parametrize(
    "family", [f if f in FAST else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_every_family(family: str, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward over three rows of different widths: each has mlx-lm's logits with its adapter. packed: quantized, as on a GPU."""
    if kept == "packed":
        monkeypatch.setattr(memory, "floats_fit", lambda *args, **options: False)
    model = write(tmp_path / "model", family, 4 if kept == "packed" else None)
    keys = DENSE if "moe" in family or family == "qwen3_next" else None
    theirs = [
        random_adapter(tmp_path / name, model, "lora", 0.3, seed=seed, rank=rank, keys=keys)
        for name, seed, rank in (("a", 1, 4), ("b", 2, 6))
    ]
    config = json.loads((model / "config.json").read_text())
    paths = {name: str(tmp_path / name) for name in ("a", "b")}
    made = assemble_lazily(config, lambda: read_folder(model), mx.float32, adapter=paths)
    evaluate([made.model])
    assert made.model.gate.names == ("a", "b")
    widths, base = (len(TOKENS), 7, len(TOKENS) - 3), logits_of(model, None)
    cache, rows = made.model.make_cache(3), FlatRows(widths)
    cache.scales = [(0.0, 1.0), (), (1.0, 0.0)]
    tokens = [t for width in widths for t in TOKENS[:width]]
    found = np.array(made.model.forward(mx.array(tokens), rows, cache, certain=True).logits)
    scale = np.abs(theirs).max()
    for row, wanted in enumerate((theirs[1], base, theirs[0])):
        start, end = rows.starts[row : row + 2]
        assert np.abs(found[start:end] - wanted[: widths[row]]).max() / scale < 1e-3
    assert np.abs(theirs[0] - base).max() / scale > 0.01
    assert np.abs(theirs[0] - theirs[1]).max() / scale > 0.01


def test_one_that_cannot_be_used_costs_only_itself(folders: dict[str, str], tmp_path: Path) -> None:
    other = write(tmp_path / "other", "qwen3")
    random_adapter(tmp_path / "foreign", other, "lora", 0.3)
    dora = write_adapter(tmp_path / "dora", TARGET, "dora")
    whole = Path(shutil.copytree(folders["a"], tmp_path / "whole"))
    told = json.loads((whole / "adapter_config.json").read_text())
    (whole / "adapter_config.json").write_text(json.dumps(told | {"fine_tune_type": "full"}))
    wrong = {
        "foreign": "no layer|does not match",
        "dora": "DoRA",
        "whole": "whole layers",
        "absent": "no folder",
    }
    paths = {name: str(tmp_path / name) for name in wrong} | {"dora": str(dora), "a": folders["a"]}
    engine = mlxspec.load("demo", adapter=paths, draft="off")
    assert engine.adapters == ("a",)
    for name, says in wrong.items():
        with pytest.raises(ConfigError, match=f"adapter '{name}' was not loaded .*: a\\.$"):
            engine.generate(PROMPT, asked(name))
        (notice,) = [n for n in engine.notices if n.startswith(f"{name} cannot be asked for.")]
        assert "\n" not in notice
        assert notice.endswith(".")
        assert any(part in notice for part in says.split("|"))
    assert engine.generate(PROMPT, asked("a")).finish_reason == "length"


def test_what_cannot_go_together(folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exact"):
        mlxspec.load("demo", adapter=folders, config=EngineConfig(exact=True))
    for wrong in ({"a": float("nan")}, {"a": 1000.0}, {"a": "1"}, "a"):
        with pytest.raises(ConfigError):
            SamplingParams(adapters=wrong)  # type: ignore[arg-type]
