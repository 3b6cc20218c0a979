"""The public surface of mlxspec: a handful of names, each imported when it is first used.

Knows where things live and nothing else; importing it loads neither MLX nor a BLAS.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlxspec.version import __version__

if sys.version_info < (3, 11):  # noqa: UP036  (where the package is run out of a checkout)
    _why = f"mlxspec needs Python 3.11 or newer; this is {sys.version_info[0]}.{sys.version_info[1]}."
    raise SystemExit(_why) if sys.argv[:1] == ["-m"] else ImportError(_why)

_HOMES = {
    "load": "mlxspec.engine.load",
    "Engine": "mlxspec.engine.engine",
    "AsyncEngine": "mlxspec.engine.async_engine",
    "Receipt": "mlxspec.engine.receipt",
    "Result": "mlxspec.engine.api",
    "Drafter": "mlxspec.drafters.base",
    "Draft": "mlxspec.drafters.base",
    "Ask": "mlxspec.drafters.base",
    "PrefillEvent": "mlxspec.events",
    "TokensEvent": "mlxspec.events",
    "FinishEvent": "mlxspec.events",
    "SamplingParams": "mlxspec.config",
    "SpecConfig": "mlxspec.config",
    "EngineConfig": "mlxspec.config",
    "MlxspecError": "mlxspec.errors",
}

__all__ = [
    "Ask",
    "AsyncEngine",
    "Draft",
    "Drafter",
    "Engine",
    "EngineConfig",
    "FinishEvent",
    "MlxspecError",
    "PrefillEvent",
    "Receipt",
    "Result",
    "SamplingParams",
    "SpecConfig",
    "TokensEvent",
    "__version__",
    "load",
]

if TYPE_CHECKING:
    from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
    from mlxspec.drafters.base import Ask, Draft, Drafter
    from mlxspec.engine.api import Result
    from mlxspec.engine.async_engine import AsyncEngine
    from mlxspec.engine.engine import Engine
    from mlxspec.engine.load import load
    from mlxspec.engine.receipt import Receipt
    from mlxspec.errors import MlxspecError
    from mlxspec.events import FinishEvent, PrefillEvent, TokensEvent


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'mlxspec' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
