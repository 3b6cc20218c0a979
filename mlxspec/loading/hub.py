"""Finds the folder of a model by what a user types: a built-in model, a path, or a Hugging Face id.

download.py fetches what is not in the local cache. A cached model is used as it is, without asking the hub for a newer one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from mlxspec.errors import ConfigError, ModelError
from mlxspec.loading import lm_studio
from mlxspec.loading.download import Plan, fetch, plan
from mlxspec.loading.folder import check_links, tensor_files
from mlxspec.loading.names import NAME_LENGTH, printable
from mlxspec.loading.repositories import cache_folder, check_form, check_repo, check_revision
from mlxspec.loading.short_names import repository
from mlxspec.platform.resources import demo_folder

Judge = Callable[[Plan], object]

DEMO = "demo"
DEMO_DRAFT = "demo-draft"
DEMO_GEMMA = "demo-gemma"
DEMO_EAGLE3 = "demo-eagle3"
DEMO_DFLASH = "demo-dflash"
DEMO_VISION = "demo-vision"
DEMO_AGENT = "demo-agent"  # the draft model, whose context holds the prompts of agents
DEMO_TARGETS = (DEMO, DEMO_GEMMA)  # DEMO_DRAFT can draft for each
_MEMBERS = {
    DEMO: "target",
    DEMO_DRAFT: "draft",
    DEMO_GEMMA: "gemma",
    DEMO_EAGLE3: "eagle3",
    DEMO_DFLASH: "dflash",
    DEMO_VISION: "vision",
    DEMO_AGENT: "draft",
}
_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve(
    model: str, *, revision: str | None = None, download: bool = True, judge: Judge | None = None
) -> Path:
    """Return the folder of a model; fetch the model from the hub where it is not on this disk. model: a built-in model ("demo"), a path,
    a repository or a short name.

    revision: branch, tag or commit of a repository, None for `main`. download: False raises ModelError in place of fetching. judge:
    called with the plan when only config.json has been fetched; raises where the download should not go on. Raises ConfigError for an
    impossible name, ModelError where there is no such model.
    """
    if model is not None and not isinstance(model, str):
        raise ConfigError(f"A model is named by a string or a path, not by {printable(repr(model))}.")
    if model is None or not model.strip():
        raise ConfigError(
            "No model was named; try `demo`, a folder, a Hugging Face id like owner/name, or a short name like qwen3.5:4b."
        )
    folder = _local(model)
    if folder is not None:
        if revision is not None:
            raise ConfigError(
                f"{printable(model, NAME_LENGTH)} is a folder here; only models from Hugging Face have revisions."
            )
        return folder
    model = repository(model)
    check_repo(model)
    found = cached(model, revision)
    if found is not None:
        return found
    if not download:
        raise ModelError(f"{model} is not in the local cache; `mlxspec pull {model}` fetches it.")
    wanted = plan(model, revision)
    if judge is not None:
        judge(wanted)
    return fetch(wanted)


def named(model: str | os.PathLike[str]) -> str:
    """Return the given model as a string. A path object always means a folder. Raises ModelError where it does not exist."""
    if not isinstance(model, os.PathLike):
        return model
    try:
        path = Path(model).expanduser().absolute()
        is_there = path.exists()
    except (OSError, RuntimeError, ValueError):  # as in _local
        path, is_there = Path(model), False
    if not is_there:
        raise ModelError(f"There is no folder {printable(path, NAME_LENGTH)}.")
    return str(path)


def is_local(model: str) -> bool:
    """Return whether the name of a model is a built-in model or a folder, not a repository."""
    return _local(model) is not None


def _local(model: str) -> Path | None:
    if model in _MEMBERS:
        return demo_folder(_MEMBERS[model])
    try:
        path = Path(model).expanduser()
        is_folder, is_there = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError):  # a name too long, or the home of a user who has none
        is_folder = is_there = False
    if is_there and not is_folder:
        check_form(model)
        raise ModelError(f"{model} is a file; a model is a folder with config.json and *.safetensors.")
    return path if is_folder else None


def cached(repo: str, revision: str | None = None) -> Path | None:
    """Return the folder of a repository that has been fetched completely, None where there is none. Looks into the hub's cache and,
    without a revision, into LM Studio's folders; uses no network. repo: owner/name, an address or a short name; revision: branch, tag
    or commit, None for `main`. Raises ModelError where the folder has links that are not allowed."""
    repo = repository(repo)
    check_repo(repo)
    check_revision(revision)
    home = cache_folder() / f"models--{repo.replace('/', '--')}"
    commit = revision or "main"
    try:
        if not _COMMIT.fullmatch(commit):
            commit = (home / "refs" / commit).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        commit = ""
    folders = [home / "snapshots" / commit] if _COMMIT.fullmatch(commit) else []
    if revision is None:
        folders += [folder for name, folder in lm_studio.models().items() if name == repo]
    for folder in folders:
        if folder.is_dir():
            check_links(folder)
            if is_complete(folder):
                return folder
    return None


def is_complete(folder: Path) -> bool:
    """Return whether `folder` holds config.json and all of its shards. Downloads fetch weights last, so that the other files are there,
    too."""
    if not (folder / "config.json").is_file():
        return False
    try:
        return any(tensor_files(folder))
    except ModelError:
        return False


def repo_of(folder: Path) -> str | None:
    """Return the repository whose revision a folder of the hub's cache holds, None for other folders."""
    owner, _, name = folder.parent.parent.name.removeprefix("models--").partition("--")
    return f"{owner}/{name}" if revision_of(folder) is not None and name else None


def revision_of(folder: Path) -> str | None:
    """Return the commit whose files a folder of the hub's cache holds, None for other folders."""
    name = folder.name
    return name if folder.parent.name == "snapshots" and _COMMIT.fullmatch(name) else None
