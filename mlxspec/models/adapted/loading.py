"""Makes a model that runs by mlx-lm's code from a checkpoint's folder, its weights not evaluated.

Only the code that classes.py finds is run: never a file of the checkpoint, which is data. mlx-lm reads and names the tensors, so whatever
it quantizes or renames is as it has it.
"""

from __future__ import annotations

import json
import re
import textwrap
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import infer_quant_config, load_model

from mlxspec.errors import MlxspecError, ModelError
from mlxspec.loading.names import printable
from mlxspec.loading.published import MODELOPT_FILE
from mlxspec.loading.safetensors import check_header
from mlxspec.loading.tokenizer import read_json
from mlxspec.models.adapted.classes import (
    MLX_LM,
    classes_of,
    computes,
    has_code,
    maker_of,
    names_key,
    reads_parts,
)
from mlxspec.models.adapted.fused import fold_norms, join_products
from mlxspec.models.adapted.mended import BUILT_IN, differences, mend, short_factors, text_of, unread
from mlxspec.models.adapted.model import AdaptedConfig, AdaptedModel
from mlxspec.models.adapted.published_weights import PublishedWeights
from mlxspec.models.adapted.words import older_words
from mlxspec.models.adapters import add_adapter, add_adapters
from mlxspec.models.config_values import short
from mlxspec.models.fill import is_packed, unpacked_dtype, unpacked_notice
from mlxspec.models.float16 import narrow_module
from mlxspec.models.folder import ModelFolder
from mlxspec.models.layers import multiply_here
from mlxspec.models.runnable import judge
from mlxspec.platform import device

DEFAULT_CONTEXT = 1 << 17  # tokens, where config.json names no limit
_CONTEXTS = (
    "max_position_embeddings",
    "model_max_length",
    "max_sequence_length",
    "seq_length",
    "n_positions",
)
_LACKS = re.compile(r"missing \d+ required positional arguments?: (.+)")
# What an error names, and words in the keys of config.json that decide whether there is such a tensor, or what shape it has.
_DECIDED_BY = (
    ("Expected shape.*[kv]_proj", "num_key_value_heads"), ("Expected shape.*mlp", "intermediate_size"),
    ("weight_scale", "quantization_config"),
    (r"lm_head\.weight", "tie_word_embeddings"), (r"mlp\.(down|gate|up)_proj\.weight", "mlp_only|sparse"), ("expert", "expert"),
    ("norm", "norm$"), (r"\.bias", "bias"),
)  # fmt: skip
_ROWS = ("vocab_size",)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_EACH = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k")


def load_adapted(
    folder: ModelFolder,
    dtype: mx.Dtype | None = None,
    adapter: str | Path | Mapping[str, str] | None = None,
    *,
    group: mx.distributed.Group | None = None,
    max_context: int | None = None,
) -> AdaptedModel:
    """Load a model that runs by mlx-lm's code from its folder, without evaluating its weights. Return the model.

    dtype: of the weights; None: as stored where there is a GPU, else float32. adapter: the folder of a LoRA adapter that is added to all
    rows, or several folders by name, of which each row of a cache has its own factors. group: the processes that run the model together;
    this process gets its part. max_context: the most tokens of a row, where it is limited. Raises ModelError.
    """
    published = PublishedWeights(adapter if isinstance(adapter, str | Path) else None)
    module, config, notices = load_module(folder, published, max_context)
    if group is not None and not hasattr(module, "shard"):
        raise ModelError(
            f"{maker_of(config)} cannot divide models of type {printable(config['model_type'])} among ranks."
        )
    with _in_one_sentence(config):
        cast(module, dtype)
        if folder.is_narrowed:
            narrow_module(module)
        if group is not None:
            module.shard(group)
        if isinstance(adapter, str | Path):
            add_adapter(module, adapter, published)
        module.eval()
        if not isinstance(adapter, Mapping):
            fuse(module)
        model = AdaptedModel(module, _described(config))
        limit = min(max_context or model.max_context, model.max_context)
        model.notices = (*notices, *differences(config, limit))
        model.unread = unread(folder.config() | {"model_type": config["model_type"]})
        if isinstance(adapter, Mapping):
            if model.seams is None:
                raise ModelError(
                    f"Rows of this model do not share all of a forward, so it takes one adapter, with --adapter: {model.by_rows}."
                )
            add_adapters(module, adapter, model.gate, published)
            fuse(module)
        return model


