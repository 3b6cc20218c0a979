"""Puts a folder's arrays into a module tree: target and, where the folder holds one, the MTP head.

Knows how loading and models fit together; knows no tokenizer and no engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxspec.errors import ModelError
from mlxspec.kernels.attention import score_bytes
from mlxspec.kernels.packed import seconds_a_weight
from mlxspec.loading import progress
from mlxspec.loading.names import printable
from mlxspec.loading.progress import amount
from mlxspec.loading.qwen_weights import head_of
from mlxspec.loading.vision_weights import in_dtype
from mlxspec.loading.weights import (
    Packed,
    Weights,
    cast,
    dequantize,
    formats,
    is_of_a_tower,
    is_of_vision,
    missing_and_extra,
    parts_of,
    parts_read,
)
from mlxspec.models.adapters import fuse_adapter
from mlxspec.models.dflash import DFlash, sanitize_dflash
from mlxspec.models.dflash_config import DFlashConfig
from mlxspec.models.eagle3 import Eagle3Config, Eagle3Head, is_eagle3, sanitize_eagle3
from mlxspec.models.gemma import Gemma
from mlxspec.models.gemma4_assistant import AssistantConfig, Gemma4Assistant, sanitize_assistant
from mlxspec.models.qwen3_5 import Qwen35
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.models.ranks import ALONE, Ranks, is_divided, join, share
from mlxspec.models.registry import Config, Head, Trunk, architecture
from mlxspec.models.vision.base import Vision
from mlxspec.models.vision.blueprint import blueprint, may_see
from mlxspec.models.vision.settings import image_settings
from mlxspec.platform import device

Stays = dict[str, tuple[Packed, int]]  # module path -> format and number of weights, of what stays packed

HEAD_GROUP = 64  # of an MTP head that is quantized when it is loaded
ROUTERS = ("mlp.gate", "shared_expert_gate", "router.proj")  # who decides between experts

HOW_TO_GET_A_HEAD = (
    "conversions by mlx-lm drop it; `mlxspec pull OWNER/NAME --with-mtp` fetches it from the original repository, `mlxspec convert FOLDER "
    "-o NEW --graft-mtp ORIGINAL` does so for a folder, or name a folder that holds it as the draft model"
)

NO_ASSISTANT = "A Gemma 4 assistant cannot draft for a model that is divided among ranks: it reads keys and values of all heads."


class Assembled(NamedTuple):
    """notices: whole sentences on what of the folder is not used. lacks_head: the model has an MTP head, which is not in the folder.
    unsupported_head: why an MTP head of this model cannot be run, None where it can. vision: what the model has for images, its tower's
    weights not evaluated; None where it reads none, and then no_images says why in one sentence."""

    model: Trunk
    config: Config
    mtp: Head | None
    notices: tuple[str, ...] = ()
    lacks_head: bool = False
    unsupported_head: str | None = None
    vision: Vision | None = None
    no_images: str = "Images were not asked for when the model was loaded."


def assemble(
    config: Mapping[str, Any],
    read: Callable[[], Weights],
    dtype: mx.Dtype | None = None,
    *,
    ranks: Ranks = ALONE,
) -> Assembled:
    """Build, read, fill, fuse and evaluate. The config is judged before `read` is called.

    `dtype` None: as stored on a GPU, float32 elsewhere. ranks: as `assemble_lazily` has it. Raises ModelError; nothing is half-loaded.
    """
    made = assemble_lazily(config, read, dtype, ranks=ranks)
    evaluate([m for m in (made.model, made.mtp) if m is not None])
    return made


_CONTEXT = 8192  # tokens of a row by which ranks are compared


def evaluate(modules: Sequence[nn.Module]) -> None:
    """Read the weights of modules that were assembled lazily, array by array, the next one while the last is cast or unpacked; of a
    divided model a rank's parts only."""
    for module in modules:
        if isinstance(module, Trunk):
            module.read_parts()
    # layers draw initial values: unless their keys are evaluated, the draws of all loads stay as one growing graph
    mx.eval(mx.random.state)
    arrays = [a for _, a in tree_flatten([m.parameters() for m in modules])]
    with progress.steps("loading", sum(a.nbytes for a in arrays)) as step:
        for array, following in zip_longest(arrays, arrays[1:]):
            if following is not None:
                mx.async_eval(array, following)
            mx.eval(array)
            step(array.nbytes)


