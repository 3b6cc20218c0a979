"""What a forward leaves behind, as transactions: append, then commit or abort. Knows arrays and rows; knows no model and no request."""

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
