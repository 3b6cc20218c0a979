"""Gemma models over prompts with images: blocks whose tokens see each other, and chunks that never end within one."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.config import SamplingParams
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.engine.engine import Engine
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.image_rows import ImageInput, ImageSpan, RowImages
from mlxspec.models.row_attention import _mask_with_blocks
from tests import families, tiny_models
from tests.engine import equality, images

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
BLOCKS = {"gemma3": "all", "gemma4-dense": "windowed", "gemma4-e": "none", "gemma4-moe": "windowed"}


def engine(form: str, drafters=None, **config) -> Engine:  # type: ignore[no-untyped-def]
    target = families.target(form)
    vision = images.vision(bidirectional=BLOCKS[form])
    if drafters is None:
        drafters = [ngram_lookup("ngram-simple", 2, 12), draft_model(form)]
    return equality.engine(drafters, model=target, vision=vision, **config)


def draft_model(form: str) -> DraftModel:
    vision = images.vision(bidirectional=BLOCKS[form])
    return DraftModel(families.draft_model(form), tiny_models.VOCAB, vision=vision)


def greedy(form: str, given, num: int) -> list[int]:  # type: ignore[no-untyped-def]
    """One forward over everything, once more for every token."""
    model, tower, answer = families.target(form), images.OneMatrix(), []
    rows = tuple((s.start, tower(p)) for s, p in zip(given.spans, given.images, strict=True))
    ids = [images.LOOKUP if t == images.IMAGE else t for t in given.tokens]
    for _ in range(num):
        tokens = [*ids, *answer]
        blocks = (tuple(range(s.start, s.stop) for s in given.spans),)
        seen = ImageInput(rows=rows, blocks=blocks, bidirectional=BLOCKS[form])
        out = model.forward(
            mx.array(tokens, mx.int32),
            FlatRows((len(tokens),)),
            model.make_cache(1),
            certain=True,
            logits_at="last",
            images=seen,
        )
        answer.append(int(mx.argmax(out.logits[-1]).item()))
    return answer


def given_for(seed: int):  # type: ignore[no-untyped-def]
    parts = [images.text(9, seed), images.image(4, 5, seed, axes=False), images.text(7, seed + 1)]
    return images.prompt(*parts, images.image(5, 3, seed + 1, axes=False), images.text(5, seed + 2))


@pytest.mark.parametrize(
    ("form", "chunk"),
    [
        ("gemma3", 16),
        ("gemma4-dense", 16),
        *(pytest.param(f, c, marks=pytest.mark.slow) for f in BLOCKS for c in (16, 17, 24, 33, 512)),
    ],
)
def test_chunks_of_any_size_give_the_text_of_one_forward(form: str, chunk: int) -> None:
    given = given_for(3)
    e = engine(form, prefill_chunk=chunk)
    plain = e.generate(given, GREEDY, spec=equality.PLAIN)
    assert list(plain.tokens) == greedy(form, given, 16)
    drafted = e.generate(
        [given, images.text(20, 5)], GREEDY, spec=equality.spec("ngram-simple", "draft-model")
    )
    assert drafted[0].tokens == plain.tokens
    assert drafted[0].stats.num_cached > 0


@pytest.mark.parametrize("seed", range(8))
def test_no_chunk_ends_within_an_image_that_must_not_be_cut(seed: int) -> None:
    given, rng = images.random_prompt(seed, axes=False), np.random.default_rng(seed)
    spans = [ImageSpan(s, p) for s, p in zip(given.spans, given.images, strict=True)]
    found = RowImages(spans, len(given.tokens), images.vision().prompt, "windowed")
    at, chunk = 0, int(rng.integers(1, 30))
    while at < len(given.tokens):
        end = found.edge(at, min(len(given.tokens), (at // chunk + 1) * chunk))
        assert at < end
        assert not any(s.start < end < s.stop for s in given.spans)
        at = end
    kept = found.edges(range(len(given.tokens)))
    assert kept == tuple(
        p for p in range(len(given.tokens)) if not any(s.start < p < s.stop for s in given.spans)
    )


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("window", [None, 3, 8])
def test_the_mask_of_blocks_is_the_rule_word_for_word(window: int | None, both_ways: bool) -> None:
    width, length, blocks = 9, 14, (range(1, 5), range(7, 9))
    mask = np.array(_mask_with_blocks(width, length, window, blocks, both_ways))
    for i in range(width):
        for key in range(length):
            query = length - width + i
            together = any(i in b and key - (length - width) in b for b in blocks)
            is_ahead = both_ways and window is not None and key >= query + window
            seen = (key <= query or together) and (window is None or key > query - window) and not is_ahead
            assert mask[i, key] == seen, (i, key)
