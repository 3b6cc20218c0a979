"""The local HTTP server. Importing it loads neither MLX nor a BLAS, because the command line reads the limits here for its help."""
