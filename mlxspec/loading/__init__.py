"""From a model's name to checked arrays, a tokenizer and a template. Knows files; runs nothing that lies in them."""

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
