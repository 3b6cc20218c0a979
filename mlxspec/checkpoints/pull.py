"""From a name on the hub to a folder in the cache, told beforehand what it takes: bytes to fetch, room on the disk, memory to run it.

Knows plans and limits; the bytes are loading/download.py's.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mlxspec.checkpoints.memory import Memory, expected
from mlxspec.errors import MemoryBudgetError, ModelError
from mlxspec.loading import download
from mlxspec.loading.progress import amount
from mlxspec.loading.tokenizer import read_json

# Folders of a drafter alone: they run beside their target, whose memory is another matter.
DRAFTER_TYPES = ("gemma4_assistant", "gemma4_unified_assistant", "qwen3_5_mtp", "qwen3_5_moe_mtp")


class Offer(NamedTuple):
    """What pulling would take. memory: None for a drafter, which runs beside its target."""

    plan: download.Plan
    memory: Memory | None


def offer(repo: str, revision: str | None = None, *, context: int | None = None) -> Offer:
    """Ask the hub; fetches no more than config.json. context: tokens of one row that the memory is reckoned for.

    Raises ModelError where the hub has no such model, or it is of a kind that mlxspec does not run.
    """
    plan = download.plan(repo, revision)
    config = read_json(plan.folder / "config.json")
    if config.get("model_type") in DRAFTER_TYPES:
        return Offer(plan, None)
    try:
        return Offer(plan, expected(config, plan.weights, context))
    except ModelError as error:
        raise ModelError(f"{repo} cannot be run: {error}") from error


def pull(offered: Offer, *, force: bool = False) -> Path:
    """Fetch it; returns the folder. Raises StorageError when it does not fit on the disk, MemoryBudgetError when it would not fit into
    memory (unless `force`), both before anything is fetched."""
    download.check_disk(offered.plan)
    memory = offered.memory
    if memory is not None and not memory.fits and offered.plan.missing and not force:
        raise MemoryBudgetError(
            f"{offered.plan.repo} would need {amount(memory.total)} of memory with {memory.context} tokens of context, and this machine "
            f"gives {amount(memory.machine)}; take a smaller or more quantized one, or add --force to fetch it all the same."
        )
    return download.fetch(offered.plan)
