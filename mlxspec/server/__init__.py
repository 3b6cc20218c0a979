"""The HTTP server: OpenAI's routes over the engine. Knows HTTP and JSON; knows no arrays."""

from mlxspec import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
