"""From a model's name to checked arrays, a tokenizer and a chat template. No code out of a model's files is run."""

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
