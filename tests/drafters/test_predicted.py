"""Predicted outputs: the alignment of an answer with a given text, the drafter, and texts that stay the same."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planting import catches

import mlxspec
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.alignment import Alignment
from mlxspec.drafters.base import Ask
from mlxspec.drafters.lookup import Lookup, PredictedRow
from mlxspec.engine.engine import Engine
from mlxspec.errors import ConfigError
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler

TEXT = random.Random(1).choices(range(300), k=600)
EDITS = {
    "nothing": TEXT,
    "an insertion": [*TEXT[:200], *range(1000, 1040), *TEXT[200:]],
    "a deletion": [*TEXT[:200], *TEXT[320:]],
    "a replacement": [*TEXT[:200], *range(1000, 1050), *TEXT[260:]],
    "a moved block": [*TEXT[400:], *TEXT[:400]],
    "a rename": [t if t != TEXT[7] else 999 for t in TEXT],
    "several": [*TEXT[:100], 1000, *TEXT[101:300], *TEXT[340:500], *range(1000, 1020), *TEXT[500:]],
}


def replayed(text: list[int], answer: list[int], most: int = 16) -> tuple[float, float]:
    """Tokens a round, and drafted tokens that were wrong for each token of the answer."""
    drafter, prompt = Lookup("predicted"), [5, 6, 7]
    drafter.open(0, PredictedRow(text, len(prompt)))
    drafter.hear(0, [*prompt[:2]], None)
    drafter.hear(0, [*prompt[2:], answer[0]], None)
    sampler = RowSampler(SamplingParams(), prompt, 2000)
    done, rounds, wrong = 1, 0, 0
    while done < len(answer):
        ask = Ask(0, [*prompt, *answer[:done]], most, sampler)
        (draft,) = drafter.draft([ask], BatchSampler([sampler], 2000))
        assert draft.length <= most
        assert bool(draft.length) <= drafter.may_draft(0)
        matched = 0
        while (
            matched < draft.length
            and done + matched < len(answer) - 1
            and draft.tokens[matched] == answer[done + matched]
        ):
            matched += 1
        rounds, wrong = rounds + 1, wrong + draft.length - matched
        drafter.hear(0, answer[done : done + matched + 1], None)
        done += matched + 1
    return len(answer) / rounds, wrong / len(answer)


@catches(
    "the place is lost at the first mismatch",
    "mlxspec.drafters.alignment:Alignment._found",
    lambda right: lambda self: (None, 0),
    case="deletion",
)
@pytest.mark.parametrize("kind", EDITS)
def test_an_edited_text_is_followed(kind: str) -> None:
    """Random tokens, of which each occurs twice on average: places are told apart by a few of them."""
    answer = EDITS[kind]
    rate, wrong = replayed(TEXT, answer)
    new = sum(token >= 900 for token in answer)  # each of them takes a round
    assert len(answer) / rate < new + 1.5 * len(answer) / 16 + 10
    assert wrong < 0.2


def test_what_has_nothing_to_do_with_the_answer_costs_little() -> None:
    rate, wrong = replayed(TEXT, random.Random(2).choices(range(300), k=600))
    assert rate >= 1
    assert wrong < 1


def test_ends_and_beginnings() -> None:
    assert replayed(TEXT[:1], TEXT)[0] >= 1
    assert replayed(TEXT, TEXT[:1] * 3)[0] >= 1
    empty = Alignment([])
    empty.push([1, 2, 3])
    assert empty.next(5) == []
    whole = Alignment(TEXT)
    whole.push(TEXT)
    assert whole.next(5) == []
    assert whole.agreed == len(TEXT)


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=60))
def test_a_place_is_behind_tokens_of_the_answer(text: list[int], answer: list[int]) -> None:
    """Whatever comes, in any pieces: the tokens said to agree do."""
    one, pieces = Alignment(text), Alignment(text)
    one.push(answer)
    for end, token in enumerate(answer, 1):
        pieces.push([token])
        if pieces.place is not None:
            n = min(pieces.agreed, 24)
            assert n == 0 or text[pieces.place - n : pieces.place] == answer[end - n : end]
    assert (one.place, one.agreed) == (pieces.place, pieces.agreed)
    assert one.next(4) == ([] if one.place is None else text[one.place : one.place + 4])


@pytest.fixture(scope="module")
def demo() -> Engine:
    return mlxspec.load("demo", config=EngineConfig(max_rows=4))


@pytest.mark.parametrize("policy", ["auto", "fixed"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_the_same(demo: Engine, policy: str, temperature: float) -> None:
    """With the answer itself predicted, with an edit of it, and with something else; alone and in rows together."""
    prompts = ["what is a list?", "what does os.path.join do?"]
    params = SamplingParams(max_tokens=48, temperature=temperature, seed=3, ignore_eos=True)
    plain = [r.tokens for r in demo.generate(prompts, params, spec=SpecConfig())]
    spec = replace(demo.spec, policy=policy)
    texts = [tuple(plain[0]), (*plain[0][:10], *plain[0][20:]), "something else " * 30]
    for predicted in texts:
        found = demo.generate(prompts, params, spec=replace(spec, predicted=predicted))
        assert [r.tokens for r in found] == plain
        alone = demo.generate(
            prompts[0], params, spec=replace(spec, predicted=predicted, drafters=("predicted",))
        )
        assert alone.tokens == plain[0]
    if policy == "fixed":
        stats = demo.generate(prompts[0], params, spec=replace(spec, predicted=texts[0])).stats
        used = stats.drafters["predicted"]
        assert used.num_accepted > 30
        assert used.num_accepted == used.num_drafted
        assert stats.num_rounds < 12


def test_what_is_predicted_is_checked(demo: Engine) -> None:
    for wrong in (3, [1.5], ["a"], [-1], [True], b"x"):
        with pytest.raises(ConfigError, match="predicted is a string or a list of token ids"):
            SpecConfig(predicted=wrong)  # type: ignore[arg-type]
    assert SpecConfig(predicted=[1, 2]).predicted == (1, 2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="predicted holds 999999"):
        demo.generate("x", spec=replace(demo.spec, predicted=(999999,)))
    with pytest.raises(ConfigError, match="more than an answer can have"):
        demo.generate("x", spec=replace(demo.spec, predicted=(1,) * (demo.max_context + 1)))
    assert demo.generate(
        "x", SamplingParams(max_tokens=4), spec=SpecConfig(predicted="y")
    ).tokens  # nobody drafts


@catches(
    "the prompt's last token is heard as the answer's first",
    "mlxspec.drafters.lookup:PredictedRow.__init__",
    lambda right: lambda self, predicted, num_prompt, *more: right(self, predicted, num_prompt - 1, *more),
)
@pytest.mark.parametrize("pieces", [[[1, 2, 3]], [[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3], []]])
def test_the_prompt_is_no_part_of_the_answer(pieces: list[list[int]]) -> None:
    row = PredictedRow([5, 6, 7, 8, 9, 10], num_prompt=3)
    for piece in pieces:
        row.extend(piece)
    assert row.draft(9).tokens == [5, 6, 7, 8, 9, 10], "nothing of the answer is known: it is taken to agree"
    row.extend([5])
    assert row.draft(9).tokens == [6, 7]


@catches(
    "the place that was left is the text's beginning",
    "mlxspec.drafters.alignment:_SETTLED",
    lambda right: 1 << 30,
)
def test_one_token_is_enough_near_the_place_that_was_left() -> None:
    """Behind a changed token the next one that agrees is believed, where the text was left; elsewhere it would have to be two."""
    text = list(range(1000))
    found = Alignment(text)
    found.push([*text[:700], 5000])
    assert found.place is None
    found.push([701])
    assert found.next(2) == [702, 703]


@catches(
    "a text is followed onwards only",
    "mlxspec.drafters.alignment:BEHIND",
    lambda right: 0,
)
def test_an_answer_that_says_the_last_lines_again_is_followed_back() -> None:
    text = list(range(1000))
    found = Alignment(text)
    found.push(text[:700])
    found.push(text[694:695])
    assert found.next(2) == [695, 696]
