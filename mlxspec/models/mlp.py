"""The gated feed-forward layer: down(silu(gate(x)) * up(x)). Knows its weights."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlxspec.kernels.activations import swiglu
from mlxspec.models.layers import FusedLinear
from mlxspec.platform import device


def make_experts_run(experts: nn.Module) -> None:
    """Convert 16-bit float stacks of expert matrices in `experts` to float32 where there is no GPU, since MLX's gather_mm supports only
    float32 there. Their products are then float32 too. Call this when the model is fused."""
    if device.has_gpu():
        return
    for part in experts.modules():
        if "scales" not in part and "weight" in part and part.weight.ndim == 3:
            part.weight = part.weight.astype(mx.float32)


class GatedMlp(nn.Module):
    """An MLP with a gate: down(silu(gate(x)) * up(x)), x (N, H) to (N, H). size: outputs of gate and of up."""

    def __init__(self, hidden_size: int, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, size, bias=False)
        self.up_proj = nn.Linear(hidden_size, size, bias=False)
        self.down_proj = nn.Linear(size, hidden_size, bias=False)

    def fuse(self) -> None:
        self.gate_up = FusedLinear([self.gate_proj, self.up_proj])
        self.down = FusedLinear([self.down_proj])
        for name in ("gate_proj", "up_proj", "down_proj"):
            delattr(self, name)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down(swiglu(*self.gate_up.split(x)))
