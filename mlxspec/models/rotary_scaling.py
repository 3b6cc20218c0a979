"""Stretched rotary positions: what `rope_parameters` or `rope_scaling` of a config.json does to the angles of a model.

Knows the kinds whose angles depend on the position alone: default, linear, yarn, llama3. Kinds that also depend on the length of the text
(dynamic, longrope) are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxspec.errors import ModelError
from mlxspec.models.config_values import Keys, Values, mapping, short

KINDS = ("default", "linear", "yarn", "llama3")
LAYER_KINDS = ("sliding_attention", "full_attention")
_PART = "partial_rotary_factor"
_COMMON = frozenset({"rope_type", "rope_theta", _PART, "mrope_section", "mrope_interleaved", "finetuned"})
_KEYS = Keys(idle=_COMMON | {"type"})  # text has the same position on all axes


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The scaling of rotary positions for longer contexts. kind: one of KINDS. factor: by which frequencies are divided. amplitude: the
    factor of cosines and sines. original: tokens of the context before scaling. beta_fast, beta_slow, truncate are for yarn; low, high for
    llama3."""

    kind: str = "default"
    factor: float = 1.0
    amplitude: float = 1.0
    original: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low: float = 1.0
    high: float = 4.0

    @classmethod
    def of(cls, get: Values, max_context: int) -> Scaling:
        """Return the scaling that a config describes. max_context: the config's max_position_embeddings, used where the settings have no
        original length. Raises ModelError for kinds that are not supported and values that are out of range."""
        kind = kind_of(get)
        if kind not in KINDS:
            raise ModelError(
                f"config.json: rotary positions of kind {short(kind)} are not supported; supported are {', '.join(KINDS)}."
            )
        if kind == "default":
            return cls()
        factor = get.number("factor")
        if kind == "linear":
            return cls(kind=kind, factor=factor)
        original = get.size("original_max_position_embeddings", max_context)
        if kind == "llama3":
            low, high = get.number("low_freq_factor"), get.number("high_freq_factor")
            if low >= high:
                raise ModelError("config.json: low_freq_factor must be below high_freq_factor.")
            return cls(kind=kind, factor=factor, original=original, low=low, high=high)
        return cls(
            kind=kind,
            factor=factor,
            amplitude=_amplitude(get, factor),
            original=original,
            beta_fast=get.number("beta_fast", 32.0),
            beta_slow=get.number("beta_slow", 1.0),
            truncate=get.flag("truncate", True),
        )

    def apply(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Return the scaled frequencies (P,). frequencies (P,): radians for each position of the rotated pairs, theta^(-i / P)."""
        if self.kind == "default":
            return frequencies
        slowed = frequencies / self.factor
        if self.kind == "linear":
            return slowed
        if self.kind == "llama3":
            # pairs by turns within the original context: up to `low` they are slowed down, from `high` on they are not
            turns = self.original * frequencies / (2 * math.pi)
            kept = np.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
        else:
            kept = 1.0 - self._ramp(len(frequencies), theta)
        return np.asarray(kept * frequencies + (1.0 - kept) * slowed)

    def _ramp(self, num_pairs: int, theta: float) -> np.ndarray:
        """Return yarn's weights (P,): 0 for pairs whose frequency stays, 1 for pairs whose frequency is divided by the factor."""

        def pair_of(turns: float) -> float:
            """Return the number of the pair, as a float, that makes `turns` full turns within the original context."""
            return num_pairs * math.log(self.original / (2 * math.pi * turns)) / math.log(theta)

        first, last = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * num_pairs - 1)
        if first == last:
            last += 0.001
        return np.clip((np.arange(num_pairs) - first) / (last - first), 0.0, 1.0)


UNSCALED = Scaling()


def kind_of(rope: Values) -> Any:
    """Return the kind that rotary settings name, under `rope_type` or `type`; "default" where they name none."""
    return rope.value("rope_type", rope.value("type", "default"))


def merged(
    get: Values, kind: str | None = None, theta: str = "rope_theta", default: Mapping[str, Any] | None = None
) -> Values:
    """Return the rotary settings that `rope_parameters`, `rope_scaling` (its older name) and the top level give together. kind: the kind of
    layers, where each kind has its own settings; `rope_scaling` then applies to full attention. theta: the name of rope_theta at the top
    level. default: settings where `rope_parameters` is empty. Raises ModelError where two places give different values."""
    found: dict[str, Any] = {}
    newer = get.object("rope_parameters")
    if kind is not None and newer.keys() - set(LAYER_KINDS):
        raise ModelError(
            f"config.json: rope_parameters must describe {' and '.join(LAYER_KINDS)}, and nothing else."
        )
    newer = mapping(newer, kind) if newer and kind is not None else newer or default or {}
    older = get.object("rope_scaling") if kind != LAYER_KINDS[0] else {}
    described = [_plain(newer), _plain(older)]
    stretches = any(rope.get("rope_type", "default") != "default" for rope in described)
    for rope in described:
        # transformers writes a default description beside an older one that stretches: only what all kinds have is meant
        is_idle = stretches and rope.get("rope_type") == "default"
        _add(
            found,
            {k: v for k, v in rope.items() if not is_idle or (k in _COMMON and k != "rope_type")},
        )
    _add(found, {"rope_theta": get.value(theta), _PART: get.value(_PART)})
    get.parts.append(Values(found, _KEYS))
    return get.parts[-1]


def theta_of(rope: Values) -> float:
    """Return the base of the angles, rope_theta. Raises ModelError where the settings have none."""
    if rope.value("rope_theta") is None:
        raise ModelError("config.json names no rope_theta, for which there is no common default.")
    return rope.number("rope_theta")


def _plain(rope: Mapping[str, Any]) -> dict[str, Any]:
    own = {k: v for k, v in rope.items() if k != "type"}
    return own | {"rope_type": kind_of(Values(rope))} if rope else own


def _add(found: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if value is not None and found.setdefault(key, value) != value:
            raise ModelError(
                f"config.json gives two values of {key} for rotary positions, {short(found[key])} and {short(value)}."
            )


def _amplitude(get: Values, factor: float) -> float:
    """Return yarn's factor of cosines and sines. Longer contexts make attention flatter, and the factor makes it sharper."""

    def by(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scales = [get.value("mscale"), get.value("mscale_all_dim")]
    if get.value("attention_factor") is not None:
        return get.number("attention_factor")
    if all(scales):
        return by(get.number("mscale")) / by(get.number("mscale_all_dim"))
    return by(1.0)
