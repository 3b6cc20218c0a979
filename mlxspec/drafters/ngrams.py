"""Makes the n-gram drafter of a name, with the settings that a SpecConfig has for it."""

from __future__ import annotations

from mlxspec.config import SpecConfig
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.ngram_cache import NgramCache
from mlxspec.drafters.ngram_map import NgramMapK, NgramMapK4v
from mlxspec.drafters.ngram_mod import NgramMod
from mlxspec.drafters.ngram_simple import NgramSimple
from mlxspec.drafters.ngram_table import NgramTable
from mlxspec.errors import ConfigError


def make_ngram_drafter(name: str, spec: SpecConfig, vocab_size: int) -> Drafter:
    """An n-gram drafter needs no model. Raises ConfigError for an unknown name or a file of counts that cannot be used."""
    if name == "ngram-simple":
        return NgramSimple(spec.ngram_n, spec.ngram_m)
    if name == "ngram-map-k":
        return NgramMapK(spec.ngram_n, spec.ngram_m, spec.ngram_min_hits)
    if name == "ngram-map-k4v":
        return NgramMapK4v(spec.ngram_n, spec.ngram_m, spec.ngram_min_hits)
    if name == "ngram-mod":
        return NgramMod(spec.ngram_mod_n, spec.ngram_m)
    if name == "ngram-cache":
        files = (spec.ngram_dynamic, spec.ngram_static)
        dynamic, static = (NgramTable.load(path, vocab_size) if path else None for path in files)
        return NgramCache(spec.ngram_m, dynamic, static)
    raise ConfigError(f"The drafter {name} cannot be made.")
