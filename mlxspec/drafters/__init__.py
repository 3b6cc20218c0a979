"""Who proposes tokens. Each drafter owns its state and hears one stream of facts; none can change the text, only its speed."""

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
