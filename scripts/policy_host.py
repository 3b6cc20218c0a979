"""What the policy and a draft's choices cost the host, on a clock of this process's CPU time: microseconds that policy `auto` takes in a
round, and how long it takes to build the choice of one drafted token, beside the building of a plain step.

Of the policy: a real engine's `Drafts` over drafters that answer at once, without a model and without rounds; the calls are those of
engine/round.py and engine/pipeline.py. What drafters do when they are asked is left out, and so is telling them the text.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlxspec.cache.model_cache import ModelCache
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.base import Ask, Draft
from mlxspec.drafters.drafts import Drafts
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.drafters.model_based import DraftStep, ModelDrafter
from mlxspec.drafters.policy import RoundPlan
from mlxspec.models.base import Output
from mlxspec.policy.controller import Controller
from mlxspec.policy.costs import CostModel, DraftCost
from mlxspec.policy.policies import Policies
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler

VOCAB = 50_000
WIDTHS = {
    1: 0.01,
    2: 0.0105,
    4: 0.0125,
    8: 0.02,
    17: 0.04,
}  # seconds by width, as on a machine where drafting pays
WARM_UP = 500  # rounds
KINDS = ("plain", "drafted")
LARGE, LAYERS = 248_320, 24  # of Qwen3.5
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top-k 20, top-p 0.95": {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
    "top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "temperature": {"temperature": 0.7},
}


class _Head(ModelDrafter):
    """Says at once what the text goes on with. One token in ten is wrong, or all are, and it is as sure as that."""

    name = "mtp"

    def __init__(self, text: Sequence[int], *, is_right: bool) -> None:
        super().__init__(None, 1 << 20)
        self._text, self._is_right = text, is_right

    def begin(self, row: int) -> None: ...

    def hear(self, row: int, tokens: Sequence[int], hidden: mx.array | None) -> None: ...

    def draft(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        return [self._draft(len(a.history), a.limit) for a in asks]

    def _draft(self, start: int, length: int) -> Draft:
        tokens = [
            self._text[i] if self._is_right and i % 10 else VOCAB - 1 for i in range(start, start + length)
        ]
        return Draft(length, tokens, [0.9 if self._is_right else 0.1] * length)

    def forget(self, row: int) -> None: ...

    def _make_cache(self, num_rows: int, kv_bits: int | None = None) -> ModelCache:
        raise NotImplementedError

    def _forward(self, step: DraftStep) -> Output:
        raise NotImplementedError


def microseconds(kind: str, num_rounds: int) -> float:
    """Mean CPU microseconds of the policy in a round of one row with n-gram lookup and a head: in a plain round where no draft pays, or in
    one with a draft, most of which is accepted."""
    is_plain, rng = kind == "plain", random.Random(0)
    text = [rng.randrange(VOCAB - 1) for _ in range(10 * (num_rounds + WARM_UP))]
    for i in range(300, len(text) - 8, 40):  # something that has stood before, now and then
        text[i : i + 3] = text[i - 200 : i - 197]
    drafts = Drafts([ngram_lookup("ngram-simple", 3, 16), _Head(text, is_right=not is_plain)], VOCAB)
    apart = [0.0]
    for name in ("_ask", "tell", "may_look_up"):
        setattr(drafts, name, _apart(getattr(drafts, name), apart))
    policies = Policies()
    costs = CostModel()
    costs.know(WIDTHS, {"mtp": DraftCost(step=0.0008)})
    policies.follow(Controller(costs))
    history = text[:64]
    sampler = RowSampler(SamplingParams(), history, VOCAB)
    spec = SpecConfig(drafters=("ngram-simple", "mtp"), policy="auto")
    drafts.begin(0, history, spec, sampler, policies.of(0, spec))
    drafts.hear(0, history, None)
    drafts.prime(0)
    rooms = {0: 1 << 20}
    spent, ahead, counts = 0.0, False, dict.fromkeys(KINDS, 0)
    for turn in range(num_rounds + WARM_UP):
        started, before, plan = time.thread_time(), apart[0], RoundPlan()
        if not ahead:
            plan = drafts.propose(rooms) or plan
            drafts.take_up(plan)
        draft = plan.draft(0)
        follows = not draft.width and drafts.rests(rooms)
        spent += time.thread_time() - started - (apart[0] - before)
        drafted = list(draft.tokens[: draft.width])
        start = len(history)
        accepted = next((i for i, t in enumerate(drafted) if t != text[start + i]), len(drafted))
        tokens = text[start : start + accepted + 1]
        history.extend(tokens)
        took = costs.curve(0).seconds(1 + len(drafted)) * (0.97 + 0.06 * rng.random()) + 0.003 * bool(drafted)
        started, before = time.thread_time(), apart[0]
        drafts.hear(0, tokens, None)
        drafts.learn(plan, (0,), 1 + len(drafted), took, ahead=ahead, is_warm=True)
        spent += time.thread_time() - started - (apart[0] - before)
        ahead = follows
        if turn == WARM_UP:
            spent = 0.0
        counts["drafted" if drafted else "plain"] += turn > WARM_UP
    if counts[kind] < 0.9 * num_rounds:
        raise RuntimeError(f"these rounds were not {kind}: {counts}")
    return 1e6 * spent / num_rounds


def _apart(work: Callable[..., object], seconds: list[float]) -> Callable[..., object]:
    """The same, its time added to `seconds`."""

    def timed(*given: object, **options: object) -> object:
        started = time.thread_time()
        try:
            return work(*given, **options)
        finally:
            seconds[0] += time.thread_time() - started

    return timed


def shares_of_a_step(num_turns: int) -> dict[str, float]:
    """By what is asked: seconds of building the choice of one drafted token and its confidence, over those of building a plain step of 24
    layers. Medians of turns, each a step and the choices behind it, another one first each time. As on Metal: kernels are stubs
    (tests/models/metal_graph.py), and nothing is evaluated."""
    import pytest

    from tests.models import deep
    from tests.models.metal_graph import as_on_metal, blank

    seconds: dict[str, list[float]] = {name: [] for name in ("", *SAMPLING)}
    with as_on_metal(pytest.MonkeyPatch()):
        model, logits = deep.ours(LAYERS), blank((1, LARGE), mx.bfloat16)
        rows = {name: RowSampler(SamplingParams(**asked), [1], LARGE) for name, asked in SAMPLING.items()}
        for turn in range(num_turns + 1):
            cache = deep.filled(model, 300)
            began = time.thread_time()
            deep.forward(model, cache, [1], certain=True)
            took = {"": time.thread_time() - began}
            for i in range(len(rows)):
                name = list(rows)[(turn + i) % len(rows)]
                began = time.thread_time()
                BatchSampler([rows[name]], LARGE).draft(logits, [0], [300 + turn])
                took[name] = time.thread_time() - began
            for name, one in took.items():
                seconds[name] += [one] * (turn > 0)  # the first compiles
    return {name: statistics.median(seconds[name]) / statistics.median(seconds[""]) for name in rows}
