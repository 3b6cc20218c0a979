"""What holds at a drafted position, against values computed here step by step in NumPy: penalties, forbidden tokens, p_min, and the cut.

Nothing is compared with another path through the engine, which could share the fault.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.base import Ask, Draft, Drafter
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.drafts import Drafts
from mlxspec.engine.engine import Engine
from mlxspec.engine.request import Request
from mlxspec.engine.round import sample_round
from mlxspec.kernels.flat import FlatRows
from mlxspec.policy.fixed import Fixed
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler
from tests import tiny_models
from tests.engine.table import Table
from tests.tiny_models import EOS, VOCAB

SIZE = 12


class Guess(Drafter):
    """Drafts what `tell` says of a text, however wrong it is."""

    name = "guess"
    max_draft = 12

    def __init__(self, tell) -> None:
        self._tell = tell

    def draft(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        return [Draft.of(self._tell(list(a.history))[: a.limit]) for a in asks]


def table(seed: int, size: int = SIZE) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((size, size)) * 2).astype(np.float32)


# ---- penalties


def penalized(logits: np.ndarray, params: SamplingParams, prompt: list[int], answer: list[int]) -> np.ndarray:
    """logits (V,) float32 behind prompt and answer, one rule after another as the parameters are defined."""
    out = logits.copy()
    for token in range(len(out)):
        count = answer.count(token)
        if count or token in prompt:
            if out[token] > 0:
                out[token] /= np.float32(params.repetition_penalty)
            else:
                out[token] *= np.float32(params.repetition_penalty)
        out[token] -= np.float32(params.presence_penalty) * (count > 0)
        out[token] -= np.float32(params.frequency_penalty) * count
    return out


PENALTIES = (
    {"frequency_penalty": 0.9},
    {},
    {"presence_penalty": 1.1, "repetition_penalty": 1.6},
    {"repetition_penalty": 0.6, "frequency_penalty": -0.7, "presence_penalty": 0.4},
)


def test_penalties_at_drafted_positions_are_those_of_each_rows_own_text() -> None:
    """Rows of different widths, penalties and drafts in one round: at each position the text up to it counts, and nothing else."""
    rng = np.random.default_rng(5)
    moved = 0
    for _ in range(40):
        requests, proposals, flat, texts = [], [], [], []
        for options in PENALTIES:
            prompt, answer, draft = (rng.integers(0, SIZE, n).tolist() for n in (2, 3, rng.integers(0, 6)))
            request = Request(
                0,
                prompt,
                SamplingParams(max_tokens=40, **options),
                SpecConfig(),
                max_context=64,
                vocab_size=SIZE,
                tokenizer=None,
            )
            request.accept(answer)
            requests.append(request)
            proposals.append(Draft.of(draft)._replace(drafter="g", width=len(draft)))
            flat += [answer[-1], *draft]
            texts += [(request.params, prompt, answer + draft[:i]) for i in range(len(draft) + 1)]
        rows = FlatRows(tuple(1 + draft.width for draft in proposals))
        logits = (rng.standard_normal((rows.num_tokens, SIZE)) * 0.7).astype(np.float32)
        found = sample_round(requests, proposals, mx.array(flat, mx.int32), mx.array(logits))
        wanted = [int(np.argmax(penalized(x, *text))) for x, text in zip(logits, texts, strict=True)]
        assert found.tokens.tolist() == wanted
        undrafted = [
            int(np.argmax(penalized(x, p, prompt, answer[:3])))
            for x, (p, prompt, answer) in zip(logits, texts, strict=True)
        ]
        moved += sum(a != b for a, b in zip(wanted, undrafted, strict=True))
    assert moved > 30  # so often the drafted tokens decided


@pytest.mark.parametrize("wrong_at", [None, 0, 2])
def test_a_penalized_text_and_its_accepted_drafts_are_exact(wrong_at: int | None) -> None:
    """Rows that draft their own right text, or a wrong token somewhere in it."""
    params = [SamplingParams(max_tokens=25, **{"frequency_penalty": 0.4, **o}) for o in PENALTIES]
    logits, prompts = table(3), [[1, 2], [3], [4, 4, 5], [6]]
    wanted = []
    for prompt, p in zip(prompts, params, strict=True):
        answer: list[int] = []
        for _ in range(25):
            answer.append(int(np.argmax(penalized(logits[[*prompt, *answer][-1]], p, prompt, answer))))
        wanted.append(answer)
    texts = [p + a for p, a in zip(prompts, wanted, strict=True)]

    def tell(history: list[int]) -> list[int]:
        text = next(t for t in texts if t[: len(history)] == history)
        rest = text[len(history) : len(history) + 4]
        if wrong_at is not None and wrong_at < len(rest):
            rest[wrong_at] = (rest[wrong_at] + 1) % SIZE
        return rest

    engine = Engine(Table(logits), None, drafters=[Guess(tell)], spec=SpecConfig(drafters=("guess",)))
    results = engine.generate(prompts, params)
    assert [list(r.tokens) for r in results] == wanted
    for result in results:
        stats = result.stats
        if wrong_at is None:
            assert (
                stats.num_accepted == stats.num_drafted == 19
            )  # four a round, five of 24 tokens are not drafted
        else:
            assert stats.num_accepted < stats.num_drafted


# ---- forbidden tokens, thinking budgets, ignored ends

LETTERS = 20  # the table model says letters in a ring of this size


def ids(text: str) -> list[int]:
    return [ord(c) - 32 for c in text]


def ring() -> np.ndarray:
    """Each token is followed by the next letter of a ring, or else by one of the two behind that; ">" by the ring's first letter."""
    logits = np.zeros((VOCAB, VOCAB), np.float32)
    first = ids("a")[0]
    for token in range(VOCAB):
        place = -1 if token == ids(">")[0] else (token - first) % LETTERS
        for rank in range(1, 4):
            logits[token, first + (place + rank) % LETTERS] = 10 - rank
    return logits


