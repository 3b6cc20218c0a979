"""Reports what a model folder holds and what running it takes, from headers alone: the folder is assembled as for running, but no weight
is read.

Knows how to count; which tensors mean what is known to loading and models only. A folder that cannot be loaded cannot be inspected
either, and for the same reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mlx.utils import tree_flatten

from mlxspec.cache.quantized import check_kv_bits
from mlxspec.cache.windowed import WindowedLayerCache
from mlxspec.checkpoints import memory
from mlxspec.checkpoints.inspect_report import Head, InspectReport, Layers, Tower, Usable
from mlxspec.checkpoints.memory import MemoryEstimate
from mlxspec.checkpoints.pairing import paired
from mlxspec.config import EngineConfig, SpecConfig
from mlxspec.drafter_kinds import DRAFTS_AS, KINDS
from mlxspec.errors import ConfigError, ModelError
from mlxspec.loading import hub
from mlxspec.loading.added_tokens import has_vocabulary
from mlxspec.loading.qwen_weights import HEAD, split_mtp
from mlxspec.loading.weights import (
    FolderWeights,
    Weights,
    formats,
    is_of_a_tower,
    is_of_vision,
    rename,
    split_experts,
)
from mlxspec.models.assemble import HOW_TO_GET_A_HEAD, Assembled, assemble_folder, assemble_lazily
from mlxspec.models.assemble_drafter import assemble_drafter, assemble_head_lazily
from mlxspec.models.drafter_module import DrafterModule
from mlxspec.models.float16 import expected_dtype
from mlxspec.models.folder import Kind, ModelFolder
from mlxspec.models.gemma_config import GemmaConfig
from mlxspec.models.proposal_rows import proposing
from mlxspec.models.registry import Architecture, architecture
from mlxspec.models.runnable import judge_folder
from mlxspec.models.sizes import bytes_of
from mlxspec.platform.memory import machine_memory


@dataclass(frozen=True, kw_only=True)
class DrafterReport:
    """The report of `inspect` on a folder that holds a drafter alone: an MTP head, a Gemma assistant, an EAGLE-3 drafter or a block
    drafter. revision: the commit, None outside the hub's cache. use: a sentence on how the drafter is used. file_bytes: bytes of its
    tensors."""

    name: str
    folder: str
    revision: str | None
    kind: str
    use: str
    num_tensors: int
    file_bytes: int

    def data(self) -> dict[str, Any]:
        """Return the report as plain objects, for JSON."""
        return asdict(self)


def inspect(
    name: str,
    *,
    revision: str | None = None,
    context: int | None = None,
    rows: int = 1,
    draft_model: str | None = None,
    kv_bits: int = EngineConfig.kv_bits,
    draft_kv_bits: int = SpecConfig.draft_kv_bits,
) -> InspectReport | DrafterReport:
    """Return a report on a model or a drafter from its config.json and the headers of its weights. name: "demo", a folder, or a
    repository in the local cache.

    context: tokens of one row for the memory estimate, None for 8192 or the model's own limit. rows: rows of that length. draft_model: a
    drafter that the report takes in; None for the one that `mlxspec pull` paired with the model. kv_bits, draft_kv_bits: bits of the
    keys and values of the model and of its drafters, as in EngineConfig and SpecConfig. Raises the MlxspecError that `load` would raise;
    vocabularies are not compared.
    """
    folder = ModelFolder(hub.resolve(name, revision=revision, download=False))
    runs = judge_folder(folder)
    if not runs.is_model:
        weights = folder.read()
        return DrafterReport(
            name=name,
            folder=str(folder.path),
            revision=hub.revision_of(folder.path),
            kind=folder.title(),
            use="it drafts for its target: name that with --model, and this with --draft-model",
            num_tensors=len(weights),
            file_bytes=_bytes(weights) + _Packed.of(weights).bytes,
        )
    if runs.by_mlx_lm:
        from mlxspec.checkpoints.inspect_adapted import read_facts  # slow to import

        made, facts = read_facts(folder)
    else:
        made, facts = _read_facts(folder)
    context = _context(context, made)
    check_kv_bits(made.model.make_cache(0).layers, kv_bits, "This model", "kv_bits")
    pair = paired(folder.path)[0] if draft_model is None else None
    beside = _beside(draft_model, made) if pair is None else _beside(str(pair), made, "paired with it")
    files = [*folder.files(), *(() if beside is None else beside.files)]
    drafters = _usable(facts["head"], beside, made)
    modules = made, beside and beside.module
    return InspectReport(
        name=name,
        folder=str(folder.path),
        revision=hub.revision_of(folder.path),
        vocab_size=made.model.vocab_size,
        max_context=made.model.max_context,
        memory=_memory(*modules, context, rows, drafters, kv_bits=kv_bits, draft_kv_bits=draft_kv_bits),
        drafters=drafters,
        has_tokenizer=has_vocabulary(folder.path),
        computed_in=expected_dtype(made.model, files),
        **facts,
    )


def _read_facts(folder: ModelFolder) -> tuple[Assembled, dict[str, Any]]:
    """Assemble a model that runs by mlxspec's own code; return it with the fields of InspectReport that describe its parts."""
    config = folder.config()
    kind, weights = architecture(config), folder.read()
    made = assemble_lazily(
        config, lambda: weights, draft_bits=SpecConfig.draft_bits, images=folder.image_settings
    )
    plain = kind.build(made.config)
    text = {k: v for k, v in weights.items() if not is_of_a_tower(k)}
    trunk, own = as_stored(text, *kind.sanitize(text, made.config))
    vision = {k: v for k, v in weights.items() if is_of_vision(k)}
    head = _head(kind, made, own, plain, _Packed.of(weights, lambda name: HEAD.match(name) is not None))
    tower = _tower(made, vision, _Packed.of(weights, vision.__contains__))
    rest = {k: v for k, v in weights.items() if k not in text}
    packed = _Packed.of(weights, lambda name: name in text and HEAD.match(name) is None)
    return made, {
        "model_type": config["model_type"],
        "layers": _layers(made),
        "hidden_size": made.model.hidden_size,
        "num_experts": made.config.num_experts,
        "parameters": _count(plain),
        "active": _active(plain, made.config),
        "formats": packed.among(_formats(trunk, plain)),
        "file_bytes": _bytes(trunk) + packed.bytes,
        "skipped_bytes": _bytes(rest) + _Packed.of(weights, rest.__contains__).bytes - tower.bytes,
        "head": head,
        "vision": tower,
    }


