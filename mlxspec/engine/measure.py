"""The costs that a loaded model begins with: those that an earlier process learned from its rounds, else guesses by bytes and layers.

Nothing is timed in this module. Rounds of answers replace the guesses (policy/costs.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mlxspec.drafters.base import Drafter
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.errors import ConfigError
from mlxspec.kernels.flat import LADDER
from mlxspec.models.base import Model
from mlxspec.models.reads import reads
from mlxspec.platform import device
from mlxspec.policy.costs import CostModel, DraftCost, likely

# of a plain round of several rows where there is no GPU: one row's draft keeps the rounds of all from running ahead, which there hides
# most of what the host does, and rows of several widths have to be taken apart
_PAUSE = 0.3
_QUEUED = 0.1  # of a drafted token's cost: what a known token costs that is run together with others


def guessed_costs(model: Model, drafters: Mapping[str, Drafter]) -> CostModel:
    """Return guessed costs of rounds and drafts for a model of which no round has been measured."""
    guesses = {n: likely_draft(d, model) for n, d in drafters.items() if isinstance(d, ModelDrafter)}
    return CostModel(likely_rounds(model), guesses, pause=0.0 if device.has_gpu() else _PAUSE)


def kept_costs(model: Model, drafters: Mapping[str, Drafter], data: Any) -> CostModel:
    """Return the costs that a cost file holds, with guesses where it holds none. data: the file's content; None: there is no file."""
    costs = guessed_costs(model, drafters)
    if data is not None:
        with suppress(ConfigError):  # of another version, or damaged: as good as none
            costs.learn_from(data)
    return costs


def likely_draft(drafter: ModelDrafter, model: Model) -> DraftCost:
    """Return a guess of what a draft costs, in plain rounds, by counting bytes and layers. A drafted token costs the larger of two
    shares: of the bytes that a plain round reads (the drafter's layers and the language-model head over all that the target reads for
    a token), and of the target's layers, for machines on which rounds wait for the host. Waiting for the draft costs as much as a
    layer."""
    target, own = reads(model), drafter.reads
    layer = 1.0 / (target.layers + 1)  # the head is one more
    step = min(1.0, max(own.bytes() / max(1.0, target.bytes()), (own.layers + 1) * layer))
    if drafter.drafts_at_once:
        return DraftCost(call=layer + step, queued=_QUEUED * step)
    return DraftCost(call=layer, step=step, queued=_QUEUED * step)


def likely_rounds(model: Model) -> dict[int, float]:
    """Return a guess of what a round costs, in plain rounds, by its width in tokens: a curve that is likely for any model, and in
    addition the bytes of the experts that more tokens read."""
    read = reads(model)
    plain = max(1.0, read.bytes())
    return {w: likely(w) + (read.bytes(w) - read.bytes()) / plain for w in LADDER}
