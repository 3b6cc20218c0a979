"""Models that run by mlx-lm's code: the same text as mlx-lm's, with and without drafts, whatever its caches are.

All of it is float32, where verifying several tokens gives what single steps give, to rounding.
"""

from __future__ import annotations

import copy
import gc
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from adapted_zoo import ARCHITECTURES, FEW, VOCAB, Noisy, model_of, module_of, theirs, write
from mlx_lm.models import llama
from planting import catches

from mlxspec.checkpoints.inspect import inspect
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.engine.engine import Engine
from mlxspec.errors import CacheError
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.adapted import parts
from mlxspec.models.adapted.cache import AdaptedCache
from mlxspec.models.adapted.classes import OWN
from mlxspec.models.adapted.model import AdaptedModel

ALONE = ("llama alone", "gpt_oss alone")  # by caches that can be cut, and windows, of mlx-lm
NAMES = [
    name if name in (*FEW, *ALONE) else pytest.param(name, marks=pytest.mark.slow)
    for name in (*ARCHITECTURES, *ALONE)
]
TOLERANCE = 2e-4  # of the largest logit: float32 sums in another order, four layers of them
GREEDY = SamplingParams(max_tokens=40, temperature=0.0)
DRAFTED = SpecConfig(drafters=("noisy", "ngram-simple"))


def not_cut(_: Any) -> Any:
    return lambda leaf, num: None


def not_run_again(right: Any) -> Any:
    """Parts see accepted tokens as if there were none."""
    return lambda self, own, num, before=(): None if before else right(self, own, num, before)


def by_reference(_: Any) -> Any:
    return copy.copy


@catches("rejected tokens stay", "mlxspec.models.adapted.leaves:cut", not_cut, case="llama alone")
@catches(
    "accepted tokens are lost", "mlxspec.models.adapted.parts:PartCall.run", not_run_again, case="mamba2"
)
@pytest.mark.parametrize("name", NAMES)
def test_drafts_do_not_change_the_text_of_mlx_lm(name: str) -> None:
    """One row and five, plain and drafted, from the store and not, and one that is cancelled beside others."""
    model, rng = model_of(name), random.Random(name)
    module = model.module
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (5, 37, 70)]
    prompts.append(prompts[0] * 6)
    wanted = [theirs(module, p, GREEDY.max_tokens) for p in prompts]
    noisy = Noisy([p + w for p, w in zip(prompts, wanted, strict=True)])
    drafters = [noisy, ngram_lookup("ngram-simple", 2, 8), ngram_lookup("ngram-map-k", 2, 8, 1)]
    config = EngineConfig(prefix_budget=1 << 26, max_rows=4, prefill_chunk=32)
    engine = Engine(model, None, drafters=drafters, config=config)
    drafted = accepted = 0
    for spec in (SpecConfig(drafters=()), DRAFTED, SpecConfig(drafters=("noisy",), policy="auto")):
        for prompt, text in zip(prompts, wanted, strict=True):
            found = engine.generate(prompt, GREEDY, spec=spec)
            assert found.error is None
            assert list(found.tokens) == text
            drafted += found.stats.num_drafted
            accepted += sum(d.num_accepted for d in found.stats.drafters.values())
    assert accepted > 20
    assert drafted - accepted > 20
    sampled = [SamplingParams(max_tokens=30, temperature=0.8, seed=i) for i in range(len(prompts))]
    plain, with_drafts = (
        engine.generate(prompts, sampled, spec=s) for s in (SpecConfig(drafters=()), DRAFTED)
    )
    assert [r.tokens for r in with_drafts] == [r.tokens for r in plain]
    for results in (
        engine.generate(prompts[:2], GREEDY, spec=DRAFTED),
        engine.generate(prompts, GREEDY, spec=DRAFTED),
    ):
        assert [list(r.tokens) for r in results] == wanted[: len(results)]
    one, other = (engine.submit(p, GREEDY, spec=DRAFTED) for p in prompts[1:3])
    for _ in range(6):
        engine.step()
    engine.cancel(one.number)
    while other.finish_reason is None:
        engine.step()
    assert list(other.history[len(other.prompt) :]) == wanted[2]
    longer = prompts[1] + wanted[1] + [1, 2, 3]
    found = engine.generate(longer, GREEDY, spec=DRAFTED)
    assert found.stats.num_cached > len(prompts[1])
    assert list(found.tokens) == theirs(module, longer, GREEDY.max_tokens)


