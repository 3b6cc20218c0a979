"""mlx-lm's Python interface on our engine: write `mlxspec.compat.mlx_lm` for `mlx_lm` in a script's imports, and the script drafts.

    from mlxspec.compat.mlx_lm import load, generate, stream_generate, batch_generate
    from mlxspec.compat.mlx_lm.models.cache import make_prompt_cache
    from mlxspec.compat.mlx_lm.sample_utils import make_sampler

These four functions run on our engine, with mlx-lm's signatures and responses. Every other module and name is mlx-lm's own, so that every
import works. A model of ours stands for an engine: mlx-lm's own functions that compute with a module need what `mlx_lm.load` returns.
"""

import importlib
from typing import Any

import mlx_lm as _theirs

from mlxspec.compat.mlx_lm import _imports
from mlxspec.compat.mlx_lm._answers import batch_generate, generate, stream_generate
from mlxspec.compat.mlx_lm._load import LoadedModel, load

__all__ = ["LoadedModel", "batch_generate", "generate", "load", "stream_generate"]

_OURS = {name: globals()[name] for name in __all__}
_imports.install(__name__, "mlx_lm", _OURS)
for _name in (
    "generate",
    "convert",
):  # modules of these names are imported here once, before the functions take their names
    importlib.import_module(f"{__name__}.{_name}")
globals().update(_OURS, convert=_theirs.convert)


def __getattr__(name: str) -> Any:
    return getattr(_theirs, name)
