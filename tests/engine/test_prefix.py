"""Prompts that begin like earlier texts: less is read, and the answer is that of a cold run, whoever drafts and whatever was let go of."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from planting import catches

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine, Result
from mlxspec.engine.prefix.rows import NEAR, STRIDE, Prefix, stride_of
from mlxspec.engine.prefix.tree import TARGET, KeyedText
from mlxspec.events import PrefillEvent
from tests import families, tiny_models
from tests.engine import equality
from tests.engine.equality import ALL, same, spec

BUDGET = 1 << 26
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, seed=5, repetition_penalty=1.1)
SPECS = [
    spec(*ALL),
    spec(),
    spec("mtp"),
    spec("draft-model", n_max=2),
    spec("ngram-simple"),
    spec("eagle3"),
]


def engine(budget: int = BUDGET, near: int = 1, **config) -> Engine:
    made = equality.engine(prefix_budget=budget, **config)
    made.prefix.near = near
    return made


def known(made: Engine, text: list[int]) -> int:
    return made.prefix.tree.depth(KeyedText(text), len(text))


def ask(made: Engine, text: list[int], wish: SpecConfig, marks: list[int]) -> Result:
    request = made.submit(text, GREEDY, spec=wish, marks=marks)
    while not made.is_idle:
        made.step()
    return Result.of(request)


@cache
def cold() -> Engine:
    """Keeps nothing."""
    return engine(0)


def words(num: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, tiny_models.EOS, num).tolist()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_conversation_goes_on_where_it_was(params: SamplingParams) -> None:
    """Each turn reads what is new only; text and drafting are those of a cold run."""
    warm, text, new = engine(), words(50, 0), []
    for turn in range(4):
        wanted, got = (e.generate(text, params, spec=SPECS[0]) for e in (cold(), warm))
        same(wanted, got, text, params, f"turn {turn}")
        assert got.stats.notices == []
        assert got.stats.num_cached == (0 if turn == 0 else len(text) - len(new))
        if got.tokens == wanted.tokens:
            assert abs(got.stats.num_rounds - wanted.stats.num_rounds) <= 2
        new = [*got.tokens[-1:], *words(7, turn + 1)]  # the last token of an answer was never run
        text = [*text, *got.tokens[:-1], *new]
        warm.prefix.tree.check()


def test_a_shorter_tail_goes_on_from_the_last_state_that_is_in_it() -> None:
    """A client that drops the reasoning of earlier turns: the text differs from the question's end on."""
    warm, text = engine(), words(60, 3)
    first = warm.submit(text, GREEDY, marks=[20, 55])
    while not warm.is_idle:
        warm.step()
    answer = first.history[60:]
    for tail, known in (([*answer[:5], 1, 2, 3], 60), ([4, 4, 4], 60)):
        got = warm.generate([*text, *tail], GREEDY, spec=SPECS[0])
        assert got.stats.num_cached == known
        same(cold().generate([*text, *tail], GREEDY), got, [*text, *tail], GREEDY, "another tail")
    for cut, known in ((57, 55), (30, 20)):
        other = [*text[:cut], 7, 7, 7]
        got = warm.generate(other, GREEDY, spec=SPECS[0])
        assert got.stats.num_cached == known
        same(cold().generate(other, GREEDY), got, other, GREEDY, "another question")


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_same_prompt_is_not_read_again(params: SamplingParams) -> None:
    warm, text = engine(), words(70, 9)
    wanted = warm.generate(text, params, spec=SPECS[0])
    events = list(warm.stream(text, params, spec=SPECS[0]))
    (progress,) = [e for e in events if isinstance(e, PrefillEvent)]
    assert (progress.num_done, progress.num_total, progress.num_cached) == (70, 70, 70)
    again = warm.generate(text, params, spec=SPECS[0])
    assert again.stats.num_cached == 70
    same(wanted, again, text, params, "the same prompt")


