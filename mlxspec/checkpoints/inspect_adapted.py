"""Inspects a folder whose model runs by mlx-lm's code: the report of inspect.py, from mlx-lm's modules and caches. Reads no weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters

from mlxspec.checkpoints import memory
from mlxspec.checkpoints.inspect_report import Head, InspectReport, Layers, Tower, Usable
from mlxspec.checkpoints.memory import MemoryEstimate
from mlxspec.config import DRAFTER_NAMES
from mlxspec.errors import ConfigError
from mlxspec.loading import hub
from mlxspec.loading.added_tokens import has_vocabulary
from mlxspec.models.adapted.loading import expert_counts
from mlxspec.models.adapted.model import AdaptedModel
from mlxspec.models.adapted.sizes import LeafForm
from mlxspec.models.assemble import assemble_folder
from mlxspec.models.assemble_drafter import assemble_drafter
from mlxspec.models.folder import ModelFolder
from mlxspec.models.reads import reads
from mlxspec.models.sizes import bytes_of
from mlxspec.platform.memory import machine_memory

EXACT = "--exact is refused: verifies may round otherwise than plain steps."
WHOLE = "Ranks are refused: mlx-lm cannot divide this architecture."
BY_ROWS = "--kv-bits is refused: mlx-lm's caches keep keys and values as they are computed."


def inspect_adapted(
    name: str, folder: ModelFolder, *, context: int | None, rows: int, draft_model: str | None
) -> InspectReport:
    """As `inspect`. Raises ConfigError for a context that is longer than the model's."""
    config, made = folder.config(), assemble_folder(folder)
    model: Any = made.model
    small: Any = None
    if draft_model is not None:
        beside = ModelFolder(hub.resolve(draft_model, download=False))
        kind = beside.kind()
        small = (
            assemble_drafter(kind, beside.config(), beside.read, model)
            if kind in ("eagle3", "dflash")
            else assemble_folder(beside).model
        )
    if context is not None and context > model.max_context:
        raise ConfigError(
            f"This model's context ends at {model.max_context} tokens; --context {context} is more."
        )
    context = context or min(memory.DEFAULT_CONTEXT, model.max_context)
    num, each = expert_counts(config)
    parameters = get_total_parameters(model.module)
    stacks = reads(model).stacks / max(1, bytes_of(model))
    advice = f"{made.unsupported_head}"
    return InspectReport(
        name=name,
        folder=str(folder.path),
        revision=hub.revision_of(folder.path),
        model_type=f"{config['model_type']}, by {made.made_by}",
        layers=_layers(model.forms),
        hidden_size=model.residual_size,
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        num_experts=num,
        parameters=parameters,
        active=int(parameters * (1 - stacks * (1 - each / num))) if num else parameters,
        formats=_formats(model),
        file_bytes=sum(path.stat().st_size for path in folder.files()),
        skipped_bytes=0,
        head=Head(present=False, parameters=0, bytes=0, formats={}, advice=advice),
        vision=Tower(
            present=False, parameters=0, bytes=0, max_tokens=0, square_tokens=0, advice=made.no_images
        ),
        memory=MemoryEstimate(
            context=context,
            rows=rows,
            weights=bytes_of(model),
            drafter_weights=0 if small is None else bytes_of(small),
            state=memory.state_bytes(model, context, rows),
            drafter_state=0 if small is None else memory.state_bytes(small, context, rows),
            machine=machine_memory(),
            a_token=memory.token_bytes(model),
        ),
        drafters=tuple(_usable(name, draft_model, advice, model.by_rows) for name in DRAFTER_NAMES),
        has_tokenizer=has_vocabulary(folder.path),
        limits=(
            EXACT,
            *(() if hasattr(model.module, "shard") else (WHOLE,)),
            *(() if model.seams else (BY_ROWS, _told(model))),
        ),
    )


def _told(model: AdaptedModel) -> str:
    share = 1 - model.share_by_rows
    return f"Rows share {share:.0%} of the weights in a forward, and read the others one by one: {model.by_rows}."


def _usable(name: str, draft_model: str | None, advice: str, by_rows: str) -> Usable:
    """by_rows: why rows do not share all of a forward, empty where they do."""
    if name == "mtp":
        return Usable(name=name, usable=False, why=advice)
    if name in ("eagle3", "dflash"):
        hidden = "reads layers, which a model does not show whose rows do not share all of a forward"
        return Usable(
            name=name, usable=False, why=hidden if by_rows else "needs --draft-model, such a drafter"
        )
    if name == "draft-model":
        why = "needs --draft-model, a smaller model of the same vocabulary"
        return Usable(
            name=name,
            usable=draft_model is not None,
            why=why if draft_model is None else "--draft-model was named",
        )
    return Usable(
        name=name, usable=True, why="what a grammar forces" if name == "forced" else "needs no weights"
    )


def _layers(forms: Sequence[LeafForm]) -> Layers:
    """By what caches keep."""
    windowed = sum(form.most is not None for form in forms)
    recurrent = sum(form.each == 0 for form in forms)
    return Layers(
        attention=len(forms) - windowed - recurrent, windowed=windowed, recurrent=recurrent, shared=0
    )


def _formats(model: AdaptedModel) -> dict[str, int]:
    """Format -> number of parameters, most used first."""
    found: Counter[str] = Counter()
    packed: set[int] = set()
    for part in model.module.modules():
        bits = getattr(part, "bits", None)
        if isinstance(bits, int) and "scales" in part:
            found[f"{bits} bits in groups of {part.group_size}"] += part.weight.size * 32 // bits
            packed |= {
                id(part[name]) for name in ("weight", "scales", "biases") if part.get(name) is not None
            }
    for _, value in tree_flatten(model.parameters()):
        if id(value) not in packed:
            found[str(value.dtype).removeprefix("mlx.core.")] += value.size
    return dict(found.most_common())
