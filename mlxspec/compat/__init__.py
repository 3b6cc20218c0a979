"""Other libraries' calls on our engine, so that a script that uses them speculates when one import is changed."""

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
