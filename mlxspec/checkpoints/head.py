"""Adds the MTP head to a conversion that lacks it: the head is found in the original that the conversion's card names, checked against the
model, fetched, quantized and kept beside the model's own files, where `load` finds it.

The head is written as `mtp.safetensors` into the model's folder of the hub's cache. mlx-lm does not open that name, `mlxspec rm` removes it
with the model, and a head that is there is there whole: it is written elsewhere, read again as for loading, and renamed.
Knows what belongs where; ranges and files are loading/ranges.py's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxspec.checkpoints.graft import GraftedHead, RemoteHead, head_in
from mlxspec.checkpoints.memory import MemoryEstimate, with_drafter
from mlxspec.checkpoints.quantize import Format, quantize
from mlxspec.checkpoints.writing import save
from mlxspec.errors import ConfigError, ModelError, StorageError
from mlxspec.loading import hub, progress, ranges, repositories
from mlxspec.loading.download import Plan
from mlxspec.loading.folder import INDEX, is_head_file
from mlxspec.loading.names import NAME_LENGTH, printable
from mlxspec.loading.qwen_weights import HEAD, head_of, is_raw, split_mtp
from mlxspec.loading.ranges import Repository
from mlxspec.loading.safetensors import STORED
from mlxspec.loading.tokenizer import read_json
from mlxspec.loading.unpacking import unpack
from mlxspec.loading.weights import Weights, read_file, read_folder, split_experts
from mlxspec.models.assemble import assemble_lazily
from mlxspec.models.assemble_drafter import head_alone
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.models.registry import ARCHITECTURES, architecture

HEAD_FILE = "mtp.safetensors"
HEAD_BITS = (4, 8, 16)
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
_MOST_STEPS = 4  # from a conversion over other conversions to the original


@dataclass(frozen=True, kw_only=True)
class HeadOffer:
    """An MTP head that can be fetched for a model. plan: of the model's download; original: the repository that holds the head; memory:
    of model and head together."""

    plan: Plan
    original: str
    memory: MemoryEstimate
    remote: RemoteHead

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes to fetch."""
        return self.remote.selection.data_bytes


def check_bits(bits: int | None) -> None:
    """Raise ConfigError unless `bits` is one of HEAD_BITS (bits of each weight of a stored MTP head) or None."""
    if bits is not None and bits not in HEAD_BITS:
        raise ConfigError(f"--mtp-bits must be one of {', '.join(map(str, HEAD_BITS))}, not {bits}.")


def may_have_head(plan: Plan) -> bool:
    """Return whether mlxspec can draft for this model with an MTP head, by its config.json. Raises ModelError where that is wrong."""
    config = read_json(plan.folder / "config.json")
    if config.get("model_type") not in ARCHITECTURES:
        return False
    parsed = architecture(config).parse(config)
    return isinstance(parsed, Qwen35Config) and parsed.num_mtp_layers > 0 and parsed.unsupported_head is None


def has_head(plan: Plan) -> bool:
    """Return whether the model's repository or its folder on this disk holds an MTP head. Where the model is not on this disk, its index
    or the headers of its files are fetched."""
    if hub.is_complete(plan.folder):
        return any(HEAD.match(name) for name in read_folder(plan.folder))
    names = [f.name for f in plan.files]
    if any(map(is_head_file, names)):
        return True
    where = Repository(plan.repo, plan.commit, {f.name: f.size for f in plan.files}, plan.base_models)
    if INDEX in names:
        places = ranges.read_json(where, INDEX).get("weight_map")
        return isinstance(places, dict) and any(HEAD.match(name) for name in places)
    held = ranges.headers(where, [n for n in names if n.endswith(".safetensors")])
    return any(HEAD.match(name) for _, tensors in held.values() for name in tensors)


