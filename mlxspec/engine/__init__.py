"""The engine: decodes many requests together, in rounds of draft, verify, accept and commit. It handles requests, rows and events; it has
no files, no terminal and no HTTP."""

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
