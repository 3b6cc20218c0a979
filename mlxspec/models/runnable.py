"""Decides whether mlxspec runs what a folder or a repository holds, and by whose code. `load`, `inspect`, `convert`, `pull` and `models`
ask here, so that what one of them takes no other refuses. Reads no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mlxspec.loading.published import description, storage
from mlxspec.models.folder import Kind, ModelFolder, drafter_in
from mlxspec.models.registry import ARCHITECTURES, architecture

Engine = Literal["auto", "mlx-lm"]  # whose code runs a model: ours where there is some, or mlx-lm's


@dataclass(frozen=True, kw_only=True)
class Runnable:
    """A folder that mlxspec can run. kind: what it is to a target, "model" for one that answers by itself. by_mlx_lm: mlx-lm's code runs
    it. config: its config.json."""

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
        """The formats of weights that loading unpacks or repacks, empty for weights that load as they are: see `published.storage`. BitNet
        is read by mlx-lm's code alone. Raises ModelError for a format that is not read."""
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
    """config: a config.json. kind: what its tensors are, where their names are known. Raises ModelError for a model of a type that nothing
    here runs."""
    kind = kind or drafter_in(config) or "model"
    by_mlx_lm = kind == "model" and _runs_by_mlx_lm(config, engine)
    if kind == "model" and not by_mlx_lm:
        architecture(config)
    return Runnable(kind=kind, by_mlx_lm=by_mlx_lm, config=config)


def judge_folder(folder: ModelFolder, engine: Engine = "auto") -> Runnable:
    """A folder that is here, by the names of its tensors and its config.json, which nothing but a head may lack. Raises ModelError."""
    kind = folder.kind()
    has_config = (folder.path / "config.json").is_file()
    return judge(folder.config() if has_config or kind != "head" else {}, engine, kind=kind)


def _runs_by_mlx_lm(config: Mapping[str, Any], engine: Engine) -> bool:
    """Whether mlx-lm's code runs a model: where that was asked for, or where it has code for it and we have none."""
    kind = config.get("model_type")
    if engine == "mlx-lm" or not isinstance(kind, str) or kind in ARCHITECTURES:
        return engine == "mlx-lm"
    from mlxspec.models.adapted.classes import has_code  # slow to import

    return has_code(config)
