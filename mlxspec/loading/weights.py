"""Reads a model folder's tensors and renames them to the names of our modules, whatever layout the folder has.

Here is what all architectures share: prefixes, towers, stacks of experts, quantized matrices. qwen_weights.py and gemma_weights.py have
the rest.
The tensors decide, never the config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlxspec.errors import ModelError
from mlxspec.loading.folder import INDEX, stale_index, tensor_files
from mlxspec.loading.names import printable
from mlxspec.loading.published import description, storage
from mlxspec.loading.safetensors import check_header
from mlxspec.loading.unpacking import Published, unpack

Weights = dict[str, mx.array]

_PREFIXES = (  # longest first
    ("model.language_model.", "language_model.model."),
    ("language_model.model.", "language_model.model."),
    ("language_model.lm_head.", "language_model.lm_head."),
    ("lm_head.", "language_model.lm_head."),
    ("model.", "language_model.model."),
    *(
        (name, f"language_model.model.{name}") for name in ("embed_tokens.", "layers.", "norm.")
    ),  # a trunk alone
)
STACKS = "switch_mlp."  # our name of stacks of experts
_SCALES = ("scales", "biases", "global_scale")
_AFFINE = dict.fromkeys(((b, g) for b in (1, 2, 3, 4, 5, 6, 8) for g in (32, 64, 128)), "affine")
_BYTES = {(4, 32): "mxfp4", (4, 16): "nvfp4", (8, 32): "mxfp8"}  # formats whose scales are bytes
_STACKED = re.compile(r"(.*)experts\.(gate_up_proj|down_proj)(?:\.(weight|scales|biases))?")
_ALONE = re.compile(r"(.*)experts\.(\d{1,6})\.((?:gate_proj|up_proj|down_proj)\.(?:weight|scales|biases))")
_SEEING = "visual|vision_tower|vision_embedder|embed_vision|multi_modal_projector"
_HEARING = "audio_tower|embed_audio"
_OF_VISION = re.compile(rf"(model\.)?({_SEEING})\.")
_OF_A_TOWER = re.compile(rf"(model\.)?({_SEEING}|{_HEARING})\.")


class FolderWeights(Weights):
    """The lazy tensors of a folder by name, and the file that holds each. stored: the stored form of each tensor that was unpacked to
    floats. notices: sentences about the folder; unread: sentences on MTP head or vision files that cannot be read. is_narrowed:
    whether bfloat16 has been cast to float16, except in towers."""

    def __init__(self, notices: Sequence[str] = ()) -> None:
        """Create an empty set of tensors. notices: whole sentences about the folder."""
        super().__init__()
        self._files: dict[str, Path] = {}
        self._dtypes: dict[str, str] = {}
        self.stored: dict[str, Published] = {}
        self.notices = tuple(notices)
        self.unread: tuple[str, ...] = ()
        self.is_narrowed = False

    def add(self, path: Path) -> None:
        """Add the tensors of a file. Raises ModelError where the file is damaged, or another file holds a tensor of the same name."""
        self._put(path, *_read(path))

    def _put(self, path: Path, loaded: Weights, dtypes: Mapping[str, str]) -> None:
        twice = sorted(self.keys() & loaded.keys())
        if twice:
            raise ModelError(f"{path.name} holds {printable(twice[0])}, which another file holds too.")
        self.update(loaded)
        self._files.update(dict.fromkeys(loaded, path))
        self._dtypes |= dtypes

    def add_beside(self, path: Path) -> None:
        """Add the tensors of a file of an MTP head or a vision tower. A file that cannot be read is passed over, with a sentence in
        `unread`."""
        try:
            loaded, dtypes = _read(path)
            stored = unpack(loaded, dtypes)
            self._put(path, loaded, dtypes)
            self.stored |= stored
        except ModelError as error:
            self.unread += (f"{path.name} was passed over: {error}",)

    def unpack(self, told: Mapping[str, Any]) -> None:
        """Convert quantized matrices in formats that MLX does not have to floats or to MLX's format (unpacking.py). told: the
        description of the format from config.json. Raises ModelError for a format that is not read."""
        self.stored = unpack(self, self._dtypes, told)

    def file_of(self, name: str) -> Path:
        return self._files[name]


def read_folder(folder: Path, found: tuple[list[Path], list[Path]] | None = None) -> FolderWeights:
    """Return all tensors of a model's folder, lazily. Names of an MTP head's tensors contain `mtp.`, whichever file holds them. found:
    the result of `tensor_files`, None to find the files.

    Raises ModelError where a shard is missing or damaged, or two files hold a tensor. A damaged file of an MTP head or a vision tower is
    passed over, see `FolderWeights.unread`.
    """
    shards, heads = tensor_files(folder) if found is None else found
    stale = f"{INDEX} names shards that are not here; it is stale, and the {len(shards)} shards that are here were read."
    weights = FolderWeights([stale] if (folder / INDEX).is_file() and stale_index(folder) else ())
    told = _told(folder)
    # whatever is refused is refused before a tensor is opened
    storage({"quantization_config": told}, names=[n for path in shards or heads for n in check_header(path)])
    for path in shards or heads:
        weights.add(path)
    weights.unpack(told)
    for path in heads if shards else ():
        weights.add_beside(path)
    return weights


def read_file(path: Path) -> Weights:
    """Return the tensors of one file, lazily; those in a format that MLX does not have are unpacked. Raises ModelError where the file is
    damaged."""
    loaded, dtypes = _read(path)
    unpack(loaded, dtypes)
    return loaded


def _read(path: Path) -> tuple[Weights, dict[str, str]]:
    """Return the tensors of one file as they are stored, lazily, and their dtypes as the header spells them. Names of a bare MTP head
    get the prefix `mtp.`. Raises ModelError where the file is damaged."""
    names = check_header(path)
    try:
        loaded = mx.load(str(path))
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"{path.name} cannot be read: {printable(error).rstrip('.')}.") from error
    if set(loaded) != set(names):
        raise ModelError(f"{path.name} holds other tensors than its header names.")
    prefix = "mtp." if is_bare_head(loaded) else ""
    dtypes = {prefix + name: dtype for name, (dtype, _) in names.items()}
    return {prefix + name: value for name, value in loaded.items()}, dtypes


def _told(folder: Path) -> Mapping[str, Any]:
    """Return the description in config.json of a quantization other than MLX's, empty where there is none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return description(config) if isinstance(config, dict) else {}


