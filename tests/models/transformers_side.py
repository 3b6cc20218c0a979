"""transformers' own modules over our tiny checkpoints. Needs PyTorch; import it inside tests that say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as moe
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig


def load(folder: Path, s: tiny.Shape) -> Any:
    """A causal language model in float32, all of its weights from the folder."""
    kind = moe.Qwen3_5MoeForCausalLM if s.num_experts else dense.Qwen3_5ForCausalLM
    model, report = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    return model.eval()


@torch.no_grad()
def stepwise(model: Any, tokens: Sequence[int], num_steps: int) -> np.ndarray:
    """Logits (len(tokens), V): a prefill, then `num_steps` steps on its own cache."""
    prompt = len(tokens) - num_steps
    out = model(torch.tensor([tokens[:prompt]]), use_cache=True)
    found = [out.logits[0]]
    for token in tokens[prompt:]:
        out = model(torch.tensor([[token]]), cache=out.cache, use_cache=True)
        found.append(out.logits[0])
    return torch.cat(found).numpy()


def mtp_head(
    s: tiny.Shape, raw: tiny.Arrays, embed: Callable[[str, list[int]], np.ndarray]
) -> Callable[[list[int], np.ndarray], np.ndarray]:
    """The head put together from the trunk's norm, rotary and full-attention layer classes. `raw`: its tensors behind `mtp.`."""
    module: Any = moe if s.num_experts else dense
    prefix = "Qwen3_5Moe" if s.num_experts else "Qwen3_5"
    values = tiny.text_config(s) | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    config = (Qwen3_5MoeTextConfig if s.num_experts else Qwen3_5TextConfig)(**values)
    config._attn_implementation = "eager"
    layer = getattr(module, prefix + "DecoderLayer")(config, 0).eval()
    tensors = {k: torch.from_numpy(v) for k, v in raw.items()}
    layer.load_state_dict(
        {k.removeprefix("layers.0."): v for k, v in tensors.items() if k.startswith("layers.0.")}
    )
    rotary = getattr(module, prefix + "TextRotaryEmbedding")(config)
    norms = {}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        norms[name] = getattr(module, prefix + "RMSNorm")(s.hidden, eps=s.rms_eps)
        norms[name].load_state_dict({"weight": tensors[f"{name}.weight"]})

    @torch.no_grad()
    def run(tokens: list[int], hiddens: np.ndarray) -> np.ndarray:
        e = norms["pre_fc_norm_embedding"](torch.from_numpy(embed(s.name, tokens)))
        h = norms["pre_fc_norm_hidden"](torch.from_numpy(hiddens))
        x = (torch.cat([e, h], dim=-1) @ tensors["fc.weight"].T)[None]
        num = len(tokens)
        positions = torch.arange(num)[None]
        mask = torch.full((num, num), float("-inf")).triu(1)[None, None]
        angles = rotary(x, positions.expand(3, 1, num))
        x = layer(x, position_embeddings=angles, attention_mask=mask, position_ids=positions)
        return norms["norm"]((x[0] if isinstance(x, tuple) else x)[0]).numpy()

    return run