def run(model: AdaptedModel, cache: AdaptedCache, pieces: list[list[int]], **more: Any) -> mx.array:
    flat = mx.array([t for piece in pieces for t in piece], mx.int32)
    found = model.forward(flat, FlatRows(tuple(map(len, pieces))), cache, **more).logits
    assert found is not None
    return found


def check(model: AdaptedModel, cache: AdaptedCache, texts: list[list[int]]) -> None:
    """What comes behind two more tokens, beside mlx-lm's module on the committed tokens alone."""
    got = run(model, cache, [[1, 2]] * len(texts), certain=True)
    for row, text in enumerate(texts):
        caches = model.new_caches()
        model.module(mx.array([text]), cache=caches)
        right = model.module(mx.array([[1, 2]]), cache=caches)[0]
        wrong = mx.abs(got[2 * row : 2 * row + 2] - right).max() / mx.abs(right).max()
        assert wrong.item() < TOLERANCE, f"row {row} of {len(text)} tokens"


@catches("accepted tokens are lost", "mlxspec.models.adapted.parts:PartCall.run", not_run_again, case="lfm2")
@catches("a state is held by name only", "mlxspec.models.adapted.leaves:twin", by_reference, case="lfm2")
@pytest.mark.parametrize("name", NAMES)
def test_a_cache_is_the_one_that_saw_only_the_committed_tokens(name: str) -> None:
    """Two rows through random verifies, aborts, forks, snapshots and changes of rows."""
    model, rng = model_of(name), random.Random(name)
    for _ in range(8):
        cache, texts = model.make_cache(2), [list[int](), list[int]()]
        for step in range(rng.randint(4, 12)):
            widths = [rng.choice((0, 1, 1, 2, 3, 5, 9, 17)) for _ in texts]
            widths[0] = widths[0] or 1
            pieces = [[rng.randrange(VOCAB) for _ in range(w)] for w in widths]
            certain = step == 0 or rng.random() < 0.3
            run(model, cache, pieces, certain=certain)
            counts = widths if certain else [rng.randint(0, w) for w in widths]
            if not certain and max(widths) > 1 and min(w for w in widths if w) > 1 and rng.random() < 0.2:
                cache.abort()
                counts = [0, 0]
            else:
                counts = [c if w > 1 else w for c, w in zip(counts, widths, strict=True)]
                cache.commit(counts)
            texts = [t + p[:c] for t, p, c in zip(texts, pieces, counts, strict=True)]
            assert cache.lengths == list(map(len, texts))
            what = rng.random()
            if what < 0.2 and all(texts):
                fork = cache.fork()
                for token in (3, 4, 5)[: rng.randint(0, 3)]:
                    run(model, fork, [[token]] * 2, certain=True)
                    fork.commit()
            elif what < 0.35 and all(texts):
                restored = [model.make_cache(1) for _ in texts]
                for row, fresh in enumerate(restored):
                    fresh.restore(cache.snapshot(row))
                restored[0].join(restored[1])
                cache = restored[0]
            elif what < 0.45:
                cache.select([1, 0])
                texts = texts[::-1]
        if all(texts):
            check(model, cache, texts)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_takes_no_more_than_was_measured(name: str) -> None:
    """Bytes of buffers for prompts in chunks, single steps and verifies; and no more than three times as many are reserved."""
    model, prompt = model_of(name), 300
    cache = model.make_cache(1)
    for start in range(0, prompt, 100):
        run(model, cache, [[start % VOCAB] * 100], certain=True)
        cache.commit()
        bound = cache.bytes_for(start + 100, prefill=100, verify=17)
        assert cache.nbytes <= bound
    for _ in range(3):
        run(model, cache, [[5]], certain=True)
        cache.commit()
    run(model, cache, [[5] * 17])
    if all(layer.is_recurrent for layer in cache.layers):
        assert cache.nbytes <= cache.bytes_for(prompt + 3, prefill=100, verify=17)
    cache.commit([17])  # until then there are two buffers where one has grown
    assert cache.nbytes <= cache.bytes_for(prompt + 20, prefill=100, verify=17)
    whole = cache.bytes_for(4096, prefill=100, verify=17)
    per_token, state = cache.snapshot_bytes()
    assert whole <= 3 * (per_token * 4096 + state) + (2 << 20)


