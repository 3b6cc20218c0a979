"""Turns logits into tokens: sampling, noise, grammars and other constraints, log-probabilities."""

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
