"""What the demo family's drafters share that read the target's layers: which layers, their inputs, a plain norm, and their folders.

Parameter names and config.json are those that others publish such drafters with. The target is the shipped one, so that nothing else of
the family has to be trained again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .network import LanguageModel

LAYERS = (1, 3, 5)  # of the target, 0-based: the residual streams behind them


class Norm(nn.Module):
    """RMS norm with a plain weight."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight).to(x.dtype)


def streams_of(target: LanguageModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T, layers * H) behind LAYERS, and the final hidden (B, T, H)."""
    x, found = target.model.embed_tokens(ids), []
    for i, layer in enumerate(target.model.layers):
        x = layer(x)
        if i in LAYERS:
            found.append(x)
    return torch.cat(found, -1), target.model.norm(x)


def begin_with_last(fc: nn.Linear) -> None:
    """Let the last of the streams go through nearly as it is."""
    with torch.no_grad():
        size = fc.weight.shape[0]
        fc.weight.mul_(0.1)
        fc.weight[:, -size:] += torch.eye(size)


def begin_small(module: nn.Module) -> None:
    """Initial values of matrices; layers begin by changing nothing."""
    for name, p in module.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(p)
        elif p.ndim == 2:
            nn.init.normal_(p, std=0.6 * p.shape[1] ** -0.5)


def write_folder(checkpoint: Path, out: Path, config: Mapping[str, object]) -> None:
    """Write `out` from a training checkpoint: matrices in bfloat16, norms in float32, integers as they are."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, value in torch.load(checkpoint)["model"].items():
        kept = value.float() if value.ndim == 1 else value.bfloat16()
        tensors[name] = (kept if value.is_floating_point() else value).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def read_folder(folder: Path) -> dict[str, Tensor]:
    """The exported weights, floats as float32."""
    state = load_file(folder / "model.safetensors")
    return {name: value.float() if value.is_floating_point() else value for name, value in state.items()}
