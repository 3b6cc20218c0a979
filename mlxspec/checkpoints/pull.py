"""Plans a download: its bytes, the memory that the model will need, and whether both fit. Judges a repository by its small files and the
headers of its weights, with the functions that loading uses, before any weight is fetched. loading/download.py fetches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

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
from mlxspec.models.assemble import assemble_folder
from mlxspec.models.assemble_drafter import assemble_alone
from mlxspec.models.drafter_folders import ALONE
from mlxspec.models.folder import Kind, ModelFolder
from mlxspec.models.runnable import Engine, Runnable, judge


def memory_of(plan: Plan, context: int | None = None, *, engine: Engine = "auto") -> MemoryEstimate | None:
    """Return the memory that running a model takes, by its config.json; None for a drafter, which runs with its target. context: tokens
    of one row, None for the default. Raises ModelError for a model of a kind that mlxspec does not run, or with weights in a format
    that it does not read."""
    config = read_json(plan.folder / "config.json")
    with _named(plan):
        runs = judge(config, engine)
        unpacked = _unpacked(plan, runs)
        return (
            expected(runs, plan.weights, context, unpacked=is_unpacked(unpacked)) if runs.is_model else None
        )


def _unpacked(plan: Plan, runs: Runnable) -> str:
    """Return the formats of the weights that loading unpacks, as `Runnable.unpacked` returns them. Where config.json alone would refuse
    the model, the names of the tensors in the repository's index decide. Raises ModelError for formats that are not read."""
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


def check_files(plan: Plan, *, engine: Engine = "auto") -> None:
    """Check the file names and sizes of a repository; fetch its small files. Raises StorageError where the missing files do not fit on
    the disk, ModelError for a kind that mlxspec does not run, or where weight files are missing."""
    check_disk(plan)
    memory_of(plan, engine=engine)
    with _named(plan):
        tensor_names(fetch_small(plan), _shards(plan))


def check_runs(plan: Plan, *, engine: Engine = "auto") -> Kind:
    """Check a repository as `check_files` does, and that loading would accept the tensors by their names, shapes and formats. Fetches
    headers. Returns the kind of model or drafter that the tensors are. Raises ModelError."""
    check_files(plan, engine=engine)
    return _check_tensors(plan, engine)


def check_fits(plan: Plan, *, engine: Engine = "auto") -> None:
    """Check a repository as `check_runs` does, and that the model fits into memory and its tokenizer can be read. Raises
    MemoryBudgetError or ModelError where a check fails."""
    memory = memory_of(plan, engine=engine)
    if memory is not None and not memory.fits and plan.missing:
        raise MemoryBudgetError(
            f"{plan.repo} would need {amount(memory.total)} of memory with {memory.context} tokens of context, and this machine gives "
            f"{amount(memory.machine)}; take a smaller or more quantized one, or fetch it all the same with `mlxspec pull --force`."
        )
    kind = check_runs(plan, engine=engine)
    with _named(plan):
        if kind == "model" or has_vocabulary(plan.folder):
            Tokenizer.from_folder(plan.folder)


def _check_tensors(plan: Plan, engine: Engine) -> Kind:
    """Assemble the model from the files that are on this disk and the headers of the others, as loading does; return the kind of model
    or drafter that the tensors are. Raises ModelError where loading would refuse them."""
    with _named(plan), TemporaryDirectory() as made:
        folder = Path(made)
        here = {f.name for f in plan.files if (plan.folder / f.name).is_file()}
        for name in here:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).symlink_to(plan.folder / name)
        ranges.write_outline(_repository(plan), sorted(_shards(plan) - here), folder)
        outline = ModelFolder(folder)
        kind = outline.kind()
        if kind == "model":
            assemble_folder(outline, engine=engine)
        elif kind in ALONE:
            assemble_alone(outline.config(), outline.read)
    return kind


@contextmanager
def _named(plan: Plan) -> Iterator[None]:
    """Put the repository's name before the message of a ModelError that is raised in the block."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{plan.repo} cannot be run: {error}") from error


def check_chat(plan: Plan) -> None:
    """Fetch a repository's small files; raise ModelError where their chat template cannot be used."""
    template = template_in(fetch_small(plan))
    fault = None if template is None else template.check()
    if fault is not None:
        raise ModelError(
            f"{plan.repo} cannot chat. {fault.rstrip('.')}; `mlxspec pull --force` fetches it all the same."
        )


def _shards(plan: Plan) -> set[str]:
    return {f.name for f in plan.files if f.name.endswith(".safetensors")}


def _repository(plan: Plan) -> Repository:
    return Repository(plan.repo, plan.commit, {f.name: f.size for f in plan.files}, plan.base_models)