def said(logits: np.ndarray, start: int, num: int, forced: dict[int, int], banned) -> list[int]:
    """The text by hand: at each place what is forced there, or the likeliest token that `banned(answer)` does not hold."""
    answer: list[int] = []
    for place in range(num):
        x = logits[answer[-1] if answer else start].copy()
        x[list(banned(answer))] = -np.inf
        answer.append(forced[place] if place in forced else int(np.argmax(x)))
    return answer


def run(logits: np.ndarray, prompt: str, params: SamplingParams, tell) -> tuple[list[int], object]:
    spec = SpecConfig(drafters=("guess",), policy="fixed")
    model, config = Table(logits, max_context=200), EngineConfig(prefix_budget=0)
    engine = Engine(model, tiny_models.tokenizer(), drafters=[Guess(tell)], spec=spec, config=config)
    result = engine.generate(prompt, params)
    assert not result.stats.notices
    return list(result.tokens), result.stats


@catches(
    "a thinking budget is looked for at a round's first position only",
    "mlxspec.sampling.constraints:Constraints.reaches",
    lambda right: lambda self, width: right(self, 1),
    case="[5-right-5]",
)
@pytest.mark.parametrize("length", [1, 2, 5, 9, 12])
@pytest.mark.parametrize("knows", [True, False], ids=["right", "unaware"])
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 5, 8, 13])
def test_a_thinking_budget_that_ends_inside_a_draft_is_exact(budget: int, knows: bool, length: int) -> None:
    """The closing tag stands behind just so many tokens, wherever in a draft that is and whether or not the drafter knows of it."""
    logits, num = ring(), 40
    forced = {budget + i: t for i, t in enumerate(ids("</think>"))}
    wanted = said(logits, ids(">")[0], num, forced, lambda answer: ())
    free = said(logits, ids(">")[0], 2 * num, {}, lambda answer: ())

    def tell(history: list[int]) -> list[int]:
        at = len(history) - len("<think>")
        if knows:
            return wanted[at : at + length]
        # on along the ring, whatever the budget says
        follows = (
            [free[(free.index(history[-1]) + 1 + i) % LETTERS] for i in range(length)]
            if history[-1] in free
            else free
        )
        return follows[:length]

    params = SamplingParams(max_tokens=num, thinking_budget=budget)
    found, stats = run(logits, "<think>", params, tell)
    assert found == wanted
    assert (stats.num_thinking, stats.num_thinking_forced) == (budget, len("</think>"))
    if knows:
        assert stats.num_accepted == stats.num_drafted


