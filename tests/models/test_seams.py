"""All rows of mlx-lm's modules in one forward: logits beside the module alone, what each row sees, and which architectures cannot.

float32, so that sums in another order are all that may differ.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from adapted_zoo import ARCHITECTURES, BY_ROWS, VOCAB, WHOLE, adapted, model_of
from mlx_lm.models import llama
from planting import catches

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.unread import UnreadCommit
from mlxspec.config import EngineConfig, SamplingParams
from mlxspec.engine.engine import Engine
from mlxspec.kernels.flat import FlatRows
from mlxspec.models import seams
from mlxspec.models.adapted.check import check_model
from mlxspec.models.adapted.model import AdaptedModel
from mlxspec.models.head_rows import HeadRows
from mlxspec.models.row_attention import attend_rows

# whole contexts; windows and sinks; values of another size than keys; parts with states of a recurrence, or with attention of their own
FEW = ("llama", "gpt_oss", "mimo_v2_flash", "lfm2", "gemma2")
TOGETHER = [
    name if name in FEW else pytest.param(name, marks=pytest.mark.slow)
    for name in ARCHITECTURES
    if name not in WHOLE
]
CLOSE = 1e-4  # of the largest logit


def tokens(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(num)]


def run(
    model: AdaptedModel, cache: ModelCache, pieces: Sequence[Sequence[int]], **more: Any
) -> list[mx.array]:
    """Logits (w, V) of each row's piece."""
    rows = FlatRows(tuple(map(len, pieces)))
    found = model.forward(
        mx.array([t for piece in pieces for t in piece], mx.int32), rows, cache, **more
    ).logits
    assert found is not None
    return mx.split(found, list(rows.starts[1:-1]))


def alone(model: AdaptedModel, texts: Sequence[Sequence[int]]) -> list[mx.array]:
    """Logits of each of one row's pieces by mlx-lm's module and caches."""
    caches = model.new_caches()
    return [model.module(mx.array([text]), cache=caches)[0] for text in texts]


def error(found: mx.array, right: mx.array) -> float:
    return float((mx.abs(found - right).max() / mx.abs(right).max()).item())


def forgetting(right: Any) -> Any:
    """Attention that sees every key, whatever the window is."""

    def attended(queries: Any, views: Any, places: Any, scale: float, _: Any, *more: Any) -> Any:
        return right(queries, views, places, scale, None, *more)

    return attended


def without_sinks(right: Any) -> Any:
    return lambda queries, views, places, scale, window, _, sight: right(
        queries, views, places, scale, window, None, sight
    )


def first_caches(right: Any) -> Any:
    """Parts are given the caches of the first row."""
    return lambda self, rows, own, *more, **how: right(self, rows, [own[0]] * len(own), *more, **how)


def first_views(right: Any) -> Any:
    """Every row sees what the first one does."""
    return lambda queries, views, *more: right(queries, [views[0]] * len(views), *more)