def load_module(
    folder: ModelFolder, published: PublishedWeights | None = None, max_context: int | None = None
) -> tuple[Any, dict[str, Any], tuple[str, ...]]:
    """Check the headers and the config.json of a folder, and make mlx-lm's module from them. Return the module with unevaluated weights,
    its config as mlx-lm reads it, and notices for the user. published: changes the folder's weights before mlx-lm's code reads them. Raises
    ModelError."""
    published = published or PublishedWeights()
    config = folder.config()
    runs = judge(config, "mlx-lm", kind="model")
    _judge(config)
    with _in_one_sentence(config):
        words = _words(config, max_context)
    names = _names(folder)
    formats = runs.unpacked(read_json(folder.path / MODELOPT_FILE), names=names)
    with _in_one_sentence(config):
        if not formats or reads_parts(config, names):
            made = load_model(
                folder.path, lazy=True, model_config=words, get_model_classes=published.classes_of
            )
            found = *made, ()
        else:
            found = _filled(folder, config | words, published)
    _check_token_ids(found[0], config)
    _check_floats(found[0])
    with _in_one_sentence(config):
        mend(found[0], config)
    return found


def _names(folder: ModelFolder) -> list[str]:
    """Return the names of the tensors in a folder. Raises ModelError where two of the files that mlx-lm reads hold one name, as its order
    would decide which counts."""
    held = dict[str, Path]()
    for path in sorted({*folder.files(), *folder.path.glob("model*.safetensors")}):
        names = check_header(path)
        if twice := sorted(held.keys() & names.keys()):
            raise ModelError(f"{path.name} holds {printable(twice[0])}, which another file holds too.")
        held |= dict.fromkeys(names, path)
    return list(held)


def _filled(
    folder: ModelFolder, config: dict[str, Any], published: PublishedWeights
) -> tuple[Any, dict[str, Any], tuple[str, ...]]:
    """Return the module, its config and notices, for weights in quantization formats that are unpacked or repacked before mlx-lm's code
    renames them."""
    weights = folder.read_shards()
    dtype = unpacked_dtype(weights, None) or mx.float32
    for name in weights.stored:
        weights[name] = weights[name].astype(dtype)
    model, arguments = published.classes_of(config)
    module = model(arguments.from_dict({k: v for k, v in config.items() if k != "quantization_config"}))
    named = module.sanitize(dict(weights)) if hasattr(module, "sanitize") else dict(weights)
    config = {k: v for k, v in config.items() if k != "quantization_config"}
    packed = {
        path: infer_quant_config(path, part, named)
        for path, part in module.named_modules()
        if hasattr(part, "to_quantized") and f"{path}.scales" in named
    }
    if packed:
        nn.quantize(module, class_predicate=lambda path, _: packed.get(path, False))
        config["quantization"] = {**next(iter(packed.values())), **packed}
    module.eval()
    module.load_weights(list(named.items()), strict=True)
    return module, config, (*weights.notices, *unpacked_notice(weights, dtype))


def blank(config: Mapping[str, Any]) -> AdaptedModel:
    """Return a model of this config.json without a checkpoint's weights, from which sizes can be read. Raises ModelError."""
    _judge(config)
    with _in_one_sentence(config):
        config = {**config, **_words(config, None)}
        model, arguments = classes_of(dict(config))
        module = model(arguments.from_dict(dict(config)))
        _check_token_ids(module, config)
        mend(module, config)
        cast(module, mx.bfloat16 if device.has_gpu() else mx.float32)
        fuse(module)
        return AdaptedModel(module, _described(config))


def fuse(module: Any) -> None:
    """Join linear layers of one input, replace norms that add 1 to their weight, and choose the quantized products that are faster on this
    machine. Only one norm of each class is evaluated."""
    fold_norms(module)
    join_products(module, lambda: module(mx.zeros((1, 2), mx.int32), cache=make_prompt_cache(module)))
    multiply_here(module)


def _judge(config: Mapping[str, Any]) -> None:
    if config.get("model_file") is not None:
        raise ModelError("config.json asks for code of the checkpoint (model_file), which is never run.")
    if not has_code(config):
        kind = printable(repr(config.get("model_type")), 80)
        raise ModelError(f"{MLX_LM} has no code for models of type {kind}.")
    text = text_of(config)
    for key in ("activation_function", "hidden_act", "hidden_activation"):
        is_known = text.get(key) in BUILT_IN[key].get(config["model_type"], ()) or names_key(config, key)
        if isinstance(text.get(key), str) and not (is_known or computes(config, text[key])):
            raise ModelError(f"config.json: {key} {short(text[key])} is not supported.")


def _words(config: Mapping[str, Any], max_context: int | None) -> dict[str, Any]:
    """Return the members to add to a config.json for mlx-lm's classes. max_context: the most tokens of a row; None where it is unknown."""
    older = older_words(config)
    return older | short_factors({**config, **older}, max_context)


