"""Block drafters in the engine: what they propose is what a reference in numpy proposes from the whole text, and texts are those of plain
decoding with every kind, policy, number of rows, way of sampling, and behind prefix hits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
import tiny_dflash
from mlx.utils import tree_flatten
from planting import catches
from tiny_dflash import Reference

from mlxspec.config import SamplingParams
from mlxspec.drafters.base import Ask, Draft, Unread
from mlxspec.drafters.dflash import DFlashDrafter
from mlxspec.engine.engine import Engine
from mlxspec.sampling.noise import Positions, Shifted, gumbel
from mlxspec.sampling.sampler import BatchSampler
from tests import tiny_models
from tests.drafters.residual_streams import shown
from tests.engine import equality
from tests.engine.equality import PLAIN, asked, prompts, same, spec

KINDS = tiny_dflash.KINDS
AT_MOST = 1e-4
NUM_ROWS = 4


class Watched(DFlashDrafter):
    """Keeps what it was asked and what it gave."""

    def __init__(self, kind: str, *, window: int | None = 9) -> None:
        super().__init__(tiny_models.dflash(kind, window=window), 2048)
        self.num_behind = 0
        self.drafted: list[tuple[list[int], list[int], list[float], np.ndarray]] = []
        self._seen: dict[tuple[int, int], np.ndarray] = {}

    def _scored(self, logits: mx.array, rows: Sequence[int], positions: Positions) -> mx.array:
        if isinstance(positions, Shifted):
            positions = np.asarray(mx.array(positions.first) + positions.by).tolist()
        self._seen |= dict(zip(zip(rows, positions, strict=True), np.array(logits), strict=True))
        return logits

    def draft_behind(self, asks: Sequence[Ask], sampler: BatchSampler, unread: Unread) -> list[Draft] | None:
        self._seen.clear()
        drafts = super().draft_behind(asks, sampler, unread)
        for i, (ask, draft) in enumerate(zip(asks, drafts or (), strict=bool(drafts))):
            known = [*ask.history, *unread.tokens[i, : unread.num_committed[i].item()].tolist()]
            self._keep(ask.row, known, draft)
            self.num_behind += 1
        return drafts

    def draft(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        self._seen.clear()
        drafts = super().draft(asks, sampler)
        for ask, draft in zip(asks, drafts, strict=True):
            self._keep(ask.row, list(ask.history), draft)
        return drafts

    def _keep(self, row: int, history: list[int], draft: Draft) -> None:
        logits = np.stack([self._seen[row, len(history) + d] for d in range(draft.length)])
        sure = draft.confidences.tolist()  # type: ignore[union-attr]
        self.drafted.append((history, draft.tokens.tolist(), sure, logits))  # type: ignore[union-attr]


@cache
def reference(kind: str, window: int | None = 9) -> Reference:
    model, target = tiny_models.make_dflash(tiny_models.target(), kind), tiny_models.target()
    c, text = model.config, model.config.text
    arrays = unfused(kind)
    published = tiny_dflash.config(
        kind,
        hidden=text.hidden_size,
        vocab=text.vocab_size,
        target_layers=3,
        layer_ids=c.layer_ids,
        mask_id=c.mask_id,
        window=window,
        head_dim=text.head_dim,
        num_attention_heads=text.num_heads,
        num_key_value_heads=text.num_kv_heads,
    )
    published["dflash_config"] |= {"selector_rank": c.rank, "markov_rank": c.rank}
    ends = target.embed(mx.arange(text.vocab_size)), target.head(mx.eye(text.hidden_size)).T
    found = Reference(kind, published, arrays, *(np.array(x) for x in ends))
    found.causal = [kind == "DSpark", window is not None]  # of tiny_models
    return found


def unfused(kind: str) -> dict[str, np.ndarray]:
    """The weights under the names of a checkpoint."""
    found: dict[str, np.ndarray] = {}

    def keep(module, form) -> None:  # type: ignore[no-untyped-def]
        for name, value in tree_flatten(module.parameters()):
            name = name.removesuffix(".weight") if "_codebook" in name else name
            found[name] = np.array(value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "finish", keep)
        tiny_models.make_dflash(tiny_models.target(), kind)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_proposals_are_those_of_the_reference(kind: str) -> None:
    """Prompts of one token and of many, ragged verifies, answers that leave the first row the least room: at every draft the whole text is
    computed anew."""
    watched, told = Watched(kind), reference(kind)
    made = equality.engine([watched])
    params = [
        SamplingParams(max_tokens=n, ignore_eos=True, temperature=t, seed=3)
        for n, t in ((18, 0.0), (24, 0.9), (30, 0.0))
    ]
    some = [[5], prompts(3, 1)[0] or [1, 2], list(range(20, 60))]
    made.generate(some, params, spec=spec("dflash", n_max=5))
    assert len(watched.drafted) >= 40
    worst = furthest(watched, told, made)
    print(f"{kind}: largest difference {worst:.1e}")
    assert worst <= AT_MOST


def furthest(watched: Watched, told: Reference, made: Engine) -> float:
    """The largest difference of logits over 40 of the drafts, or all if they are fewer."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for i in rng.permutation(len(watched.drafted))[:40]:
        history, drafted, sure, logits = watched.drafted[i]
        features = shown(made.model, history, watched.needs.layers)[1:]
        hidden, own = told.block(features, history[-1], len(drafted))
        for d, (h, x, before) in enumerate(zip(hidden, own, [history[-1], *drafted], strict=False)):
            wanted = told.behind(h, x, before)
            possible = np.isfinite(wanted)
            assert (np.isfinite(logits[d]) == possible).all()
            worst = max(worst, np.abs(logits[d][possible] - wanted[possible]).max())
            if told.kind == "DSpark":
                assert abs(sure[d] - told.sureness(h, before)) < 1e-4
    return worst


