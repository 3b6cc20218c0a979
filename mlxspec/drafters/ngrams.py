"""Makes the n-gram drafter of a name, with the settings that a SpecConfig has for it."""

from __future__ import annotations

from mlxspec.config import SpecConfig
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.ngram_map import NgramMapK, NgramMapK4v
from mlxspec.drafters.ngram_simple import NgramSimple
from mlxspec.errors import ConfigError


def make_ngram_drafter(name: str, spec: SpecConfig) -> Drafter:
    """An n-gram drafter needs no model. Raises ConfigError for an unknown name."""
    if name == "ngram-simple":
        return NgramSimple(spec.ngram_n, spec.ngram_m)
    if name == "ngram-map-k":
        return NgramMapK(spec.ngram_n, spec.ngram_m, spec.ngram_min_hits)
    if name == "ngram-map-k4v":
        return NgramMapK4v(spec.ngram_n, spec.ngram_m, spec.ngram_min_hits)
    raise ConfigError(f"The drafter {name} cannot be made.")
