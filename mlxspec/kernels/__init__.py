"""One file a kernel: a Metal launch and its plain-mx twin behind one function. Knows arrays and shapes; knows no cache, no model."""

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