def test_drafters_go_on_as_if_they_had_heard_it_all() -> None:
    """What they propose behind a hit is what they propose in a cold run: round for round."""
    text = words(60, 21)
    for wish in (*SPECS[2:4], SPECS[5]):
        warm = engine()
        answer = warm.generate(text, GREEDY, spec=wish)
        longer = [*text, *answer.tokens, *words(5, 22)]
        wanted, got = (e.generate(longer, SAMPLED, spec=wish) for e in (cold(), warm))
        assert got.stats.num_cached > 60
        if got.tokens == wanted.tokens:
            figures = [{n: d.by_position for n, d in r.stats.drafters.items()} for r in (wanted, got)]
            assert figures[0] == figures[1]


TURNS = {
    "never": (None, None, None),
    "then not": ("mtp", None, None),
    "now and then": (None, "mtp", None),
    "another": ("ngram-simple", "draft-model", "ngram-simple"),
}


@catches(
    "a text goes on behind a state without a head's part",
    "mlxspec.engine.prefix.tree:Node.has",
    lambda right: lambda self, needed: right(self, ()),
    case="then not",
    errors=(AttributeError,),
)
@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS)
def test_a_text_goes_on_behind_the_last_turn_that_its_head_drafted_for(turns: tuple[str | None, ...]) -> None:
    """Its keys and values are those of a cold run, and so are its drafts."""
    warm, text, heard = engine(prefill_chunk=16), words(40, 71), 0
    for turn, name in enumerate(turns):
        heard = len(text) if name == "mtp" else heard
        answer = warm.generate(text, SAMPLED, spec=spec(*([name] if name else [])))
        text = [*text, *answer.tokens, *words(9, turn)]
    got = {}
    for which, made in (("cold", engine(0)), ("warm", warm)):
        request = made.submit(text, SAMPLED, spec=spec("mtp"))
        while not made.num_running or made.places.prefills:
            made.step()
        head = made.drafts.drafters["mtp"]
        length = head._cache.lengths[0] + head.skips
        got[which] = [np.asarray(x) for x in head.snapshot(request.number, length, 0).arrays]
        assert len(text) <= length < len(text) + request.num_generated  # what stood of a draft is behind
        most = heard + GREEDY.max_tokens if which == "warm" and heard else 0
        assert min(heard, most) <= request.stats.num_cached <= most
        while not made.is_idle:
            made.step()
        assert request.stats.notices == []
        got[which].append([d.by_position for d in request.stats.drafters.values()])
        made.prefix.tree.check()
    for wanted, found in zip(got["cold"][:-1], got["warm"][:-1], strict=True):
        num = min(wanted.shape[2], found.shape[2])
        np.testing.assert_allclose(found[:, :, :num], wanted[:, :, :num], atol=2e-4)
    assert got["cold"][-1] == got["warm"][-1]


@catches(
    "the residual streams of a state go with a row that shows none",
    "mlxspec.engine.prefix.tree:PrefixTree.put",
    lambda right: (
        lambda self, text, length, parts, hidden, **more: right(
            self, text, length, parts, hidden[:, :64], **more
        )
    ),
)
def test_rows_that_show_layers_and_rows_that_do_not_go_on_from_the_same_states() -> None:
    """A part is kept with the residual streams that it goes on by; a row without that part takes the final hidden alone."""
    warm, text = engine(), words(60, 75)
    for wish in (spec("eagle3"), spec(), spec("mtp"), spec("eagle3"), spec("mtp", "eagle3")):
        for known in (text, [*text, 5, 6, 7]):
            got, wanted = (made.generate(known, GREEDY, spec=wish) for made in (warm, cold()))
            assert got.stats.notices == []
            same(wanted, got, known, GREEDY, "behind a state of others")
            assert [d.by_position for d in got.stats.drafters.values()] == [
                d.by_position for d in wanted.stats.drafters.values()
            ]


