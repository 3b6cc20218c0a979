"""From what a person types to a folder on disk: `demo`, a path, or a Hugging Face id.

Knows names and folders; knows nothing of what lies in them. Downloads only data files, never code.
"""

from __future__ import annotations

import re
from pathlib import Path

from mlxspec.errors import ConfigError, ModelError
from mlxspec.resources import demo_folder

DEMO = "demo"
DEMO_DRAFT = "demo-draft"
_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")


def resolve(model: str) -> Path:
    """The folder of a model. Raises ConfigError for a name that can be none, ModelError when nothing is there."""
    if not isinstance(model, str) or not model.strip():
        raise ConfigError("No model was named; try `demo`, a folder, or a Hugging Face id like owner/name.")
    if model in (DEMO, DEMO_DRAFT):
        return demo_folder("target" if model == DEMO else "draft")
    try:
        path = Path(model).expanduser()
        is_folder, is_there = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError):  # a name too long, or the home of a user who has none
        is_folder = is_there = False
    if is_folder:
        return path
    if is_there:
        raise ModelError(f"{model} is a file; a model is a folder with config.json and *.safetensors.")
    if not _REPO_ID.fullmatch(model) or ".." in model:
        raise ModelError(
            f"There is no folder {model[:400]}, and it is no Hugging Face id (owner/name) either."
        )
    return _download(model)


def _download(repo: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo, allow_patterns=_PATTERNS))
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"There is no folder {repo} here and no model {repo} on Hugging Face (or it is private: set HF_TOKEN)."
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(f"{repo} is not in the local cache and Hugging Face cannot be reached.") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"{repo} could not be downloaded: {type(error).__name__}.") from error