def is_bare_head(names: Collection[str]) -> bool:
    """Return whether tensors with these names are an MTP head without the prefix `mtp.`. No text model has the two names that decide."""
    return "pre_fc_norm_embedding.weight" in names and "pre_fc_norm_hidden.weight" in names


def is_of_a_tower(name: str) -> bool:
    """Return whether the name of a tensor is that of a tower for images, video or sound."""
    return _OF_A_TOWER.match(name) is not None


def is_of_vision(name: str) -> bool:
    """Return whether the name of a tensor is that of a tower for images or video."""
    return _OF_VISION.match(name) is not None


def rename(weights: Weights) -> Weights:
    """Return the text model's tensors under mlxspec's names, which begin with `language_model.`; tensors of towers are left out. Raises
    ModelError where two tensors have one name."""
    named: Weights = {}
    for given, value in weights.items():
        if is_of_a_tower(given):
            continue
        name = our_name(given)
        if name in named:
            raise ModelError(f"The folder has two tensors for one place: {printable(given)} and another.")
        named[name] = value
    return named


def our_name(name: str) -> str:
    """Return mlxspec's name of a tensor or of a module path of the text model."""
    for prefix, ours in _PREFIXES:
        if name.startswith(prefix):
            return ours + name[len(prefix) :]
    return name


