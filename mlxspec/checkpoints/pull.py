"""Plans a download: its bytes, the memory that the model will need, and whether both fit. loading/download.py fetches."""

from __future__ import annotations

from mlxspec.checkpoints.memory import MemoryEstimate, expected
from mlxspec.errors import MemoryBudgetError, ModelError
from mlxspec.loading import ranges
from mlxspec.loading.download import Plan, check_disk
from mlxspec.loading.folder import INDEX
from mlxspec.loading.progress import amount
from mlxspec.loading.published import MODELOPT_FILE, is_unpacked
from mlxspec.loading.ranges import Repository
from mlxspec.loading.tokenizer import read_json
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
    where = Repository(plan.repo, plan.commit, {f.name: f.size for f in plan.files}, plan.base_models)
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
    """Raise StorageError when what is missing does not fit on the disk, ModelError when it is of a kind that mlxspec does not run."""
    check_disk(plan)
    memory_of(plan)


def check_fits(plan: Plan) -> None:
    """As `check_runs`. Raise MemoryBudgetError, too, when the model would not fit into memory."""
    check_disk(plan)
    memory = memory_of(plan)
    if memory is not None and not memory.fits and plan.missing:
        raise MemoryBudgetError(
            f"{plan.repo} would need {amount(memory.total)} of memory with {memory.context} tokens of context, and this machine gives "
            f"{amount(memory.machine)}; take a smaller or more quantized one, or fetch it all the same with `mlxspec pull --force`."
        )