def as_stored(weights: Weights, trunk: Weights, head: Weights) -> tuple[Weights, Weights]:
    """Return the tensors of trunk and MTP head with the values that they have in the folder, before norms were shifted and convolutions
    transposed. weights: all tensors of the folder, as stored; trunk, head: the tensors that loading makes of them, under mlxspec's
    names."""
    body, own = split_mtp(weights)
    given, own = split_experts(rename(body)), split_experts(own)
    return {k: given.get(k, v) for k, v in trunk.items()}, {k: own.get(k, v) for k, v in head.items()}


class _Packed(NamedTuple):
    """A count of the tensors that loading unpacks to floats. bytes: what they take in the files minus what the floats take, less than 0;
    sizes: number of parameters by stored format."""

    bytes: int
    sizes: Counter[str]

    @classmethod
    def of(cls, weights: FolderWeights, is_wanted: Callable[[str], bool] = lambda _: True) -> _Packed:
        """Count the unpacked tensors of a folder and return the count. is_wanted: receives the name of a tensor and returns whether it
        is counted."""
        found = {name: how for name, how in weights.stored.items() if is_wanted(name)}
        sizes: Counter[str] = Counter()
        for how in found.values():
            sizes[how.format] += how.size
        return cls(sum(how.nbytes - int(weights[name].nbytes) for name, how in found.items()), sizes)

    def among(self, formats: dict[str, int]) -> dict[str, int]:
        """Return the number of parameters by format, with the unpacked ones moved from float32 to their stored formats. formats: numbers
        of parameters after unpacking."""
        found = Counter(formats) + self.sizes
        found["float32"] -= self.sizes.total()
        return dict((+found).most_common())


