"""The gated feed-forward layer: down(act(gate(x)) * up(x)). Knows its weights; which function gates is the family's."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from mlxspec.models.layers import FusedLinear
from mlxspec.platform import device


def make_experts_run(experts: nn.Module) -> None:
    """Call at fusing, with the module that holds the stacks of expert matrices. Without a GPU MLX multiplies
    with a stack of float matrices (gather_mm) in float32 only and raises for other dtypes: 16-bit ones are kept as float32 there, and
    their products are float32 too."""
    if device.has_gpu():
        return
    for part in experts.modules():
        if "scales" not in part and "weight" in part and part.weight.ndim == 3:
            part.weight = part.weight.astype(mx.float32)


class GatedMlp(nn.Module):
    """gated: (gate (N, F), up (N, F)) -> (N, F)."""

    def __init__(self, hidden_size: int, size: int, gated: Callable[[mx.array, mx.array], mx.array]) -> None:
        super().__init__()
        self._gated = gated
        self.gate_proj = nn.Linear(hidden_size, size, bias=False)
        self.up_proj = nn.Linear(hidden_size, size, bias=False)
        self.down_proj = nn.Linear(size, hidden_size, bias=False)

    def fuse(self) -> None:
        self.gate_up = FusedLinear([self.gate_proj, self.up_proj])
        self.down = FusedLinear([self.down_proj])
        for name in ("gate_proj", "up_proj", "down_proj"):
            delattr(self, name)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down(self._gated(*self.gate_up.split(x)))