@catches("windows see everything", "mlxspec.models.seams:attended", forgetting, case="gpt_oss")
@catches("sinks are left out", "mlxspec.models.seams:attended", without_sinks, case="gpt_oss")
@catches("rows see one another", "mlxspec.models.seams:attended", first_views, case="llama")
@catches(
    "parts see one another",
    "mlxspec.models.adapted.parts:RowsForward.__init__",
    first_caches,
    case="lfm2",
    errors=(ValueError,),
)
@pytest.mark.parametrize("name", TOGETHER)
def test_ragged_rows_share_a_forward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts behind a window of 16, verifies of which a part is accepted, and a step that one row sits out; the layers run once."""
    model, rng = model_of(name), random.Random(name)
    assert model.seams is not None or model.parts is not None, model.by_rows
    cache, calls = model.make_cache(3), 0
    inside = model._run

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return inside(*args)

    monkeypatch.setattr(model, "_run", counted)
    prompts, verifies, steps = ([tokens(rng, n) for n in w] for w in ((37, 1, 20), (5, 1, 3), (2, 1, 0)))
    kept = [2, 1, 3]
    found = [run(model, cache, prompts, certain=True)]
    cache.commit()
    found.append(run(model, cache, verifies))
    cache.commit(kept)
    found.append(run(model, cache, steps, certain=True))
    assert calls == 3
    monkeypatch.undo()
    for row, count in enumerate(kept):
        texts = [text for text in (prompts[row], verifies[row][:count], steps[row]) if text]
        for i, right in enumerate(alone(model, texts)):
            assert error(found[i][row][: len(texts[i])], right) < CLOSE, f"piece {i} of row {row}"


@pytest.mark.parametrize("name", BY_ROWS)
def test_what_cannot_share_a_forward_says_why(name: str) -> None:
    model = model_of(name)
    assert model.seams is None
    assert BY_ROWS[name] in model.by_rows
    assert model.num_layers == 0
    assert (model.parts is None) == (name in WHOLE)
    assert 0 < model.share_by_rows < 1


def test_mlx_attention_is_its_own_again_behind_a_forward() -> None:
    model, own = model_of("llama"), mx.fast.scaled_dot_product_attention
    cache = model.make_cache(2)
    run(model, cache, [[1, 2], [3]], certain=True)
    assert mx.fast.scaled_dot_product_attention is own
    with seams.attending_by_row(), seams.attending_by_row():
        q = mx.random.normal((1, 4, 3, 16))
        assert mx.array_equal(
            mx.fast.scaled_dot_product_attention(q, q, q, scale=0.25), own(q, q, q, scale=0.25)
        )
    assert mx.fast.scaled_dot_product_attention is own


class Turned(llama.Attention):
    """Scales what it is given by the position, which it takes to be one row's; it shows from token 400 on."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        at = 0 if cache is None else mx.sum(mx.array(cache.offset)) // 400
        return super().__call__(x * (1 + at), mask, cache)


def test_positions_that_are_wrong_only_later_are_found_when_a_model_is_loaded() -> None:
    config = llama.ModelArgs.from_dict({"model_type": "llama", **ARCHITECTURES["llama"]})
    module = llama.Model(config)
    model = adapted(module)
    assert check_model(model) is None
    for layer in module.layers:
        layer.self_attn.__class__ = Turned
    model = adapted(module)
    assert model.seams is not None
    notice = check_model(model)
    assert notice is not None
    assert "one by one" in notice
    assert model.seams is None
    assert model.parts is not None


def test_a_window_drops_memory() -> None:
    """Keys and values behind a window of 16 stay as many, however long the text is."""
    model, rng = model_of("gpt_oss"), random.Random(1)
    cache, sizes = model.make_cache(1), []
    for _ in range(40):
        run(model, cache, [tokens(rng, 64)], certain=True)
        cache.commit()
        sizes.append([layer.arrays[0].shape[2] for layer in cache.layers])
    windowed, whole = sizes[-1][0], sizes[-1][1]
    assert windowed < 600
    assert whole >= 2560


def test_a_forward_may_begin_before_the_host_knows_what_was_accepted() -> None:
    """A commit by an array, and a forward behind it, are what commits by numbers are."""
    model, rng = model_of("llama"), random.Random(2)
    assert not model.make_cache(0).needs_lengths
    prompts, verifies, steps = ([tokens(rng, n) for n in w] for w in ((9, 4), (4, 3), (1, 1)))
    found = []
    for counts in ([2, 3], mx.array(np.array([2, 3], np.int32))):
        cache = model.make_cache(2)
        run(model, cache, prompts, certain=True)
        cache.commit()
        run(model, cache, verifies)
        if isinstance(counts, mx.array):
            UnreadCommit(cache, counts)
        else:
            cache.commit(counts)
        found.append(mx.concatenate(run(model, cache, steps)))
    assert error(found[1], found[0]) < CLOSE


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_keys_and_values(bits: int) -> None:
    """Close to the text by whole ones, and one text whatever is drafted and however rows are batched."""
    config = llama.ModelArgs.from_dict({"model_type": "llama", **ARCHITECTURES["llama"], "head_dim": 64})
    mx.random.seed(3)
    model, rng = adapted(llama.Model(config)), random.Random(3)
    prompts = [tokens(rng, n) for n in (30, 3)]
    caches = model.make_cache(2), model.make_cache(2, kv_bits=bits)
    whole, packed = (mx.concatenate(run(model, cache, prompts, certain=True)) for cache in caches)
    assert 0 < error(packed, whole) < (0.2 if bits == 4 else 0.02)
    params = SamplingParams(max_tokens=24, temperature=0.0)
    engine = Engine(model, None, config=EngineConfig(kv_bits=bits, max_rows=2))
    together = engine.generate(prompts, params)
    assert [list(r.tokens) for r in together] == [list(engine.generate(p, params).tokens) for p in prompts]