class _Beside(NamedTuple):
    """A drafter in a folder of its own. how: a phrase on how it was chosen for the model; module: its modules, not evaluated; files: its
    safetensors files. lends_head: whether it is a whole model with an MTP head that fits the target."""

    name: str
    kind: Kind
    module: Any
    how: str
    files: list[Path]
    lends_head: bool = False


def _beside(name: str | None, target: Assembled, how: str = "named with --draft-model") -> _Beside | None:
    """Assemble the drafter `name`, a folder or a repository in the cache, for a target, and return it; None where name is None. how: a
    phrase on how it was chosen. Raises ModelError where the folder cannot be loaded, and where an MTP head or a drafter that needs
    its target does not fit it. Whether a whole draft model fits is not checked."""
    if name is None:
        return None
    folder = ModelFolder(hub.resolve(name, download=False))
    kind, name = folder.kind(), hub.repo_of(folder.path) or name
    if kind == "head":
        head = assemble_head_lazily(folder.read, target, draft_bits=SpecConfig.draft_bits)
        return _Beside(name, kind, head, how, folder.files())
    if kind != "model":
        bits = SpecConfig.draft_bits
        made = assemble_drafter(kind, folder.config(), folder.read, target.model, draft_bits=bits)
        return _Beside(name, kind, made, how, folder.files())
    module = assemble_folder(folder).model
    try:
        assemble_head_lazily(folder.read, target)
    except ModelError:
        return _Beside(name, kind, module, how, folder.files())
    return _Beside(name, kind, module, how, folder.files(), lends_head=True)


def _bytes(weights: Weights) -> int:
    return sum(int(v.nbytes) for v in weights.values())


def _context(asked: int | None, made: Assembled) -> int:
    most = made.model.max_context
    if asked is not None and asked > most:
        raise ConfigError(f"This model's context ends at {most} tokens; --context {asked} is more.")
    return asked or min(memory.DEFAULT_CONTEXT, most)


def _layers(made: Assembled) -> Layers:
    caches = made.model.make_cache(0).layers
    recurrent = sum(c.is_recurrent for c in caches)
    windowed = sum(isinstance(c, WindowedLayerCache) for c in caches)
    return Layers(
        attention=len(caches) - recurrent - windowed,
        windowed=windowed,
        recurrent=recurrent,
        shared=len(made.model.language_model.model.layers) - len(caches),
    )


def _count(module: Any) -> int:
    return sum(int(v.size) for _, v in tree_flatten(module.parameters()))


def _active(plain: Any, config: Any) -> int:
    """Return the number of parameters that one token uses: of a mixture of experts only the experts that the token is routed to."""
    experts = sum(v.size for k, v in tree_flatten(plain.parameters()) if ".switch_" in k)
    idle = 1 - config.num_experts_per_token / config.num_experts if config.num_experts else 0
    return _count(plain) - int(experts * idle)


def _formats(weights: Weights, plain: Any) -> dict[str, int]:
    """Return the number of parameters by format ("4 bits in groups of 64", "float32"), most used first. plain: the unquantized module,
    for the shapes."""
    shapes = {k: tuple(v.shape) for k, v in tree_flatten(plain.parameters())}
    found: Counter[str] = Counter()
    packed = formats(weights, shapes)
    for name, value in weights.items():
        path, _, part = name.rpartition(".")
        if path not in packed:
            found[str(value.dtype).removeprefix("mlx.core.")] += value.size
        elif part == "weight":
            how = packed[path]
            mode = "" if how.mode == "affine" else f"{how.mode}, "
            found[f"{mode}{how.bits} bits in groups of {how.group_size}"] += math.prod(shapes[name])
    return dict(found.most_common())


def _head(kind: Architecture, made: Assembled, own: Weights, plain: Any, packed: _Packed) -> Head:
    if made.mtp is None or kind.head is None:
        return Head(advice=_advice(kind, made))
    module = kind.head(made.config, plain)
    return Head(
        present=True,
        parameters=_count(module),
        bytes=_bytes(own) + packed.bytes,
        formats=packed.among(_formats(own, module)),
    )


