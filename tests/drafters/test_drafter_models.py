"""Drafters that run a model: what they keep of a row is what one forward over its whole history would keep."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from planting import catches, rewritten

from mlxspec.config import SamplingParams
from mlxspec.drafters import model_based
from mlxspec.drafters.base import Ask, Needs
from mlxspec.drafters.dflash import DFlashDrafter
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.eagle3 import Eagle3
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine
from mlxspec.kernels.flat import FlatRows
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler
from tests import tiny_models

VOCAB = tiny_models.VOCAB


def true_hiddens(history: list[int], needs: Needs = Mtp.needs) -> mx.array:
    """(len(history), H): what each token was sampled from: zeros, then the target's final hidden of the token before, or the streams that
    these needs name."""
    model = tiny_models.target()
    cache, rows = model.make_cache(1), FlatRows((len(history),))
    out = model.forward(mx.array(history, mx.int32), rows, cache, certain=True, taps=needs.layers)
    given = mx.concatenate([out.taps[i] for i in needs.layers], axis=-1) if needs.layers else out.hidden
    return mx.concatenate([mx.zeros((1, given.shape[1])), given[:-1]])


def head_from_scratch(history: list[int]) -> tuple[list[np.ndarray], np.ndarray]:
    """Keys and values of the MTP head for all tokens but the first, and its logits behind the last."""
    head = tiny_models.mtp_head()
    cache, tokens = head.make_cache(1), history[1:]
    out = head.forward(mx.array(tokens, mx.int32), true_hiddens(history)[1:], FlatRows((len(tokens),)), cache)
    cells = [np.asarray(x[:, :, : len(tokens)]) for x in cache.arrays]
    return cells, np.asarray(out.logits[-1])


class Driver:
    """A drafter, its rows' histories, and the target's true hiddens for those who want them."""

    def __init__(self, drafter: ModelDrafter) -> None:
        self.drafter = drafter
        self.rows: dict[int, list[int]] = {}
        self.num_run: dict[int, int] = {}

    def begin(self, row: int, prompt: list[int]) -> None:
        self.drafter.begin(row)
        self.rows[row] = []
        self.hear(row, prompt)

    def hear(self, row: int, tokens: list[int]) -> None:
        history = self.rows[row] = self.rows[row] + tokens
        needs = self.drafter.needs
        hidden = true_hiddens(history, needs)[-len(tokens) :] if needs.wants_hidden else None
        self.drafter.hear(row, tokens, hidden)

    def propose(self, limits: dict[int, int], params: SamplingParams | None = None) -> dict[int, list[int]]:
        samplers = {r: RowSampler(params or SamplingParams(), self.rows[r], VOCAB) for r in limits}
        asks = [Ask(r, self.rows[r], n, samplers[r]) for r, n in limits.items()]
        drafts = self.drafter.draft(asks, BatchSampler([a.sampler for a in asks], VOCAB))
        for draft, n in zip(drafts, limits.values(), strict=True):
            assert draft.length == n
            assert mx.array(draft.confidences).shape == (n,)
        return {r: np.asarray(d.tokens).tolist() for r, d in zip(limits, drafts, strict=True)}

    def length(self, row: int) -> int:
        return self.drafter._length(row)


def make(kind: str) -> ModelDrafter:
    if kind == "mtp":
        return Mtp(tiny_models.mtp_head(), 2048)
    if kind == "eagle3":
        return Eagle3(tiny_models.eagle3(), 2048)
    if kind in ("DFlash2", "DSpark"):
        return DFlashDrafter(tiny_models.dflash(kind), 2048)
    return DraftModel(tiny_models.echo(), VOCAB)


def play(driver: Driver, seed: int = 0) -> None:
    """Three rows, ragged prompts; rounds in which only some are asked, one row leaves and another comes."""
    rng = np.random.default_rng(seed)

    def some(low: int, high: int) -> list[int]:
        return rng.integers(0, VOCAB, int(rng.integers(low, high))).tolist()

    for row in range(3):
        driver.begin(row, some(1, 9))
        driver.hear(row, some(1, 2))
    for n in range(10):
        if n == 4:
            driver.drafter.forget(1)
            del driver.rows[1]
            driver.begin(7, some(3, 6))
        asked = [r for r in driver.rows if rng.random() < 0.7]
        if asked:
            driver.propose({r: int(rng.integers(1, 5)) for r in asked})
            for row in asked:
                assert driver.length(row) == len(driver.rows[row])  # drafts left no trace
        for row in driver.rows:
            driver.hear(row, some(1, 5))


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "draft-model"])
def test_a_drafter_holds_as_many_cells_as_it_was_told_tokens(kind: str) -> None:
    driver = Driver(make(kind))
    play(driver)
    for row, history in driver.rows.items():
        queued = driver.drafter._rows[row].tokens
        assert driver.length(row) + len(queued) == len(history)
        assert queued == history[driver.length(row) :]
    driver.propose(dict.fromkeys(driver.rows, 3))
    assert [driver.length(r) for r in driver.rows] == [len(h) for h in driver.rows.values()]
    assert driver.drafter.nbytes > 0
    for row in driver.rows:
        driver.drafter.forget(row)
    assert driver.drafter.nbytes == 0


def test_cells_of_the_head_are_those_of_a_forward_over_the_whole_history() -> None:
    driver = Driver(make("mtp"))
    play(driver)
    driver.propose(dict.fromkeys(driver.rows, 2))
    cache = driver.drafter._cache
    for place, row in enumerate(driver.drafter._order):
        history = driver.rows[row]
        wanted, _ = head_from_scratch(history)
        got = [x[place][:, :, : len(history) - 1] for x in (cache.layers[0].keys, cache.layers[0].values)]
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "draft-model"])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, seed=4)], ids=str
)
def test_a_draft_is_the_one_a_fresh_drafter_makes(kind: str, params: SamplingParams) -> None:
    driver = Driver(make(kind))
    play(driver, seed=1)
    got = driver.propose(dict.fromkeys(driver.rows, 4), params)
    for row, history in driver.rows.items():
        fresh = Driver(make(kind))
        fresh.begin(0, history)
        assert fresh.propose({0: 4}, params)[0] == got[row]


def confidences(kind: str, rows: dict[int, list[int]], limits: dict[int, int]) -> dict[int, list[float]]:
    """By row, how sure a drafter is of the tokens that it drafts behind these histories together."""
    driver = Driver(make(kind))
    for row, history in rows.items():
        driver.begin(row, history)
    asks = [Ask(r, rows[r], n, RowSampler(SamplingParams(), rows[r], VOCAB)) for r, n in limits.items()]
    drafts = driver.drafter.draft(asks, BatchSampler([a.sampler for a in asks], VOCAB))
    return {a.row: mx.array(d.confidences).tolist() for a, d in zip(asks, drafts, strict=True)}


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "draft-model", "DFlash2", "DSpark"])
def test_a_row_that_drafts_on_beside_shorter_drafts_drafts_as_alone(kind: str) -> None:
    """By what the drafter makes of each token: its choice may be the same by chance."""
    limits = {0: 1, 1: 5, 2: 3, 3: 5}
    rows = {r: np.random.default_rng(r).integers(0, VOCAB, 4 + r).tolist() for r in limits}
    together = confidences(kind, rows, limits)
    for row, limit in limits.items():
        alone = confidences(kind, {row: rows[row]}, {row: limit})
        np.testing.assert_allclose(together[row], alone[row], rtol=1e-4)


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "draft-model"])
def test_rounds_told_together_are_those_told_one_by_one(kind: str) -> None:
    one, together = Driver(make(kind)), Driver(make(kind))
    for driver in (one, together):
        driver.begin(0, [5, 6, 7, 8])
        driver.propose({0: 2})
    pieces = [[9], [1, 2, 3], [4]]
    for piece in pieces:
        one.hear(0, piece)
    told = [([9, 1, 2, 3, 4][i:j], None) for i, j in ((0, 1), (1, 4), (4, 5))]
    if together.drafter.needs.wants_hidden:
        hidden = true_hiddens([5, 6, 7, 8, 9, 1, 2, 3, 4], together.drafter.needs)[4:]
        told = [
            (tokens, hidden[i:j]) for (tokens, _), (i, j) in zip(told, ((0, 1), (1, 4), (4, 5)), strict=True)
        ]
    together.rows[0] = one.rows[0]
    for tokens, given in told:
        together.drafter.hear(0, tokens, given)
    assert one.propose({0: 4}) == together.propose({0: 4})
    assert one.length(0) == together.length(0)


def test_the_first_drafted_token_is_the_heads_best() -> None:
    driver = Driver(make("mtp"))
    driver.begin(0, [3, 1, 4, 1, 5, 9, 2, 6])
    _, logits = head_from_scratch(driver.rows[0])
    assert driver.propose({0: 1})[0] == [int(np.argmax(logits))]


def test_a_draft_model_is_the_model_itself_running_on() -> None:
    driver, model = Driver(make("draft-model")), tiny_models.echo()
    driver.begin(0, [3, 1, 4, 1, 5])
    text = list(driver.rows[0])
    for _ in range(5):
        cache = model.make_cache(1)
        out = model.forward(mx.array(text), FlatRows((len(text),)), cache, certain=True, logits_at="last")
        text.append(int(mx.argmax(out.logits[0]).item()))
    assert driver.propose({0: 5})[0] == text[5:]


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "draft-model"])
def test_asking_one_row_does_not_touch_the_others(kind: str) -> None:
    driver, alone = Driver(make(kind)), Driver(make(kind))
    for one in (driver, alone):
        one.begin(0, [1, 2, 3])
    driver.begin(1, [9, 8, 7, 6])
    for _ in range(3):
        driver.propose({1: 4})
        driver.hear(1, [5, 4])
    assert driver.length(0) == driver.drafter.skips
    assert driver.propose({0: 3}) == alone.propose({0: 3})


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "draft-model"])
@pytest.mark.parametrize("length", [511, 512, 1023])
def test_a_long_prompt_is_run_before_it_fills_the_queue(kind: str, length: int) -> None:
    """Whatever the prompt's length there is a token left to begin the draft with."""
    driver = Driver(make(kind))
    prompt = (np.arange(length) * 7 % VOCAB).tolist()
    driver.drafter.begin(0)
    needs = driver.drafter.needs
    hiddens = true_hiddens([*prompt, 5], needs)
    driver.rows[0] = [*prompt, 5]
    for start in range(0, length + 1, 512):
        piece = driver.rows[0][start : min(start + 512, length)] if start < length else []
        if piece:
            part = hiddens[start : start + len(piece)] if needs.wants_hidden else None
            driver.drafter.hear(0, piece, part)
    driver.drafter.hear(0, [5], hiddens[-1:] if needs.wants_hidden else None)
    assert 1 <= len(driver.drafter._rows[0].tokens) <= model_based.QUEUE_AT_MOST
    got = driver.propose({0: 2})[0]
    fresh = Driver(make(kind))
    fresh.begin(0, driver.rows[0][:100])
    fresh.drafter.hear(0, driver.rows[0][100:], hiddens[100:] if needs.wants_hidden else None)
    fresh.rows[0] = driver.rows[0]
    assert fresh.propose({0: 2})[0] == got
    assert driver.length(0) == length + 1


