"""Architectures: parameters and forward passes over the flat token axis. Know caches and kernels; know no request and no sampling."""

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
