"""What it takes to fetch a model and to run it, told before it is fetched. Knows plans and limits; fetching is loading/download.py's."""

from __future__ import annotations

from mlxspec.checkpoints.memory import MemoryEstimate, expected
from mlxspec.errors import MemoryBudgetError, ModelError
from mlxspec.loading.download import Plan, check_disk
from mlxspec.loading.progress import amount
from mlxspec.loading.tokenizer import read_json
from mlxspec.models.folder import drafter_in


def memory_of(plan: Plan, context: int | None = None) -> MemoryEstimate | None:
    """What running it takes, by its config.json; None for a drafter, which runs beside its target. context: tokens of one row.

    Raises ModelError for a model of a kind that mlxspec does not run.
    """
    config = read_json(plan.folder / "config.json")
    if drafter_in(config) is not None:
        return None
    try:
        return expected(config, plan.weights, context)
    except ModelError as error:
        raise ModelError(f"{plan.repo} cannot be run: {error}") from error


def check_fits(plan: Plan) -> None:
    """Raise StorageError when what is missing does not fit on the disk, MemoryBudgetError when the model would not fit into memory,
    ModelError when it is of a kind that mlxspec does not run."""
    check_disk(plan)
    memory = memory_of(plan)
    if memory is not None and not memory.fits and plan.missing:
        raise MemoryBudgetError(
            f"{plan.repo} would need {amount(memory.total)} of memory with {memory.context} tokens of context, and this machine gives "
            f"{amount(memory.machine)}; take a smaller or more quantized one, or fetch it all the same with `mlxspec pull --force`."
        )
