"""The command line. Importing it imports neither MLX nor a model: every command fetches what it needs when it runs."""
