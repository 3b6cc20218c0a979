"""However an answer ends (end token, stop string, budget, context), it ends at the same token inside a draft as without one."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from planting import catches
from tokenizers import Tokenizer as InnerTokenizer
from tokenizers import decoders, models, pre_tokenizers

from mlxspec.config import SamplingParams
from mlxspec.engine.engine import Engine, Result
from mlxspec.events import FinishEvent, PrefillEvent, TokensEvent
from mlxspec.loading.tokenizer import Tokenizer
from tests import tiny_models
from tests.engine import equality
from tests.engine.equality import ALL, PLAIN, spec

PROMPTS = equality.prompts(6, 42)


@cache
def engine() -> Engine:
    return equality.engine()


@cache
def long_answer(number: int, temperature: float) -> Result:
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=number, ignore_eos=True)
    return engine().generate(PROMPTS[number], params, spec=PLAIN)


def oracle(number: int, temperature: float, **config) -> Engine:
    """An engine whose one drafter knows the whole answer: everything is drafted at once, endings too."""
    text = [*PROMPTS[number], *long_answer(number, temperature).tokens]
    return equality.engine([equality.Oracle([text])], ngram_m=80, **config)


def check(number: int, params: SamplingParams, **config) -> Result:
    """Plain decoding against the oracle's one draft and against real drafters, alone."""
    plain = equality.engine([], **config).generate(PROMPTS[number], params)
    drafted_engine = oracle(number, params.temperature, **config)
    drafted = drafted_engine.generate(PROMPTS[number], params, spec=spec("ngram-simple", ngram_m=80))
    equality.same(plain, drafted, PROMPTS[number], params, "oracle")
    real = equality.engine(**config).generate(PROMPTS[number], params, spec=spec(*ALL))
    equality.same(plain, real, PROMPTS[number], params, "all drafters")
    # the round's own token is one of the budget's and of the context's, so the oracle's one draft is two tokens shorter than the answer
    room = min(params.max_tokens, drafted_engine.max_context - len(PROMPTS[number]) + 1)
    assert drafted.stats.num_drafted <= max(0, room - 2)
    assert drafted.stats.num_accepted >= min(len(plain.tokens), 60) - 2
    return plain


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 30])
def test_a_budget_ends_inside_a_draft(max_tokens: int, temperature: float) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1, ignore_eos=True)
    plain = check(1, params)
    assert plain.tokens == long_answer(1, temperature).tokens[:max_tokens]
    assert plain.finish_reason == "length"


@pytest.mark.parametrize("room", [1, 2, 5, 20])
def test_the_context_ends_inside_a_draft(room: int) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    plain = check(2, params, max_context=len(PROMPTS[2]) + room)
    assert plain.tokens == long_answer(2, 0.0).tokens[:room]
    assert plain.finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", [0, 1, 2, 9])
def test_an_end_token_inside_a_draft(place: int, temperature: float) -> None:
    """Some token of the answer is taken for the end token."""
    tokens = long_answer(3, temperature).tokens
    eos = tokens[place]
    first = tokens.index(eos)
    tokenizer = type(tiny_models.tokenizer())(tiny_models.tokenizer()._inner, frozenset({eos}), None)
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3)
    drafter = equality.Oracle([[*PROMPTS[3], *tokens]])
    for drafters in ([], [drafter], None):
        loaded = equality.engine(drafters).drafts.drafters
        wish = spec(*loaded, ngram_m=80)
        engine = Engine(tiny_models.target(), tokenizer, drafters=list(loaded.values()), spec=wish)
        result = engine.generate(PROMPTS[3], params, spec=wish)
        assert result.tokens == tokens[:first]
        assert result.finish_reason == "stop"
        assert result.text == tokenizer.decode(tokens[:first])
        assert engine.generate(PROMPTS[3], params, spec=wish).tokens == result.tokens
        assert engine.is_idle


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("start", "length"), [(0, 1), (1, 2), (4, 3), (10, 1), (20, 5)])
def test_a_stop_string_inside_a_draft(start: int, length: int, temperature: float) -> None:
    text = long_answer(4, temperature).text
    stop = text[start : start + length]
    params = SamplingParams(
        max_tokens=60, temperature=temperature, seed=4, stop=(stop, "no such text"), ignore_eos=True
    )
    plain = check(4, params)
    assert plain.text == text[: text.index(stop)]
    assert plain.finish_reason == "stop"
    decode = tiny_models.tokenizer().decode
    assert stop in decode(plain.tokens)
    assert stop not in decode(plain.tokens[:-1])


def test_whichever_ending_comes_first_counts() -> None:
    number = next(
        n for n in range(6) if tiny_models.EOS not in long_answer(n, 0.0).tokens
    )  # a letter a token
    tokens, text = long_answer(number, 0.0).tokens, long_answer(number, 0.0).text
    stop = text[12:15]
    at = text.index(stop) + 3
    for budget, reason in ((at - 1, "length"), (at, "stop"), (at + 5, "stop")):
        plain = check(number, SamplingParams(max_tokens=budget, stop=stop, ignore_eos=True))
        assert (plain.finish_reason, len(plain.tokens)) == (reason, min(budget, at))
        assert plain.tokens == tokens[: min(budget, at)]


