"""Models that run by mlx-lm's code: the same text as mlx-lm's, with and without drafts, whatever its caches are.

All of it is float32, where verifying several tokens gives what single steps give, to rounding.
"""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from adapted_zoo import ARCHITECTURES, FEW, VOCAB, Noisy, model_of, theirs
from planting import catches

from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.engine.engine import Engine
from mlxspec.errors import CacheError
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.adapted import leaves
from mlxspec.models.adapted.cache import OWED_AT_MOST, AdaptedCache
from mlxspec.models.adapted.model import AdaptedModel

ALONE = ("llama alone", "gpt_oss alone")  # by caches that can be cut, and windows, of mlx-lm
NAMES = [
    name if name in (*FEW, *ALONE) else pytest.param(name, marks=pytest.mark.slow)
    for name in (*ARCHITECTURES, *ALONE)
]
TOLERANCE = 2e-4  # of the largest logit: float32 sums in another order, four layers of them
GREEDY = SamplingParams(max_tokens=40, temperature=0.0)
DRAFTED = SpecConfig(drafters=("noisy", "ngram-simple"))


def kept_stale(_: Any) -> Any:
    """A cut that only moves the lengths back, as RotatingKVCache.trim does."""

    def cut(leaf: Any, num: int) -> None:
        leaf.offset -= num
        if leaves.is_window(leaf):
            leaf._idx -= num

    return cut


def not_cut(_: Any) -> Any:
    return lambda leaf, num: None


def without_owed(_: Any) -> Any:
    return lambda owed, tokens: tokens


def by_reference(_: Any) -> Any:
    return lambda leaf: dict(vars(leaf))


@catches(
    "rejected tokens stay",
    "mlxspec.models.adapted.leaves:cut",
    not_cut,
    case="llama alone",
    errors=(CacheError,),
)
@catches("accepted tokens are lost", "mlxspec.models.adapted.cache:_joined", without_owed, case="mamba2")
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


@catches(
    "stale tokens stay in a window", "mlxspec.models.adapted.leaves:cut", kept_stale, case="gpt_oss alone"
)
@catches("accepted tokens are lost", "mlxspec.models.adapted.cache:_joined", without_owed, case="lfm2")
@catches("a state is held by name only", "mlxspec.models.adapted.leaves:held", by_reference, case="lfm2")
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
    """Bytes of buffers, held ones included, for prompts in chunks and single steps; and no more than three times as many are reserved."""
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
    assert cache.nbytes <= cache.bytes_for(prompt + 3, prefill=100, verify=17)
    whole = cache.bytes_for(4096, prefill=100, verify=17)
    per_token, state = cache.snapshot_bytes()
    assert whole <= 3 * (per_token * 4096 + state) + (2 << 20)


def test_accepted_tokens_run_at_once_where_many_are_owed() -> None:
    model, rng = model_of("mamba2"), random.Random(1)
    cache, text = model.make_cache(1), [rng.randrange(VOCAB) for _ in range(9)]
    run(model, cache, [text], certain=True)
    cache.commit()
    for _ in range(4):
        piece = [rng.randrange(VOCAB) for _ in range(9)]
        run(model, cache, [piece])
        cache.commit([7])
        text += piece[:7]
        owed = cache._rows[0].owed
        assert owed is None or owed.shape[0] <= OWED_AT_MOST
    check(model, cache, [text])


def test_references_are_held_only_while_drafts_are_verified() -> None:
    """Otherwise a write in place copies the whole buffer."""
    model = model_of("lfm2")
    cache = model.make_cache(1)
    run(model, cache, [[1, 2, 3]], certain=True)
    assert not any(isinstance(before, dict) for before in cache._rows[0].before)
    cache.commit()
    run(model, cache, [[1]])
    assert not any(isinstance(before, dict) for before in cache._rows[0].before)
    cache.commit()
    run(model, cache, [[1, 2, 3]])
    grows = [form.is_cuttable for form in model.forms]
    assert [isinstance(before, dict) for before in cache._rows[0].before] == [not g for g in grows]
    cache.commit([1])
    assert not cache._rows[0].before


def test_a_plain_forward_that_fails_leaves_a_dead_cache_and_a_verify_does_not() -> None:
    model = model_of("mamba2")
    cache = model.make_cache(1)
    run(model, cache, [[1, 2, 3]], certain=True)
    cache.commit()
    run(model, cache, [[4, 5, 6]])
    cache.abort()
    run(model, cache, [[7]], certain=True)
    cache.abort()
    with pytest.raises(CacheError, match="could not be put back"):
        run(model, cache, [[7]], certain=True)


def test_a_token_that_was_not_held_is_not_taken_back() -> None:
    cache = (model := model_of("mamba2")).make_cache(1)
    run(model, cache, [[1, 2, 3]], certain=True)
    cache.commit()
    run(model, cache, [[4]])
    with pytest.raises(CacheError, match="nothing of it can be taken back"):
        cache.commit([0])
    cache.abort()
    with pytest.raises(CacheError, match="could not be put back"):
        run(model, cache, [[4]])


def test_caches_refuse_what_they_cannot() -> None:
    model = model_of("lfm2")
    cache = model.make_cache(1)
    run(model, cache, [[1, 2, 3]], certain=True)
    with pytest.raises(CacheError, match="committed whole"):
        cache.commit([2])
    cache.commit()
    with pytest.raises(CacheError, match="snapshot"):
        cache.truncate(0, 1)
    run(model, cache, [[1, 2, 3]])
    with pytest.raises(CacheError, match="by numbers"):
        cache.commit(mx.array([1], mx.int32))
    with pytest.raises(CacheError, match="Cannot keep"):
        cache.commit([4])
    cache.commit([3])
    with pytest.raises(CacheError, match="as they are computed"):
        model.make_cache(1, kv_bits=8)
