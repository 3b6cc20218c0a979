"""Teaches a drafter the texts of its user: hidden states in pieces, gradient descent, a guard on held-out text."""

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