def _tower(made: Assembled, own: Weights, packed: _Packed) -> Tower:
    if made.vision is None:
        return Tower(advice=made.no_images)
    preprocessor = made.vision.preprocessor
    return Tower(
        present=True,
        parameters=made.vision.parameters,
        bytes=_bytes(own) + packed.bytes,
        max_tokens=preprocessor.max_tokens,
        square_tokens=preprocessor.tokens_of(1024, 1024),
    )


def _advice(kind: Architecture, made: Assembled) -> str:
    if kind.head is not None:
        if made.unsupported_head is not None:
            return made.unsupported_head
        return HOW_TO_GET_A_HEAD if made.lacks_head else "this model was made without one"
    if isinstance(made.config, GemmaConfig) and made.config.generation == 4:
        return "drafters of Gemma 4 are models of their own: name google/gemma-4-...-it-assistant with --draft-model"
    return "models of this family have none"


def _memory(
    made: Assembled,
    beside: Any,
    context: int,
    rows: int,
    usable: tuple[Usable, ...],
    *,
    kv_bits: int,
    draft_kv_bits: int,
) -> MemoryEstimate:
    head_rows = sum(u.proposing.row_bytes for u in usable if u.proposing is not None)
    drafters = [m for m in (made.mtp, beside) if m is not None]
    caching = [m for m in drafters if hasattr(m, "make_cache")]
    for module in caching:
        check_kv_bits(module.make_cache(0).layers, draft_kv_bits, "The drafter", "draft_kv_bits")
    return MemoryEstimate(
        context=context,
        rows=rows,
        weights=bytes_of(made.model),
        drafter_weights=bytes_of(*drafters) + head_rows,
        state=memory.state_bytes(made.model, context, rows, kv_bits),
        drafter_state=sum(memory.state_bytes(m, context, rows, draft_kv_bits) for m in caching),
        machine=machine_memory(),
        vision=0 if made.vision is None else made.vision.nbytes,
        reading=0 if made.vision is None else memory.reading_bytes(made.vision),
        a_token=memory.token_bytes(made.model, kv_bits),
    )


def _usable(head: Head, beside: _Beside | None, made: Assembled) -> tuple[Usable, ...]:
    found, hides_layers = [], bool(getattr(made.model, "by_rows", ""))
    drafts_as = None if beside is None else DRAFTS_AS[beside.kind]
    for kind in KINDS:
        name, usable, why, drafting = kind.name, True, kind.needs, None
        if name == "mtp":
            usable, why = _mtp(head, beside)
            drafting = beside.module if beside is not None and drafts_as == name else made.mtp
        elif kind.reads_layers and hides_layers:
            usable = False
            why = "reads layers, which a model does not show whose rows do not share all of a forward"
        elif beside is not None and drafts_as == name:
            why, drafting = _told(beside), None if kind.has_own_rows else beside.module
        elif kind.folders:
            usable, why = False, f"needs --draft-model, {kind.needs}"
            if name == "draft-model" and beside is not None:
                why = f"{beside.name} is no model of its own; it drafts as {drafts_as}"
        read = None if drafting is None else proposing(drafting, made.model, None, SpecConfig.draft_bits)
        found.append(Usable(name=name, usable=usable, why=why, proposing=read))
    return tuple(found)


def _mtp(head: Head, beside: _Beside | None) -> tuple[bool, str]:
    """Return whether the drafter `mtp` can run, and a phrase on the head it uses or on how to get one. The order is that of `load`: a
    head named as drafter, the model's own head, the head of another whole model."""
    if beside is not None and DRAFTS_AS[beside.kind] == "mtp":
        what = "the assistant" if beside.kind == "assistant" else "the head"
        return True, f"{what} in {beside.name}, {beside.how}"
    if head.present:
        return True, "the model's own head"
    if beside is not None and beside.lends_head:
        return True, f"the head of {beside.name}, where `mtp` is asked for by name"
    return False, head.advice


def _told(beside: _Beside) -> str:
    """Return the end of a sentence that describes a drafter from its own folder: its name, how it was chosen for the model, and its
    title where known."""
    module, end = beside.module, ""
    if isinstance(module, DrafterModule):
        end = ": " + ", ".join(filter(None, (module.title, module.summary)))
    return f"{beside.name}, {beside.how}{end}"
