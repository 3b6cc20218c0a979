"""From logits to tokens. Knows distributions and seeds; knows no model, no cache and no drafting."""

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
