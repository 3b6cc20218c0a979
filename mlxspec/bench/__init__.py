"""Measurements: ratios taken side by side in one run, medians of alternating repetitions. Knows how to time; decides nothing."""

from mlxspec.platform import device as _device  # noqa: F401  (loads the BLAS before mlx is imported)