def as_factor(norm: mx.array) -> mx.array:
    """Return a zero-centred weight of a norm as the factor that it stands for, in float32. What is no float stays, for `fill` to refuse."""
    return norm.astype(mx.float32) + 1.0 if mx.issubdtype(norm.dtype, mx.floating) else norm


def without_tied_head(trunk: Weights) -> Weights:
    """Return the tensors without the language-model head, for models that use the embedding as head."""
    return {k: v for k, v in trunk.items() if not k.startswith("language_model.lm_head.")}


def places_of(name: str, into: str = STACKS) -> tuple[str, ...]:
    """Return mlxspec's names of the tensors that a tensor of experts becomes: two for a joined gate and up projection, else one. Other
    tensors keep their name. into: the name of the stacks."""
    stacked, alone = _STACKED.fullmatch(name), _ALONE.fullmatch(name)
    if stacked:
        parts = ("gate_proj", "up_proj") if stacked[2] == "gate_up_proj" else ("down_proj",)
        return tuple(f"{stacked[1]}{into}{part}.{stacked[3] or 'weight'}" for part in parts)
    return (f"{alone[1]}{into}{alone[3]}",) if alone else (name,)


def split_experts(weights: Weights, into: str = STACKS) -> Weights:
    """Return the tensors with experts as three stacks (gate, up and down projection) under the name `into`. Experts may be stored as
    stacks (E, 2I, H) or as one tensor for each, quantized or not. Raises ModelError where experts are missing or differ in shape."""
    out: Weights = {}
    single: dict[str, dict[int, mx.array]] = {}
    for name, value in weights.items():
        places, alone = places_of(name, into), _ALONE.fullmatch(name)
        if alone:
            single.setdefault(places[0], {})[int(alone[2])] = value
        elif len(places) == 1:
            out[places[0]] = value
        elif value.ndim == 3 and value.shape[1] % 2 == 0:
            out |= zip(places, mx.split(value, 2, axis=1), strict=True)
        else:
            out[name] = value
    for name, parts in single.items():
        if sorted(parts) != list(range(len(parts))):
            raise ModelError(f"Experts are missing for {printable(name)}.")
        if len({(v.shape, v.dtype) for v in parts.values()}) > 1:
            raise ModelError(f"Experts differ in shape or dtype for {printable(name)}.")
        out[name] = mx.stack([parts[i] for i in range(len(parts))])
    return out


class Packed(NamedTuple):
    """The quantization of one matrix or a stack of matrices, in MLX's terms. scaled: whether each matrix of the stack has one more scale
    of its own."""

    group_size: int
    bits: int
    mode: str
    scaled: bool = False


def formats(weights: Weights, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Packed]:
    """Return the quantization of each quantized matrix by module path. shapes: unpacked shapes (..., out, in) by tensor name; matrices
    of other names are ignored.

    The format follows from the tensors: the number of words and of scales in a row of known length, and the dtype of the scales.
    config.json is not used, because it is wrong in some conversions that quantize matrices in several ways. Raises ModelError where
    tensors are in no format of MLX.
    """
    found = {}
    for path in (k.removesuffix(".scales") for k in weights if k.endswith(".scales")):
        packed, shape = weights.get(f"{path}.weight"), shapes.get(f"{path}.weight")
        if packed is None:
            raise ModelError(f"There are scales but no weights for {printable(path)}.")
        if shape is not None:
            found[path] = _format(path, packed, weights, shape)
    return found


