"""`load`: a model's name to an engine that can answer. Ties folders, weights, tokenizer and drafters together; owns no logic of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from mlxspec import device
from mlxspec.config import EngineConfig, SpecConfig
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.draft_model import DraftModel, check_vocabularies
from mlxspec.drafters.mtp import Mtp
from mlxspec.drafters.ngram_cache import NgramCache
from mlxspec.drafters.ngram_map import NgramMapK, NgramMapK4v
from mlxspec.drafters.ngram_mod import NgramMod
from mlxspec.drafters.ngram_simple import NgramSimple
from mlxspec.drafters.ngram_table import NgramTable
from mlxspec.engine.engine import Engine
from mlxspec.errors import ConfigError, ModelError
from mlxspec.kernels import races
from mlxspec.loading import hub
from mlxspec.loading.tokenizer import Tokenizer, read_json
from mlxspec.loading.weights import read_folder
from mlxspec.models.assemble import Assembled, assemble

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def load(
    model: str = hub.DEMO,
    *,
    draft: str | Sequence[str] = "auto",
    draft_model: str | None = None,
    spec: SpecConfig | None = None,
    config: EngineConfig | None = None,
    dtype: str | None = None,
) -> Engine:
    """Load a model and its drafters.

    model: `demo`, a folder, or a Hugging Face id. draft: "off", "auto" (everything this model has: n-gram lookup, then its MTP
    head, else the draft model), or names in the order in which they are asked. draft_model: folder or id; the demo brings its own.
    spec: limits of the drafts (its `drafters` are replaced by `draft` unless that is "auto" and spec names some). dtype: "float32",
    "float16", "bfloat16" or None, which keeps the stored one on a GPU and takes float32 on a CPU.

    Raises MlxspecError subclasses with one sentence; nothing stays half-loaded.
    """
    spec = spec or SpecConfig()
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype!r}.")
    asked = _asked(draft, spec)
    folder = hub.resolve(model)
    if draft_model is None and model == hub.DEMO:
        draft_model = hub.DEMO_DRAFT
    with device.private_kernels():
        races.prepare()
        target = _read(folder, dtype)
        tokenizer = _tokenizer(folder, target)
        names = _names(asked, target, draft_model)
        drafters = [
            _drafter(name, spec, target, tokenizer, draft_model, dtype) for name in names if name != "forced"
        ]
    engine = Engine(
        target.model,
        tokenizer,
        drafters=drafters,
        spec=replace(spec, drafters=names),
        config=config,
        name=model,
    )
    if names and spec.policy == "auto":
        engine.prepare_auto(keep=True)
    return engine


def _asked(draft: str | Sequence[str], spec: SpecConfig) -> tuple[str, ...] | None:
    """Drafter names, () for off, None for auto."""
    if draft == "auto":
        return spec.drafters or None
    if draft == "off":
        return ()
    names = tuple(n.strip() for n in draft.split(",")) if isinstance(draft, str) else tuple(draft)
    if {"off", "auto"} & set(names):
        raise ConfigError("`off` and `auto` stand alone in a list of drafters.")
    return SpecConfig(drafters=names).drafters


def _names(asked: tuple[str, ...] | None, target: Assembled, draft_model: str | None) -> tuple[str, ...]:
    if asked is None:
        model_based = ("mtp",) if target.mtp is not None else ("draft-model",) if draft_model else ()
        return ("ngram-simple", *model_based)
    if "mtp" in asked and target.mtp is None:
        raise ModelError(
            "This model has no MTP head (conversions by mlx-lm drop it); take the original repository, or leave `mtp` out."
        )
    if "draft-model" in asked and draft_model is None:
        raise ConfigError(
            "Drafting with a draft model needs one: name it with --draft-model (draft_model=...)."
        )
    return asked


def _read(folder: Path, dtype: str | None) -> Assembled:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"There is no config.json in {folder}.")
    try:
        config = read_json(path)
    except ModelError as error:
        raise ModelError(str(error)) from error
    return assemble(config, lambda: read_folder(folder), _DTYPES[dtype] if dtype else None)


def _tokenizer(folder: Path, target: Assembled) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer.vocab_size > target.model.vocab_size:
        raise ModelError(
            f"The tokenizer in {folder} knows {tokenizer.vocab_size} ids, the model only {target.model.vocab_size}."
        )
    return tokenizer


def _drafter(
    name: str,
    spec: SpecConfig,
    target: Assembled,
    tokenizer: Tokenizer,
    draft_model: str | None,
    dtype: str | None,
) -> Drafter:
    if name.startswith("ngram-"):
        return make_ngram_drafter(name, spec, target.model.vocab_size)
    if name == "mtp" and target.mtp is not None:
        return Mtp(target.mtp, target.model.max_context)
    if name == "draft-model" and draft_model is not None:
        folder = hub.resolve(draft_model)
        small = _read(folder, dtype)
        check_vocabularies(
            tokenizer, _tokenizer(folder, small), target.model.vocab_size, small.model.vocab_size
        )
        return DraftModel(small.model, target.model.vocab_size)
    raise ConfigError(f"The drafter {name} cannot be made.")


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
