"""Repositories of the Hugging Face hub: what their names and revisions may be, which of their files are used, and where they are kept."""

from __future__ import annotations

import re
from pathlib import Path

from mlxspec.errors import ConfigError, ModelError
from mlxspec.loading.names import NAME_LENGTH, printable

PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]  # data, never code
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9_][\w.+/-]{0,199}", re.ASCII)


def check_form(name: str) -> None:
    """Raise ModelError where the name of a model is that of a GGUF file or repository, of a data set or space, or an address other than
    Hugging Face's."""
    gguf = re.fullmatch(r"(?:.*/)?(.+?)[.-]gguf(?::[\w.-]+)?", name.strip(), re.IGNORECASE)
    if gguf is not None:
        raise ModelError(
            f"{printable(name, NAME_LENGTH)} is in GGUF, which mlxspec does not read; `mlxspec models {printable(gguf[1], NAME_LENGTH)}` "
            "searches for the model in MLX's format."
        )
    other = re.match(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(dataset|space)s/", name.strip())
    if other is not None:
        raise ModelError(f"{printable(name, NAME_LENGTH)} is a {other[1]}, not a model.")
    if re.match(r"https?://", name.strip()):
        last = printable(re.split(r"[/:]", name.strip().rstrip("/"))[-1], NAME_LENGTH)
        raise ModelError(
            f"{printable(name, NAME_LENGTH)} names no model of Hugging Face; `mlxspec models {last}` searches for it there."
        )


def check_repo(repo: str) -> None:
    """Raise ModelError unless `repo` has the form of a repository's name (owner/name)."""
    check_form(repo)
    if not _REPO_ID.fullmatch(repo) or ".." in repo:
        said = printable(repo, NAME_LENGTH) or "''"
        words = " ".join(re.findall(r"[\w.]+", said)[:3])
        tip = " `mlxspec run` lists common models" if words and "/" not in repo else ""
        tip += f", `mlxspec models {words}` searches for others." if tip else ""
        raise ModelError(f"There is no folder {said}, and it is no Hugging Face id (owner/name) either.{tip}")


def check_revision(revision: str | None) -> None:
    """Raise ConfigError unless `revision` has the form of a branch, a tag or a commit. None is allowed."""
    if revision is None:
        return
    if not _REVISION.fullmatch(revision) or ".." in revision or "//" in revision or revision.endswith("/"):
        raise ConfigError(
            f"{printable(revision, NAME_LENGTH)!r} can be no branch, tag or commit; leave --revision out for the newest."
        )


def cache_folder() -> Path:
    """Return the folder in which Hugging Face's library keeps repositories, as HF_HUB_CACHE and HF_HOME determine it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()
