"""Block drafters against a reference in numpy and against mlx-vlm's: logits of blocks of every length behind growing contexts, alone and
in ragged rows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_dflash
from compare import array, to_numpy
from planting import catches
from tiny_dflash import Reference

from mlxspec.errors import ModelError
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.dflash import DFlash, sanitize_dflash
from mlxspec.models.dflash_config import DFlashConfig
from tests import tiny_models

AT_MOST = 1e-4
LAYER_IDS, MASK = (0, 2), 3
SIZES = {
    "hidden": 64,
    "vocab": tiny_models.VOCAB,
    "target_layers": 3,
    "layer_ids": LAYER_IDS,
    "mask_id": MASK,
}


def make(kind: str, *, own_ends: bool = False, **more: Any) -> tuple[DFlash, Reference]:
    c = tiny_dflash.config(kind, **{**SIZES, **more})
    arrays = tiny_dflash.weights(kind, c, own_ends=own_ends)
    model = loaded(c, arrays)
    target = model.target
    ends = target.embed(mx.arange(tiny_models.VOCAB)), target.head(mx.eye(64)).T
    return model, Reference(kind, c, arrays, *(np.array(x) for x in ends))


def loaded(c: Any, arrays: tiny_dflash.Arrays) -> DFlash:
    model = DFlash(DFlashConfig.from_dict(c, arrays.keys()), tiny_models.target())
    named = sanitize_dflash({k: mx.array(v) for k, v in arrays.items()})
    model.load_weights(list(named.items()), strict=True)
    model.fuse()
    mx.eval(model.parameters())
    return model


def features(seed: int, num: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num, len(LAYER_IDS) * 64), np.float32)


def check_block(
    model: DFlash, reference: Reference, cache: Any, seen: list[np.ndarray], widths: list[int], what: str
) -> None:
    """Blocks of rows whose committed features are `seen`; a row of width 0 sits out."""
    skipped = 0 if model.config.starts_at_anchor else 1
    newest = [7 + r for r in range(len(seen))]
    tokens = [t for r, w in enumerate(widths) if w for t in (newest[r], *[MASK] * (w + skipped - 1))]
    rows = FlatRows(tuple(w + skipped if w else 0 for w in widths))
    hidden = model.block(array(tokens), rows, cache).hidden
    for r, width in enumerate(widths):
        if not width:
            continue
        wanted, logits = reference.block(seen[r], newest[r], width)
        ours = hidden[rows.starts[r] + skipped : rows.starts[r + 1]]
        np.testing.assert_allclose(to_numpy([ours]), wanted, atol=AT_MOST, err_msg=what)
        own = model.head(ours)
        np.testing.assert_allclose(to_numpy([own]), logits, atol=AT_MOST, err_msg=what)
        before = [newest[r], *range(20, 19 + width)]
        found = model.follow(ours, own, array(before)) if model.picks_in_order else own
        said = np.stack([reference.behind(h, x, b) for h, x, b in zip(wanted, logits, before, strict=True)])
        np.testing.assert_allclose(to_numpy([found]), said, atol=AT_MOST, err_msg=what)
        sure = model.sureness(ours, array(before))
        if sure is not None:
            told = [reference.sureness(h, b) for h, b in zip(wanted, before, strict=True)]
            np.testing.assert_allclose(to_numpy([sure]), told, atol=1e-5)


@pytest.mark.parametrize("own_ends", [False, True])
@pytest.mark.parametrize("kind", tiny_dflash.KINDS)
def test_blocks_behind_a_growing_context(kind: str, own_ends: bool) -> None:
    """A context of one token, then shorter and longer than the window; 20 rounds of uneven commits."""
    model, reference = make(kind, own_ends=own_ends)
    rng, cache, seen = np.random.default_rng(5), model.make_cache(1), np.zeros((0, 128), np.float32)
    for round_ in range(20):
        new = features(round_, 1 if round_ == 0 else int(rng.integers(1, 6)))
        model.remember(mx.array(new), FlatRows((len(new),)), cache)
        cache.commit()
        seen = np.concatenate([seen, new])
        width = 1 + round_ % model.config.num_drafts
        check_block(model, reference, cache, [seen], [width], f"{kind}, round {round_}")


@catches(
    "only DSpark's blocks begin to draft at the newest token",
    "mlxspec.models.dflash_config:_starts_at_anchor",
    lambda right: lambda get, kind: kind == "DSpark",
)
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("DFlash", {"sample_from_anchor": True}),
        ("DFlash", {"query_zero_predicts_next": True}),
        ("DFlash2", {"sample_from_anchor": True}),
        ("DFlash", {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0, "num_anchors": 512}),
        ("DSpark", {"sample_from_anchor": False}),
    ],
    ids=["sample_from_anchor", "query_zero_predicts_next", "DFlash2", "DeepSpec's DFlash", "DSpark, not"],
)
@pytest.mark.parametrize("is_inner", [False, True], ids=["outside", "inside"])
def test_where_the_first_drafted_token_is_predicted(kind: str, said: dict[str, Any], is_inner: bool) -> None:
    """A drafter that is read one place off drafts at full speed, and next to nothing of it is accepted."""
    c = tiny_dflash.config(kind, **SIZES)
    where = c["dflash_config"] if is_inner and "architectures" not in said else c
    where |= said
    arrays = tiny_dflash.weights(kind, c)
    model = loaded(c, arrays)
    ends = model.target.embed(mx.arange(tiny_models.VOCAB)), model.target.head(mx.eye(64)).T
    reference = Reference(kind, c, arrays, *(np.array(x) for x in ends))
    reference.starts_at_anchor = kind != "DSpark"
    assert model.config.num_drafts == (8 if reference.starts_at_anchor else 7)
    cache, seen = model.make_cache(1), features(1, 23)
    model.remember(mx.array(seen), FlatRows((23,)), cache)
    cache.commit()
    for width in (1, 7):
        check_block(model, reference, cache, [seen], [width], f"{kind}, {said}")


def test_names_of_the_first_place_that_contradict_each_other_are_refused() -> None:
    c = tiny_dflash.config("DFlash", **SIZES, sample_from_anchor=True)
    c["dflash_config"]["query_zero_predicts_next"] = False
    with pytest.raises(ModelError, match=r"query_zero_predicts_next and sample_from_anchor contradict"):
        DFlashConfig.from_dict(c, tiny_dflash.weights("DFlash", c).keys())


@catches(
    "blocks are never causal",
    "mlxspec.models.dflash_config:_causal",
    lambda right: lambda get, windows: (False,) * len(windows),
    case="None",
)
@pytest.mark.parametrize("kind", ["DFlash", "DSpark"])
@pytest.mark.parametrize("non_causal", [None, False, True])
def test_the_speculators_windows(kind: str, non_causal: bool | None) -> None:
    """Its layers with a window are causal within the block unless it says otherwise, and count what lies before the block."""
    _, reference = make(kind, own_ends=True)
    c, arrays = tiny_dflash.as_speculators(reference.c, tiny_dflash.weights(kind, reference.c, own_ends=True))
    c |= {} if non_causal is None else {"sliding_window_non_causal": non_causal}
    model = loaded(c, arrays)
    reference.causal = [False, not non_causal]
    cache, seen = model.make_cache(2), [features(1, 23), features(2, 3)]
    model.remember(mx.array(np.concatenate(seen)), FlatRows(tuple(map(len, seen))), cache)
    cache.commit()
    check_block(model, reference, cache, seen, [7, 5], f"{kind}, {non_causal}")


@pytest.mark.parametrize(
    ("said", "causal"),
    [
        ({}, [False, True]),
        ({"is_causal": None}, [False, True]),
        ({"is_causal": False}, [False, False]),
        ({"is_causal": True, "causal": False}, [True, True]),
        ({"causal": True}, [True, True]),
        ({"causal": False}, [False, False]),
        ({"dflash_query_causal": True}, [True, True]),
    ],
)
@pytest.mark.parametrize("is_inner", [False, True], ids=["outside", "inside"])
def test_which_layers_are_causal(said: dict[str, Any], causal: list[bool], is_inner: bool) -> None:
    c = tiny_dflash.config("DFlash", **SIZES)
    (c["dflash_config"] if is_inner else c).update(said)
    arrays = tiny_dflash.weights("DFlash", c)
    model = loaded(c, arrays)
    ends = model.target.embed(mx.arange(tiny_models.VOCAB)), model.target.head(mx.eye(64)).T
    reference = Reference("DFlash", c, arrays, *(np.array(x) for x in ends))
    reference.causal = causal
    cache, seen = model.make_cache(1), features(1, 23)
    model.remember(mx.array(seen), FlatRows((23,)), cache)
    cache.commit()
    check_block(model, reference, cache, [seen], [7], f"{said}")


@pytest.mark.parametrize("kind", tiny_dflash.KINDS)
def test_ragged_rows(kind: str) -> None:
    model, reference = make(kind)
    cache, seen = model.make_cache(3), [features(r, n) for r, n in enumerate((23, 1, 9))]
    model.remember(mx.array(np.concatenate(seen)), FlatRows(tuple(map(len, seen))), cache)
    cache.commit()
    for widths in ([3, 1, 7], [0, 5, 2], [7, 0, 0]):
        check_block(model, reference, cache, seen, widths, f"{kind}, {widths}")
        new = [features(40 + r, w) for r, w in enumerate(widths)]
        model.remember(mx.array(np.concatenate(new)), FlatRows(tuple(widths)), cache)
        cache.commit()
        seen = [np.concatenate(pair) for pair in zip(seen, new, strict=True)]
    cache.select([2, 0])
    check_block(model, reference, cache, [seen[2], seen[0]], [4, 4], f"{kind}, rows that stayed")


def test_a_shorter_block_is_another_block() -> None:
    """Places of a block see those behind them, so a long draft's beginning is not the short draft."""
    model, _ = make("DFlash")
    cache = model.make_cache(1)
    model.remember(mx.array(features(1, 5)), FlatRows((5,)), cache)
    cache.commit()
    long, short = (model.block(array([7] + [MASK] * n), FlatRows((n + 1,)), cache).hidden for n in (6, 2))
    assert np.abs(to_numpy([long[:3]]) - to_numpy([short])).max() > 1e-2


