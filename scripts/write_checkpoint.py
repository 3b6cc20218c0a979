#!/usr/bin/env python3
"""Writes a model folder of a published shape with random weights, for tests and benches at real sizes.

    scripts/write_checkpoint qwen3.5-0.8b FOLDER [--layers 4] [--bits 4] [--vocab 4096] [--seed 0] [--shard 1000]

Memory does not grow with the model: weights are repeated from one pool of random numbers and go to the disk as they are made. Without
--bits the folder is what a hub has: bfloat16, Hugging Face's names, MTP head among the shards. With --bits it is what
`mlxspec convert` writes: mlx-lm's names, affine groups of 64, the MTP head quantized in a file of its own.

Matrices have a standard deviation of one over the square root of their inputs, so that every layer passes on values of about 1 and logits
have a standard deviation of about 1. The tokenizer has a token for every byte and made-up words for other ids. The MTP head is as random
as the model: what it drafts is hardly ever accepted.
"""

from __future__ import annotations

import argparse
import json
import math
import string
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from published_shapes import CONFIGS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mlxspec.checkpoints.mlx_config import mlx_config
from mlxspec.checkpoints.quantize import Format, described, quantize
from mlxspec.checkpoints.writing import whole_folder, write_json
from mlxspec.demo import TARGET
from mlxspec.errors import MlxspecError
from mlxspec.models.registry import architecture

_POOL = 8_388_593  # numbers; a prime, so that no two rows of a matrix begin at the same one
_AT_ONCE = 1 << 20  # numbers that are made together
_GROUP = 64
_CODES = {mx.bfloat16: "BF16", mx.float32: "F32", mx.uint32: "U32"}
_TOKENS = 248_047  # of Qwen's tokenizer, up to <|im_end|>; the model has some rows more
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


