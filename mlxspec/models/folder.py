"""A model folder as what it can be: a model, an MTP head alone, a Gemma assistant, or an EAGLE-3 drafter. Knows which files say so; builds
nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from mlxspec.errors import ModelError
from mlxspec.loading.folder import check_links
from mlxspec.loading.tokenizer import read_json
from mlxspec.loading.weights import Weights, read_folder
from mlxspec.models.eagle3 import is_eagle3
from mlxspec.models.gemma4_assistant import ASSISTANT_TYPES

Kind = Literal["head", "assistant", "eagle3", "model"]
# As which drafter each of them drafts.
DRAFTS_AS: dict[Kind, str] = {
    "head": "mtp",
    "assistant": "mtp",
    "eagle3": "eagle3",
    "model": "draft-model",
}
NAMES: dict[Kind, str] = {
    "head": "an MTP head",
    "assistant": "a Gemma assistant",
    "eagle3": "an EAGLE-3 drafter",
    "model": "a model",
}


class ModelFolder:
    """A folder whose links have been judged. Methods raise ModelError."""

    def __init__(self, path: Path) -> None:
        check_links(path)
        self.path = path

    def config(self) -> dict[str, Any]:
        path = self.path / "config.json"
        if not path.is_file():
            raise ModelError(f"There is no config.json in {self.path}.")
        return read_json(path)

    def read(self) -> Weights:
        """All tensors, lazily."""
        return read_folder(self.path)

    def kind(self) -> Kind:
        """What it can be to a target. A folder of nothing but a head needs no config."""
        names = self.read().keys()
        if all(name.startswith("mtp.") for name in names):
            return "head"
        config = self.config()
        if is_eagle3(names, config):
            return "eagle3"
        return "assistant" if config.get("model_type") in tuple(ASSISTANT_TYPES) else "model"
