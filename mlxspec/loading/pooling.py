"""Reads how a model's hidden states become one vector for a text, from the files of sentence-transformers: `modules.json`,
`1_Pooling/config.json`, and a folder for each linear layer after the pooling, like EmbeddingGemma's `2_Dense`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from mlxspec.errors import MlxspecError, ModelError, TokenizerError
from mlxspec.loading.names import printable
from mlxspec.loading.tokenizer import read_json
from mlxspec.loading.weights import read_file

DENSE_PLACE = re.compile(r"\d_Dense", re.ASCII)
POOLING_FILE = "1_Pooling/config.json"
_MODES: dict[str, Literal["last", "mean", "first"]] = {
    "lasttoken": "last",
    "mean": "mean",
    "mean_tokens": "mean",
    "cls": "first",
    "cls_token": "first",
}
NO_POOLING = "its folder has no modules.json, which embedding models have"


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """The way in which an embedding model makes one vector of a text's hidden states. mode: the hidden state of the last or the first
    token, or the mean over all tokens. dense: linear layers that are applied next, as weight (out, in) and bias (out,) or None,
    float32, not evaluated. normalizes: whether the vector is scaled to length 1 at the end."""

    mode: Literal["last", "mean", "first"]
    normalizes: bool
    dense: tuple[tuple[mx.array, mx.array | None], ...] = ()

    @property
    def size(self) -> int | None:
        """Return the size of a text's vector, None where it is the model's hidden size."""
        return self.dense[-1][0].shape[0] if self.dense else None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the linear layers."""
        return sum(array.nbytes for layer in self.dense for array in layer if array is not None)


def pooling_of(folder: Path) -> Pooling | str:
    """Return the pooling of a model's folder, or a phrase on why the folder has no usable one."""
    path = folder / "modules.json"
    if not path.is_file():
        return NO_POOLING
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        kinds = [str(module["type"]).rpartition(".")[2] for module in listed]
        places = [str(module["path"]) for module, kind in zip(listed, kinds, strict=True) if kind == "Dense"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "its modules.json is damaged"
    strange = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Dense", "Normalize")]
    if strange:
        return f"its modules.json names {printable(strange[0])}, which is not supported"
    if "Pooling" not in kinds or not (folder / POOLING_FILE).is_file():
        return f"its {POOLING_FILE} is missing; the original repository has it"
    try:
        modes = _modes(read_json(folder / POOLING_FILE))
    except TokenizerError:
        return f"its {POOLING_FILE} is damaged"
    if len(modes) != 1 or modes[0] not in _MODES:
        return f"its {POOLING_FILE} asks for another pooling than one of last token, mean and first token"
    try:
        dense = tuple(_dense(folder, place) for place in places)
    except (MlxspecError, KeyError) as error:
        return f"its layers behind the pooling cannot be used: {printable(error).rstrip('.')}"
    return Pooling(mode=_MODES[modes[0]], normalizes="Normalize" in kinds, dense=dense)


def _dense(folder: Path, place: str) -> tuple[mx.array, mx.array | None]:
    """Return weight (out, in) and bias (out,) or None, in float32, of the linear layer in `place`, a folder within `folder`. Raises
    MlxspecError where the layer is missing, damaged or not linear."""
    if not DENSE_PLACE.fullmatch(place):
        raise ModelError(f"{printable(place)} is no folder of theirs")
    told = read_json(folder / place / "config.json")
    if str(told.get("activation_function", "Identity")).rpartition(".")[2] != "Identity":
        raise ModelError(f"{place} has another activation than Identity")
    held = read_file(folder / place / "model.safetensors")
    weight, bias = held["linear.weight"].astype(mx.float32), held.get("linear.bias")
    if weight.shape != (told.get("out_features"), told.get("in_features")):
        raise ModelError(f"{place} has a weight of shape {weight.shape}, unlike its config.json")
    return weight, None if bias is None else bias.astype(mx.float32)


def _modes(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the pooling modes that are switched on. settings: 1_Pooling/config.json, which has one name, or a flag for
    each mode."""
    named = settings.get("pooling_mode")
    if isinstance(named, str):
        return [named]
    flag = "pooling_mode_"
    return [
        name.removeprefix(flag) for name, value in settings.items() if name.startswith(flag) and value is True
    ]
