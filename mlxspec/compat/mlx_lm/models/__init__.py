"""Where mlx-lm keeps its prompt caches: see cache.py."""
