"""Operations on arrays, one file each: a Metal kernel and its twin in plain MLX behind one function."""

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
