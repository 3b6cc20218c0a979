"""Caches: the keys, values and recurrent states that a model keeps between forwards. Each forward is a transaction: append, then commit or
abort."""

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