def test_taps_are_the_residual_stream() -> None:
    """Of ragged rows, behind the layers asked for; and the table and what the first layer is given are mlx-lm's."""
    model, rng = model_of("gemma3_text"), random.Random(4)
    layers = model.module.model.layers
    assert model.num_layers == len(layers)
    pieces = [tokens(rng, 6), tokens(rng, 3)]
    flat = mx.array(pieces[0] + pieces[1], mx.int32)
    out = model.forward(flat, FlatRows((6, 3)), model.make_cache(2), certain=True, taps=(0, 2))
    assert sorted(out.taps) == [0, 2]
    embedded = model.module.model.embed_tokens(flat)
    assert mx.array_equal(model.embedding(flat), embedded)
    assert error(model.embed(flat), embedded * mx.array(32**0.5, mx.bfloat16)) < CLOSE  # as mlx-lm scales it
    x, caches = model.embed(mx.array(pieces[0], mx.int32))[None], model.new_caches()
    for i in range(3):
        x = layers[i](x, "causal", caches[i])
        if i in out.taps:
            assert error(out.taps[i][:6], x[0]) < CLOSE


def test_long_prompts_with_values_of_another_size_attend_in_blocks() -> None:
    """600 queries behind 50 keys, beside MLX's attention of all of them at once."""
    mx.random.seed(5)
    rows, (num, length) = FlatRows((600,)), (600, 650)
    queries, sinks = mx.random.normal((num, 4, 16)), mx.random.normal((4,))
    view = mx.random.normal((1, 2, length, 16)), mx.random.normal((1, 2, length, 8))
    found = attend_rows(queries, [view], rows, 0.25, sinks=sinks)
    whole = mx.fast.scaled_dot_product_attention(
        queries.swapaxes(0, 1)[None], *view, scale=0.25, mask="causal", sinks=sinks
    )
    assert error(found, whole[0].swapaxes(0, 1).reshape(num, -1)) < CLOSE


def unscaled(_: Any) -> Any:
    return lambda module, trunk, product, raw: raw


@catches(
    "scales and caps are left out",
    "mlxspec.models.adapted.split:behind_product",
    unscaled,
    case="gemma4_text",
)
@pytest.mark.parametrize("name", ["llama", "gemma4_text", "cohere", "granite", "lfm2"])
def test_rows_of_the_head_give_those_logits(name: str) -> None:
    """Heads of their own and embeddings, logits that are scaled and capped: what a drafter proposes from."""
    model, ids = model_of(name), np.array([3, 40, 41, 90])
    hidden = mx.random.normal((5, model.hidden_size))
    assert model.head_module is not None
    rows = HeadRows(model.head_module, ids, VOCAB, capped=model.capped)
    assert error(rows(hidden), model.head(hidden)[:, mx.array(ids)]) < CLOSE


@pytest.mark.parametrize("name", ["minicpm", "gptj"])
def test_rows_are_taken_of_no_head_that_does_more(name: str) -> None:
    """One that scales hiddens before the product, and one with a bias."""
    assert model_of(name).head_module is None
