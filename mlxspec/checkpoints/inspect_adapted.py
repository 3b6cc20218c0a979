"""The facts that `inspect` gives of the parts of a model that runs by mlx-lm's code, from mlx-lm's modules and caches. Reads no weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters

from mlxspec.checkpoints.inspect_report import Head, Layers, Tower
from mlxspec.models.adapted.loading import expert_counts
from mlxspec.models.adapted.model import AdaptedModel
from mlxspec.models.adapted.sizes import LeafForm
from mlxspec.models.assemble import Assembled, assemble_folder
from mlxspec.models.folder import ModelFolder
from mlxspec.models.reads import reads
from mlxspec.models.sizes import bytes_of

EXACT = "--exact is refused: verifies may round otherwise than plain steps."
WHOLE = "Ranks are refused: mlx-lm cannot divide this architecture."
BY_ROWS = "--kv-bits is refused: mlx-lm's caches keep keys and values as they are computed."


def read_facts(folder: ModelFolder) -> tuple[Assembled, dict[str, Any]]:
    """Assemble a model that runs by mlx-lm's code; return it with the fields of InspectReport that describe its parts."""
    config, made = folder.config(), assemble_folder(folder)
    model: Any = made.model
    num, each = expert_counts(config)
    parameters = get_total_parameters(model.module)
    stacks = reads(model).stacks / max(1, bytes_of(model))
    return made, {
        "model_type": f"{config['model_type']}, by {made.made_by}",
        "layers": _layers(model.forms),
        "hidden_size": model.residual_size,
        "num_experts": num,
        "parameters": parameters,
        "active": int(parameters * (1 - stacks * (1 - each / num))) if num else parameters,
        "formats": _formats(model),
        "file_bytes": sum(path.stat().st_size for path in folder.files()),
        "skipped_bytes": 0,
        "head": Head(advice=f"{made.unsupported_head}"),
        "vision": Tower(advice=made.no_images),
        "limits": (
            EXACT,
            *(() if hasattr(model.module, "shard") else (WHOLE,)),
            *(() if model.seams else (BY_ROWS, _told(model))),
        ),
    }


def _told(model: AdaptedModel) -> str:
    share = 1 - model.share_by_rows
    return f"Rows share {share:.0%} of the weights in a forward, and read the others one by one: {model.by_rows}."


def _layers(forms: Sequence[LeafForm]) -> Layers:
    """Return the numbers of layers by what their caches keep. forms: of the caches of the model's layers."""
    windowed = sum(form.most is not None for form in forms)
    recurrent = sum(form.each == 0 for form in forms)
    return Layers(
        attention=len(forms) - windowed - recurrent, windowed=windowed, recurrent=recurrent, shared=0
    )


def _formats(model: AdaptedModel) -> dict[str, int]:
    """Return the number of parameters by format ("4 bits in groups of 64", "float32"), most used first."""
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
