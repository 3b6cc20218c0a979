"""The state that a forward leaves behind (keys and values, recurrent states), as transactions: append, then commit or abort."""

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