def _check_floats(module: Any) -> None:
    """Check that the weights of a module are floats, but for quantized matrices and bytes that scale them, as mlx-lm takes a tensor of any
    dtype. Raises ModelError."""
    for path, part in module.named_modules():
        packed = {name for name in part if "scale" in name} and {"weight"}
        packed |= {"scales"} if getattr(part, "mode", "affine") != "affine" else set()
        for name in {"weight", "bias", "scales", "biases"} & set(part) - packed:
            value = part[name]
            if isinstance(value, mx.array) and not mx.issubdtype(value.dtype, mx.floating):
                kind = str(value.dtype).removeprefix("mlx.core.")
                raise ModelError(
                    f"The model cannot be loaded: {printable(path)}.{name} holds {kind}, expected floats."
                )


def _check_token_ids(module: Any, config: Mapping[str, Any]) -> None:
    """Check that the token ids in mlx-lm's code for this architecture are in the vocabulary. MLX does not check indices, so a token id
    outside of the embedding would end the process. Raises ModelError."""
    num_rows = number(config, *_ROWS)
    for name, value in module.items():
        if (
            "token" not in name
            or not isinstance(value, mx.array)
            or not mx.issubdtype(value.dtype, mx.integer)
        ):
            continue
        if num_rows and value.size and (last := value.max().item()) >= num_rows:
            raise ModelError(
                f"{maker_of(config)} cannot run this model: its code names token {last}, and the vocabulary of config.json has {num_rows} "
                "tokens."
            )


@contextmanager
def _in_one_sentence(config: Mapping[str, Any]) -> Iterator[None]:
    """Turn any exception of a model's code in the `with` block into a ModelError of one sentence. Exceptions of mlxspec pass unchanged."""
    try:
        yield
    except MlxspecError:
        raise
    except (Exception, SystemExit) as error:  # mlx-lm's olmo.py exits where a package is missing
        lacks = _LACKS.search(str(error))
        what = f"config.json lacks {lacks[1]}" if lacks else printable(error, 4096)
        if isinstance(error, SystemExit):
            what = f"its code ended with status {error}"
        what = textwrap.shorten(what, 160, placeholder=" and more").rstrip(".") or type(error).__name__
        keys = "" if lacks else f" (config.json: {', '.join(_concerned(error, config))})"
        raise ModelError(f"{maker_of(config)} cannot load this model: {what}{keys}.") from error


def _concerned(error: BaseException, config: Mapping[str, Any]) -> list[str]:
    """Return the keys of config.json that an error of mlx-lm's code is about, as far as tensors that it names or lines that failed tell;
    model_type where they do not."""
    keys = {*text_of(config), "quantization_config"}
    words = next((words for named, words in _DECIDED_BY if re.search(named, str(error))), None)
    found = {key for key in keys if words is not None and re.search(words, key)}
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).parent.name == "models" and "mlx_lm" in frame.filename:
            found |= {*re.findall(r"(?:args|config|self)\.(\w+)", frame.line or "")} & keys
    return sorted(found) or ["model_type"]


def cast(module: Any, dtype: mx.Dtype | None) -> None:
    """Cast the module's floats to `dtype`, except those that the architecture needs in their own dtype. dtype None: float32 where there is
    no GPU and the weights are not quantized; else nothing is cast."""
    if dtype is None and not device.has_gpu() and not is_packed(module):
        dtype = mx.float32
    if dtype is None:
        return
    may = getattr(module, "cast_predicate", lambda _: True)
    changed = [
        (name, value.astype(dtype))
        for name, value in tree_flatten(module.parameters())
        if mx.issubdtype(value.dtype, mx.floating) and (dtype == mx.float32 or may(name))
    ]
    module.update(tree_unflatten(changed))


def _described(config: Mapping[str, Any]) -> AdaptedConfig:
    num, each = expert_counts(config)
    return AdaptedConfig(
        model_type=str(config["model_type"]),
        made_by=maker_of(config),
        told=json.dumps(config, sort_keys=True),
        max_context=min(number(config, *_CONTEXTS, default=DEFAULT_CONTEXT), 1 << 24),
        num_heads=number(config, "num_attention_heads", "num_heads", "n_head"),
        hidden_size=number(config, "hidden_size", "n_embd", "d_model", "hidden_dim"),
        experts_share=each / num if 0 < each < num else 1.0,
    )


def expert_counts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of experts of a layer, and the number of experts that each token uses; 0 where there are none."""
    return number(config, *_EXPERTS), number(config, *_EXPERTS_EACH)


def number(config: Mapping[str, Any], *names: str, default: int = 0) -> int:
    """Return the value of the first of the keys `names` that config.json has as a positive integer, or `default`. Keys of `text_config`
    count first."""
    text = config.get("text_config")
    for part in (text if isinstance(text, Mapping) else {}, config):
        for name in names:
            value = part.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return default