# Keys of a hub's config that change no shape, which is why the list of known models does not have them.
_QWEN = {
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "max_position_embeddings": 262144,
    "mtp_use_dedicated_embeddings": False,
    "dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}


def hub_config(name: str) -> dict[str, Any]:
    """The config.json of a known model as its repository has it. name: as in `known.CONFIGS`."""
    config = CONFIGS[name][1]
    kind = config["model_type"]
    if kind == "gemma3_text":
        more = {"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 6, "dtype": "bfloat16"}
        return config | more
    text = config["text_config"] | {"model_type": f"{kind}_text"}
    if kind == "gemma4":
        shared = {"num_kv_shared_layers": text.get("num_kv_shared_layers", 0)}  # mlx-lm's default is E2B's
        text |= {"tie_word_embeddings": True, "dtype": "bfloat16", **shared}
        return {**config, "architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    every, layers = text["full_attention_interval"], text["num_hidden_layers"]
    kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    family = "Qwen3_5Moe" if kind == "qwen3_5_moe" else "Qwen3_5"
    return {
        **config,
        "architectures": [f"{family}ForConditionalGeneration"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text | _QWEN | {"layer_types": kinds},
    }


_NAMES = {
    "qwen3.5-0.8b": "Qwen3.5-0.8B",
    "qwen3.5-2b": "Qwen3.5-2B",
    "qwen3.5-4b": "Qwen3.5-4B",
    "qwen3.5-9b": "Qwen3.5-9B",
    "qwen3.6-27b": "Qwen3.5-27B",
    "qwen3.6-35b-a3b": "Qwen3.5-35B-A3B",
    "gemma-3-270m": "gemma-3-270m",
    "gemma-3-1b": "gemma-3-1b",
    "gemma-3-4b": "gemma-3-4b",
    "gemma-4-e2b": "gemma-4-E2B",
    "gemma-4-31b": "gemma-4-31B",
}
SIZES: dict[str, dict[str, Any]] = {size: hub_config(name) for size, name in _NAMES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder", type=Path, help="absent or empty")
    parser.add_argument("--layers", type=int, help="keep the first so many layers")
    parser.add_argument("--vocab", type=int, help="another number of words")
    parser.add_argument("--bits", type=int, choices=(4, 8), help="quantize")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", type=int, default=1000, help="megabytes of a file at most")
    options = parser.parse_args()
    try:
        config = cut(SIZES[options.size], options.layers, options.vocab)
        if options.shard < 1:
            raise ValueError("--shard must be at least 1")
    except ValueError as error:
        parser.error(str(error))
    try:
        shard = options.shard * 1_000_000
        size = write(options.folder, config, bits=options.bits, seed=options.seed, shard=shard)
    except MlxspecError as error:
        sys.exit(str(error))
    print(f"{options.folder}: {size / 1e9:.2f} GB")


def cut(config: Mapping[str, Any], layers: int | None, vocab: int | None) -> dict[str, Any]:
    """The first so many layers, and so many words. Raises ValueError where no layer of full attention would be left."""
    text = dict(config.get("text_config", config))
    if layers is not None:
        most = text["num_hidden_layers"]
        every = ["full_attention" if i % 6 == 5 else "" for i in range(most)]
        kinds = text.get("layer_types", every)[:layers]
        if not 1 <= layers <= most or "full_attention" not in kinds:
            first = text.get("layer_types", every).index("full_attention") + 1
            raise ValueError(f"--layers must be from {first} to {most}")
        text["num_hidden_layers"] = layers
        if "layer_types" in text:
            text["layer_types"] = kinds
        if "num_kv_shared_layers" in text:
            text["num_kv_shared_layers"] = max(0, text["num_kv_shared_layers"] - (most - layers))
    if vocab is not None:
        least = 256 + len(_SPECIAL)
        if vocab < least:
            special = len(_SPECIAL)
            raise ValueError(f"--vocab must be at least {least}: a token for every byte and {special} more")
        text["vocab_size"] = vocab
        if "vocab_size_per_layer_input" in text:
            text["vocab_size_per_layer_input"] = vocab
    return {**config, "text_config": text} if "text_config" in config else text


def write(
    folder: Path, config: Mapping[str, Any], *, bits: int | None = None, seed: int = 0, shard: int = 1 << 30
) -> int:
    """A folder that is absent or empty gets model, config and tokenizer. bits: None for bfloat16. shard: bytes of a file at most. Returns
    the bytes of its weights. Raises MlxspecError."""
    kind = architecture(config)
    parsed = kind.parse(config)
    model = kind.build(parsed)
    trunk = _tensors(model)
    has_head = kind.head is not None and getattr(parsed, "num_mtp_layers", 0)
    module = kind.head(parsed, model) if kind.head is not None and has_head else None
    head = _tensors(module) if module is not None else {}
    description, formats = dict(config), dict[str, Format]()
    if bits is None:
        tensors, beside = _raw(trunk) | {f"mtp.{k}": v for k, v in _raw(head).items()}, {}
    else:
        how = Format(bits=bits, group_size=_GROUP)
        tensors, formats = quantize(trunk, model, how)
        head, own = quantize(head, module, how) if module is not None else ({}, {})
        formats |= {f"mtp.{path}": form for path, form in own.items()}
        beside = {f"mtp.{k}": v for k, v in head.items()}
        description = mlx_config(config, parsed, described(formats, how))
    is_gemma3 = str(config["model_type"]).startswith("gemma3")
    draw = _Draw(
        seed,
        bits={path: form.bits for path, form in formats.items()},
        zero_norms=is_gemma3 or (bits is None and kind.head is not None),
    )
    total = sum(v.nbytes for v in (*tensors.values(), *beside.values()))
    with whole_folder(folder, total) as draft:
        files = _split(tensors, shard)
        for file, part in files.items():
            _save(draft / file, part, draw)
        if len(files) > 1:
            index = {name: file for file, part in files.items() for name in part}
            data = {"metadata": {"total_size": total}, "weight_map": index}
            write_json(draft / "model.safetensors.index.json", data)
        if beside:
            _save(draft / "mtp.safetensors", beside, draw)
        write_json(draft / "config.json", description)
        _write_tokenizer(draft, parsed.vocab_size)
    return total


def _tensors(module: Any) -> dict[str, mx.array]:
    """Name -> an array that is never evaluated: only its shape and dtype are used."""
    return {
        name: value.astype(mx.float32 if name.endswith("A_log") else mx.bfloat16)
        for name, value in tree_flatten(module.parameters())
    }


def _raw(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """mlx-lm's names and layouts -> Hugging Face's."""
    out: dict[str, mx.array] = {}
    for name, value in weights.items():
        name = name.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head.", "lm_head."
        )
        for stack in ("switch_mlp.", "experts.switch_glu."):
            name = name.replace(stack, "experts.")
        if name.endswith("conv1d.weight"):
            value = mx.moveaxis(value, 2, 1)
        if ".experts." in name:
            name = name.removesuffix(".weight")
            if name.endswith("up_proj"):
                continue
            if name.endswith("gate_proj"):
                name = name.removesuffix("gate_proj") + "gate_up_proj"
                value = mx.concatenate([value, value], axis=1)
        out[name] = value.astype(mx.float32) if name.endswith("linear_attn.norm.weight") else value
    return out


@dataclass(frozen=True, kw_only=True)
class _Spread:
    """How the numbers of a tensor are drawn: normally around `mean`; where the deviation is 0 all are equal."""

    mean: float = 0.0
    deviation: float = 0.0


class _Draw:
    """The numbers of every tensor. bits: by module path, of what is quantized. zero_norms: the weights of norms lie around 0, not 1."""

    def __init__(self, seed: int, *, bits: Mapping[str, int], zero_norms: bool) -> None:
        self._random = np.random.default_rng(seed)
        self._normal = self._random.standard_normal(_POOL, dtype=np.float32)
        self._words = self._random.integers(0, 1 << 32, _POOL, dtype=np.uint32)
        self._bits, self._zero_norms = bits, zero_norms

    def parts(self, name: str, value: mx.array) -> Iterator[memoryview]:
        """The bytes of a tensor of this name, shape and dtype, from a random place of the pool on."""
        spread, code = self._spread(name, value.shape), _CODES[value.dtype]
        pool = self._words if code == "U32" else self._normal
        left, start = value.size, int(self._random.integers(_POOL))
        while left:
            part = pool[start : start + min(left, _AT_ONCE)]
            if code != "U32":
                part = np.float32(spread.mean) + np.float32(spread.deviation) * part
            if code == "BF16":
                part = _to_bfloat16(part)
            yield memoryview(part).cast("B")
            left, start = left - len(part), (start + len(part)) % _POOL

    def _spread(self, name: str, shape: tuple[int, ...]) -> _Spread:
        path, _, part = name.rpartition(".")
        if part in ("scales", "biases"):
            levels = 2 ** self._bits[path]
            scale = (shape[-1] * _GROUP) ** -0.5 / math.sqrt((levels**2 - 1) / 12)
            return _Spread(mean=scale if part == "scales" else -scale * (levels - 1) / 2)
        if part == "A_log":
            return _Spread(mean=0.5, deviation=0.5)
        if part == "dt_bias":
            return _Spread(mean=-3.0, deviation=0.5)
        if len(shape) > 1:
            num_inputs = shape[-1] if "conv1d" not in name else max(shape[1:])
            return _Spread(deviation=num_inputs**-0.5)
        if part != "weight":
            return _Spread(mean=1.0)  # factors
        is_zero = self._zero_norms and not name.endswith("linear_attn.norm.weight")
        return _Spread(mean=0.0 if is_zero else 1.0, deviation=0.02)


def _to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """float32 -> its upper half, rounded to nearest, (N,) uint16."""
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _split(tensors: Mapping[str, mx.array], most: int) -> dict[str, dict[str, mx.array]]:
    """File name -> its tensors, of so many bytes together unless one alone has more."""
    parts, left = [dict[str, mx.array]()], most
    for name, value in tensors.items():
        if value.nbytes > left and parts[-1]:
            parts.append({})
            left = most
        parts[-1][name] = value
        left -= value.nbytes
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts)}


def _save(path: Path, tensors: Mapping[str, mx.array], draw: _Draw) -> None:
    """One safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in tensors.items():
        begin, end = end, end + value.nbytes
        header[name] = {
            "dtype": _CODES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [begin, end],
        }
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    with path.open("wb") as file:
        file.write(len(packed).to_bytes(8, "little") + packed)
        for name, value in tensors.items():
            for part in draw.parts(name, value):
                file.write(part)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json: a token for every byte, made-up words, and the last ids for what
    begins and ends turns. A vocabulary as large as Qwen's has them where Qwen has them."""
    num_tokens = min(vocab_size, _TOKENS)
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [_word(i) for i in range(num_tokens - len(words) - len(_SPECIAL))]
    inner = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(_SPECIAL))
    inner.save(str(folder / "tokenizer.json"))
    ends = [inner.token_to_id("<|im_end|>"), inner.token_to_id("<|endoftext|>")]
    write_json(folder / "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends[1]})
    settings = json.loads((TARGET / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(folder / "tokenizer_config.json", settings | {"model_max_length": 262144})


def _word(number: int) -> str:
    """Another one for every number, with a space before it."""
    letters = ""
    while True:
        number, digit = divmod(number, 26)
        letters = string.ascii_lowercase[digit] + letters
        if not number:
            return f"\u0120{letters}"


if __name__ == "__main__":
    main()