def test_an_answer_that_ended_inside_a_draft_leaves_what_was_said() -> None:
    """Behind a stop nothing that was drafted is kept: a prompt that goes on otherwise gets the text of a cold run."""
    text = words(40, 31)
    plain = cold().generate(text, GREEDY)
    oracle = equality.Oracle([[*text, *plain.tokens]])
    for budget in (1, 2, 5, 9):
        warm = equality.engine([oracle], ngram_m=30, prefix_budget=BUDGET)
        warm.prefix.near = 1
        params = SamplingParams(max_tokens=budget, ignore_eos=True)
        got = warm.generate(text, params, spec=spec("ngram-simple", ngram_m=30))
        assert got.tokens == plain.tokens[:budget]
        longer = [*text, *got.tokens, 3, 1, 4]
        after = warm.generate(longer, GREEDY)
        assert after.stats.num_cached >= 40 + budget - 1
        same(cold().generate(longer, GREEDY), after, longer, GREEDY, "behind a stop")


@pytest.mark.parametrize("place", [8, 15])
def test_an_answer_that_stopped_inside_a_draft_is_kept_to_its_end(place: int) -> None:
    """The target accepts drafted tokens behind the end, too. They are not committed, so that what is kept is the answer."""
    text = words(40, 31)
    plain = cold().generate(text, GREEDY)
    end = next(i for i in range(place, 24) if plain.tokens[i] not in plain.tokens[:i])
    warm = equality.engine([equality.Oracle([[*text, *plain.tokens]])], ngram_m=30, prefix_budget=BUDGET)
    warm.prefix.near = 1
    params = SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=(plain.tokens[end],))
    got = warm.generate(text, params, spec=spec("ngram-simple", ngram_m=30))
    assert got.tokens == plain.tokens[:end]
    longer = [*text, *got.tokens, 3, 1, 4]
    after = warm.generate(longer, GREEDY)
    assert after.stats.num_cached == 40 + end
    same(cold().generate(longer, GREEDY), after, longer, GREEDY, "behind a stop")


def test_a_stop_string_in_a_draft_and_an_end_token() -> None:
    text = words(40, 33)
    plain = cold().generate(text, GREEDY)
    for params in (
        SamplingParams(max_tokens=24, ignore_eos=True, stop=plain.text[6:9]),
        SamplingParams(max_tokens=24),
    ):
        warm = engine()
        got = warm.generate(text, params, spec=SPECS[0])
        longer = [*text, *got.tokens, tiny_models.EOS, 9]
        after = warm.generate(longer, GREEDY, spec=SPECS[0])
        assert after.stats.num_cached >= 40
        same(cold().generate(longer, GREEDY), after, longer, GREEDY, "behind a stop string")


def test_a_cancelled_row_with_a_round_in_flight_can_be_gone_on_from() -> None:
    warm, text = engine(), words(40, 35)
    request = warm.submit(text, SamplingParams(max_tokens=100, ignore_eos=True), spec=spec())
    for _ in range(9):
        warm.step()
    assert warm.pipeline.next is not None
    warm.cancel(request.number)
    longer = [*request.history, 5, 6]
    after = warm.generate(longer, GREEDY, spec=spec())
    assert after.stats.num_cached == len(request.history)
    same(cold().generate(longer, GREEDY), after, longer, GREEDY, "behind a cancelled row")


def test_nothing_of_a_failed_row_is_kept() -> None:
    warm, text = engine(), words(40, 37)
    request = warm.submit(text, GREEDY)
    for _ in range(3):
        warm.step()
    before = len(warm.prefix.tree.states)
    request.fail("planted")
    warm.step()
    assert len(warm.prefix.tree.states) == before


def test_off_means_off() -> None:
    off = engine(0)
    text = words(80, 1)
    assert off.generate(text, GREEDY).stats.num_cached == 0
    assert off.generate(text, GREEDY).stats.num_cached == 0
    assert off.prefix.tree.nbytes == 0


