"""Training of the demo family in PyTorch: network, batches, phases, export. Knows nothing of mlx or of mlxspec's engine."""