def _format(path: str, packed: mx.array, weights: Weights, shape: tuple[int, ...]) -> Packed:
    scales, biases, own = (weights.get(f"{path}.{name}") for name in _SCALES)
    if scales is None:
        raise ModelError(f"There are no scales for {printable(path)}.")
    rows = packed.shape[:-1] == scales.shape[:-1] == shape[:-1] != ()
    if rows and packed.dtype == mx.uint32 and 0 not in (packed.size, scales.size):
        bits, odd = divmod(packed.shape[-1] * 32, shape[-1])
        group_size, over = divmod(shape[-1], scales.shape[-1])
        is_float = mx.issubdtype(scales.dtype, mx.floating)
        known = _AFFINE if is_float else _BYTES if scales.dtype == mx.uint8 else {}
        mode = known.get((bits, group_size))
        shifts = biases is not None and biases.shape == scales.shape
        whole = not odd and not over and (shifts if mode == "affine" else biases is None)
        if mode is not None and whole and (own is None or own.shape == shape[:-2] != ()):
            return Packed(group_size, bits, mode, own is not None)
    raise ModelError(f"{printable(path)} is quantized in no way that fits a matrix of shape {shape}.")


def dequantize(weights: Weights, formats: Mapping[str, Packed], dtype: mx.Dtype) -> Weights:
    """Return the tensors with every matrix of `formats` as floats of `dtype`, equal to those of `mx.dequantize`. formats: by module
    path."""
    out = dict(weights)
    for path, (group_size, bits, mode, scaled) in formats.items():
        packed = out.pop(f"{path}.weight")
        scales, biases, own = (out.pop(f"{path}.{name}", None) for name in _SCALES)
        unpack = partial(mx.dequantize, group_size=group_size, bits=bits, mode=mode, dtype=dtype)
        if mode == "affine" and bits in (4, 8) and not scaled:
            unpack = partial(_unpack, group_size=group_size, bits=bits, dtype=dtype)
        if scaled:
            stack = [unpack(w, s, global_scale=g) for w, s, g in zip(packed, scales, own, strict=True)]
            out[f"{path}.weight"] = mx.stack(stack)
        else:
            out[f"{path}.weight"] = unpack(packed, scales, biases)
    return out


def _unpack(
    packed: mx.array, scales: mx.array, biases: mx.array, *, group_size: int, bits: int, dtype: mx.Dtype
) -> mx.array:
    """Return an affine matrix of 8 or 4 bits as floats, equal to those of `mx.dequantize`. Reads bytes, because MLX's own operation on a
    CPU reads a whole 32-bit word for each number."""
    numbers = packed.view(mx.uint8)
    if bits == 4:
        numbers = mx.stack([numbers & 15, numbers >> 4], axis=-1)
    grouped = numbers.reshape(*scales.shape, group_size).astype(scales.dtype)
    values = grouped * scales[..., None] + biases[..., None]
    return values.reshape(*packed.shape[:-1], -1).astype(dtype)


def cast(
    weights: Weights,
    dtype: mx.Dtype | None,
    as_stored: Container[str] = (),
    *,
    scales_dtype: mx.Dtype | None = None,
) -> Weights:
    """Return the tensors with matrices cast to `dtype` and scales of quantized ones to `scales_dtype` (None: as stored). Vectors become
    float32, where rounding hurts and size does not matter. as_stored: names of tensors that are not cast."""
    out = {}
    for name, value in weights.items():
        if not mx.issubdtype(value.dtype, mx.floating) or name in as_stored:
            out[name] = value
        elif value.ndim == 1:
            out[name] = value.astype(mx.float32)
        else:
            wanted = scales_dtype if name.endswith((".scales", ".biases")) else dtype
            out[name] = value if wanted is None else value.astype(wanted)
    return out


def missing_and_extra(expected: Iterable[str], given: Iterable[str]) -> str | None:
    """Return a phrase on the tensors that are missing and those that are unknown, None where the two sets of names are equal."""
    expected, given = set(expected), set(given)
    missing, extra = sorted(expected - given), sorted(given - expected)
    if not missing and not extra:
        return None
    parts = []
    if missing:
        parts.append(f"tensors are missing ({_some(missing)})")
    if extra:
        parts.append(f"tensors are unknown ({_some(extra)})")
    return " and ".join(parts)


def _some(names: list[str]) -> str:
    return ", ".join(map(printable, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