def test_a_store_that_fails_costs_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    warm = engine()

    def planted(*_):
        raise MemoryError("planted")

    monkeypatch.setattr(warm.prefix.tree, "put", planted)
    got = warm.generate(words(50, 2), GREEDY)
    assert got.finish_reason == "length"
    assert "nothing of this was kept" in got.stats.notices[0]


# ---- where states are kept


def test_stops_depend_on_the_prompt_alone() -> None:
    prefix = Prefix(1)
    assert prefix.stops((), 100) == ()
    assert prefix.stops((), 3 * STRIDE) == (STRIDE, 2 * STRIDE)
    assert prefix.stops((5, 90), 100) == (90,)
    assert prefix.stops((900, 911), 920) == (900,)  # a system prompt and a short question
    assert prefix.stops((900, 911, 1300), 1310) == (900, 1300)
    turns = tuple(range(40, 4000, 40))
    stops = prefix.stops(turns, 4000)
    marks = [s for s in stops if s % STRIDE]
    assert marks[-1] == turns[-1]
    assert marks[0] == turns[0]
    assert all(b - a >= prefix.spacing for a, b in zip(marks[:-1], marks[1:-1], strict=False))
    assert set(prefix.stops(turns[:50], 2010)) - {turns[49]} <= set(stops)  # of a prompt that goes on
    assert prefix.stops((900, 911), 920, branch=300) == (300, 900)
    assert prefix.stops((900, 911), 920, branch=prefix.spacing - 1) == (900,)
    assert prefix.stops((900, 1300), 1310, branch=1000) == (900, 1300)
    assert Prefix(0).stops(turns, 4000) == ()
    wide = Prefix(1, stride=3 * STRIDE)
    assert wide.spacing == 3 * prefix.spacing
    assert wide.stops((), 5 * STRIDE) == (3 * STRIDE,)


def test_the_stride_is_that_of_the_models_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxspec.engine.prefix.rows.STRIDE", 16)  # the model is small
    made = engine()
    assert made.prefix.stride == stride_of(made.model.make_cache(0)) > 16
    per_token, state = made.model.make_cache(0).snapshot_bytes()
    made.generate(words(100, 0), GREEDY)
    (node,) = [n for n in made.prefix.tree.states if n.length == 100]
    piece = node.pieces[TARGET]
    assert piece.kv_bytes == (100 - piece.start) * per_token
    assert piece.point_bytes == state


@pytest.mark.parametrize(
    "wish", [pytest.param(spec(), marks=pytest.mark.slow), spec("mtp")], ids=["plain", "drafted"]
)
def test_a_prompt_larger_than_the_store_leaves_others_where_they_were(wish: SpecConfig) -> None:
    """And itself goes on from the beginning that it shares with them."""
    probe = engine()
    system = words(60, 80)
    others = [[*system, *words(40, seed)] for seed in (81, 82)]
    for text in others:
        ask(probe, text, wish, [60])
    warm = engine(probe.prefix.tree.nbytes + 10_000)
    warm.prefix.stride, warm.prefix.spacing = 64, 8
    for text in others:
        ask(warm, text, wish, [60])
    before = [known(warm, text) for text in (system, *others)]
    assert before == [60, 100, 100]
    large = [*system, *words(1500, 83)]
    for _ in range(2):
        got = ask(warm, large, wish, [60, 1200])
        assert got.stats.num_cached >= 60
        assert got.stats.notices == []
        same(cold().generate(large, GREEDY), got, large, GREEDY, "larger than the store")
        warm.prefix.tree.check()
        assert [known(warm, text) for text in (system, *others)] == before


