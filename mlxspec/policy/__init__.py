"""Policies: they decide how much is drafted, and how much of a draft is verified. Knows drafters and costs; knows no target model's
forward and no requests."""

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
