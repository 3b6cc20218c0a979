"""What a model folder holds and what running it takes, from headers alone: the folder is assembled as for running, but no weight is read.

Knows how to count; which tensors mean what is known to loading and models only. A folder that cannot be loaded cannot be inspected
either, and for the same reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten

from mlxspec.cache.windowed import WindowedLayerCache
from mlxspec.checkpoints import memory
from mlxspec.checkpoints.memory import Memory
from mlxspec.config import DRAFTER_NAMES
from mlxspec.errors import ConfigError, ModelError
from mlxspec.loading import hub
from mlxspec.loading.tokenizer import read_json
from mlxspec.loading.weights import _NOT_TEXT, Weights, read_folder
from mlxspec.models.assemble import Assembled, assemble_lazily
from mlxspec.models.registry import Architecture, architecture

_GEMMA_DRAFTERS = "google/gemma-4-...-it-assistant"


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Numbers of layers. attention: over the whole text; windowed: over a window; recurrent: Gated DeltaNet; shared: attention over
    another layer's keys and values."""

    attention: int
    windowed: int
    recurrent: int
    shared: int

    @property
    def total(self) -> int:
        return self.attention + self.windowed + self.recurrent + self.shared


@dataclass(frozen=True, kw_only=True)
class Head:
    """The MTP head. formats: format -> number of parameters. advice: how to get one where it is absent, else empty."""

    present: bool
    parameters: int
    bytes: int
    formats: dict[str, int]
    advice: str


@dataclass(frozen=True, kw_only=True)
class Usable:
    """Whether a drafter can run with this model; why: what it needs."""

    name: str
    usable: bool
    why: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """All of it. Sizes in elements or bytes.

    revision: the commit, of folders of the hub's cache. parameters: of the text model without the MTP head; active: those a token runs
    through. formats: format -> number of parameters. file_bytes: the text model's in the files; skipped_bytes: of vision and audio, which
    are not loaded.
    """

    name: str
    folder: str
    revision: str | None
    model_type: str
    layers: Layers
    hidden_size: int
    vocab_size: int
    max_context: int
    num_experts: int
    parameters: int
    active: int
    formats: dict[str, int]
    file_bytes: int
    skipped_bytes: int
    head: Head
    memory: Memory
    drafters: tuple[Usable, ...]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.file_bytes / self.parameters

    def data(self) -> dict[str, Any]:
        """As plain objects."""
        found = asdict(self) | {"bits_per_weight": round(self.bits_per_weight, 3)}
        found["memory"] |= {"total": self.memory.total, "fits": self.memory.fits}
        found["layers"] |= {"total": self.layers.total}
        return found