@pytest.mark.parametrize("ends_at", [(), (0,), (3,), (3, 4), (1, 6, 11)])
@pytest.mark.parametrize("asked", ["words", "budget", "both"])
def test_ignored_end_tokens_inside_drafts_lift_nothing(asked: str, ends_at: tuple[int, ...]) -> None:
    """The text says end tokens at some places, which it ignores; drafts hold them, and what is forbidden behind them stays so."""
    words, budget, num = ("bc", "f", "hij"), 9, 30
    logits = ring()
    end_after = {ids("abcdefghijkl"[i])[0] for i in ends_at}
    for token in end_after:
        logits[token, EOS] = 20

    def banned(answer: list[int]) -> set[int]:
        if asked == "budget":
            return set()
        text = "".join(chr(32 + t) for t in answer if t != EOS)
        return {
            t
            for t in ids("abcdefghijklmnopqrstuvwxyz")
            if any((text + chr(32 + t)).endswith(w) for w in words)
        }

    forced = {} if asked == "words" else {budget + i: t for i, t in enumerate(ids("</think>"))}
    wanted = said(logits, ids(">")[0], num, forced, banned)
    assert EOS in wanted or not ends_at
    more = {} if asked == "words" else {"thinking_budget": budget}
    more |= {} if asked == "budget" else {"bad_words": words}
    params = SamplingParams(max_tokens=num, ignore_eos=True, **more)
    start = len("<think>")
    for tell in (
        lambda history: wanted[len(history) - start :][:7],
        lambda history: [EOS, *ids("bcfhij")],
        lambda history: [*wanted[len(history) - start :][:1], EOS, *ids("abc")],
        lambda history: [EOS] * 5,
    ):
        found, stats = run(logits, "<think>", params, tell)
        assert found == wanted
        assert stats.num_drafted


# ---- p_min


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("p_min", [0.3, 0.5])
def test_p_min_goes_by_the_likeliest_token(p_min: float) -> None:
    """A draft ends before the first place at which the drafter's likeliest token is below p_min, whichever token was drawn there."""
    size, depth = 8, 6
    draft = (np.random.default_rng(2).standard_normal((size, size)) * 1.8).astype(np.float32)
    q = softmax(draft)
    unlikely = shorter = 0
    drafts = Drafts([DraftModel(Table(draft), size)], size)
    spec = SpecConfig(drafters=("draft-model",), n_max=depth, p_min=p_min, policy="fixed")
    for row in range(60):
        sampler = RowSampler(SamplingParams(temperature=1.0, seed=row), [0], size)
        first = row % size
        drafts.begin(row, [first], spec, sampler, Fixed())
        drafts.hear(row, [first], None)
        found = drafts.propose({row: depth}).draft(row)
        drafts.close(row)
        tokens = np.asarray(found.tokens)[: found.width].astype(int).tolist()
        before = [first, *tokens]
        for place, token in enumerate(tokens):
            assert q[before[place]].max() >= p_min
            unlikely += q[before[place], token] < p_min
        if len(tokens) < depth:
            assert q[before[-1]].max() < p_min
            shorter += 1
    assert unlikely > 10  # drawn tokens that their own probability would have dropped
    assert shorter > 10
