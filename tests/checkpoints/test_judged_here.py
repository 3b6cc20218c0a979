"""A repository's files are judged alike for every kind of fault, whichever code runs the model. That no weight is fetched for it is tested
with a hub: test_pull_small_files.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from planting import catches
from repository_edits import CONFIGS, ENDS, GOOD, HEADERS, QUANTIZATION, SHARDS, TEMPLATES, TOKENIZERS, made

from mlxspec.checkpoints import pull
from mlxspec.checkpoints.pull import check_chat, check_fits
from mlxspec.engine.load import load
from mlxspec.errors import ModelError
from mlxspec.loading.download import File, Plan
from mlxspec.loading.safetensors import check_header

OF_TENSORS = SHARDS | HEADERS | QUANTIZATION | CONFIGS
FAULTS = TOKENIZERS | TEMPLATES | ENDS | OF_TENSORS


@pytest.fixture(autouse=True)
def without_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "fetch_small", lambda plan: plan.folder)


def judge(folder: Path) -> None:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = tuple(File(name, (folder / name).stat().st_size, True) for name in sorted(names))
    plan = Plan("owner/name", None, "c" * 40, folder, files)
    check_fits(plan)
    check_chat(plan)


@catches(
    "a model need not have the tokens of its tokenizer",
    "mlxspec.loading.tokenizer:Tokenizer.check_rows",
    lambda right: lambda self, rows: None,
    case="more tokens than rows",
)
@catches(
    "an end that no vocabulary has ends texts",
    "mlxspec.loading.tokenizer:_eos_ids",
    lambda right: lambda folder, inner, special: frozenset(),
    case="an end beyond the vocabulary",
)
@catches(
    "templates are compiled only",
    "mlxspec.loading.template:ChatTemplate.render",
    lambda right: lambda self, messages, **more: "",
    case="a template that calls what is not there",
)
@catches(
    "keys of models that mlx-lm's code runs have any value",
    "mlxspec.models.runnable:check_plain",
    lambda right: lambda config: None,
    case="a base of nothing-llama]",
)
@catches(
    "mlx-lm's code computes every activation",
    "mlxspec.models.adapted.loading:computes",
    lambda right: lambda config, activation: True,
    case="another activation-llama]",
)
@catches(
    "a tensor of a model of mlx-lm's may be of any dtype",
    "mlxspec.models.adapted.loading:_check_floats",
    lambda right: lambda module: None,
    case="scales that are whole-llama]",
)
@catches(
    "a file without tensors is an MTP head",
    "mlxspec.models.folder:kind_by",
    lambda right: lambda names, config: right(names, config) if names else "head",
    case="no tensor at all-draft]",
)
@catches(
    "mlx-lm's order of files decides which of two tensors counts",
    "mlxspec.models.adapted.loading:_names",
    lambda right: lambda folder: [name for path in folder.files() for name in check_header(path)],
    case="a tensor in two shards without an index-llama]",
)
@pytest.mark.parametrize(
    ("case", "source"), [*((case, "draft") for case in FAULTS), *((case, "llama") for case in OF_TENSORS)]
)
def test_a_fault_is_refused(case: str, source: str, tmp_path: Path) -> None:
    edit, words = FAULTS[case]
    folder = made(tmp_path / "folder", edit, source)
    with pytest.raises(ModelError) as caught:
        judge(folder)
    said = str(caught.value)
    assert any(word in said for word in words.split("|")), said
    assert len(said.splitlines()) == 1


@catches(
    "config.json alone tells the format of the weights",
    "mlxspec.checkpoints.pull:_names",
    lambda right: lambda plan, where: {"layer.q_perm"},
    case="a description that was left behind-llama]",
    errors=(ModelError,),
)
@pytest.mark.parametrize("source", ["draft", "llama"])
@pytest.mark.parametrize("case", GOOD)
def test_what_is_not_refused_loads(case: str, source: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "folder", GOOD[case], source)
    judge(folder)
    with load(str(folder), draft="off") as engine:
        assert engine.generate([5, 6, 7], max_tokens=2).tokens