def check_finite(module: nn.Module, what: str) -> None:
    """Raise ModelError where a weight of a module that has been evaluated is no number."""
    for name, value in tree_flatten(module.parameters()):
        if mx.issubdtype(value.dtype, mx.floating) and not mx.isfinite(value).all().item():
            raise ModelError(f"{what} cannot be used: {printable(name)} holds values that are no numbers.")


def assemble_lazily(
    config: Mapping[str, Any],
    read: Callable[[], Weights],
    dtype: mx.Dtype | None = None,
    *,
    beside: int = 0,
    adapter: str | None = None,
    draft_bits: int = 16,
    images: Path | None = None,
    ranks: Ranks = ALONE,
) -> Assembled:
    """All of `assemble` but the last step: whether a folder can be loaded and how large it becomes is known without its weights, as long
    as `read` is lazy too. beside: bytes of other models that were assembled so and whose weights will be read as well. adapter: a folder
    whose LoRA layers are folded into the weights. draft_bits: as SpecConfig has it. images: the folder with the preprocessing settings,
    where the model is to read images. What is wrong with its vision only costs it the images. ranks: those that run the model together, of
    which this process gets its share; the MTP head is whole on each."""
    kind = architecture(config)
    parsed = kind.parse(config)
    if ranks.size > 1 and adapter is not None:
        raise ModelError("An adapter cannot be used with a model that is divided among ranks.")
    own = share(parsed, ranks) if ranks.size > 1 else None
    weights, foreign = read(), _foreign_format(config)

    def filled(given: Weights, stays: Stays | None = None) -> tuple[Trunk, Stays, Weights]:
        made = kind.build(parsed if own is None else own.config)
        trunk, head = kind.sanitize(given, parsed)
        return made, _fill(made, trunk, dtype, "The model", foreign, beside, stays=stays), head

    model, packed, head = filled(weights if own is None else parts_of(weights, own.cut_of))
    if adapter is not None:
        fuse_adapter(model, adapter)
    mtp = None
    refused = parsed.unsupported_head if isinstance(parsed, Qwen35Config) else None
    if head and kind.head is not None and refused is None:
        mtp = kind.head(parsed, model)
        head_is_packed = bool(_fill(mtp, head, dtype, "The MTP head", foreign))
        if packed and not head_is_packed:
            _pack(mtp, draft_bits)
    for module in (model, mtp):
        if module is not None:
            module.fuse()
    if own is not None:
        join(model, parsed, ranks)
        read_parts = partial(parts_read, weights, own.cut_of)

        def parts() -> dict[str, Any]:
            again, _, _ = filled(read_parts(), packed)
            again.fuse()
            join(again, parsed, ranks)
            return again.parameters()

        model.parts = parts
    vision, no_images = None, Assembled._field_defaults["no_images"]
    if images is not None:
        try:
            vision = _vision(config, images, weights, model)
        except ModelError as error:
            no_images = str(error)
    notices = _passed_over(weights, vision, no_images if images is not None else None)
    if packed and not device.has_gpu():
        notices.append(_slowness(packed, parsed))
    if head and refused is not None:
        notices.append(f"There is no drafting with this model's MTP head: {refused}.")
    unknown = kind.unknown(config)
    if unknown:
        notices.append(not_read(unknown, "config.json"))
    lacks_head = (
        not head and refused is None and isinstance(parsed, Qwen35Config) and parsed.num_mtp_layers > 0
    )
    return Assembled(model, parsed, mtp, tuple(notices), lacks_head, refused, vision, no_images)


def widest_share(config: Mapping[str, Any], size: int, model: Trunk) -> Trunk:
    """The share of that rank of `size` whose rows take most memory, without weights: for sizes only. model: any rank's, for its dtype."""
    kind = architecture(config)
    parsed = kind.parse(config)
    found: list[tuple[int, Trunk]] = []
    for rank in range(size):
        ranks = Ranks(rank=rank, size=size)
        bare = kind.build(share(parsed, ranks).config)
        bare.set_dtype(model.dtype)
        bare.fuse()
        join(bare, parsed, ranks)
        per_token, state = bare.make_cache(0).snapshot_bytes()
        scores = max((score_bytes(heads, 1, _CONTEXT) for heads in bare.attention_heads), default=0)
        found.append((_CONTEXT * per_token + state + scores, bare))
    return max(found, key=lambda f: f[0])[1]


