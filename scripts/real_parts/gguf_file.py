"""A GGUF file as the folder that Hugging Face would hold: its metadata, and its weights in bfloat16 under other names."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PACKAGE = {"gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"}
# token types: never spelled by text; added, and spelled by text; no token
_CONTROL, _ADDED, _UNUSED = 3, 4, 5
LLAMA_LAYER = {  # names of a layer's tensors, here and in Hugging Face's folders of Llama and Qwen2
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


class GgufFile(NamedTuple):
    """values: its metadata; tensors: each with name, shape (innermost first), data and tensor_type; dequantize: data and type to
    float32."""

    values: Mapping[str, Any]
    tensors: Iterable[Any]
    dequantize: Callable[[Any, Any], np.ndarray]


@contextmanager
def opened(path: Path, packages: Path) -> Iterator[GgufFile]:
    """packages: a folder that holds the package gguf."""
    sys.path.insert(0, str(packages))
    try:
        from gguf import GGUFReader  # type: ignore[import-not-found]
        from gguf.quants import dequantize  # type: ignore[import-not-found]

        reader = GGUFReader(path)
        yield GgufFile({k: f.contents() for k, f in reader.fields.items()}, reader.tensors, dequantize)
    finally:
        sys.path.remove(str(packages))


def write(
    folder: Path,
    file: GgufFile,
    config: Mapping[str, Any],
    in_layer: Mapping[str, str],
    changed: Callable[[str, np.ndarray], np.ndarray] = lambda name, array: array,
) -> None:
    """Write config.json and the weights. in_layer: names of a layer's parts; changed: an array as Hugging Face has it, by its GGUF name."""
    import mlx.core as mx

    weights = {}
    for tensor in file.tensors:
        name, _, kind = tensor.name.rpartition(".")
        array = np.asarray(file.dequantize(tensor.data, tensor.tensor_type), np.float32)
        array = changed(name, array.reshape([int(n) for n in reversed(tensor.shape)]))
        weights[f"model.{renamed(name, in_layer)}.{kind}"] = mx.array(array).astype(mx.bfloat16)
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    rows = {"vocab_size": weights["model.embed_tokens.weight"].shape[0]}
    (folder / "config.json").write_text(json.dumps({**config, **rows}, indent=1) + "\n")


def renamed(name: str, in_layer: Mapping[str, str]) -> str:
    """A GGUF tensor's name (without ".weight" or ".bias") as Hugging Face's, behind "model."."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, layer, part = name.split(".", 2)
    return f"layers.{layer}.{in_layer[part]}"


def common_config(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The members of config.json that all text models have. prefix: of the architecture's own metadata."""
    own = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
    return {
        "dtype": "bfloat16",
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": own["attention.head_count"],
        "num_key_value_heads": own["attention.head_count_kv"],
        # float32 in the file: the shortest decimal that is the same number
        "rms_norm_eps": float(str(np.float32(own["attention.layer_norm_rms_epsilon"]))),
        "rope_theta": own["rope.freq_base"],
        "max_position_embeddings": own["context_length"],
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
    }


def write_tokenizer(
    folder: Path,
    values: Mapping[str, Any],
    words: Any,
    *,
    is_text: tuple[str, ...] = (),
    normalizer: Any = None,
) -> None:
    """Write tokenizer.json and tokenizer_config.json of a byte-level BPE from the file's tokens and merges.

    words: the pre-tokenizer. is_text: beginnings of added tokens that Hugging Face does not call special.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

    tokens = values["tokenizer.ggml.tokens"]
    kinds = list(zip(tokens, values["tokenizer.ggml.token_type"], strict=True))
    merges = [tuple(pair.split(" ", 1)) for pair in values["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, (token, kind) in enumerate(kinds) if kind != _UNUSED}
    made = Tokenizer(models.BPE(vocabulary, merges))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = words
    made.decoder = decoders.ByteLevel()
    added = [token for token, kind in kinds if kind in (_CONTROL, _ADDED)]
    made.add_tokens([AddedToken(t, special=not t.startswith(is_text), normalized=False) for t in added])
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[values["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[values["tokenizer.ggml.eos_token_id"]],
        "chat_template": values["tokenizer.chat_template"],
        "model_max_length": values[f"{values['general.architecture']}.context_length"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