def test_the_first_token_has_no_cell_in_the_head() -> None:
    """A text of one token cannot be drafted behind; whether the first token comes alone or with others makes no difference."""
    driver, together = Driver(make("mtp")), Driver(make("mtp"))
    driver.begin(0, [7])
    sampler = RowSampler(SamplingParams(), [7], VOCAB)
    draft = driver.drafter.draft([Ask(0, [7], 2, sampler)], BatchSampler([sampler], VOCAB))[0]
    assert (draft.length, draft.ended) == (0, None)
    driver.hear(0, [8])
    driver.hear(0, [9, 4])
    together.begin(0, [7, 8, 9, 4])
    assert driver.propose({0: 3}) == together.propose({0: 3})
    assert driver.drafter._cache.lengths == together.drafter._cache.lengths == [3]


@pytest.mark.parametrize("start", [0, 1, 4])
def test_a_snapshot_of_the_head_counts_tokens(start: int) -> None:
    """As the prefix cache wants it: as many places as tokens, and what is restored from one drafts as a fresh row does."""
    history = [3, 1, 4, 1, 5, 9, 2, 6]
    driver = Driver(make("mtp"))
    driver.begin(0, history)
    kept = driver.drafter.snapshot(0, 6, start)
    assert (kept.start, kept.length) == (start, 6)
    assert {x.shape[2] for x in kept.arrays} == {6 - start}
    if start:
        whole = driver.drafter.snapshot(0, 6, 0)
        for a, b in zip(kept.arrays, whole.arrays, strict=True):
            assert mx.array_equal(a, b[:, :, start:])
        return
    back = Driver(make("mtp"))
    back.drafter.begin(0)
    back.drafter.resume(0, history[:6], kept)
    back.rows[0] = history[:6]
    back.hear(0, history[6:])
    assert back.propose({0: 3}) == driver.propose({0: 3})
    assert back.length(0) == len(history)


