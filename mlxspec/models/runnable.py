"""Decides whether mlxspec runs what a folder or a repository holds, and by whose code. `load`, `inspect`, `convert`, `pull` and `models`
ask here, so that what one of them takes no other refuses. Reads no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mlxspec.loading.published import description, storage
from mlxspec.models.config_values import check_plain
from mlxspec.models.folder import Kind, ModelFolder, drafter_in
from mlxspec.models.registry import ARCHITECTURES, architecture

Engine = Literal["auto", "mlx-lm"]  # whose code runs a model: ours where there is some, or mlx-lm's


@dataclass(frozen=True, kw_only=True)
class Runnable:
    """The way in which mlxspec runs a folder. kind: "model" for a model that generates text by itself, "head", or a kind of drafter.
    by_mlx_lm: whether mlx-lm's code runs the model. config: the folder's config.json."""

    kind: Kind
    by_mlx_lm: bool
    config: Mapping[str, Any]

    @property
    def is_model(self) -> bool:
        return self.kind == "model"

    def unpacked(
        self,
        modelopt: Mapping[str, Any] | None = None,
        *,
        names: Iterable[str] | None = None,
        is_excerpt: bool = False,
    ) -> str:
        """Return the names of the quantization formats that loading dequantizes or converts, "" where weights load as they are, as BitNet's
        do by mlx-lm's code. modelopt: the folder's ModelOpt config, if there is one. names, is_excerpt: as in `published.storage`. Raises
        ModelError for a format that is not supported."""
        if self.by_mlx_lm:
            from mlxspec.models.adapted.classes import names_part  # slow to import

            if description(self.config, modelopt).get("quant_method") == "bitnet":
                return ""
            names = None if names is None else list(names)
            parts = {name.rpartition(".")[2] for name in names or ()}
            own = {part for part in parts if names_part(self.config, part)}
            names = names and [name for name in names if name.rpartition(".")[2] not in own]
        return storage(self.config, modelopt, names=names, is_excerpt=is_excerpt)


def judge(config: Mapping[str, Any], engine: Engine = "auto", *, kind: Kind | None = None) -> Runnable:
    """Return how mlxspec runs a folder with this config.json. engine: "mlx-lm" to run a model by mlx-lm's code, "auto" to prefer mlxspec's
    own. kind: the kind of the folder by its tensors, None where these are unknown. Raises ModelError for a model_type that mlxspec's own
    code does not run and mlx-lm's is not to run, and for values that no model has."""
    kind = kind or drafter_in(config) or "model"
    by_mlx_lm = kind == "model" and _runs_by_mlx_lm(config, engine)
    if by_mlx_lm:
        check_plain(config)
    elif kind == "model":
        architecture(config)
    return Runnable(kind=kind, by_mlx_lm=by_mlx_lm, config=config)


def judge_folder(folder: ModelFolder, engine: Engine = "auto") -> Runnable:
    """Return how mlxspec runs a local folder, by the names of its tensors and its config.json. Only a folder with an MTP head alone may
    lack a config.json. Raises ModelError."""
    kind = folder.kind()
    has_config = (folder.path / "config.json").is_file()
    return judge(folder.config() if has_config or kind != "head" else {}, engine, kind=kind)


def _runs_by_mlx_lm(config: Mapping[str, Any], engine: Engine) -> bool:
    """Return whether mlx-lm's code runs a model: where this was requested, or where only mlx-lm has code for the model_type."""
    kind = config.get("model_type")
    if engine == "mlx-lm" or not isinstance(kind, str) or kind in ARCHITECTURES:
        return engine == "mlx-lm"
    from mlxspec.models.adapted.classes import has_code  # slow to import

    return has_code(config)