def test_a_state_that_saves_little_is_not_kept() -> None:
    warm = engine(near=NEAR)
    warm.generate(words(NEAR - 9, 1), SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(warm.prefix.tree.states) == 0
    warm.generate(words(NEAR + 9, 1), SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(warm.prefix.tree.states) == 1


def test_ends_of_turns_are_found_in_the_prompt() -> None:
    warm = engine()
    text = [*words(40, 41), tiny_models.EOS, *words(10, 42)]
    warm.generate(text, GREEDY)
    other = [*text[:45], 1, 1]
    assert warm.generate(other, GREEDY).stats.num_cached == 41


# ---- other models


@pytest.mark.parametrize(
    "form", ["gemma3", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gemma4-dense", "gemma4-e"))]
)
def test_windows_are_kept_as_states(form: str) -> None:
    """Gemma: sliding windows cannot be cut, so they are kept as recurrent states are."""
    model = families.target(form)
    drafters = [ngram_lookup("ngram-simple", 3, 12), DraftModel(families.draft_model(form), model.vocab_size)]
    engines = []
    for budget in (0, BUDGET):
        config = equality.EngineConfig(prefix_budget=budget)
        engines.append(Engine(model, tiny_models.tokenizer(), drafters=drafters, config=config))
        engines[-1].prefix.near = 1
    text, wish = words(50, 51), spec("ngram-simple", "draft-model")
    for turn in range(3):
        wanted, got = (e.generate(text, SAMPLED, spec=wish) for e in engines)
        assert (got.stats.num_cached > 0) == (turn > 0)
        same(wanted, got, text, SAMPLED, f"{form}, turn {turn}", model)
        text = [*text, *got.tokens, *words(5, turn)]


def test_an_mtp_head_of_its_own_context_ends_where_it_must() -> None:
    warm = equality.engine([Mtp(tiny_models.mtp_head(), 90)], prefix_budget=BUDGET)
    text = words(80, 61)
    answer = warm.generate(text, GREEDY)
    longer = [*text, *answer.tokens, 1]
    again = warm.generate(longer, GREEDY)
    assert again.stats.num_cached >= 80
    assert any("context of 90 tokens is full" in n for n in again.stats.notices)
    same(cold().generate(longer, GREEDY), again, longer, GREEDY, "behind a full head")


def _hidden_behind(made: Engine, text: list[int]) -> np.ndarray:
    """(H,) of the last token of a text that is kept."""
    state = made.prefix.tree.state(KeyedText(text).key(len(text)))
    assert state is not None
    assert state.hidden is not None
    return np.array(state.hidden)[0]


@catches(
    "the hidden behind an answer is that of its last round's first token",
    "mlxspec.engine.prefix.rows:Prefix.keep",
    lambda right: lambda self, request, *rest: right(self, request, *rest[:-1], request.tail[0][:1]),
)
def test_the_hidden_behind_an_answer_is_its_last_tokens() -> None:
    """The answer ends inside an accepted draft, so that its last round committed several tokens. A head that goes on there reads it."""
    prompt = words(20, 7)
    answer = cold().generate(prompt, GREEDY, spec=spec()).tokens
    wish = replace(spec("ngram-simple"), predicted=tuple(answer))
    for num in (9, 12, 14):
        params = SamplingParams(max_tokens=num, ignore_eos=True)
        drafted, plain = engine(), engine()
        got = drafted.generate(prompt, params, spec=wish)
        assert got.tokens == answer[:num]
        assert got.stats.num_accepted
        plain.generate(prompt, params, spec=spec())
        text = [*prompt, *answer[: num - 1]]
        found, wanted = (_hidden_behind(made, text) for made in (drafted, plain))
        assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max()


@catches(
    "places where texts branch off are dropped like any other",
    "mlxspec.engine.prefix.rows:Prefix._is_anchor",
    lambda right: lambda self, request, length: length >= len(request.prompt),
)
def test_texts_are_expected_to_branch_off_at_the_first_and_the_last_mark() -> None:
    """A system prompt's end, the last turn's beginning, the prompt's end and the answer's end are kept before the places between them."""
    made = engine(near=4)
    made.prefix.spacing = 4
    text = words(60, 3)
    ask(made, text, spec(), marks=[10, 25, 40])
    found = {state.length: state.is_anchor for state in made.prefix.tree.states}
    assert found.pop(60 + GREEDY.max_tokens - 1)
    assert found == {10: True, 25: False, 40: True, 60: True}
