"""Drafters, which propose tokens. A drafter keeps its own state and is told every known token; it changes the speed and never the text."""

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
