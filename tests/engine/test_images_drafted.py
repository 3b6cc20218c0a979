"""Drafters over prompts with images: the text is that of plain decoding whoever drafts, and the MTP head is fed the images' own rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from planting import catches, rewritten

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.base import Ask, Draft
from mlxspec.drafters.dflash import DFlashDrafter
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.eagle3 import Eagle3
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.image_rows import ImageInput, ImageSpan, RowImages, SeenImages
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler
from tests import tiny_models
from tests.engine import equality, images

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
NGRAMS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
DRAFTERS = (*NGRAMS, "mtp", "eagle3", "dflash", "draft-model")


def drafters(form: str = "float32"):
    model = tiny_models.target(form)
    return [
        Mtp(tiny_models.mtp_head(form), model.max_context),
        Eagle3(tiny_models.eagle3(form), model.max_context),
        DFlashDrafter(tiny_models.dflash(form=form), model.max_context),
        DraftModel(tiny_models.echo(form=form), model.vocab_size, vision=images.vision()),
        ngram_lookup("ngram-simple", 2, 12),
        ngram_lookup("ngram-map-k", 2, 8, 1),
        ngram_lookup("ngram-map-k4v", 2, 8, 1),
    ]


def engine(given=(), form: str = "float32", **config) -> Engine:
    return equality.engine(given, form, vision=images.vision(), **config)


class Case:
    """Two turns of one to three rows, some without images; the drafters, the policy and what is asked are drawn from the number. among:
    drafters that there are. axes: whether positions of images have three axes."""

    def __init__(
        self,
        number: int,
        drafter: str | None = None,
        policy: str | None = None,
        *,
        among: Sequence[str] = DRAFTERS,
        axes: bool = True,
    ) -> None:
        self.rng = rng = np.random.default_rng(number)
        self.axes = axes
        names = [drafter] if drafter else [str(n) for n in rng.permutation(among)[: int(rng.integers(1, 4))]]
        self.spec = SpecConfig(
            drafters=tuple(names),
            policy=policy or ("auto" if rng.random() < 0.4 else "fixed"),
            n_max=int(rng.choice([1, 3, 6])),
            p_min=float(rng.choice([0.0, 0.0, 0.4])),
            ngram_m=8,
        )
        self.rows = [
            images.text(int(rng.integers(3, 40)), number + r)
            if rng.random() < 0.3
            else images.random_prompt(1000 * number + r, axes=axes)
            for r in range(int(rng.integers(1, 4)))
        ]
        self.params = [
            SamplingParams(
                max_tokens=int(rng.integers(6, 24)),
                temperature=float(rng.choice([0.0, 0.8])),
                seed=number + r,
                repetition_penalty=float(rng.choice([1.0, 1.2])),
                ignore_eos=True,
            )
            for r in range(len(self.rows))
        ]

    def play(self, drafting: Engine, plain: Engine) -> Counter[str]:
        counts: Counter[str] = Counter()
        for turn in range(2):
            wanted = [
                plain.generate(p, params, spec=equality.PLAIN)
                for p, params in zip(self.rows, self.params, strict=True)
            ]
            got = drafting.generate(self.rows, self.params, spec=self.spec)
            for row, (a, b) in enumerate(zip(wanted, got, strict=True)):
                assert b.tokens == a.tokens, f"turn {turn}, row {row}, {self.spec}"
                assert b.error is None
                assert not b.stats.notices
                counts["cached"] += b.stats.num_cached
                for name, work in b.stats.drafters.items():
                    counts[name] += work.num_drafted
                    counts["accepted"] += work.num_accepted
            self.rows = [self._longer(p, list(r.tokens)) for p, r in zip(self.rows, wanted, strict=True)]
        return counts

    def _longer(self, before, answer: list[int]):  # type: ignore[no-untyped-def]
        more = [*answer, *images.text(int(self.rng.integers(1, 9)), int(self.rng.integers(1 << 20)))]
        if isinstance(before, list):
            return [*before, *more]
        parts, at = [], 0
        for span, prepared in zip(before.spans, before.images, strict=True):
            parts += [list(before.tokens[at : span.start]), prepared]
            at = span.stop
        parts.append([*before.tokens[at:], *more])
        if self.rng.random() < 0.5:
            parts += [images.image(3, 4, int(self.rng.integers(0, 2)), axes=self.axes), images.text(4, 1)]
        return images.prompt(*parts)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("policy", ["fixed", "auto"])
@pytest.mark.slow
def test_every_drafter_and_policy_gives_the_plain_text(name: str, policy: str) -> None:
    drafting, plain, counts = engine(drafters()), engine(prefix_budget=0), Counter()
    for number in range(6):
        counts += Case(number, name, policy).play(drafting, plain)
    if policy == "fixed":
        assert counts[name] > 0
    assert counts["cached"] > 0


@pytest.mark.parametrize("number", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 10))])
def test_random_rows_and_drafters_give_the_plain_text(number: int) -> None:
    chunk = int(np.random.default_rng(number).choice([16, 23, 512]))
    Case(number).play(engine(drafters(), prefill_chunk=chunk), engine(prefix_budget=0))


class Watched(Mtp):
    """made: how many tokens were known, and what was drafted behind them with which probabilities."""

    def __init__(self, head, max_context: int) -> None:  # type: ignore[no-untyped-def]
        super().__init__(head, max_context)
        self.made: list[tuple[int, list[int], list[float]]] = []

    def draft(self, asks, sampler) -> list[Draft]:  # type: ignore[no-untyped-def]
        drafts = super().draft(asks, sampler)
        for ask, draft in zip(asks, drafts, strict=True):
            sure = np.array(draft.confidences).tolist()
            self.made.append((len(ask.history), np.array(draft.tokens).tolist(), sure))
        return drafts

    def draft_behind(self, asks, sampler, unread):  # type: ignore[no-untyped-def]
        return None


def head_alone(given, answer: list[int], known: int, num: int):  # type: ignore[no-untyped-def]
    """What the head drafts behind the first `known` tokens: one forward of the target over all of them, one of the head over all cells."""
    target, head, tower = tiny_models.target(), tiny_models.mtp_head(), images.OneMatrix()
    tokens = [*given.tokens, *answer][:known]
    places = images.positions(given, len(answer) + num)
    rows = [(span.start, tower(p)) for span, p in zip(given.spans, given.images, strict=True)]
    ids = mx.array([images.LOOKUP if t == images.IMAGE else t for t in tokens], mx.int32)
    whole = ImageInput(rows=tuple(rows), positions=places[: known - 1])
    hidden = target.forward(
        ids[:-1], FlatRows((known - 1,)), target.make_cache(1), certain=True, logits_at="none", images=whole
    ).hidden
    cells = ImageInput(
        rows=tuple((p - 1, r) if p else (0, r[1:]) for p, r in rows), positions=places[: known - 1]
    )
    cache = head.make_cache(1)
    out = head.forward(ids[1:], hidden, FlatRows((known - 1,)), cache, images=cells)
    drafted, sure = [], []
    for i in range(num):
        cache.commit()
        chances = mx.softmax(out.logits[-1])
        drafted.append(int(mx.argmax(chances).item()))
        sure.append(float(chances.max().item()))
        step = ImageInput(positions=places[known - 1 + i : known + i])
        token = mx.array([drafted[-1]], mx.int32)
        out = head.forward(token, out.hidden[-1:], FlatRows((1,)), cache, images=step)
    return drafted, sure


@catches(
    "a head that continues from the prefix cache does not know how images shift positions",
    "mlxspec.drafters.model_based:ModelDrafter.resume",
    rewritten("self._turn(row)", "pass"),
)
@pytest.mark.parametrize("chunk", [16, 19, 512])
def test_the_head_is_fed_the_rows_and_positions_of_images(chunk: int) -> None:
    """When a prompt is read, and when it is known from the prefix cache."""
    given = images.prompt(
        images.text(13, 1), images.image(4, 5, 1), images.text(7, 2), images.image(3, 6, 2), images.text(3, 3)
    )
    watched = Watched(tiny_models.mtp_head(), tiny_models.target().max_context)
    made = engine([watched], prefill_chunk=chunk)
    for is_known in (False, True):
        watched.made = []
        result = made.generate(given, GREEDY, spec=equality.spec("mtp", n_max=3))
        assert (result.stats.num_cached > 0) is is_known
        assert watched.made
        for known, tokens, sure in watched.made:
            wanted, chances = head_alone(given, list(result.tokens), known, len(tokens))
            assert tokens == wanted
            assert np.abs(np.array(sure) - chances).max() < 2e-4


def test_a_prompt_that_begins_or_ends_with_an_image_is_drafted_for() -> None:
    for given in (
        images.prompt(images.image(3, 4, 1), images.text(3, 1)),
        images.prompt(images.text(3, 1), images.image(3, 4, 1)),
    ):
        wanted = images.greedy(tiny_models.target(), given, 16, images.OneMatrix())
        for name in ("mtp", "draft-model", "ngram-simple", "eagle3"):
            result = engine(drafters()).generate(given, GREEDY, spec=equality.spec(name))
            assert list(result.tokens) == wanted, name


@pytest.mark.parametrize(
    "drafter",
    [
        ngram_lookup("ngram-simple", 2, 12),
        ngram_lookup("ngram-map-k", 2, 8, 1),
        ngram_lookup("ngram-map-k4v", 2, 8, 1),
    ],
)
def test_lookups_neither_match_nor_propose_images(drafter) -> None:  # type: ignore[no-untyped-def]
    """What followed the words the first time is an image; and what stands between two of the same images is found by its words alone."""
    one, words, others = images.image(2, 3, 1), images.text(8, 1), images.text(8, 2)
    given = images.prompt(words, one, others, one)
    spans = [ImageSpan(s, p) for s, p in zip(given.spans, given.images, strict=True)]
    seen = SeenImages(RowImages(spans, len(given.tokens), images.vision().prompt), images.OneMatrix())
    sampler = RowSampler(SamplingParams(), [], tiny_models.VOCAB)
    batch = BatchSampler([sampler], tiny_models.VOCAB)
    drafter.begin(7)
    drafter.see(7, seen)
    history = seen.images.keyed(given.tokens)
    drafter.hear(7, history, None)
    assert (
        drafter.draft([Ask(7, history, 8, sampler)], batch)[0].length == 0
    )  # it ends as it did before `others`
    drafter.hear(7, words[:5], None)
    history = [*history, *words[:5]]
    draft = drafter.draft([Ask(7, history, 8, sampler)], batch)[0]
    assert list(draft.tokens) == words[5:]  # and no further
    drafter.forget(7)
