"""A small Qwen3 whose weights are quantized by the tools that publish such weights, and what the tools' own numbers give. Needs PyTorch,
transformers and the tool that is asked for; import it inside tests that say so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

TOKENS = (5, 17, 3, 99, 101, 7, 8, 150, 11, 2, 60, 61, 62)
Tensors = dict[str, torch.Tensor]


class Packed(NamedTuple):
    """One matrix. tensors: by their names behind the module's; meant (N, K) float32: the numbers they stand for."""

    tensors: Tensors
    meant: torch.Tensor


class Written(NamedTuple):
    """What a folder should give. weights: name -> (N, K); logits, whole: (T, V) of the tool's numbers and of the unquantized ones."""

    weights: dict[str, np.ndarray]
    logits: np.ndarray
    whole: np.ndarray


def config() -> Qwen3Config:
    made = Qwen3Config(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    made.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    return made


def fp8_by_transformers() -> tuple[Callable[[torch.Tensor], Packed], dict[str, Any]]:
    """Blocks of 128 x 128, as Qwen's own repositories have them."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    told = FineGrainedFP8Config(weight_block_size=(128, 128))
    quantizer: Any = type("Quantizer", (), {"quantization_config": told, "pre_quantized": True})()

    def pack(weight: torch.Tensor) -> Packed:
        found = Fp8Quantize(quantizer)._quantize_one("weight", weight)
        whole = found["weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return Packed(found, found["weight"].to(torch.float32) * whole)

    return pack, {"quantization_config": json.loads(json.dumps(told.to_dict(), default=str))}


def by_compressed_tensors(
    kind: str, **values: Any
) -> tuple[Callable[[torch.Tensor], Packed], dict[str, Any]]:
    """kind: such as float-quantized; values: of QuantizationArgs."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(type="float", symmetric=True, **values)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=kind)
    tool = BaseCompressor.get_value_from_registry(kind)

    def pack(weight: torch.Tensor) -> Packed:
        given, more = {"weight": weight}, {}
        if args.strategy == "tensor_group":
            given["weight_global_scale"] = generate_gparam(weight.min(), weight.max()).reshape(1)
            parts, over = weight.reshape(weight.shape[0], -1, 16), (-1,)
            more = {"global_scale": given["weight_global_scale"]}
        elif args.strategy == "block":
            parts = weight.reshape(weight.shape[0] // 128, 128, weight.shape[1] // 128, 128)
            over = (1, 3)
        else:
            parts, over = weight, (1,) if args.strategy == "channel" else (0, 1)
        keeps = args.strategy == "channel"
        low, high = parts.amin(over, keepdim=keeps), parts.amax(over, keepdim=keeps)
        given["weight_scale"] = calculate_qparams(low, high, args, **more)[0]
        found = tool.compress(given, scheme)
        scale = found["weight_scale"].to(torch.float32)
        if args.strategy == "tensor_group":
            # the tool's own `decompress` rounds this scale to a narrower type
            numbers = unpack_fp4_from_uint8(found["weight_packed"], *weight.shape, dtype=torch.float32)
            scale = (scale / found["weight_global_scale"].to(torch.float32)).repeat_interleave(16, 1)
            return Packed(found, numbers.to(torch.float32) * scale)
        if args.strategy == "block":
            scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return Packed(found, found["weight"].to(torch.float32) * scale)

    described = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=kind,
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    told = json.loads(described.model_dump_json()) | {"quant_method": "compressed-tensors"}
    return pack, {"quantization_config": told}


def nvfp4_by_modelopt() -> tuple[Callable[[torch.Tensor], Packed], dict[str, Any]]:
    """Described in a file of its own, hf_quant_config.json."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def pack(weight: torch.Tensor) -> Packed:
        second = NVFP4QTensor.get_weights_scaling_factor_2(weight)
        scale, second = NVFP4QTensor.get_weights_scaling_factor(weight, 16, second)[:2]
        made = NVFP4QTensor.quantize(weight, 16, scale, second)
        made = made[0] if isinstance(made, tuple) else made
        kept = scale.to(torch.float8_e4m3fn)
        tensors = {
            "weight": made._quantized_data,
            "weight_scale": kept,
            "weight_scale_2": second.reshape(()).float(),
            "input_scale": torch.tensor(1.0),
        }
        sizes = {-1: 16}
        return Packed(
            tensors,
            made.dequantize(dtype=torch.float32, scale=kept, double_scale=second, block_sizes=sizes),
        )

    quantization = {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head"],
    }
    return pack, {"hf_quant_config": {"producer": {"name": "modelopt"}, "quantization": quantization}}


@torch.no_grad()
def write(folder: Path, pack: Callable[[torch.Tensor], Packed], told: dict[str, Any]) -> Written:
    """A folder of the model with all its linear layers but the head packed, and what it should give."""
    torch.manual_seed(0)
    made = config()
    model = Qwen3ForCausalLM(made).to(torch.float32).eval()
    for name, value in model.named_parameters():
        if value.ndim == 2:
            value.copy_(torch.randn_like(value) * (1.0 if "embed" in name else value.shape[-1] ** -0.5))
    ids = torch.tensor([TOKENS])
    whole = model(ids).logits[0].numpy()
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    weights: dict[str, np.ndarray] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            packed = pack(tensors.pop(f"{name}.weight"))
            tensors |= {f"{name}.{part}": value for part, value in packed.tensors.items()}
            weights[f"{name}.weight"] = packed.meant.numpy()
            module.weight.copy_(packed.meant)
    folder.mkdir()
    values = json.loads(made.to_json_string(use_diff=False))
    values = {key: value for key, value in values.items() if value is not None}
    values["architectures"] = ["Qwen3ForCausalLM"]
    for name, value in told.items():
        if name == "quantization_config":
            values[name] = value
        else:
            (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "config.json").write_text(json.dumps(values))
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    save_file(contiguous, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return Written(weights, model(ids).logits[0].numpy(), whole)