def test_only_parts_with_states_run_again_and_only_behind_rejected_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the accepted tokens alone. Keys and values are cut."""
    model, again = model_of("lfm2"), list[tuple[str, int]]()
    inside = parts.PartCall.run

    def counted(self: Any, own: Any, num: int, before: Any = ()) -> Any:
        if before:
            again.append((type(self.part).__name__, num))
        return inside(self, own, num, before)

    monkeypatch.setattr(parts.PartCall, "run", counted)
    cache = model.make_cache(2)
    run(model, cache, [[1, 2, 3], [4]], certain=True)
    cache.commit()
    for kept in ([3, 1], [2, 1], [3, 0]):
        run(model, cache, [[1, 2, 3], [4]])
        cache.commit(kept)
        cache.flush()
    num_states = sum(not form.is_cuttable for form in model.forms)
    assert again == [("ShortConv", 2)] * num_states


def test_what_runs_again_is_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time belongs to the round that was rejected: the next one may be plain, and teaches what plain rounds cost."""
    model, computed = model_of("lfm2"), list[int]()
    cache = model.make_cache(1)
    run(model, cache, [[1, 2, 3]], certain=True)
    cache.commit()
    for kept in (2, 3, 0):
        run(model, cache, [[1, 2, 3]])
        cache.commit([kept])
        with monkeypatch.context() as patch:
            patch.setattr(mx, "eval", lambda arrays: computed.append(len(arrays)))
            cache.flush()
    num_states = sum(not form.is_cuttable for form in model.forms)
    assert computed == [1, num_states, 1, 1]  # each time also the numbers of accepted tokens


def test_forwards_of_certain_tokens_hold_nothing_of_what_was_before() -> None:
    """A window that something else still refers to would be copied whole at each token."""
    model = model_of("lfm2")
    cache = model.make_cache(1)
    for piece in ([1, 2, 3], [4], [5]):
        run(model, cache, [piece], certain=True)
        cache.commit()
        assert not any(layer.before for layer in cache.layers)
    run(model, cache, [[6, 7]])
    cache.commit([1])
    assert all(layer.before for layer in cache.layers)  # until what was rejected is taken out


def test_steps_and_verifies_leave_no_garbage() -> None:
    """What refers to itself would hold arrays until Python looks for it."""
    model = model_of("lfm2")
    cache = model.make_cache(2)
    gc.collect()
    gc.disable()
    try:
        for pieces, kept in (([[1, 2, 3], [4]], None), ([[5, 6, 7], [8]], [2, 1]), ([[1], [2]], None)):
            run(model, cache, pieces, certain=kept is None)
            cache.commit(kept)
            cache.flush()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_forward_that_fails_leaves_the_cache_as_it_was() -> None:
    """Whatever its tokens are, and none of one is kept."""
    for name in ("mamba2", "llama alone"):
        model = model_of(name)
        cache = model.make_cache(1)
        run(model, cache, [[1, 2, 3]], certain=True)
        cache.commit()
        for pieces, certain in (([[4, 5, 6]], False), ([[7]], True), ([[7]], False)):
            run(model, cache, pieces, certain=certain)
            cache.abort()
        run(model, cache, [[4]])
        cache.commit([0])
        check(model, cache, [[1, 2, 3]])


def test_caches_refuse_what_they_cannot() -> None:
    model = model_of("lfm2")
    cache = model.make_cache(1)
    run(model, cache, [[1, 2, 3]], certain=True)
    with pytest.raises(CacheError, match="committed whole"):
        cache.commit([2])
    cache.commit()
    assert cache.needs_lengths
    run(model, cache, [[1, 2, 3]])
    with pytest.raises(CacheError, match="Cannot keep"):
        cache.commit([4])
    cache.commit([3])
    with pytest.raises(CacheError, match="as they are computed"):
        model.make_cache(1, kv_bits=8)


def test_a_line_of_the_zoo_may_name_a_module_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OWN, "creek", lambda: (llama.Model, llama.ModelArgs))
    monkeypatch.setitem(ARCHITECTURES, "creek", ARCHITECTURES["llama"])
    assert isinstance(module_of("creek"), llama.Model)
    assert model_of("creek").seams is not None


@catches(
    "a module of ours is taken for mlx-lm's",
    "mlxspec.models.adapted.loading:maker_of",
    lambda right: lambda config: "mlx-lm 0.32",
)
def test_a_module_of_our_own_is_not_said_to_be_mlx_lms(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(OWN, "creek", lambda: (llama.Model, llama.ModelArgs))
    monkeypatch.setitem(ARCHITECTURES, "creek", ARCHITECTURES["llama"])
    report = inspect(str(write("creek", tmp_path / "creek")))
    assert report.model_type == "creek, by mlxspec"
    told = [report.head.advice, report.vision.advice, *(drafter.why for drafter in report.drafters)]
    assert not [sentence for sentence in told if "mlx-lm" in sentence]
    assert "A module of mlxspec" in report.head.advice
