"""Operations that are computed differently on CPUs."""

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