def find(plan: Plan, memory: MemoryEstimate, original: str | None = None) -> HeadOffer:
    """Find an MTP head for a model that lacks one and return it. memory: of the model alone. original: the repository to look in; None
    follows the `base_model` of the models' cards until a repository holds a head. Fetches headers, and no tensor. Raises ConfigError
    for a model of a kind that has no head, ModelError where no head is found or it does not fit the model."""
    if not may_have_head(plan):
        raise ConfigError(
            f"{plan.repo} is of a kind that has no MTP head here; leave --with-mtp out (see `mlxspec models --drafters`)."
        )
    seen, named = [plan.repo], plan.base_models if original is None else (original,)
    while True:
        where = _original(seen[-1], named)
        remote = head_in(where)
        if remote is not None:
            break
        seen.append(where.repo)
        named = where.base_models
        if original is not None or not named or set(named) & set(seen) or len(seen) > _MOST_STEPS:
            raise ModelError(
                f"{where.repo} holds no MTP head (no tensors named mtp.*); name the original with --mtp-from OWNER/NAME."
            )
    both = with_drafter(memory, _checked(plan, where, remote))
    return HeadOffer(plan=plan, original=where.repo, memory=both, remote=remote)


def _original(repo: str, named: tuple[str, ...]) -> Repository:
    if not named:
        raise ModelError(
            f"The card of {repo} names no base_model, so where its MTP head is cannot be told; name the original with "
            "--mtp-from OWNER/NAME."
        )
    if len(named) > 1:
        raise ModelError(
            f"The card of {repo} names {len(named)} base models ({printable(', '.join(named), NAME_LENGTH)}); "
            "choose one with --mtp-from OWNER/NAME."
        )
    try:
        repositories.check_repo(named[0])
    except ModelError as error:
        raise ModelError(
            f"{printable(named[0], NAME_LENGTH)} is no Hugging Face id; name the original of {repo} with --mtp-from OWNER/NAME."
        ) from error
    return ranges.look(named[0])


def _checked(plan: Plan, where: Repository, remote: RemoteHead) -> Any:
    """Return the module of a repository's MTP head, without values. Raises ModelError unless the head fits the model of the plan, by
    config, names and shapes."""
    config = read_json(plan.folder / "config.json")
    ours = architecture(config).parse(config)
    other = ranges.read_json(where, "config.json")
    try:
        theirs = architecture(other).parse(other)
    except ModelError as error:
        raise ModelError(f"{where.repo} is no original of {plan.repo}: {error}") from error
    sizes = ("hidden_size", "vocab_size", "num_heads", "num_experts")
    differ = [f"its {name} is {getattr(theirs, name, None)}, not {getattr(ours, name)}" for name in sizes
              if getattr(theirs, name, None) != getattr(ours, name)]  # fmt: skip
    if not differ and len(theirs.is_linear) != len(ours.is_linear):
        differ = [f"it has {len(theirs.is_linear)} layers, not {len(ours.is_linear)}"]
    if differ:
        raise ModelError(f"{where.repo} is no original of {plan.repo}: {differ[0]}.")
    named = {n: mx.zeros(e.shape, STORED[e.dtype]) for n, e in remote.selection.tensors.items()}
    if not any(HEAD.match(name) for name in named):
        named = {f"mtp.{name}": value for name, value in named.items()}
    dtypes = {(n if n in named else f"mtp.{n}"): e.dtype for n, e in remote.selection.tensors.items()}
    try:
        unpack(named, dtypes)
        return head_alone(config, head_of(named, {}, raw=True))
    except ModelError as error:
        raise ModelError(f"The MTP head of {where.repo} does not fit {plan.repo}: {error}") from error


