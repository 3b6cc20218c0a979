"""Bytes that modules hold in memory."""

from __future__ import annotations

from typing import Any

from mlx.utils import tree_flatten


def bytes_of(*modules: Any) -> int:
    """Return the bytes of the parameters of these modules, evaluated or not. An object without parameters counts 0."""
    held = [module.parameters() for module in modules if hasattr(module, "parameters")]
    return sum(value.nbytes for parameters in held for _, value in tree_flatten(parameters))
