"""The local HTTP server. Loading this package loads neither MLX nor a BLAS: the command line reads the limits here for its help."""
