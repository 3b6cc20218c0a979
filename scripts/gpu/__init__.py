"""The project's Metal kernels on an NVIDIA GPU: the same text, compiled by nvcc. Needs Python, numpy and nvcc; no MLX."""
