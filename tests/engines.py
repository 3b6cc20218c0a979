"""Engines for tests: those that a session shares, made when first asked for and closed at its end.

A shared engine keeps what requests leave in it: texts in its prefix cache, times in its costs. A test that counts such things, plants
something or changes options makes its own with `equality.engine`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import mlx.core as mx
import numpy as np

import mlxspec
from mlxspec.config import EngineConfig
from mlxspec.drafters.base import Ask, Draft, Drafter
from mlxspec.drafters.dflash import DFlashDrafter
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.eagle3 import Eagle3
from mlxspec.drafters.gemma_assistant import GemmaAssistant
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine
from mlxspec.models.base import Model
from mlxspec.models.head_rows import HeadRows
from mlxspec.sampling.sampler import BatchSampler
from tests import families, tiny_models
from tests.engine import equality

LISTED = range(30, 70)  # ids that models propose, beside a text's own, where they read some rows of the head
_made: list[Engine] = []
Given = ParamSpec("Given")
Made = TypeVar("Made", bound=Engine)


def once(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """The function makes an engine once for equal arguments; `close_all` closes it."""

    @functools.cache
    def cached(*args: Given.args, **named: Given.kwargs) -> Made:
        engine = make(*args, **named)
        _made.append(engine)
        return engine

    return cached  # type: ignore[return-value]


def close_all() -> None:
    while _made:
        _made.pop().close()


@once
def demo(**options: Any) -> Engine:
    """The built-in model, loaded with these options, whose values must be hashable."""
    return mlxspec.load("demo", **options)


class Own(equality.Oracle):
    """A user's drafter: right with a probability, on the device, with confidences in the model's dtype."""

    name = "own"

    def __init__(self, dtype: mx.Dtype, *, sure: float = 0.8) -> None:
        super().__init__([], sure=sure)
        self._dtype = dtype

    def draft(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        return [self._on_device(draft) for draft in super().draft(asks, sampler)]

    def _on_device(self, draft: Draft) -> Draft:
        if not draft.length:
            return draft
        sure = mx.full((draft.length,), 0.75, self._dtype)
        return Draft(draft.length, mx.array(draft.tokens, mx.int32), sure)


@once
def plain(family: str, form: str = "float32", *, kv_bits: int = 16) -> Engine:
    """Without drafters and without a prefix cache."""
    return _engine(family, form, [], prefix_budget=0, kv_bits=kv_bits)


@once
def drafting(
    family: str,
    form: str = "float32",
    *,
    block: str = "DFlash",
    kv_bits: int = 16,
    some_rows: bool = False,
    prefix_budget: int = 4 << 20,
) -> Engine:
    """With every drafter there is for the family. block: the kind of block drafter, the first kind without a window. kv_bits: of the
    target; drafters keep 8 bits where it keeps fewer than 16. some_rows: models propose from LISTED rows of their head, kept in 4 bits."""
    drafters = made_drafters(
        families.target(family, form), family, form, block=block, kv_bits=kv_bits, some_rows=some_rows
    )
    return _engine(
        family, form, drafters, prefix_budget=prefix_budget, kv_bits=kv_bits, max_rows=4, prefill_chunk=32
    )


def made_drafters(
    model: Model,
    family: str,
    form: str,
    *,
    block: str = "DFlash",
    kv_bits: int = 16,
    some_rows: bool = False,
    told: bool = True,
) -> list[Drafter]:
    """One of each kind for a target of that family. told: with those that must be told how texts go on."""
    kinds, context, bits = families.drafting(family), model.max_context, 16 if kv_bits == 16 else 8

    def rows(reads: Model) -> HeadRows | None:
        if not some_rows:
            return None
        return HeadRows(reads.head_module, LISTED, reads.vocab_size, bits=4, capped=reads.capped)

    drafters: list[Drafter] = [Own(model.dtype)] if told else []
    if "mtp" in kinds and family in families.GEMMA:
        drafters.append(
            GemmaAssistant(families.make_assistant(model, families.CLUSTERS.get(family, 0), form), context)
        )
    elif "mtp" in kinds:
        head = tiny_models.make_mtp(families.QWEN[family], model, form=form)
        drafters.append(Mtp(head, context, rows(model), kv_bits=bits))
    if "eagle3" in kinds:
        ids = np.sort(np.random.default_rng(5).permutation(model.vocab_size)[: 3 * model.vocab_size // 4])
        eagle = tiny_models.eagle3_for(families.QWEN[family], model, form=form, ids=ids)
        drafters.append(Eagle3(eagle, context, kv_bits=bits))
    if "dflash" in kinds:
        like, window = families.dense(family) if family == "wide" else None, None if block == "DFlash" else 9
        made = tiny_models.make_dflash(model, block, form=form, window=window, like=like)
        listed = rows(model) if block == "DFlash" else None  # the others pick tokens in order
        drafter = equality.Nudged if told else DFlashDrafter
        drafters.append(drafter(made, context, head_rows=listed, kv_bits=bits))
    if "draft-model" in kinds:
        small = families.draft_model(family, form)
        drafters.append(DraftModel(small, model.vocab_size, rows(small), kv_bits=bits))
    lookups = [ngram_lookup("ngram-simple", 2, 12)]
    lookups += [ngram_lookup(name, 2, 8, 1) for name in ("ngram-map-k", "ngram-map-k4v")]
    return [*drafters, *lookups]


def _engine(family: str, form: str, drafters: Sequence[Drafter], **config: Any) -> Engine:
    model = families.target(family, form)
    return Engine(model, tiny_models.tokenizer(), drafters=drafters, config=EngineConfig(**config))