def inspect(
    name: str,
    *,
    revision: str | None = None,
    context: int | None = None,
    rows: int = 1,
    draft_model: str | None = None,
) -> Report:
    """What `name` (demo, a folder, or an id in the local cache) is. context: tokens a row (default: 8192, or the model's own limit);
    draft_model counts in the memory. Reads headers only. Raises MlxspecError subclasses where `load` would."""
    folder = hub.resolve(name, revision=revision, download=False)
    config = read_config(folder)
    kind = architecture(config)
    weights = read_folder(folder)
    made = assemble_lazily(config, lambda: weights)
    context = _context(context, made)
    head = _head(kind, made, weights, config)
    small = None
    if draft_model is not None:
        small_folder = hub.resolve(draft_model, download=False)
        small = assemble_lazily(read_config(small_folder), lambda: read_folder(small_folder))
    plain = kind.build(made.config)
    trunk = kind.sanitize(weights, made.config)[0]
    text = {k: v for k, v in weights.items() if not _NOT_TEXT.match(k)}
    file_bytes = sum(v.nbytes for v in text.values()) - head.bytes
    return Report(
        name=name,
        folder=str(folder),
        revision=hub.revision_of(folder),
        model_type=config["model_type"],
        layers=_layers(made),
        hidden_size=made.model.hidden_size,
        vocab_size=made.model.vocab_size,
        max_context=made.model.max_context,
        num_experts=made.config.num_experts,
        parameters=_count(plain),
        active=_active(plain, made.config),
        formats=_formats(trunk, plain),
        file_bytes=file_bytes,
        skipped_bytes=sum(v.nbytes for v in weights.values()) - file_bytes - head.bytes,
        head=head,
        memory=_memory(made, small, context, rows),
        drafters=_usable(head, small is not None),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises ModelError where there is none."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"There is no config.json in {folder}.")
    return read_json(folder / "config.json")


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
    """Of a mixture of experts only those that a token is sent to."""
    experts = sum(v.size for k, v in tree_flatten(plain.parameters()) if ".switch_" in k)
    idle = 1 - config.num_experts_per_token / config.num_experts if config.num_experts else 0
    return _count(plain) - int(experts * idle)


def _formats(weights: Weights, plain: Any) -> dict[str, int]:
    """Format -> number of parameters, most used first."""
    shapes = {k: tuple(v.shape) for k, v in tree_flatten(plain.parameters())}
    found: Counter[str] = Counter()
    for name, value in weights.items():
        path, _, part = name.rpartition(".")
        scales = weights.get(f"{path}.scales")
        if scales is None:
            found[str(value.dtype).removeprefix("mlx.core.")] += value.size
        elif part == "weight" and name in shapes:
            length = shapes[name][-1]
            bits, group_size = value.shape[-1] * 32 // length, length // scales.shape[-1]
            found[f"{bits} bits in groups of {group_size}"] += math.prod(shapes[name])
    return dict(found.most_common())


def _head(kind: Architecture, made: Assembled, weights: Weights, config: Mapping[str, Any]) -> Head:
    if made.mtp is None or kind.head is None:
        return Head(present=False, parameters=0, bytes=0, formats={}, advice=_advice(kind, config))
    plain = kind.head(made.config, kind.build(made.config))
    tensors = kind.sanitize(weights, made.config)[1]
    in_files = [v for k, v in weights.items() if _is_head(k)]
    return Head(
        present=True,
        parameters=_count(plain),
        bytes=sum(v.nbytes for v in in_files),
        formats=_formats(tensors, plain),
        advice="",
    )


def _is_head(name: str) -> bool:
    return ".mtp." in f".{name}"


def _advice(kind: Architecture, config: Mapping[str, Any]) -> str:
    if kind.head is not None:
        return (
            "conversions by mlx-lm drop it: `mlxspec convert MODEL -o FOLDER --graft-mtp ORIGINAL` takes it from the original "
            "repository, fetching only the files that hold it"
        )
    if str(config.get("model_type")).startswith("gemma4"):
        return f"drafters of this family are models of their own ({_GEMMA_DRAFTERS})"
    return "models of this family have none"


def _memory(made: Assembled, small: Assembled | None, context: int, rows: int) -> Memory:
    drafters = [m for m in (made.mtp, small.model if small else None) if m is not None]
    return Memory(
        context=context,
        rows=rows,
        weights=memory.bytes_of(made.model),
        drafter_weights=memory.bytes_of(*drafters),
        state=memory.state_bytes(made.model, context, rows),
        drafter_state=sum(memory.state_bytes(m, context, rows) for m in drafters),
        machine=memory.machine_memory(),
    )


def _usable(head: Head, has_draft_model: bool) -> tuple[Usable, ...]:
    found = []
    for name in DRAFTER_NAMES:
        usable, why = True, "needs no weights"
        if name == "mtp":
            usable, why = head.present, "the model's own head" if head.present else head.advice
        elif name == "draft-model":
            usable = has_draft_model
            why = (
                "--draft-model was named"
                if usable
                else "needs --draft-model, a smaller model of the same vocabulary"
            )
        elif name == "forced":
            why = "what a grammar forces"
        found.append(Usable(name=name, usable=usable, why=why))
    return tuple(found)
