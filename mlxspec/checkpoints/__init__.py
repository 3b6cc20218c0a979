"""Checkpoints as things to look at, fetch, keep and convert: what the commands `inspect`, `pull`, `models`, `rm` and `convert` do."""

from mlxspec.platform import device as device  # before anything imports MLX: it loads the real BLAS
