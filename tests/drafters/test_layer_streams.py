"""The layers hook: what drafters are given of chosen layers is the residual stream that a plain run of the text has behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.base import Ask, Draft, Needs, Unread
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine
from mlxspec.errors import ConfigError
from mlxspec.platform.host import numbers
from mlxspec.sampling.sampler import BatchSampler
from tests import families, tiny_models
from tests.drafters.residual_streams import shown
from tests.engine import equality

FAST = {("hybrid", "float32"), ("moe", "float32"), ("gemma4-e", "float32"), ("hybrid", "4bit")}
WISH = equality.spec("watch")


class Watch(equality.Oracle):
    """Drafts what it knows, wrong at times, and keeps everything that it is given. behind: whether it drafts behind unread rounds, with
    junk then."""

    def __init__(
        self, layers: tuple[int, ...], *, name: str = "watch", hidden: bool = False, behind: bool = False
    ) -> None:
        super().__init__([], sure=0.7)
        self.name, self.needs, self.behind = name, Needs(layers=layers, hidden=hidden), behind
        self.given: dict[int, list[np.ndarray]] = {}
        self.texts: dict[int, list[int]] = {}
        self.unread: list[
            tuple[int, int, np.ndarray]
        ] = []  # row, length of its history, what was unread then

    def begin(self, row: int) -> None:
        super().begin(row)
        self.given[row], self.texts[row] = [], self.told[row]

    def knows(self, texts: Sequence[Sequence[int]]) -> Watch:
        self._texts = [list(t) for t in texts]
        return self

    def hear(self, row: int, tokens: Sequence[int], hidden: mx.array | None) -> None:
        assert hidden is not None
        assert len(hidden) == len(tokens)
        super().hear(row, tokens, None)
        self.given[row].append(numbers(hidden.astype(mx.float32)).copy())

    def draft_behind(self, asks: Sequence[Ask], sampler: BatchSampler, unread: Unread) -> list[Draft] | None:
        if not self.behind:
            return None
        seen = numbers(unread.hidden.astype(mx.float32)).reshape(len(asks), unread.width, -1)
        for ask, rows, num in zip(asks, seen, unread.num_committed.tolist(), strict=True):
            self.unread.append((ask.row, len(ask.history), rows[:num].copy()))
        return [Draft(a.limit, mx.broadcast_to(unread.newest[i], (a.limit,))) for i, a in enumerate(asks)]

    def rows(self, row: int) -> np.ndarray:
        return np.concatenate(self.given[row])


def bound(target, wanted: np.ndarray) -> float:  # type: ignore[no-untyped-def]
    """Sums of other widths are rounded otherwise, in every layer, by a few units in the last place of the largest number."""
    steps = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}[target.dtype]
    return float(8 * target.num_layers * steps * max(1.0, np.abs(wanted).max()))


def check(target, watch: Watch, layers: tuple[int, ...], num: int) -> None:  # type: ignore[no-untyped-def]
    """All that was given for `num` rows is what a plain run of their texts has."""
    assert len(watch.given) == num
    for row, text in watch.texts.items():
        wanted, got = shown(target, text, layers), watch.rows(row)
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=0, atol=bound(target, wanted), err_msg=f"row {row}")


def marked(form: str, weights: str):  # type: ignore[no-untyped-def]
    return pytest.param(form, weights, marks=() if (form, weights) in FAST else pytest.mark.slow)


CASES = [
    *(marked(form, "float32") for form in (*families.QWEN, *families.GEMMA)),
    *(marked(f, w) for f in ("hybrid", "moe", "gemma4-e", "gemma3") for w in ("bfloat16", "4bit", "8bit")),
]


@catches(
    "a drafter is given the streams of its layers in another order",
    "mlxspec.drafters.streams:Streams.given",
    lambda right: (
        lambda self, needs, seen: right(self, replace(needs, layers=tuple(sorted(needs.layers))), seen)
    ),
    case="hybrid-float32",
)
@pytest.mark.parametrize(("form", "weights"), CASES)
def test_rows_are_those_of_layer_after_layer(form: str, weights: str) -> None:
    """Prompts in pieces, ragged verifies of which parts are rejected, plain rounds: every token's rows, and no other's."""
    target = families.target(form, weights)
    layers = (target.num_layers - 1, 0)  # in the order asked for; the first and the last
    some, params = equality.prompts(3, 5), equality.asked(0, 3)
    config = EngineConfig(prefill_chunk=32, prefix_budget=0)
    plain = Engine(target, tiny_models.tokenizer(), config=config)
    wanted = plain.generate(some, params, spec=equality.PLAIN)
    watch = Watch(layers).knows([[*p, *r.tokens] for p, r in zip(some, wanted, strict=True)])
    run = Engine(target, tiny_models.tokenizer(), drafters=[watch], config=config)
    results = run.generate(some, params, spec=WISH)
    for prompt, asked, text, got in zip(some, params, wanted, results, strict=True):
        equality.same(text, got, prompt, asked, f"{form}, {weights}", target)
        drafted = got.stats.drafters["watch"]
        assert 0 < drafted.num_accepted < drafted.num_drafted  # some were rejected
    check(target, watch, layers, 3)


@pytest.mark.parametrize("shapes", [{}, {"hidden": True}])
def test_each_drafter_is_given_its_own_columns(shapes: dict) -> None:
    """Two that need layers, an MTP head and one that needs nothing, in rows that use some of them, over one forward of all."""
    target = families.target("ends-linear")
    one, two = Watch((3, 1), name="one", **shapes), Watch((1, 0), name="two")
    head = tiny_models.make_mtp(tiny_models.config(tiny_models.STACKS["ends-linear"]), target)
    run = Engine(target, tiny_models.tokenizer(), drafters=[one, two, Mtp(head, target.max_context)])
    some, params = equality.prompts(4, 6), equality.asked(1, 4)
    wishes = [equality.spec(*names) for names in (("one",), ("mtp", "two"), ("mtp",), ("two", "one"))]
    plain = run.generate(some, params, spec=equality.PLAIN)
    requests = [run.submit(p, s, spec=w) for p, s, w in zip(some, params, wishes, strict=True)]
    while not run.is_idle:
        run.step()
    for text, request in zip(plain, requests, strict=True):
        got = request.history[len(request.prompt) :]
        assert got == list(text.tokens) or not equality.EXACT
        assert not request.stats.notices
    for watch, layers, num in ((one, (3, 1), 2), (two, (1, 0), 2)):
        assert len(watch.given) == num
        for row, text in watch.texts.items():
            got = watch.rows(row)
            if watch.needs.hidden:
                final, got = np.split(got, [target.hidden_size], axis=1)
                out = target.head(mx.array(final[1:]))
                assert numbers(mx.argmax(out, axis=-1)).shape == (len(text) - 1,)
                wanted = shown(target, text, (3,))[1:]
                norm = target.language_model.model.norm.weight
                normed = mx.fast.rms_norm(mx.array(wanted), norm, 1e-6)
                np.testing.assert_allclose(final[1:], numbers(normed), atol=1e-4)
            np.testing.assert_allclose(got, shown(target, text, layers), atol=1e-4)


@pytest.mark.parametrize("policy", ["fixed", "auto"])
def test_a_drafter_that_keeps_no_state_hears_each_prompt_from_its_first_token(policy: str) -> None:
    """Whatever the prefix cache knows of it; rows without it go on from there."""
    target, layers = families.target("hybrid"), (0, 2)
    watch = Watch(layers)
    config = EngineConfig(prefill_chunk=32)
    run = Engine(target, tiny_models.tokenizer(), drafters=[watch], config=config)
    run.prefix.near = 1
    text = equality.prompts(6, 7)[4][:50] or [1]
    text = (text * 50)[:60]
    wish = equality.spec("watch", policy=policy)
    for turn, asked in enumerate([equality.PLAIN, wish, equality.PLAIN, wish]):
        got = run.generate([*text], SamplingParams(max_tokens=24, ignore_eos=True), spec=asked)
        assert (got.stats.num_cached > 0) == (turn == 2)
        assert not got.stats.notices
        text += [*got.tokens, 5, 6, 7]
    check(target, watch, layers, 2)


def test_rows_of_rounds_that_nobody_has_read() -> None:
    """`draft_behind` is given the rows that `observe` gives when the round has been read."""
    target, layers = families.target("hybrid"), (1, 0)
    watch = Watch(layers, behind=True)
    run = Engine(target, tiny_models.tokenizer(), drafters=[watch], config=EngineConfig(prefix_budget=0))
    some = equality.prompts(2, 8)
    texts = run.generate(some, SamplingParams(max_tokens=30, ignore_eos=True), spec=equality.PLAIN)
    watch.knows([[*p, *t.tokens] for p, t in zip(some, texts, strict=True)])
    got = run.generate(
        some, SamplingParams(max_tokens=30, ignore_eos=True), spec=equality.spec("watch", n_max=3)
    )
    assert [r.tokens for r in got] == [t.tokens for t in texts] or not equality.EXACT
    assert watch.unread
    for row, length, rows in watch.unread:
        heard = watch.rows(row)[length : length + len(rows)]
        np.testing.assert_array_equal(rows[: len(heard)], heard)
    check(target, watch, layers, 2)


def test_layers_are_computed_for_those_who_ask_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards of rows that use no such drafter give no layers."""
    target, asked = families.target("hybrid"), []
    forward = type(target).forward

    def noted(self, *args, taps=(), **more):  # type: ignore[no-untyped-def]
        asked.append(tuple(taps))
        return forward(self, *args, taps=taps, **more)

    monkeypatch.setattr(type(target), "forward", noted)
    few = SamplingParams(max_tokens=4, ignore_eos=True)
    for wish, expected in ((equality.PLAIN, ()), (WISH, (0, 2))):
        run = Engine(target, tiny_models.tokenizer(), drafters=[Watch((2, 0))])
        asked.clear()
        run.generate([1, 2, 3], few, spec=wish)
        assert set(asked) == {expected}


def test_what_cannot_be_needed() -> None:
    for wrong in ((-1,), (1, 1), [1], (True,), (1.0,)):
        with pytest.raises(ConfigError, match="different layer ids"):
            Needs(layers=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="newest alone"):
        Needs(layers=(1,), hidden=True, newest=True)
    with pytest.raises(ConfigError, match=r"drafter watch reads layer 3 of the model, whose last one is 2\."):
        Engine(families.target("hybrid"), drafters=[Watch((0, 3))], spec=SpecConfig())