def one_late(right: Any) -> Any:
    """A rule by which stop strings count one token later."""
    could: dict[int, bool] = {}

    def push(self: Any, token: int, *, may_stop: bool = True) -> tuple[str, bool]:
        before, could[id(self)] = could.get(id(self), False), may_stop
        return right(self, token, may_stop=may_stop and before)  # type: ignore[no-any-return]

    return push


@catches(
    "a stop string that ends with the last token of min_tokens is passed over",
    "mlxspec.engine.text:AnswerText.push",
    one_late,
)
def test_a_stop_string_counts_from_min_tokens_on() -> None:
    text = long_answer(4, 0.0).text  # a letter a token
    stop = max(text[:30], key=text.index)
    at = text.index(stop) + 1
    assert at > 2
    for least in (0, at - 1, at):
        plain = check(4, SamplingParams(max_tokens=60, stop=stop, min_tokens=least, ignore_eos=True))
        assert (plain.finish_reason, len(plain.tokens)) == ("stop", at)
    later = check(4, SamplingParams(max_tokens=60, stop=stop, min_tokens=at + 1, ignore_eos=True))
    assert len(later.tokens) > at


@catches(
    "what a limit cuts is shown as the replacement character",
    "mlxspec.engine.text:AnswerText.finish",
    lambda right: lambda self, *, cut=False: right(self),
    case="[3-",
)
@pytest.mark.parametrize(("max_tokens", "text"), [(3, "  "), (4, "  \ufffd")])
def test_an_answer_that_a_limit_cuts_inside_a_character_leaves_it_out(max_tokens: int, text: str) -> None:
    """The third token is the first byte of three, the fourth one ends the answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    inner = InnerTokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    inner.decoder = decoders.ByteLevel()
    said = [alphabet.index("\u0120"), alphabet.index("\u0120"), alphabet.index("\xe5"), 7]

    def wants(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, said[int(tokens.shape[0]) - 2]].add(1000.0)

    made = Engine(tiny_models.target(), Tokenizer(inner, frozenset({7}), None))
    result = made.generate([5, 6], SamplingParams(max_tokens=max_tokens, logits_processors=[wants]))
    assert result.text == text


@pytest.mark.parametrize("drafters", [(), ALL], ids=["plain", "drafted"])
def test_events_add_up_to_the_result(drafters: tuple[str, ...]) -> None:
    text = long_answer(1, 0.0).text
    for params in (
        SamplingParams(max_tokens=25, ignore_eos=True),
        SamplingParams(max_tokens=25),
        SamplingParams(max_tokens=40, stop=text[9:12], ignore_eos=True),
        SamplingParams(max_tokens=1, ignore_eos=True),
    ):
        result = engine().generate(PROMPTS[1], params, spec=spec(*drafters))
        first, *events, last = engine().stream(PROMPTS[1], params, spec=spec(*drafters))
        assert isinstance(first, PrefillEvent)
        assert isinstance(last, FinishEvent)
        assert last.reason == result.finish_reason
        assert all(isinstance(e, TokensEvent) for e in events)
        assert "".join(e.text for e in events) == result.text
        assert tuple(t for e in events for t in e.tokens) == result.tokens
        assert all((e.drafter is None) == (e.num_drafted == 0) for e in events)
        assert all(e.num_drafted <= len(e.tokens) for e in events)
        assert sum(e.num_drafted for e in events) <= result.stats.num_accepted


def test_statistics_count_what_happened() -> None:
    result = oracle(2, 0.0).generate(
        PROMPTS[2], SamplingParams(max_tokens=21, ignore_eos=True), spec=spec("ngram-simple", ngram_m=4)
    )
    did = result.stats.drafters["ngram-simple"]
    assert result.stats.num_prompt == len(PROMPTS[2])
    assert result.stats.num_generated == 21
    assert result.stats.num_rounds == 4  # 20 tokens behind the first, five a round
    assert (did.num_rounds, did.num_drafted, did.num_accepted) == (4, 16, 16)
    assert did.by_position == [(4, 4)] * 4
    assert result.stats.tokens_per_round == 5.0
    assert did.acceptance == 1.0


@catches(
    "an event counts accepted tokens behind the answer's end",
    "mlxspec.events:TokensEvent.__init__",
    lambda right: lambda self, *, num_drafted=0, **more: right(self, num_drafted=num_drafted and 57, **more),
)
def test_an_event_counts_no_accepted_token_behind_the_end() -> None:
    """The answer ends at its tenth token, inside a draft of which the target accepts far more."""
    whole = long_answer(3, 0.0)
    place = next(i for i in range(8, 40) if whole.tokens[i] not in whole.tokens[:i])
    engine = oracle(3, 0.0)
    params = SamplingParams(max_tokens=60, stop_token_ids=(whole.tokens[place],))
    events = [
        event
        for event in engine.stream(PROMPTS[3], params, spec=spec("ngram-simple", ngram_m=80))
        if isinstance(event, TokensEvent)
    ]
    assert sum(len(event.tokens) for event in events) == place
    assert any(event.num_drafted for event in events)
    assert all(event.num_drafted <= len(event.tokens) for event in events)
    assert all(event.num_drafted_chars <= len(event.text) for event in events)
