"""Facts about the machine: device, BLAS, folders for caches and compiled code. The only package that may ask whether MLX computes on a
CPU."""