def test_a_long_context_in_pieces() -> None:
    """A prompt that wraps the window's buffer, then back to the store and out again."""
    model, reference = make("DFlash")
    cache, whole = model.make_cache(1), features(9, 700)
    for start in range(0, 700, 300):
        piece = whole[start : start + 300]
        model.remember(mx.array(piece), FlatRows((len(piece),)), cache)
        cache.commit()
    check_block(model, reference, cache, [whole], [5], "long")
    kept, other = cache.snapshot(0), model.make_cache(1)
    other.restore(kept)
    check_block(model, reference, other, [whole], [5], "restored")


@pytest.mark.parametrize("kind", tiny_dflash.KINDS)
def test_against_mlx_vlm(kind: str) -> None:
    name = {"DFlash": "qwen3_dflash", "DFlash2": "dflash2", "DSpark": "dspark"}[kind]
    theirs = pytest.importorskip(f"mlx_vlm.speculative.drafters.{name}", reason="needs mlx-vlm")
    model, reference = make(
        kind, is_causal=False
    )  # it takes windows for that unless told otherwise; vLLM and SGLang do not
    target = tiny_models.target()
    built = theirs.Model(theirs.ModelConfig.from_dict(reference.c))
    raw = {k: mx.array(v) for k, v in tiny_dflash.weights(kind, reference.c).items()}
    built.load_weights(list(built.sanitize(raw).items()), strict=True)
    built.embed_tokens, built.embed_scale = target.embed, 1.0
    built.lm_head = lambda hidden: target.head(hidden[0])[None]
    ours, cache, seen = model.make_cache(1), built.make_cache(), 0
    # of several tokens at once its layers with a window keep some too many
    for round_, num in enumerate((11, 1, 1, 1)):
        new = mx.array(features(round_, num))
        model.remember(new, FlatRows((num,)), ours)
        ours.commit()
        seen += num
        tokens = array([9] + [MASK] * 5)
        found = model.head(model.block(tokens, FlatRows((6,)), ours).hidden)
        wanted = built(tokens[None], new[None], cache)[0]
        worst = np.abs(to_numpy([found]) - to_numpy([wanted])).max()
        print(f"{kind} behind {seen} tokens: largest difference {worst:.1e}")
        assert worst <= AT_MOST