def add(offer: HeadOffer, bits: int | None = None) -> int:
    """Fetch an MTP head, quantize it and write it to its model's folder, which must be on this disk. bits: 4 or 8, 16 to leave the head
    as it is, None for 4. Returns the bytes of the written head. Raises ConfigError for other bits; ModelError or StorageError where
    the head cannot be fetched, used or written, and the model's folder is then unchanged."""
    check_bits(bits)
    folder, wanted = offer.plan.folder, offer.remote.selection
    blobs = folder.parent.parent / "blobs"
    path = ranges.fetch(wanted, blobs / f"mtp-{wanted.key}.safetensors")
    made = blobs / f"mtp-{wanted.key}-made.safetensors"
    try:
        config, weights = read_json(folder / "config.json"), read_folder(folder)
        kind = architecture(config)
        parsed = kind.parse(config)
        trunk, _ = kind.sanitize(weights, parsed)
        head = in_convention(GraftedHead(read_file(path), offer.remote.raw), weights, trunk)
        head = cast(head, main_dtype(config, weights), norms=False)
        head, _ = quantize_head(head, parsed, kind.build(parsed), bits)
        total = int(sum(v.nbytes for v in head.values()))
        with progress.steps(f"quantizing the MTP head of {offer.original}", total) as step:
            save(made, {f"mtp.{k}": v for k, v in head.items()}, step)
        again = weights | read_file(made)
        if assemble_lazily(config, lambda: again).mtp is None:
            raise ModelError("The MTP head did not come through the quantization; it was not kept.")
        made.replace(folder / HEAD_FILE)
    except OSError as error:
        raise StorageError(
            f"The MTP head could not be kept in {folder}: {error.strerror or error}."
        ) from error
    finally:
        made.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    return total


def in_convention(head: GraftedHead, weights: Weights, trunk: Mapping[str, mx.array]) -> Weights:
    """Return the tensors of an MTP head with its norms in the convention of a model's folder (zero-centred or factors). weights: all
    tensors of that folder; trunk: the text model's, under mlxspec's names."""
    if head.raw and is_raw(weights):  # nothing is to be done, and 1 added and taken away would round
        return split_experts(split_mtp(head.weights)[1])
    shifted = head_of(head.weights, trunk, raw=head.raw)
    if is_raw(weights):  # a raw folder: whoever loads it adds 1 to the norms
        return {k: v - 1.0 if v.ndim == 1 else v for k, v in shifted.items()}
    return shifted


def quantize_head(
    head: Weights, parsed: Qwen35Config, model: Any, bits: int | None
) -> tuple[Weights, dict[str, Format]]:
    """Quantize the matrices of an MTP head; return its tensors, and the format of each quantized matrix by module path. bits: 4 or 8,
    None for 4. The head is returned unchanged, with no formats, where bits is 16 or it is quantized already. parsed, model: the
    config and the modules of its text model."""
    if not head or bits == 16 or is_quantized(head):
        return head, {}
    return quantize(head, Qwen35Mtp(parsed, model), Format(bits=bits or 4))


def is_quantized(weights: Mapping[str, mx.array]) -> bool:
    """Return whether any of these tensors is a quantized matrix."""
    return any(k.endswith(".scales") for k in weights)


def main_dtype(config: Mapping[str, Any], weights: Weights) -> mx.Dtype:
    """Return the dtype that config.json names, else the dtype of most values of `weights`, else bfloat16."""
    text = config.get("text_config")
    for source in (config, text if isinstance(text, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            if source.get(key) in DTYPES:
                return DTYPES[source[key]]
    sizes: Counter[mx.Dtype] = Counter()
    for value in weights.values():
        if mx.issubdtype(value.dtype, mx.floating):
            sizes[value.dtype] += value.size
    return sizes.most_common(1)[0][0] if sizes else mx.bfloat16


def cast(weights: Weights, dtype: mx.Dtype, *, norms: bool = True) -> Weights:
    """Return the tensors with floats cast to `dtype`, except A_log. norms: whether vectors are cast, too; in a converted model they must
    be, because mlx-lm would compute in float32 after a float32 norm."""

    def keeps(name: str, value: mx.array) -> bool:
        floats = mx.issubdtype(value.dtype, mx.floating)
        return not floats or name.endswith("A_log") or (value.ndim == 1 and not norms)

    return {k: v if keeps(k, v) else v.astype(dtype) for k, v in weights.items()}
