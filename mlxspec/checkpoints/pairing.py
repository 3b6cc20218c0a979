"""Pairs a drafter with a model: finds it in the catalogue or by its name, checks that it fits the model before it is fetched, and writes
its name to the model's folder, where `load` finds it.

What is remembered is the name of a repository, in `mlxspec-drafter.json` beside the model's own files, so `mlxspec rm` removes it with the
model. Knows names and headers; what a drafter must be for a model is known to models/assemble_drafter.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxspec.checkpoints.catalogue import PublishedDrafter, drafters_for
from mlxspec.checkpoints.memory import MemoryEstimate, with_drafter
from mlxspec.errors import ConfigError, MemoryBudgetError, MlxspecError, ModelError, StorageError
from mlxspec.loading import download, hub, ranges
from mlxspec.loading.download import Plan
from mlxspec.loading.names import NAME_LENGTH, printable
from mlxspec.loading.progress import amount
from mlxspec.loading.qwen_weights import head_of
from mlxspec.loading.ranges import Repository
from mlxspec.loading.safetensors import STORED
from mlxspec.loading.tokenizer import read_json
from mlxspec.loading.unpacking import unpack
from mlxspec.loading.weights import Weights, is_bare_head
from mlxspec.models.assemble_drafter import assemble_drafter, head_alone
from mlxspec.models.drafter_folders import title_of
from mlxspec.models.folder import kind_by
from mlxspec.models.registry import architecture
from mlxspec.models.runnable import judge
from mlxspec.platform.folders import write_whole

PAIR_FILE = "mlxspec-drafter.json"
_MOST_STEPS = 4  # from a conversion over other conversions to the original
_LARGEST = 4096  # bytes of PAIR_FILE


@dataclass(frozen=True, kw_only=True)
class DrafterOffer:
    """A published drafter that fits a model. plan: of the model's download; where: the drafter's repository; title: its kind with the
    article, "a DFlash2 drafter"; memory: of model and drafter together; note: the catalogue's remark on its use."""

    plan: Plan
    where: Repository
    title: str
    memory: MemoryEstimate
    note: str = ""

    @property
    def repo(self) -> str:
        return self.where.repo

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the drafter's weights."""
        return sum(self.where.sizes[name] for name in _weight_files(self.where))


def published_for(plan: Plan) -> list[PublishedDrafter]:
    """Return the catalogue's drafters for a model on the hub, the best first, without MTP heads. A conversion is followed to its
    original by the `base_model` of the models' cards, with one request for each step."""
    names, following = [plan.repo, *plan.base_models], plan.base_models
    while True:
        found = [p for p in drafters_for(names) if p.kind != "head"]
        if found or len(following) != 1 or len(names) > _MOST_STEPS:
            return found
        try:
            following = ranges.look(following[0]).base_models
        except MlxspecError:
            return []
        if set(following) & set(names):
            return []
        names += following


def find(
    plan: Plan, memory: MemoryEstimate, drafter: str | None = None
) -> tuple[DrafterOffer | None, list[str]]:
    """Return the first drafter of the catalogue that fits a model, None where none does, and a sentence on each drafter before it that
    does not fit. memory: of the model alone. Fetches configs and headers, and no tensor.

    drafter: a repository to check in place of the catalogue; ConfigError, ModelError or MemoryBudgetError is raised where it does not
    fit.
    """
    if drafter is not None:
        return _looked_at(plan, memory, drafter), []
    refused: list[str] = []
    for listed in published_for(plan):
        try:
            return _looked_at(plan, memory, listed.repo, listed.note), refused
        except MlxspecError as error:
            refused.append(str(error))
    return None, refused


def _looked_at(plan: Plan, memory: MemoryEstimate, repo: str, note: str = "") -> DrafterOffer:
    """Check that the repository `repo` holds a drafter for the model of the plan and that both fit into memory; return the offer.
    Fetches its config.json and headers. note: the catalogue's remark on it. Raises MlxspecError where the drafter does not fit."""
    where = ranges.look(repo)
    config = ranges.read_json(where, "config.json")
    held = ranges.headers(where, _weight_files(where))
    entries = {
        ("mtp." if is_bare_head(tensors) else "") + name: entry
        for _, tensors in held.values()
        for name, entry in tensors.items()
    }
    kind = kind_by(entries.keys(), config)
    if kind == "model":
        raise ConfigError(
            f"{repo} is a model of its own; name it with --draft-model where it is to draft for another."
        )
    weights: Weights = {name: mx.zeros(e.shape, STORED[e.dtype]) for name, e in entries.items()}
    try:
        unpack(weights, {name: e.dtype for name, e in entries.items()})
        title = title_of(kind, weights)
        of_target = read_json(plan.folder / "config.json")
        if kind == "head":
            module: Any = head_alone(of_target, head_of(weights, {}, raw=True))
        else:
            module = assemble_drafter(kind, config, lambda: weights, _target(of_target))
    except ModelError as error:
        raise ModelError(f"{repo} does not draft for {plan.repo}: {error}") from error
    both = with_drafter(memory, module)
    if not both.fits:
        raise MemoryBudgetError(
            f"{plan.repo} with {repo} would need {amount(both.total)} of memory, and this machine gives {amount(both.machine)}."
        )
    return DrafterOffer(plan=plan, where=where, title=title, memory=both, note=note)


def _target(config: dict[str, Any]) -> Any:
    """Return the model that a config.json describes, without weights. Raises ModelError for a model of mlx-lm whose hidden states a
    drafter cannot read."""
    if not judge(config).by_mlx_lm:
        family = architecture(config)
        return family.build(family.parse(config))
    from mlxspec.models.adapted.loading import blank  # slow to import

    model = blank(config)
    if model.seams is None:
        raise ModelError(f"rows of this model do not share all of a forward: {model.by_rows}.")
    return model


def _weight_files(where: Repository) -> list[str]:
    found = sorted(name for name in where.sizes if name.endswith(".safetensors") and "/" not in name)
    if not found:
        raise ModelError(f"{where.repo} holds no *.safetensors files; mlxspec runs no other format.")
    return found


def add(offer: DrafterOffer) -> Path:
    """Fetch a drafter and write its name to its model's folder, which must be on this disk. Returns the drafter's folder. Raises
    ModelError or StorageError where that fails; complete files are kept for the next attempt."""
    folder = download.fetch(download.plan(offer.repo, offer.where.commit))
    remembered = {"drafter": offer.repo, "revision": offer.where.commit}
    try:
        write_whole(offer.plan.folder / PAIR_FILE, json.dumps(remembered).encode())
    except OSError as error:
        raise StorageError(
            f"The drafter could not be remembered in {offer.plan.folder}: {error.strerror or error}."
        ) from error
    return folder


def paired(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the folder of the drafter that is paired with the model in `folder`, and notices on why it cannot draft. The folder is None
    where no drafter is paired or it is not on this disk. Uses no network."""
    path = folder / PAIR_FILE
    if not path.is_file():
        return None, []
    try:
        told = json.loads(path.read_bytes()) if path.stat().st_size <= _LARGEST else {}
        repo, revision = told["drafter"], told["revision"]
        found = hub.cached(repo, revision)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, MlxspecError):
        return None, [
            f"No drafter is paired with this model: {path} is damaged; pull the model with --drafter again."
        ]
    if found is None:
        return None, [
            f"The drafter {printable(repo, NAME_LENGTH)}, which is paired with this model, is not here: "
            f"`mlxspec pull {printable(repo, NAME_LENGTH)}` fetches it."
        ]
    return found, []
