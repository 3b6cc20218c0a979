"""Drafting from everything said before: texts stay the same, owners stay apart, and what was said is drafted."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from planting import catches

from mlxspec.config import OTHER_NAMES, SamplingParams, SpecConfig, drafter_names
from mlxspec.drafters import lookup
from mlxspec.drafters.base import Ask
from mlxspec.drafters.lookup import COPIED, EarlierRow, Lookup
from mlxspec.drafters.text_index import TextIndex
from mlxspec.engine.engine import Engine
from mlxspec.errors import ConfigError
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler
from tests.engine import equality

SUFFIX = SpecConfig(drafters=("suffix",), policy="fixed")
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


@catches(
    "nothing is learned",
    "mlxspec.drafters.text_index:TextIndex.add",
    lambda right: lambda self, owner, text: None,
)
def test_a_question_asked_again_is_answered_in_few_rounds() -> None:
    engine = equality.engine()
    (prompt,) = equality.prompts(1, 3)
    first = engine.generate(prompt, PARAMS, spec=SUFFIX)
    again = engine.generate(prompt, PARAMS, spec=SUFFIX)
    assert again.tokens == first.tokens
    assert first.stats.num_drafted == 0
    assert again.stats.num_rounds < 8
    assert again.stats.drafters["suffix"].num_accepted > 30


@catches(
    "all owners share their texts",
    "mlxspec.drafters.lookup:EarlierRow.__init__",
    lambda right: lambda self, index, owner, num: right(self, index, "", num),
)
def test_owners_do_not_meet() -> None:
    engine = equality.engine()
    (prompt,) = equality.prompts(1, 3)
    mine, yours = replace(SUFFIX, owner="mine"), replace(SUFFIX, owner="yours")
    engine.generate(prompt, PARAMS, spec=mine)
    for other in (yours, SUFFIX):
        assert engine.generate(prompt, PARAMS, spec=other).stats.num_drafted == 0
    assert engine.generate(prompt, PARAMS, spec=mine).stats.num_drafted > 0


def test_a_closed_engine_holds_no_texts() -> None:
    engine = equality.engine()
    engine.generate([1, 2, 3], PARAMS, spec=SUFFIX)
    assert engine.texts.nbytes > 0
    engine.close()
    assert engine.texts.nbytes == 0


def test_a_text_that_cannot_be_learned_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = equality.engine()
    (prompt,) = equality.prompts(1, 3)
    wanted = engine.generate(prompt, PARAMS, spec=SpecConfig())

    def fails(owner: str, text: list[int]) -> None:
        raise OverflowError("too large")

    monkeypatch.setattr(engine.texts, "add", fails)
    with caplog.at_level(logging.WARNING):
        assert engine.generate(prompt, PARAMS, spec=SUFFIX).tokens == wanted.tokens
    assert "suffix failed at the end of a request" in caplog.text
    assert engine.is_idle


def test_a_row_that_has_not_begun_is_forgotten_quietly() -> None:
    drafter = Lookup("suffix")
    drafter.forget(3)
    drafter.open(1, EarlierRow(TextIndex(0), "a", 0))
    assert not drafter.may_draft(1)
    drafter.forget(1)
    assert drafter.nbytes == 0


def test_other_names() -> None:
    for name in OTHER_NAMES:
        assert SpecConfig(drafters=(name, "mtp")).drafters == ("suffix", "ngram-simple", "mtp")
    assert drafter_names("ngram-mod") == ("suffix", "ngram-simple")
    assert drafter_names(["ngram-simple", "ngram-cache"]) == ("ngram-simple", "suffix")
    with pytest.raises(ConfigError, match="twice"):
        drafter_names(["ngram-mod", "ngram-mod"])


def test_an_engine_without_room_for_texts_drafts_nothing_from_them() -> None:
    engine: Engine = equality.engine(past_texts=0)
    for _ in range(2):
        assert engine.generate([1, 2, 3], PARAMS, spec=SUFFIX).stats.num_drafted == 0


def edited(prompt: list[int], answer: list[int], most: int = 16) -> tuple[int, int]:
    """Rounds of an answer, and wrong drafted tokens, where nothing was said before."""
    drafter = Lookup("suffix")
    index = TextIndex(0)
    drafter.open(0, EarlierRow(index, "", len(prompt)))
    drafter.hear(0, [*prompt, answer[0]], None)
    sampler = RowSampler(SamplingParams(), prompt, 5000)
    done, rounds, wrong = 1, 0, 0
    while done < len(answer):
        ask = Ask(0, [*prompt, *answer[:done]], most, sampler)
        (draft,) = drafter.draft([ask], BatchSampler([sampler], 5000))
        assert draft.length == len(draft.tokens) <= most
        assert bool(draft.length) == drafter.may_draft(0)
        pairs = zip(draft.tokens, answer[done : len(answer) - 1], strict=False)
        matched = next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(draft.length, len(answer) - 1 - done)
        )
        rounds, wrong = rounds + 1, wrong + draft.length - matched
        drafter.hear(0, answer[done : done + matched + 1], None)
        while index.work():
            pass
        done += matched + 1
    return rounds, wrong


FILE = np.random.default_rng(5).integers(0, 900, 1500).tolist()
ANSWERS = {
    "as it is": FILE,
    "behind a marker": [*range(1000, 1030), *FILE],
    "an insertion": [*FILE[:700], *range(1000, 1030), *FILE[700:]],
    "a deletion": [*FILE[:700], *FILE[950:]],
    "a stretch of it, edited": [*FILE[600:800], 1000, 1001, *FILE[802:1000]],
    "search and replace": [1000, *FILE[600:660], 1001, *FILE[600:640], 1002, *FILE[641:660], 1003],
}


@catches(
    "the place is lost at the first mismatch",
    "mlxspec.drafters.alignment:Alignment._found",
    lambda right: lambda self: (None, 0),
    case="deletion",
)
@pytest.mark.parametrize("kind", ANSWERS)
def test_a_file_in_the_prompt_drafts_its_edit_whatever_the_format(kind: str) -> None:
    answer = ANSWERS[kind]
    prompt = [*np.random.default_rng(6).integers(0, 900, 300).tolist(), *FILE, *range(2000, 2030)]
    rounds, wrong = edited(prompt, answer)
    new = sum(token >= 900 for token in answer)  # each of them takes a round
    assert rounds < new + len(answer) / 17 + 2 * COPIED + 12
    assert wrong < 60


def test_an_answer_that_copies_nothing_drafts_nothing() -> None:
    prompt = [*FILE, *range(2000, 2030)]
    assert edited(prompt, np.random.default_rng(7).integers(0, 900, 500).tolist()) == (499, 0)
    assert edited(FILE[:8], [*FILE[:8] * 3, 1]) == (24, 0), "a prompt of less than two blocks"


def test_image_tokens_of_a_prompt_are_never_drafted() -> None:
    with_image = [*FILE[:700], *range(-40, 0), *FILE[700:]]
    rounds, wrong = edited(with_image, FILE)
    assert rounds < len(FILE) / 17 + 2 * COPIED + 12
    assert wrong < 60


def test_a_prompt_is_followed_across_pieces_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that goes on elsewhere in a long prompt is followed there."""
    monkeypatch.setattr(lookup, "BEFORE", 100)
    monkeypatch.setattr(lookup, "BEHIND", 200)
    rounds, _ = edited(FILE, [*FILE[:250], *FILE[900:1150], *FILE[100:300]])
    assert rounds < 3 * COPIED + 700 / 17 + 24


@catches(
    "an earlier text goes before a longer copy of the prompt",
    "mlxspec.drafters.text_index:TextIndex.find",
    lambda right: lambda self, *asked: (found := right(self, *asked)) and found._replace(length=1000),
    case="30-True",
)
@pytest.mark.parametrize(("num_copied", "from_prompt"), [(30, True), (18, False)])
def test_what_agrees_with_more_of_the_text_drafts(num_copied: int, from_prompt: bool) -> None:
    """An earlier text agrees with the last 24 tokens, the prompt with 30 of them or with 18."""
    shared = list(range(100, 140))
    index = TextIndex(1 << 24)
    earlier, row = EarlierRow(index, "", 0), EarlierRow(index, "", 60)
    earlier.extend([*shared[-24:], 900, 901, 902])
    earlier.close()
    prompt = [*range(10, 20), *shared[-num_copied:], 800, 801, 802]
    prompt += range(1000, 1060 - len(prompt))
    while index.has_work:
        index.work()
    row.extend(prompt)
    for token in (7, *shared[-30:]):
        row.extend([token])
        while index.has_work:
            index.work()
    assert row.draft(3).tokens == ([800, 801, 802] if from_prompt else [900, 901, 902])
