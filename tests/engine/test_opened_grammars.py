"""A grammar that a tag opens in the middle of an answer: the text is the one of an engine that looks at every token before the next, for
drafts on the host and on the device, and for rounds launched before the last one was read. Until a tag comes nothing is waited for."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from planting import catches

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.engine import round as rounds
from mlxspec.engine.engine import Engine, Result
from mlxspec.errors import ConfigError
from mlxspec.sampling import opening
from mlxspec.sampling.constraints import Constraints
from tests.engine import equality
from tests.engine.equality import prompts, same
from tests.engine.random_requests import Anywhere, case, play

PROMPTS = prompts(6, 3)
TAGS = ("F", "BO", "TF")  # of one token and of two, in most texts of the tiny model
SAMPLERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 0.0, "repetition_penalty": 1.3},
)
DRAFTED = {
    "mtp": SpecConfig(drafters=("mtp",), n_max=4),
    "lookup": SpecConfig(drafters=("ngram-simple",), ngram_m=8),
    "both": SpecConfig(drafters=("ngram-simple", "mtp"), n_max=3),
    "plain": SpecConfig(),
}


@pytest.fixture(autouse=True)
def _anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "Place", Anywhere)


def params(number: int, **more: Any) -> SamplingParams:
    tag = TAGS[number % 3]
    lark = f'start: ahead /[a-z]{{2,9}}/ ";"\nahead[suffix="{tag}"]: /(?s:.*)/'
    chosen = {"max_tokens": 60, "seed": number, "lark": lark, "lark_at": tag, "ignore_eos": True}
    return SamplingParams(**chosen | SAMPLERS[number % 4] | more)


def engine(*, overlaps: bool) -> Engine:
    made = equality.engine(["mtp", ngram_lookup("ngram-simple", 2, 8)], prefix_budget=0)
    made.pipeline.overlaps = overlaps
    return made


@cache
def plain(number: int) -> Result:
    """By the twin: what may come is asked at every place, before a token is chosen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "Place", Anywhere)
        patch.setattr(Constraints, "reaches", lambda self, width: True)
        return equality.engine([], prefix_budget=0).generate(PROMPTS[number % 6], params(number))


def check_text(number: int, text: str) -> int:
    """Every call but one that the end cuts is of the grammar. Returns how many there are."""
    parts = text.split(TAGS[number % 3])[1:]
    for part in parts[:-1]:
        assert re.match("[a-z]{2,9};", part), text
    return len(parts)


@catches(
    "a round sampled without its row's grammar is taken as it is",
    "mlxspec.engine.round:_masked",
    lambda right: lambda round_, place, accepted: None,
    case="mtp-True",
)
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("drafted", DRAFTED)
def test_the_text_is_that_of_an_engine_that_looks_at_every_token(drafted: str, overlaps: bool) -> None:
    own, calls = engine(overlaps=overlaps), 0
    for first in range(0, 24, 6):
        for some in (range(first, first + 1), range(first + 1, first + 3), range(first + 3, first + 6)):
            asked = [params(n) for n in some]
            found = own.generate([PROMPTS[n % 6] for n in some], asked, spec=DRAFTED[drafted])
            for number, got in zip(some, found, strict=True):
                same(plain(number), got, PROMPTS[number % 6], params(number), f"{number} {drafted}")
                assert not got.stats.notices
                calls += check_text(number, got.text)
    assert calls > 20
    assert own.nbytes == 0


@pytest.mark.parametrize(
    "number", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 60))]
)
@pytest.mark.parametrize("constraint", ["opened", "thought"])
def test_random_requests_have_the_same_text(number: int, constraint: str) -> None:
    """With a grammar that a tag opens, and with one that begins behind thinking which the answer may open."""
    play(case(number, form=("float32",), constraint=(constraint,)))


def test_rounds_that_wait_for_nothing_are_sampled_again_only_behind_a_tag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a tag in the text the rounds, and what is waited for, are those of a request without a grammar."""
    own = engine(overlaps=True)
    again: list[int] = []
    real = rounds._masked

    def watched(round_, place, accepted):  # type: ignore[no-untyped-def]
        found = real(round_, place, accepted)
        again.append(found is not None)
        return found

    monkeypatch.setattr(rounds, "_masked", watched)
    counts = []
    for lark_at in ("", "never", "F"):
        before = own.stats.num_rounds, own.stats.num_synchronised, own.stats.num_verified
        free = {"lark": None, "lark_at": "", "temperature": 0.0}
        given = free if not lark_at else {"lark_at": lark_at, "temperature": 0.0}
        again.clear()
        result = own.generate(PROMPTS[0], params(0, **given), spec=DRAFTED["mtp"])
        after = own.stats.num_rounds, own.stats.num_synchronised, own.stats.num_verified
        counts.append([b - a for a, b in zip(before, after, strict=True)])
        assert sum(again) == 0 if lark_at != "F" else sum(again) > 0, result.text
    assert counts[0] == counts[1]


def test_an_answer_ends_behind_its_only_call() -> None:
    own = engine(overlaps=True)
    for number in (0, 3):
        got = own.generate(PROMPTS[number], params(number, lark_once=True), spec=DRAFTED["mtp"])
        assert got.finish_reason == "stop"
        assert re.search(f"{TAGS[number % 3]}[a-z]{{2,9}};\\Z", got.text)
        assert plain(number).text.startswith(got.text)


def test_a_tag_in_code_or_within_a_line_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    class Bytes:
        """One token a byte."""

        special = frozenset[int]()
        tokens = tuple(bytes([token]) for token in range(256))

    rule = opening.Opening("<call>", Bytes(), once=False)  # type: ignore[arg-type]

    def opens(text: str) -> bool:
        seen = rule.start()
        for byte in text.encode():
            seen = rule.step(seen, byte)
            if seen.is_open:
                return True
        return False

    assert opens("<call>")
    assert opens("Now.\n\n  <call>")
    assert opens("a <call> is `<call>`.\n<call>")
    assert opens("```\n<call>\n```\n<call>")
    assert not opens("a <call>")
    assert opens("Don't forget the ` character.\n<call>")
    assert not opens("```xml\n<call>\n")
    assert not opens("<cal\n<ca<call")


def test_what_opens_a_grammar_is_checked() -> None:
    with pytest.raises(ConfigError, match="lark_at needs"):
        SamplingParams(lark_at="<call>")
    with pytest.raises(ConfigError, match="lark_at must be a text"):
        SamplingParams(lark="start: /a/", lark_at=5)  # type: ignore[arg-type]