def _vision(config: Mapping[str, Any], folder: Path, weights: Weights, model: Trunk) -> Vision:
    """Raises ModelError where the model reads no images."""
    if not any(map(is_of_vision, weights)):
        dropped = ", which conversions by mlx-lm drop" if may_see(config) else ""
        raise ModelError(f"This model reads no images: its folder holds no vision tower{dropped}.")
    plan = blueprint(config, image_settings(folder), model.hidden_size)
    tower: Any = plan.tower
    num = sum(v.size for _, v in tree_flatten(tower.parameters()))
    _fill(tower, plan.sanitize(weights), model.dtype, "The vision tower", _foreign_format(config), whole=True)
    return Vision(
        tower=tower,
        preprocessor=plan.preprocessor,
        prompt=plan.prompt,
        bidirectional=plan.bidirectional,
        parameters=num,
        nbytes=sum(v.nbytes for _, v in tree_flatten(tower.parameters())),
    )


def _passed_over(weights: Weights, vision: Vision | None, no_images: str | None) -> list[str]:
    """Notices on tensors that are not of the text model. no_images: why images are not read though they were asked for."""
    if vision is not None:
        num = sum(is_of_a_tower(name) and not is_of_vision(name) for name in weights)
        return [f"Sound is not read: {num} tensors for it were passed over."] if num else []
    num = sum(map(is_of_a_tower, weights))
    if not num:
        return []
    why = f" {no_images}" if no_images else ""
    return [f"Only text is read: {num} tensors for images, video and sound were passed over.{why}"]


def not_read(keys: Sequence[str], where: str) -> str:
    """A notice on keys that may ask for what is not implemented."""
    names = ", ".join(map(printable, keys[:8]))
    more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
    return f"These keys of {where} are not known here and were not used: {names}{more}."


def assemble_head_lazily(
    read: Callable[[], Weights],
    target: Assembled,
    dtype: mx.Dtype | None = None,
    *,
    draft_bits: int = 16,
) -> Qwen35Mtp:
    """An MTP head out of another folder than its target's: one of its own, or the original model's. Its weights are not read yet.
    draft_bits: as SpecConfig has it. Raises ModelError."""
    if not isinstance(target.model, Qwen35) or not isinstance(target.config, Qwen35Config):
        raise ModelError("An MTP head of Qwen3.5 drafts for Qwen3.5 models only.")
    if target.unsupported_head is not None:
        raise ModelError(f"There is no drafting with this model's MTP head: {target.unsupported_head}.")
    head = head_of(read(), dict(tree_flatten(target.model.parameters())))
    if not head:
        raise ModelError(f"The draft model's folder holds no MTP head either; {HOW_TO_GET_A_HEAD}.")
    mtp = Qwen35Mtp(target.config, target.model)
    head_is_packed = bool(_fill(mtp, head, dtype, "The MTP head"))
    if is_packed(target.model) and not head_is_packed:
        _pack(mtp, draft_bits)
    mtp.fuse()
    return mtp


def check_head(config: Mapping[str, Any], head: Weights) -> None:
    """Raise ModelError unless these tensors, under our names, are an MTP head of the model that config.json describes. Reads no value."""
    kind = architecture(config)
    if kind.head is None:
        raise ModelError("Models of this family have no MTP head.")
    parsed = kind.parse(config)
    _fill(kind.head(parsed, kind.build(parsed)), head, None, "The MTP head")


def assemble_assistant_lazily(
    config: Mapping[str, Any], read: Callable[[], Weights], target: Trunk, dtype: mx.Dtype | None = None
) -> Gemma4Assistant:
    """A Gemma 4 assistant, which drafts for `target`. Its weights are not read yet. Raises ModelError, also if it is for another model."""
    if not isinstance(target, Gemma):
        raise ModelError("A Gemma 4 assistant drafts for Gemma 4 models only.")
    if is_divided(target):
        raise ModelError(NO_ASSISTANT)
    assistant = Gemma4Assistant(AssistantConfig.from_dict(config), target)
    _fill(assistant, sanitize_assistant(read()), dtype, "The assistant", _foreign_format(config))
    assistant.fuse()
    return assistant


