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
from mlxspec.loading.safetensors import check_header
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
    the model, the names of the tensors decide, as they do in loading. Raises ModelError for formats that are not read."""
    where = _repository(plan)
    modelopt = None
    try:
        if MODELOPT_FILE in where.sizes:
            modelopt = ranges.read_json(where, MODELOPT_FILE)
        return runs.unpacked(modelopt)
    except ModelError:
        return runs.unpacked(modelopt, names=_names(plan, where))


def _names(plan: Plan, where: Repository) -> set[str]:
    """Return the names of a repository's tensors: those in its index, else those in the headers of its files. Raises ModelError."""
    if INDEX in where.sizes:
        listed = ranges.read_json(where, INDEX).get("weight_map")
        return set(listed if isinstance(listed, dict) else ())
    here, others = _placed(plan)
    held = [check_header(plan.folder / name) for name in here & _shards(plan)]
    return set[str]().union(*held, *(found for _, found in ranges.headers(where, others).values()))


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
    return _check_tensors(plan, engine)[0]


def check_fits(plan: Plan, *, engine: Engine = "auto") -> None:
    """Check a repository as `check_runs` does, and that the model fits into memory, its tokenizer can be read, and the model has the
    tokens of the tokenizer. Raises MemoryBudgetError or ModelError where a check fails."""
    memory = memory_of(plan, engine=engine)
    if memory is not None and not memory.fits and plan.missing:
        raise MemoryBudgetError(
            f"{plan.repo} would need {amount(memory.total)} of memory with {memory.context} tokens of context, and this machine gives "
            f"{amount(memory.machine)}; take a smaller or more quantized one, or fetch it all the same with `mlxspec pull --force`."
        )
    check_files(plan, engine=engine)
    with _named(plan):
        tokenizer = Tokenizer.from_folder(plan.folder) if has_vocabulary(plan.folder) else None
    kind, rows = _check_tensors(plan, engine)
    with _named(plan):
        if kind == "model":
            (tokenizer or Tokenizer.from_folder(plan.folder)).check_rows(rows)


def _check_tensors(plan: Plan, engine: Engine) -> tuple[Kind, int]:
    """Assemble the model from the files that are on this disk and the headers of the others, as loading does. Returns the kind of model
    or drafter that the tensors are, and the rows of a model's embedding, 0 for a drafter. Raises ModelError where loading would refuse
    the tensors."""
    rows = 0
    with _named(plan), TemporaryDirectory() as made:
        folder = Path(made)
        here, others = _placed(plan)
        for name in here:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).symlink_to(plan.folder / name)
        ranges.write_outline(_repository(plan), others, folder)
        outline = ModelFolder(folder)
        kind = outline.kind()
        if kind == "model":
            rows = assemble_folder(outline, engine=engine).model.vocab_size
        elif kind in ALONE:
            assemble_alone(outline.config(), outline.read)
    return kind, rows


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


def _placed(plan: Plan) -> tuple[set[str], list[str]]:
    """Return the names of a plan's files that are on this disk, and the names of its weight files that are not, in order."""
    here = {f.name for f in plan.files if (plan.folder / f.name).is_file()}
    return here, sorted(_shards(plan) - here)


def _repository(plan: Plan) -> Repository:
    return Repository(plan.repo, plan.commit, {f.name: f.size for f in plan.files}, plan.base_models)
