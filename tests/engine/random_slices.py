"""Which random requests the tests of a room play: for each value of an axis one case in the fast tier, and MORE in the slow one.

`LIVELY` has the number of each fast case: one whose drafts partly stand and partly fall, since equal texts prove little otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests import families, tiny_models
from tests.engine.random_requests import CONSTRAINTS, DRAFTERS, GRAMMARS, SAMPLERS, Case, case, play

MORE = 3
_SMALL = {"num_rows": (1, 2), "num_turns": (1, 2), "policy": ("fixed",)}
_ALIKE = tuple(
    name for name in DRAFTERS if name not in ("none", "suffix")
)  # they draft alike whatever was said before
_TINY = {
    "family": ("hybrid",),
    "form": ("float32",),
    "kv_bits": (16,),
    "block": ("DFlash",),
    "some_rows": (False,),
    "drafter": _ALIKE,
}
# by slice: for each value what the fast case holds fast, and what the slow ones do
Fixed = dict[str, Sequence[Any]]
SLICES: dict[str, dict[str, tuple[Fixed, Fixed]]] = {
    "family": {
        name: (
            {**_SMALL, "form": ("float32",), "kv_bits": (16,), "family": (name,), "drafter": _ALIKE},
            {"family": (name,)},
        )
        for name in families.NAMES
    },
    "form": {form: ({**_SMALL, **_TINY, "form": (form,)}, {"form": (form,)}) for form in tiny_models.FORMS},
    "drafter": {
        name: (
            {**_SMALL, **_TINY, "drafter": (name,), "constraint": ("none",)},
            {"drafter": (name,), "family": ("hybrid", "wide", "qwen3", "gemma4-dense")},
        )
        for name in DRAFTERS
    },
    "block": {
        kind: (
            {**_SMALL, **_TINY, "block": (kind,), "drafter": ("dflash",)},
            {"block": (kind,), "drafter": ("dflash",)},
        )
        for kind in ("DFlash", "DFlash2", "DSpark")
    },
    "sampler": {
        name: ({**_SMALL, **_TINY, "sampler": (name,)}, {"sampler": (name,), "family": ("hybrid",)})
        for name in SAMPLERS
    },
    "constraint": {
        name: ({**_SMALL, **_TINY, "constraint": (name,)}, {"constraint": (name,), "family": ("hybrid",)})
        for name in CONSTRAINTS
    },
    "kv_bits": {
        f"{bits}-{form}": (
            {
                **_SMALL,
                "family": ("wide",),
                "kv_bits": (bits,),
                "form": (form,),
                "num_turns": (2,),
                "drafter": _ALIKE,
            },
            {"family": ("wide",), "kv_bits": (bits,)},
        )
        for bits in (8, 4)
        for form in ("float32", "bfloat16")
    },
    "some_rows": {
        form: (
            {
                **_SMALL,
                **_TINY,
                "form": (form,),
                "some_rows": (True,),
                "drafter": ("mtp", "dflash", "draft-model"),
            },
            {"some_rows": (True,), "form": (form,), "drafter": ("mtp", "dflash", "draft-model")},
        )
        for form in ("float32", "bfloat16", "4bit")
    },
    "auto": {
        form: (
            {
                **_TINY,
                "policy": ("auto",),
                "form": (form,),
                "num_rows": (2,),
                "num_turns": (1,),
                "drafter": ("own", "mtp", "suffix"),
            },
            {"policy": ("auto",), "form": (form,)},
        )
        for form in ("float32", "bfloat16", "4bit")
    },
    "joins": {
        f"{joins}-{num}": (
            {**_TINY, "joins": (joins,), "num_rows": (num,), "num_turns": (2,), "policy": ("fixed",)},
            {"joins": (joins,), "num_rows": (num,)},
        )
        for joins in ("together", "staggered", "at random")
        for num in (2, 4)
    },
    "prefix_budget": {
        str(budget): (
            {**_TINY, "prefix_budget": (budget,), "num_rows": (3,), "num_turns": (3,), "policy": ("fixed",)},
            {"prefix_budget": (budget,), "num_turns": (3,)},
        )
        for budget in (0, 100_000, 4 << 20)
    },
}
LIVELY: dict[str, dict[str, int]] = {
    "family": {
        "attention": 3,
        "recurrent": 7,
        "hybrid": 22,
        "ends-linear": 22,
        "moe": 35,
        "moe-attention-first": 35,
        "qwen3-next": 42,
        "qwen3-moe": 49,
        "qwen3": 56,
        "wide": 63,
        "gemma3": 301,
        "gemma4-dense": 79,
        "gemma4-e": 88,
        "gemma4-moe": 91,
        "llama": 99,
        "gpt_oss": 105,
        "lfm2": 113,
        "mamba2": 119,
        "llama alone": 300,
        "gpt_oss alone": 136,
    },
    "form": {
        "float32": 2,
        "bfloat16": 7,
        "float16": 14,
        "4bit": 21,
        "8bit": 1,
        "4bit-float32": 39,
        "mxfp4": 43,
        "mxfp8": 52,
        "nvfp4": 56,
    },
    "drafter": {
        "none": 7,
        "mtp": 2,
        "eagle3": 7,
        "dflash": 15,
        "draft-model": 21,
        "own": 35,
        "forced": 48,
        "ngram-simple": 48,
        "ngram-map-k": 56,
        "ngram-map-k4v": 56,
        "suffix": 69,
    },
    "block": {"DFlash": 6, "DFlash2": 7, "DSpark": 18},
    "sampler": {
        "greedy": 2,
        "temperature": 11,
        "hot": 16,
        "top-p": 21,
        "top-k": 29,
        "min-p": 43,
        "top-n-sigma": 43,
        "typical-p": 49,
        "xtc": 56,
        "dry": 63,
        "repetition": 313,
        "repetition below 1": 315,
        "presence": 309,
        "last tokens": 102,
        "logit bias": 102,
        "processor": 105,
        "callable": 112,
        "all": 124,
    },
    "constraint": {
        "none": 2,
        "regex": 10,
        "counted": 14,
        "schema": 21,
        "stop": 29,
        "end tokens": 35,
        "bad words": 42,
        "thinking": 49,
        "allowed": 56,
        "least": 66,
    },
    "kv_bits": {"8-float32": 0, "8-bfloat16": 7, "4-float32": 313, "4-bfloat16": 22},
    "some_rows": {"float32": 2, "bfloat16": 7, "4bit": 18},
    "auto": {"float32": 0, "bfloat16": 11, "4bit": 17},
    "joins": {
        "together-2": 0,
        "together-4": 8,
        "staggered-2": 14,
        "staggered-4": 21,
        "at random-2": 28,
        "at random-4": 35,
    },
    "prefix_budget": {"0": 0, "100000": 8, "4194304": 14},
}


def fast_case(axis: str, value: str) -> Case:
    return case(LIVELY[axis][value], **SLICES[axis][value][0])


def cases(axis: str) -> list:
    """Parameters for `check`."""
    found = []
    for value, (_, fixed) in SLICES[axis].items():
        made = fast_case(axis, value)
        is_alike = set(made.spec.drafters) <= set(_ALIKE) and made.spec.drafters != ()
        found.append(pytest.param(made, is_alike, id=value))
        found += [
            pytest.param(case(n, **fixed), False, id=f"{value}-{n}", marks=pytest.mark.slow)
            for n in range(100, 100 + MORE)
        ]
    return found


def check(made: Case, is_alike: bool) -> None:
    """is_alike: drafts are the same whatever the engine has said before, so that some of them must stand and some must fall."""
    counts = play(made)
    if is_alike and made.spec.policy == "fixed":  # auto may find that drafts do not pay
        drafted, accepted = counts["drafted"], counts["accepted"]
        is_forced = any(ask.constraint in GRAMMARS for turn in made.turns for ask in turn)
        assert 0 < accepted < drafted or (is_forced and accepted), counts