@catches(
    "states that a fork's forward writes take nothing",
    "mlxspec.drafters.model_based:ModelDrafter.row_bytes",
    rewritten("2 * states", "states"),
    case="recurrent",
)
@pytest.mark.parametrize("stack", ["attention", "recurrent", "hybrid"])
def test_a_row_holds_no_more_than_is_planned_for_it_while_it_is_drafted_for(
    stack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache, the fork on which drafted tokens run, and what a forward on the fork writes."""
    drafter = DraftModel(tiny_models.stack(stack), VOCAB)
    history, held, right = list(range(1, 30)), [], drafter._forward

    def watched(step):
        out = right(step)
        arrays = {id(x): x.nbytes for cache in (drafter._cache, step.cache) for x in cache.arrays}
        held.append(sum(arrays.values()))
        return out

    monkeypatch.setattr(drafter, "_forward", watched)
    drafter.begin(0)
    drafter.hear(0, history, None)
    sampler = RowSampler(SamplingParams(), history, VOCAB)
    for token in range(20):
        drafter.draft([Ask(0, history, 4, sampler)], BatchSampler([sampler], VOCAB))
        assert max(held) <= drafter.row_bytes(len(history) + 4)
        history = [*history, token]
        drafter.hear(0, [token], None)
    assert len(held) >= 80


# ---- limits of a draft model that is not made for the target


def test_a_draft_model_with_a_short_context_ends_for_the_long_row_only() -> None:
    drafter = DraftModel(tiny_models.echo(max_context=40), VOCAB)
    engine = Engine(tiny_models.target(), drafters=[drafter])
    plain = Engine(tiny_models.target())
    prompts = [[1, 2, 3], list(range(30)), list(range(60))]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (20, 25, 12)]
    got = engine.generate(prompts, params)
    assert [r.tokens for r in got] == [r.tokens for r in plain.generate(prompts, params)]
    assert got[0].stats.notices == []
    for result in got[1:]:
        assert len(result.stats.notices) == 1
        assert "draft-model drafting ended: its context of 40 tokens is full" in result.stats.notices[0]
    assert got[0].stats.num_accepted > 0
    assert got[1].stats.num_accepted > 0  # until its context was full
    assert got[2].stats.num_drafted == 0
    assert drafter.nbytes == 0


@pytest.mark.parametrize("max_context", [5, 8, 9, 10, 13])
def test_drafts_never_reach_past_the_draft_models_context(max_context: int) -> None:
    drafter = DraftModel(tiny_models.echo(max_context=max_context), VOCAB)
    drafter.begin(0)
    history = [1, 2, 3, 4, 5, 6, 7]
    drafter.hear(0, history, None)
    row = RowSampler(SamplingParams(), history, VOCAB)
    draft = drafter.draft([Ask(0, history, 4, row)], BatchSampler([row], VOCAB))[0]
    assert draft.length == max(0, min(4, max_context - len(history)))
    assert (draft.ended is not None) == (max_context <= len(history))


class Watching:
    """A model that is never asked for a token it does not have: looking one up reads memory that is not its own."""

    def __init__(self, inner) -> None:
        self._inner = inner

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def forward(self, tokens: mx.array, *args, **kwargs):
        assert 0 <= tokens.min().item() <= tokens.max().item() < self._inner.vocab_size
        return self._inner.forward(tokens, *args, **kwargs)


@pytest.mark.parametrize("vocab", [VOCAB - 30, VOCAB - 1, VOCAB + 1, VOCAB + 40])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_may_have_a_smaller_or_a_padded_vocabulary(vocab: int, temperature: float) -> None:
    """Also where the text holds tokens that the draft model does not have."""
    drafter = DraftModel(Watching(tiny_models.echo(vocab=vocab)), VOCAB)
    engine = Engine(tiny_models.target(), drafters=[drafter])
    prompts = [[VOCAB - 1, VOCAB - 2, 3], [VOCAB - 1] * 20, list(range(VOCAB - 20, VOCAB))]
    params = SamplingParams(max_tokens=25, temperature=temperature, seed=1, logit_bias={VOCAB - 1: 2.0})
    got = engine.generate(prompts, params)
    wanted = Engine(tiny_models.target()).generate(prompts, params)
    assert [r.tokens for r in got] == [r.tokens for r in wanted]
    assert all(not r.stats.notices and r.stats.num_drafted for r in got)
    driver = Driver(drafter)
    driver.begin(0, [1, 2, 3])
    assert all(0 <= t < min(vocab, VOCAB) for t in driver.propose({0: 5})[0])
