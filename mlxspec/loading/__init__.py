"""Leads from a model's name to checked arrays, a tokenizer and a chat template. Of its files only chat templates are programs; they run
in a sandbox in a helper process."""

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
