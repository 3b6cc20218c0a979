"""What a folder's headers, its tokenizer, its template and the options tell is checked before any weight is read: counted in bytes."""

from __future__ import annotations

import gc
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from planting import catches

from mlxspec.config import EngineConfig
from mlxspec.engine.load import load
from mlxspec.errors import (
    ConfigError,
    MemoryBudgetError,
    MlxspecError,
    ModelError,
    TokenizerError,
    VocabularyError,
)
from mlxspec.loading import progress
from mlxspec.platform.resources import demo_folder

SMALL = (
    64 << 10
)  # bytes: norms and tables of angles; the smallest matrices of the demo's model together take more


def copied(to: Path, name: str = "target") -> Path:
    """A folder with the demo's files, so that one of them can be written anew."""
    shutil.copytree(demo_folder(name), to)
    return to


def header(folder: Path, change: Callable[[dict], None]) -> None:
    """Write the safetensors file with a changed header and no more data than a hole in a file."""
    path = folder / "model.safetensors"
    with path.open("rb") as file:
        found = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    change(found)
    size = max(v["data_offsets"][1] for k, v in found.items() if k != "__metadata__")
    path.unlink()
    text = json.dumps(found).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)


def a_tensor_less(folder: Path) -> None:
    header(folder, lambda found: found.pop(next(k for k in found if k.endswith("down_proj.weight"))))


def a_tensor_more(folder: Path) -> None:
    header(
        folder,
        lambda found: found.update(
            {"model.strange.weight": {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]}}
        ),
    )


def a_tensor_turned(folder: Path) -> None:
    def turn(found: dict) -> None:
        entry = next(v for k, v in found.items() if k.endswith("down_proj.weight"))
        entry["shape"] = entry["shape"][::-1]

    header(folder, turn)


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def a_broken_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\x81")


def other_words(folder: Path) -> None:
    text = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    words = text["model"]["vocab"]
    a, b = sorted(words)[300:302]
    words[a], words[b] = words[b], words[a]
    (folder / "tokenizer.json").write_text(json.dumps(text), encoding="utf-8")


def refused(error: type[MlxspecError], match: str, model: Path, **options) -> None:
    """`load` raises this, tells nobody of weights being read, and never holds more than SMALL bytes."""
    told: list[str] = []

    class Watched:
        def __enter__(self) -> progress.Step:
            return lambda _: None

        def __exit__(self, *_: object) -> None: ...

    def watch(what: str, total: int) -> Watched:
        told.append(what)
        return Watched()

    gc.collect()
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    with progress.watched_by(watch), pytest.raises(error, match=match):
        load(str(model), **options)
    assert mx.get_peak_memory() - held < SMALL
    assert not told


CASES = {
    "a tensor less": (a_tensor_less, ModelError, "tensors are missing"),
    "a tensor more": (a_tensor_more, ModelError, "tensors are unknown"),
    "a tensor turned": (a_tensor_turned, ModelError, "has shape"),
    "no tokenizer": (no_tokenizer, TokenizerError, "no tokenizer.json"),
    "a broken tokenizer": (a_broken_tokenizer, TokenizerError, "cannot be read"),
    "a broken template": (a_broken_template, TokenizerError, "no readable text"),
}


@pytest.mark.parametrize("damage", CASES)
def test_what_is_wrong_with_a_folder_is_said_before_its_weights_are_read(damage: str, tmp_path: Path) -> None:
    act, error, match = CASES[damage]
    folder = copied(tmp_path / "model")
    act(folder)
    refused(error, match, folder)


@pytest.mark.parametrize("damage", [*CASES, "other words"])
def test_what_is_wrong_with_a_draft_model_is_said_before_the_targets_weights_are_read(
    damage: str, tmp_path: Path
) -> None:
    act, error, match = {**CASES, "other words": (other_words, VocabularyError, "different things")}[damage]
    draft = copied(tmp_path / "draft", "draft")
    act(draft)
    refused(error, match, copied(tmp_path / "model"), draft_model=str(draft), draft="draft-model")


@catches(
    "the memory budget is not compared with the weights",
    "mlxspec.engine.memory:check_weights",
    lambda right: lambda weights, budget: right(0, budget),
)
@pytest.mark.parametrize("exact", [False, True])
def test_a_budget_below_the_weights_is_refused_before_they_are_read(exact: bool, tmp_path: Path) -> None:
    folder, config = copied(tmp_path / "model"), EngineConfig(memory_budget=1 << 20, exact=exact)
    refused(MemoryBudgetError, "weights take .* memory_budget is 1.0 MiB", folder, config=config)


def test_a_budget_counts_the_drafters_weights_before_they_are_read(tmp_path: Path) -> None:
    folder, draft = copied(tmp_path / "model"), copied(tmp_path / "draft", "draft")
    alone = load(str(folder), draft="off").memory.weights
    refused(
        MemoryBudgetError,
        "drafters included",
        folder,
        draft="draft-model",
        draft_model=str(draft),
        config=EngineConfig(memory_budget=alone + 1000),
    )


def test_options_that_nothing_can_serve_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder = copied(tmp_path / "model")
    refused(ConfigError, "needs a smaller model", folder, draft="draft-model")


def test_what_is_loaded_has_been_read_and_was_told_of(tmp_path: Path) -> None:
    engine = load(str(copied(tmp_path / "model")), draft="mtp")
    held = mx.get_active_memory()
    engine.generate("def main():", None)
    assert mx.get_active_memory() - held < engine.memory.weights / 2


def test_loads_leave_nothing_behind_in_the_random_state() -> None:
    """Layers draw initial values that nobody uses. Each draw splits MLX's global key: unevaluated, the splits of all loads would stay."""
    load("demo", draft="off")
    graph = io.StringIO()
    mx.export_to_dot(graph, mx.random.state[0])
    assert "Split" not in graph.getvalue()
