"""Converts a model folder to one that mlx-lm and mlxspec load: quantized as requested, with the MTP head and the vision tower.

The trunk is what mlx-lm would write (names, stacks of experts, formats), but norms and convolutions stay in the source's convention: every
loader turns them as it reads, and adding 1 to a weight in bfloat16 for good costs digits. Qwen3-Next is the exception: mlx-lm turns them
only where experts are stored one by one, which a conversion never does. The head lies beside it in `mtp.safetensors` and the vision tower
in `vision.safetensors`, which mlx-lm does not open. Knows what goes where; formats are quantize.py's, files writing.py's.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxspec.checkpoints.graft import read_head
from mlxspec.checkpoints.head import (
    DTYPES,
    HEAD_FILE,
    cast,
    check_bits,
    in_convention,
    is_quantized,
    main_dtype,
    quantize_head,
)
from mlxspec.checkpoints.inspect import as_stored
from mlxspec.checkpoints.mlx_config import mlx_config
from mlxspec.checkpoints.pull import check_runs
from mlxspec.checkpoints.quantize import Format, described, quantize
from mlxspec.checkpoints.writing import check_target, save, save_model, whole_folder, write_json
from mlxspec.errors import ConfigError, ModelError
from mlxspec.loading import hub, progress
from mlxspec.loading.folder import VISION_FILE, is_hidden
from mlxspec.loading.pooling import POOLING_FILE
from mlxspec.loading.published import MODELOPT_FILE, of_mlx
from mlxspec.loading.weights import Weights, is_of_a_tower, is_of_vision
from mlxspec.models.assemble import assemble_lazily
from mlxspec.models.assemble_drafter import assemble_alone
from mlxspec.models.drafter_folders import ALONE, FOLDERS
from mlxspec.models.folder import ModelFolder
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.registry import architecture
from mlxspec.models.runnable import judge_folder
from mlxspec.models.sizes import bytes_of

_ALSO = (
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "merges.txt",
    "LICENSE*",
    "NOTICE*",
    POOLING_FILE,
    "?_Dense/*",
)
_NOT = ("config.json", "model.safetensors.index.json", MODELOPT_FILE)
_TURNED = ("qwen3_next",)  # whose norms and convolutions are written as they are used
_WRAPPED = "language_model."  # in front of our names


@dataclass(frozen=True, kw_only=True)
class Wish:
    """The options of a conversion. trunk: the format to quantize the text model to, None to leave its weights as they are. head_bits:
    bits of the MTP head, 4 or 8 in groups of 64, 16 for floats; None for 4, or for the head's own format where it is quantized
    already. dtype: of the tensors that are not quantized, None for the source's. graft: a folder or repository to take the MTP head
    from, None for none. vision: whether to keep a usable vision tower; it is never quantized. Raises ConfigError for wrong values."""

    trunk: Format | None = None
    head_bits: int | None = None
    dtype: str | None = None
    graft: str | None = None
    vision: bool = True

    def __post_init__(self) -> None:
        check_bits(self.head_bits)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}.")


@dataclass(frozen=True, kw_only=True)
class Converted:
    """The result of a conversion. title: the kind of the converted model, with its article. trunk_bytes, head_bytes, vision_bytes: bytes
    of the text model, the MTP head and the vision tower, 0 where there is none. skipped: number of tensors for images, video and
    sound that were left out. no_images: why the vision tower was left out although it was wanted, else empty."""

    folder: Path
    title: str
    trunk_bytes: int
    head_bytes: int
    skipped: int
    vision_bytes: int = 0
    no_images: str = ""


class _Made(NamedTuple):
    """The tensors and the config.json that a conversion writes. trunk holds all tensors of a drafter. The arrays are lazy and referred
    to from here only, so that each is released when it has been written. skipped, no_images: as in Converted."""

    trunk: Weights
    head: Weights
    vision: Weights
    config: dict[str, Any]
    skipped: int
    no_images: str


def convert(source: str, out: Path, wish: Wish, *, revision: str | None = None) -> Converted:
    """Convert a model, or a drafter, to a folder of MLX weights, quantized as `wish` says. Returns a description of what was written.

    source: `demo`, a folder or a Hugging Face id. out: a folder that is absent or empty; it is written completely or not at all. wish: the
    options of the conversion. revision: of the Hugging Face repository.

    Raises ConfigError for options that the source does not allow, ModelError for a source that cannot be loaded, and StorageError.
    """
    check_target(out)
    folder = ModelFolder(hub.resolve(source, revision=revision, judge=check_runs))
    runs = judge_folder(folder)
    if runs.by_mlx_lm:
        return _by_mlx_lm(folder, source, out, wish)
    is_drafter = runs.kind in ALONE
    made = _prepare_drafter(folder, source, wish) if is_drafter else _prepare(folder, source, wish)
    parts = (made.trunk, made.head, made.vision)
    trunk_bytes, head_bytes, vision_bytes = (sum(v.nbytes for v in part.values()) for part in parts)
    total = trunk_bytes + head_bytes + vision_bytes
    with whole_folder(out, total) as draft, progress.steps(f"converting {source}", total) as step:
        _copy_beside(folder.path, draft)
        write_json(draft / "config.json", made.config)
        save_model(draft, made.trunk, step)
        if made.head:
            save(draft / HEAD_FILE, {f"mtp.{k}": v for k, v in made.head.items()}, step)
        if made.vision:
            save(draft / VISION_FILE, made.vision, step)
        written = ModelFolder(draft)
        _check_written(written, head_bytes, vision_bytes, is_drafter=is_drafter)
    return Converted(
        folder=out,
        title=folder.title(),
        trunk_bytes=trunk_bytes,
        head_bytes=head_bytes,
        skipped=made.skipped,
        vision_bytes=vision_bytes,
        no_images=made.no_images,
    )


def _copy_beside(folder: Path, draft: Path) -> None:
    """Copy the files of a model other than its config.json and its tensors (tokenizer, chat template, licence) from `folder` to `draft`."""
    also = {str(p.relative_to(folder)) for pattern in _ALSO for p in folder.glob(pattern) if not is_hidden(p)}
    for name in sorted(also - {*_NOT}):
        (draft / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(folder / name, draft / name)


def _by_mlx_lm(folder: ModelFolder, source: str, out: Path, wish: Wish) -> Converted:
    """Convert a model that runs by mlx-lm's code: quantize and write it with mlx-lm's own functions. Returns a description of what was
    written. Raises ConfigError for an option that such a model does not allow, ModelError where the model cannot be loaded."""
    from mlx_lm.utils import quantize_model, save_config
    from mlx_lm.utils import save_model as save_module

    from mlxspec.models.adapted.loading import cast as cast_module
    from mlxspec.models.adapted.loading import load_adapted, load_module

    if wish.head_bits is not None or wish.graft is not None:
        raise ConfigError(
            "Models that run by mlx-lm's code have no MTP head; leave --mtp-bits and --graft-mtp out."
        )
    module, config, _ = load_module(folder)
    is_float = not any(isinstance(part, nn.QuantizedLinear) for part in module.modules())
    # experts that are quantized alone stay as they are, as in mlx-lm
    _check(wish, {} if is_float else dict(tree_flatten(module.parameters())), {}, source)
    if wish.dtype is not None:
        cast_module(module, DTYPES[wish.dtype])
    if wish.trunk is not None:
        form = wish.trunk
        choose = getattr(module, "quant_predicate", None)
        module, config = quantize_model(
            module, config, form.group_size, form.bits, mode=form.mode, quant_predicate=choose
        )
    total = bytes_of(module)
    with whole_folder(out, total) as draft, progress.steps(f"converting {source}", total) as step:
        _copy_beside(folder.path, draft)
        save_module(draft, module, donate_model=True)
        save_config(config, draft / "config.json")
        load_adapted(ModelFolder(draft))  # as for loading
        step(total)
    return Converted(folder=out, title=folder.title(), trunk_bytes=total, head_bytes=0, skipped=0)


def _check_written(written: ModelFolder, head_bytes: int, vision_bytes: int, *, is_drafter: bool) -> None:
    """Assemble a written folder again, as for loading. Raises ModelError where it cannot be loaded, or an MTP head or vision tower for
    which bytes were written is missing."""
    if is_drafter:
        assemble_alone(written.config(), written.read)
        return
    again = assemble_lazily(written.config(), written.read, images=written.image_settings)
    if head_bytes and again.unsupported_head is not None:
        raise ModelError(f"The MTP head cannot be loaded: {again.unsupported_head}; nothing was written.")
    for what, found, wanted in (
        ("MTP head", again.mtp, head_bytes),
        ("vision tower", again.vision, vision_bytes),
    ):
        if (found is not None) != bool(wanted):
            raise ModelError(f"The {what} did not come through the conversion; nothing was written.")


def _prepare_drafter(folder: ModelFolder, source: str, wish: Wish) -> _Made:
    """Return the tensors and config.json of a converted EAGLE-3 or block drafter, under the names that it is loaded by and quantized as
    requested. Raises ConfigError for options that such a drafter does not allow, ModelError where it cannot be loaded."""
    if wish.head_bits is not None or wish.graft is not None:
        raise ConfigError(
            f"{source} is {folder.title()} and has no MTP head; leave --mtp-bits and --graft-mtp out."
        )
    keeps_bfloat16 = FOLDERS[folder.kind()].keeps_bfloat16
    if wish.dtype == "float16" and keeps_bfloat16:
        raise ConfigError(
            "A block drafter is not computed in float16, in which sums over several layers overflow; leave --dtype out."
        )
    config = folder.config()
    module, weights = assemble_alone(config, folder.read)
    _check(wish, weights, {}, source)
    dtype = DTYPES[wish.dtype] if wish.dtype else main_dtype(config, weights)
    weights = cast(weights, mx.bfloat16 if dtype == mx.float16 and keeps_bfloat16 else dtype)
    if not is_quantized(weights):  # what config.json says of it is of other tensors
        config = {k: v for k, v in config.items() if k != "quantization_config"}
    if wish.trunk is None:
        return _Made(weights, {}, {}, config, 0, "")
    weights, formats = quantize(weights, module, wish.trunk)
    return _Made(weights, {}, {}, config | {"quantization": described(formats, wish.trunk)}, 0, "")


def _prepare(folder: ModelFolder, source: str, wish: Wish) -> _Made:
    config, found = folder.config(), folder.read()
    weights: Weights = found
    kind = architecture(config)
    if found.unread:
        raise ModelError(found.unread[0])
    # whatever is wrong with the source is found here
    assembled = assemble_lazily(
        config, lambda: weights, images=folder.image_settings if wish.vision else None
    )
    vision = {k: v for k, v in weights.items() if is_of_vision(k)} if assembled.vision is not None else {}
    skipped = sum(map(is_of_a_tower, weights)) - len(vision)
    parsed = assembled.config
    model = kind.build(parsed)
    sanitized = kind.sanitize(weights, parsed)
    if config["model_type"] in _TURNED:
        weights = sanitized[0] | {f"mtp.{k}": v for k, v in sanitized[1].items()}
    trunk, head = as_stored(weights, *sanitized)
    if wish.graft is not None:
        head = _grafted(wish.graft, head, kind.head is not None, weights, sanitized[0])
    _check(wish, trunk, head, source)
    dtype = DTYPES[wish.dtype] if wish.dtype else main_dtype(config, trunk)
    trunk, head = cast(trunk, dtype), cast(head, dtype, norms=False)
    vision = cast(vision, dtype) if wish.dtype else vision
    formats: dict[str, Format] = {}
    was_quantized = is_quantized(trunk) or is_quantized(head)
    if wish.trunk is not None:
        trunk, formats = quantize(trunk, model, wish.trunk)
    if isinstance(parsed, Qwen35Config):
        head, own = quantize_head(head, parsed, model, wish.head_bits)
        formats |= {f"mtp.{path}": form for path, form in own.items()}
    written = mlx_config(config, parsed, None)
    if "text_config" not in written:  # mlx-lm has a class of its own for the text model
        trunk = {k.removeprefix(_WRAPPED): v for k, v in trunk.items()}
        formats = {k.removeprefix(_WRAPPED): form for k, form in formats.items()}
    quantization = _quantization(config, wish.trunk, formats, keeps=was_quantized)
    if quantization is not None:
        written = mlx_config(config, parsed, quantization)
    if vision:
        written = dict(sorted({**written, "vision_config": config["vision_config"]}.items()))
    no_images = assembled.no_images if wish.vision and not vision else ""
    return _Made(trunk, head, vision, written, skipped, no_images)


def _grafted(graft: str, head: Weights, may_have: bool, weights: Weights, trunk: Weights) -> Weights:
    """Return the MTP head of the folder or repository `graft`, with its norms zero-centred or as factors, as in the source. head: the
    source's own head, empty where it has none; may_have: whether the model's family can have a head; weights: all tensors of the
    source; trunk: the text model's, under mlxspec's names. Raises ConfigError where a head cannot be added, ModelError where `graft`
    holds none."""
    if not may_have:
        raise ConfigError("Models of this family have no MTP head; leave --graft-mtp out.")
    if head:
        raise ConfigError("The source has an MTP head already; leave --graft-mtp out.")
    return in_convention(read_head(graft), weights, trunk)


def _check(wish: Wish, trunk: Weights, head: Weights, source: str) -> None:
    if wish.trunk is not None and is_quantized(trunk):
        raise ConfigError(
            f"{source} is quantized already; quantize the original, or leave --bits and --mode out."
        )
    if wish.head_bits is not None and not head:
        raise ConfigError(
            f"{source} has no MTP head for --mtp-bits; take one from the original with --graft-mtp."
        )
    if wish.head_bits is not None and is_quantized(head):
        raise ConfigError(f"The MTP head of {source} is quantized already; leave --mtp-bits out.")


def _quantization(
    config: Mapping[str, Any], main: Format | None, formats: Mapping[str, Format], *, keeps: bool
) -> dict[str, Any] | None:
    """Return the `quantization` entry of the written config.json, None where nothing is quantized. main: the main format, None where
    only the MTP head was quantized; formats: of the matrices that were quantized now, by module path; keeps: whether the source's own
    entry stays, for tensors that were quantized before."""
    old = of_mlx(config)
    if keeps and old:
        return dict(old) | {path: form.data for path, form in formats.items()}
    if not formats:
        return None
    return described(formats, main or next(iter(formats.values())))