def assemble_eagle3_lazily(
    config: Mapping[str, Any], read: Callable[[], Weights], target: Trunk, dtype: mx.Dtype | None = None
) -> Eagle3Head:
    """An EAGLE-3 drafter for `target`, without its weights but for the table of its vocabulary. Raises ModelError, also if it is for
    another model."""
    parsed = Eagle3Config.from_dict(config)
    weights = sanitize_eagle3(read())
    head = Eagle3Head(parsed, target, weights)
    _fill(head, weights, dtype, "The EAGLE-3 drafter", _foreign_format(config))
    head.fuse()
    return head


def assemble_dflash_lazily(
    config: Mapping[str, Any],
    read: Callable[[], Weights],
    target: Trunk,
    dtype: mx.Dtype | None = None,
    *,
    draft_bits: int = 16,
) -> DFlash:
    """A block drafter for `target`, not evaluated. draft_bits: as SpecConfig has it. Raises ModelError, also if it is for another model."""
    weights = sanitize_dflash(read())
    parsed = DFlashConfig.from_dict(config, weights.keys())
    made = DFlash(parsed, target)
    dtype = mx.bfloat16 if dtype is not None and dtype == mx.float16 else dtype
    own_is_packed = bool(_fill(made, weights, dtype, f"The {parsed.kind} drafter", _foreign_format(config)))
    if is_packed(target) and not own_is_packed:
        _pack(made, draft_bits)
    made.fuse()
    return made


class _AbsentTarget(NamedTuple):
    """What drafters ask of their target when they are built. config: has its softcap."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    config: Any


def assemble_alone(config: Mapping[str, Any], read: Callable[[], Weights]) -> tuple[nn.Module, Weights]:
    """An EAGLE-3 or block drafter without its target, which is taken to be the one that it was made for: the module, not filled and not
    fused, and the folder's tensors under its names. Raises ModelError where `assemble_eagle3_lazily` or `assemble_dflash_lazily` would."""
    weights = read()
    if is_eagle3(weights, config):
        weights, eagle = sanitize_eagle3(weights), Eagle3Config.from_dict(config)
        target: Any = _AbsentTarget(
            hidden_size=eagle.target_size,
            vocab_size=eagle.vocab_size,
            num_layers=1 + max(eagle.layers, default=63),
            config=eagle,
        )
        made: list[Eagle3Head | DFlash] = [Eagle3Head(eagle, target, weights) for _ in range(2)]
    else:
        weights = sanitize_dflash(weights)
        block = DFlashConfig.from_dict(config, weights.keys())
        target = _AbsentTarget(
            hidden_size=block.text.hidden_size,
            vocab_size=block.text.vocab_size,
            num_layers=block.num_target_layers or 1 + max(block.layer_ids),
            config=block,
        )
        made = [DFlash(block, target) for _ in range(2)]
    filled, empty = made
    _fill(filled, weights, None, f"The {filled.title}", _foreign_format(config))
    return empty, weights


def _foreign_format(config: Mapping[str, Any]) -> str | None:
    """The name of a quantization that is not MLX's, for a sentence on why tensors are not what they should be."""
    found = config.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    return method if isinstance(method, str) else None


def _dtype_or_default(dtype: mx.Dtype | None) -> mx.Dtype | None:
    return mx.float32 if dtype is None and not device.has_gpu() else dtype


