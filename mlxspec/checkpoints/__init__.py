"""Inspects, fetches, lists, removes and converts checkpoints, for the commands `inspect`, `pull`, `models`, `rm` and `convert`."""

from mlxspec.platform import device as device  # before anything imports MLX: it loads the real BLAS