@catches(
    "a block drafter sees cells of rejected tokens",
    "mlxspec.models.dflash:_seen",
    lambda right: lambda *_: None,
    case="DFlash",
)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_behind_rounds_that_nobody_has_read(kind: str) -> None:
    """They are the reference's from the whole text, drawn with the noise of their positions, and texts are plain; with windows that end in
    the unread round, and without."""
    some = [[5], list(range(20, 60)), list(range(30, 5, -1))]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=t, seed=3) for t in (0.0, 0.9, 0.7)]
    for window in (None, 9):
        watched = Watched(kind, window=window)
        made = equality.engine([watched])
        made.pipeline.overlaps = True
        got = made.generate(some, params, spec=spec("dflash", n_max=4))
        for prompt, wish, one in zip(some, params, got, strict=True):
            wanted = equality.engine([]).generate(prompt, wish, spec=PLAIN)
            same(wanted, one, prompt, wish, kind)
            assert not one.stats.notices
        assert watched.num_behind > 15
        assert furthest(watched, reference(kind, window), made) <= AT_MOST
        for history, drafted, _, logits in watched.drafted:
            row = next(i for i, p in enumerate(some) if history[: len(p)] == p)
            if params[row].temperature > 0:
                for d, token in enumerate(drafted):
                    noise = np.array(gumbel([3], [len(history) + d], logits.shape[1]))[0]
                    assert np.argmax(logits[d] / params[row].temperature + noise) == token


@cache
def engine(kind: str, form: str = "float32", window: int | None = 9) -> tuple[Engine, equality.Nudged]:
    model = tiny_models.target(form)
    drafter = equality.Nudged(tiny_models.dflash(kind, form, window), model.max_context)
    return equality.engine([drafter], form, prefill_chunk=32), drafter


@cache
def batch(number: int, form: str = "float32") -> tuple:  # type: ignore[type-arg]
    some, params = prompts(NUM_ROWS, number), asked(number * NUM_ROWS, NUM_ROWS)
    plain = equality.engine([], form, prefix_budget=0)
    return some, params, [plain.generate(p, s, spec=PLAIN) for p, s in zip(some, params, strict=True)]


def test_a_whole_block_is_asked_for_unless_told_otherwise() -> None:
    made, drafter = engine("DFlash")
    some, params, plain = batch(1)
    drafter.learn([[*p, *r.tokens] for p, r in zip(some, plain, strict=True)])
    for most, longest in ((None, 6), (2, 2), (40, 6)):
        result = made.generate(some[0], params[0], spec=spec("dflash", n_max=most))
        assert len(result.stats.drafters["dflash"].by_position) == longest


@pytest.mark.parametrize("kind", KINDS)
def test_turns_of_a_conversation(kind: str) -> None:
    """Behind a prefix hit the drafter has its cells again: it proposes as in a cold run, and texts are plain."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    text = list(range(10, 60))
    warm, cold = (equality.engine([Watched(kind)], prefix_budget=b) for b in (1 << 26, 0))
    for turn in range(3):
        got, wanted = (made.generate(text, params, spec=spec("dflash")) for made in (warm, cold))
        assert got.tokens == wanted.tokens
        assert not got.stats.notices
        assert (got.stats.num_cached > 0) == (turn > 0)
        text = [*text, *wanted.tokens, *range(30 + turn, 50)]
    ours, theirs = (
        {tuple(h): x for h, _, _, x in made.drafts.drafters["dflash"].drafted} for made in (warm, cold)
    )
    assert ours.keys() == theirs.keys()
    for history, logits in ours.items():
        np.testing.assert_allclose(logits, theirs[history], atol=2e-4)


@catches(
    "a block drafter draws with the noise of the position before",
    "mlxspec.drafters.dflash:_positions",
    lambda right: lambda known, *more: right([n - 1 for n in known], *more),
)
@pytest.mark.parametrize("kind", ["DFlash", "DSpark"])
def test_noise_is_that_of_the_position(kind: str) -> None:
    """Each drafted token is drawn from its own logits with the noise that the target draws with at that position."""
    watched = Watched(kind)
    hot = 8.0  # so that noise decides
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=hot, seed=11)
    equality.engine([watched]).generate([4, 8, 15], params, spec=spec("dflash"))
    assert watched.drafted
    for history, drafted, _, logits in watched.drafted:
        places = range(len(history), len(history) + len(drafted))
        noise = np.array(gumbel([11] * len(drafted), list(places), tiny_models.VOCAB))
        assert (logits / hot + noise).argmax(-1).tolist() == drafted
        assert drafted != logits.argmax(-1).tolist() or len(drafted) < 4
