"""Model folders for tests of the command line: tiny random hybrids with a byte-level tokenizer and a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mlxspec.models.qwen3_5 import Qwen35
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 256


def byte_tokenizer(first: str = "", special: Sequence[str] = SPECIAL) -> Tokenizer:
    """Every byte is a token, then `special`. `first`: a character whose id is swapped with that of `a`, for another vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if first:
        i, j = alphabet.index("a"), alphabet.index(first)
        alphabet[i], alphabet[j] = alphabet[j], alphabet[i]
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    return made


def shape(num_layers: int, hidden: int, *, mtp: bool, num_special: int = len(SPECIAL)) -> dict[str, Any]:
    """config.json of a tiny hybrid: every second layer is attention."""
    return {
        "model_type": "qwen3_5",
        "vocab_size": 256 + num_special,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "full_attention_interval": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "max_position_embeddings": CONTEXT,
        "mtp_num_hidden_layers": int(mtp),
        "eos_token_id": 256 + SPECIAL.index("<|im_end|>"),
    }


def write_checkpoint(
    folder: Path,
    *,
    num_layers: int = 2,
    hidden: int = 48,
    mtp: bool = True,
    seed: int = 0,
    first: str = "",
    special: Sequence[str] = SPECIAL,
    template: str = TEMPLATE,
) -> Path:
    """A model folder as mlx-lm would write it. Its answers are printable ASCII: other bytes get no weight in the head."""
    folder.mkdir(parents=True)
    (folder / "generation_config.json").write_text('{"do_sample": false}')
    config = shape(num_layers, hidden, mtp=mtp, num_special=len(special))
    tokenizer = byte_tokenizer(first, special)
    parsed, rng = Qwen35Config.from_dict(config), np.random.default_rng(seed)
    model = Qwen35(parsed)
    tensors = dict(tree_flatten(model.parameters()))
    if mtp:
        tensors |= {"mtp." + k: v for k, v in tree_flatten(Qwen35Mtp(parsed, model).parameters())}
    printable = np.array(
        [32 <= ord(c) < 127 for c in map(tokenizer.decode, [[i] for i in range(256)])]
        + [False] * len(special)
    )
    for name, value in tensors.items():
        if value.ndim == 1:
            new = rng.uniform(0.7, 1.3, value.shape) * (-1.0 if name.endswith(("A_log", "dt_bias")) else 1.0)
        elif "embed_tokens" in name:
            new = rng.normal(0.0, 1.0, value.shape)
        else:
            new = rng.normal(0.0, value.shape[-1] ** -0.5, value.shape)
        if "lm_head" in name:
            new = 8.0 * new * printable[:, None]
        tensors[name] = mx.array(new.astype(np.float32))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": template})
    )
    return folder
