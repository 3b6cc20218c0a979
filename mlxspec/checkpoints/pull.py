"""Plans a download: its bytes, the memory that the model will need, and whether both fit. Judges a repository by its small files before any
weight is fetched. loading/download.py fetches.
"""

from __future__ import annotations

from mlxspec.checkpoints.head import may_have_head
from mlxspec.checkpoints.memory import MemoryEstimate, expected
from mlxspec.errors import MemoryBudgetError, ModelError
from mlxspec.loading import ranges
from mlxspec.loading.added_tokens import has_vocabulary
from mlxspec.loading.download import Plan, check_disk, fetch_small
from mlxspec.loading.folder import INDEX, tensor_names
from mlxspec.loading.progress import amount
from mlxspec.loading.published import MODELOPT_FILE, is_unpacked
from mlxspec.loading.ranges import Repository
from mlxspec.loading.tokenizer import Tokenizer, read_json, template_in
from mlxspec.loading.weights import is_bare_head
from mlxspec.models.folder import drafter_in, kind_by
from mlxspec.models.runnable import Runnable, judge


def memory_of(plan: Plan, context: int | None = None) -> MemoryEstimate | None:
    """What running it takes, by its config.json; None for a drafter, which runs beside its target. context: tokens of one row.

    Raises ModelError for a model of a kind that mlxspec does not run, or whose weights are in a format that it does not read.
    """
    config = read_json(plan.folder / "config.json")
    try:
        runs = judge(config)
        unpacked = _unpacked(plan, runs)
        return (
            expected(runs, plan.weights, context, unpacked=is_unpacked(unpacked)) if runs.is_model else None
        )
    except ModelError as error:
        raise ModelError(f"{plan.repo} cannot be run: {error}") from error


def _unpacked(plan: Plan, runs: Runnable) -> str:
    """As `Runnable.unpacked`. A description that speaks against a model is compared with the index, which tells the tensors' names."""
    where = _repository(plan)
    has_own = MODELOPT_FILE in where.sizes
    modelopt = ranges.read_json(where, MODELOPT_FILE) if has_own else None
    try:
        return runs.unpacked(modelopt)
    except ModelError:
        if INDEX not in where.sizes:
            raise
        names = ranges.read_json(where, INDEX).get("weight_map")
        return runs.unpacked(names=names if isinstance(names, dict) else ())


def check_runs(plan: Plan) -> None:
    """Raise StorageError when what is missing does not fit on the disk, ModelError for a kind that mlxspec does not run, or a shard that
    the index names and the repository lacks. Fetches the small files."""
    check_disk(plan)
    memory_of(plan)
    check_shards(plan)


def check_fits(plan: Plan) -> None:
    """As `check_runs`. Raise MemoryBudgetError, too, when the model would not fit into memory, and ModelError when its tokenizer cannot be
    read."""
    check_disk(plan)
    memory = memory_of(plan)
    if memory is not None and not memory.fits and plan.missing:
        raise MemoryBudgetError(
            f"{plan.repo} would need {amount(memory.total)} of memory with {memory.context} tokens of context, and this machine gives "
            f"{amount(memory.machine)}; take a smaller or more quantized one, or fetch it all the same with `mlxspec pull --force`."
        )
    check_shards(plan)
    check_tokenizer(plan)


def check_shards(plan: Plan) -> None:
    """Fetch the small files; raise ModelError when the files of the repository are not those that loading will look for."""
    folder = fetch_small(plan)
    try:
        tensor_names(folder, _shards(plan))
    except ModelError as error:
        raise ModelError(f"{plan.repo} cannot be run: {error}") from error


def check_tokenizer(plan: Plan) -> None:
    """Fetch the small files; raise ModelError when their tokenizer cannot be read, or there is none and the tensors are a model's."""
    folder = fetch_small(plan)
    try:
        if has_vocabulary(folder) or _is_model(plan):
            Tokenizer.from_folder(folder)
    except ModelError as error:
        raise ModelError(f"{plan.repo} cannot be run: {error}") from error


def check_chat(plan: Plan) -> None:
    """Fetch the small files; raise ModelError when their chat template cannot be used."""
    template = template_in(fetch_small(plan))
    fault = None if template is None else template.check()
    if fault is not None:
        raise ModelError(
            f"{plan.repo} cannot chat. {fault.rstrip('.')}; `mlxspec pull --force` fetches it all the same."
        )


def _shards(plan: Plan) -> set[str]:
    return {f.name for f in plan.files if f.name.endswith(".safetensors")}


def _is_model(plan: Plan) -> bool:
    """Whether the tensors are a model's: by config.json, else by their names where the index has them. Headers are fetched only for a
    config.json that may be a drafter's: of one layer, of a block drafter, or of a model with an MTP head, which may be there alone."""
    config, index = read_json(plan.folder / "config.json"), read_json(plan.folder / INDEX)
    if drafter_in(config) is not None:
        return False
    if index:
        return kind_by(index["weight_map"], config) == "model"
    if (
        config.get("num_hidden_layers", 1) != 1
        and "target_layer_ids" not in config
        and not may_have_head(plan)
    ):
        return True
    held = [tensors for _, tensors in ranges.headers(_repository(plan), sorted(_shards(plan))).values()]
    names = [("mtp." if is_bare_head(found) else "") + name for found in held for name in found]
    return kind_by(names, config) == "model"


def _repository(plan: Plan) -> Repository:
    return Repository(plan.repo, plan.commit, {f.name: f.size for f in plan.files}, plan.base_models)
