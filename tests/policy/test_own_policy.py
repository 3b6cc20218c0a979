"""A policy of two functions and what it has to know: it drafts three tokens where the last draft was right, and the text stays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence

import pytest
from planting import catches

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.base import Draft
from mlxspec.drafters.policy import PLAIN, LearnedRound, Policy, RowChoice
from mlxspec.drafters.row import DraftRow
from mlxspec.engine.engine import Engine
from tests import tiny_models
from tests.engine import equality

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, seed=3)


class Threes(Policy):
    """Asks the first drafter for three tokens; after a wrong draft one round is plain."""

    looks_up = True

    def __init__(self) -> None:
        self.was_wrong: set[int] = set()
        self.learned: list[LearnedRound] = []
        self.judged: list[tuple[str, int]] = []

    def choose(self, rows: Sequence[DraftRow], offers: Sequence[Mapping[str, Draft]]) -> list[RowChoice]:
        return [self._choice(row, given) for row, given in zip(rows, offers, strict=True)]

    def _choice(self, row: DraftRow, given: Mapping[str, Draft]) -> RowChoice:
        if row.number in self.was_wrong:
            self.was_wrong.discard(row.number)
            return PLAIN
        for drafter, longest in row.limits:
            if drafter.name not in given or given[drafter.name].length:
                return RowChoice(drafter=drafter.name, length=min(3, longest, row.room))
        return PLAIN

    def judge(self, row: DraftRow, draft: Draft, matched: int, known: int) -> None:
        self.judged.append((draft.drafter, matched))
        if not matched:
            self.was_wrong.add(row.number)

    def learn(self, done: LearnedRound) -> None:
        self.learned.append(done)


@catches(
    "a model's drafts are not compared with the text",
    "mlxspec.drafters.drafts:Drafts.take_up",
    lambda right: lambda self, plan: None,
    case="greedy",
)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafters", [("mtp",), ("mtp", "draft-model")], ids="+".join)
def test_a_policy_of_two_functions(drafters: tuple[str, ...], params: SamplingParams) -> None:
    made, policy = equality.engine(prefix_budget=0), Threes()
    prompts = equality.prompts(3, 5)
    wanted = Engine(tiny_models.target(), tiny_models.tokenizer()).generate(prompts, params)
    requests = [made.submit(p, params, spec=SpecConfig(drafters=drafters)) for p in prompts]
    for request in requests:
        made.policies.lead(request.number, policy)
    while not made.is_idle:
        made.step()
    assert [tuple(r.history[len(r.prompt) :]) for r in requests] == [r.tokens for r in wanted]
    stats = [d for r in requests for d in r.stats.drafters.values()]
    assert sum(d.num_accepted for d in stats) > 0
    assert all(len(d.by_position) <= 3 for d in stats)
    verified = sum(d.num_drafted for d in stats)
    assert sum(done.num_tokens - done.num_rows for done in policy.learned) == verified
    assert {call.name for done in policy.learned for call in done.calls} == {drafters[0]}
    # the answer's end may leave the last draft unjudged
    num_drafts = sum(d.num_rounds for d in stats)
    assert num_drafts - len(prompts) <= len(policy.judged) <= num_drafts
    assert sum(matched for _, matched in policy.judged) >= sum(d.num_accepted for d in stats) - 3 * len(
        prompts
    )
    gone = weakref.ref(policy)
    del policy
    gc.collect()
    assert gone() is None, "rows that have ended keep their policy"
    made.close()
