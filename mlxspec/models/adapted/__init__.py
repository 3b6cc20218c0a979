"""Text models that run by mlx-lm's code, behind our contracts of a model and of a cache. Importing it imports mlx-lm, which is slow."""