def _fill(
    module: nn.Module,
    weights: Weights,
    dtype: mx.Dtype | None,
    what: str,
    foreign: str | None = None,
    beside: int = 0,
    *,
    whole: bool = False,
    stays: Stays | None = None,
) -> Stays:
    """Put `weights` into `module`, unpacked where that is faster. foreign: how the folder is quantized, if not as MLX does it. beside: as
    in `assemble_lazily`. whole: vectors get `dtype` as well, for modules whose operations want one dtype. stays: what stays packed, where
    that has been decided.

    Returns what stays packed.
    """
    dtype = _dtype_or_default(dtype)
    shapes = {name: place.shape for name, place in tree_flatten(module.parameters())}
    packed = formats(weights, shapes)
    if packed and not device.has_gpu():
        # there MLX multiplies with all formats but the one with a scale for each expert
        fits = device.floats_fit(4 * sum(math.prod(shape) for shape in shapes.values()), beside)
        unpacked = {path: how for path, how in packed.items() if fits or how.scaled}
        if stays is not None:  # how much memory is free has changed since
            unpacked = {path: how for path, how in packed.items() if path not in stays}
        weights = dequantize(weights, unpacked, dtype or mx.float32)
        packed = {path: how for path, how in packed.items() if path not in unpacked}
    if packed:
        _quantize_like(module, packed)
    norms = {f"{path}.weight": m for path, m in module.named_modules() if isinstance(m, nn.RMSNorm)}
    weights = in_dtype(weights, dtype) if whole and dtype is not None else cast(weights, dtype, norms)
    expected = dict(tree_flatten(module.parameters()))
    difference = missing_and_extra(expected, weights)
    if difference:
        because = (
            f"; it is quantized in the way of {printable(foreign)}, which is not supported" if foreign else ""
        )
        raise ModelError(f"{what} cannot be loaded: {difference}{because}.")
    for name, value in weights.items():
        place = expected[name]
        if value.shape != place.shape:
            raise ModelError(
                f"{what} cannot be loaded: {name} has shape {value.shape}, expected {place.shape}."
            )
        floats = mx.issubdtype(value.dtype, mx.floating) and mx.issubdtype(place.dtype, mx.floating)
        if not floats and value.dtype != place.dtype:
            raise ModelError(
                f"{what} cannot be loaded: {name} holds {_dtype(value)}, expected {_dtype(place)}."
            )
    module.load_weights(list(weights.items()), strict=True)
    for norm in norms.values() if not whole else ():
        if norm.weight.dtype != module.dtype:
            norm.weight = norm.weight.astype(mx.float32)
    module.eval()
    return {path: (how, math.prod(shapes[f"{path}.weight"])) for path, how in packed.items()}


def is_packed(module: nn.Module) -> bool:
    """Whether matrices of a model are quantized in memory."""
    return any(name.endswith(".scales") for name, _ in tree_flatten(module.parameters()))


def _slowness(packed: Stays, config: Config) -> str:
    """A sentence on what a token takes where packed weights are multiplied slowly; a sample of one matrix is timed."""
    tied = "language_model.lm_head" not in packed
    used = 0.0
    for path, (_, num) in packed.items():
        if "embed_tokens" in path and not (tied and path.endswith("model.embed_tokens")):
            continue  # looked up, not multiplied
        used += num * (config.num_experts_per_token / config.num_experts if ".switch_" in path else 1)
    how = max(packed.values(), key=lambda found: found[1])[0]
    seconds = used * seconds_a_weight(how.group_size, how.bits, how.mode)
    return (
        f"The quantized weights stay packed, since unpacked they would take more than {amount(device.UNPACKED_AT_MOST)} or than three "
        f"quarters of the memory that is free. They are multiplied slowly here: a token takes about {seconds:.2g} s."
    )


def _quantize_like(module: nn.Module, packed: Mapping[str, Packed]) -> None:
    """Quantize those submodules; their values are replaced afterwards."""

    def how(path: str, m: nn.Module) -> dict[str, Any] | bool:
        if path not in packed or not hasattr(m, "to_quantized"):
            return False
        group_size, bits, mode, scaled = packed[path]
        form = {"group_size": group_size, "bits": bits, "mode": mode}
        return form | {"global_scale": True} if scaled else form

    nn.quantize(module, class_predicate=how)


def _pack(head: Qwen35Mtp | DFlash, bits: int) -> None:
    """Quantize the matrices of a drafter that was read as floats, before it is fused; routers of experts stay as they are."""

    def is_packable(path: str, part: nn.Module) -> bool:
        is_matrix = hasattr(part, "to_quantized") and not path.endswith(ROUTERS)
        return is_matrix and part.weight.shape[-1] % HEAD_GROUP == 0

    if bits < 16:
        nn.quantize(head, HEAD_GROUP, bits, class_predicate=is_packable)
        head.bits_at_load = bits


def _dtype(x: mx.array) -> str:
    return str(x.dtype).removeprefix("mlx.core.")
