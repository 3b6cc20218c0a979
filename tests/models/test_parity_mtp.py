"""Our MTP head against independent ones: modules of mlx-lm put together here (always), of transformers, and mlx-vlm's drafter.

All get the same tokens and the same hiddens of the target. Cells of a prompt first, then steps that feed the head's own output back.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mtp_reference
import numpy as np
import pytest
import tiny
from compare import array, to_numpy, tokens_of
from mtp_reference import Head
from zoo import Zoo

from mlxspec.kernels.flat import FlatRows

AT_MOST = 1e-4
NUM_CELLS, NUM_RECYCLED = 29, 4


@pytest.fixture(params=["tied", "untied", "moe"])
def shape(request: pytest.FixtureRequest) -> str:
    return request.param


def target_hiddens(zoo: Zoo, shape: str, tokens: list[int]) -> np.ndarray:
    """(n, H): the hidden before each token, zeros before the first."""
    model = zoo.ours(shape).model
    out = model.forward(
        array(tokens), FlatRows((len(tokens),)), model.make_cache(1), certain=True, logits_at="none"
    )
    hidden = to_numpy([out.hidden])
    return np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]])


def run_ours(
    zoo: Zoo, shape: str, tokens: list[int], hiddens: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Outputs (cells + recycled, H) and logits of the recycled steps and the cell before them, and the tokens these were given."""
    head = zoo.ours(shape).mtp
    assert head is not None
    cache, found, drafted = head.make_cache(1), [], []
    for start, end in ((0, 17), (17, 18), (18, len(tokens))):  # a prompt in chunks
        given = mx.array(hiddens[start:end])
        out = head.forward(array(tokens[start:end]), given, FlatRows((end - start,)), cache)
        cache.commit()
        found.append(out.hidden)
    logits = [out.logits]
    for _ in range(NUM_RECYCLED):
        drafted.append(int(out.logits[-1].argmax().item()))
        out = head.forward(array(drafted[-1:]), out.hidden[-1:], FlatRows((1,)), cache)
        cache.commit()
        found.append(out.hidden)
        logits.append(out.logits)
    return to_numpy(found), to_numpy(logits), drafted


def check(zoo: Zoo, shape: str, reference: Head, what: str) -> None:
    tokens = tokens_of(11, NUM_CELLS, tiny.VOCAB)
    hiddens = target_hiddens(zoo, shape, tokens)
    ours, logits, drafted = run_ours(zoo, shape, tokens, hiddens)
    theirs = reference(tokens, hiddens)
    for token in drafted:
        tokens, hiddens = [*tokens, token], np.concatenate([hiddens, theirs[-1:]])
        theirs = np.concatenate([theirs, reference(tokens, hiddens)[-1:]])
    assert ours.shape == theirs.shape
    worst = float(np.abs(ours - theirs).max())
    print(f"{shape}, {what}: largest difference {worst:.1e} of outputs up to {np.abs(theirs).max():.1f}")
    assert worst <= AT_MOST
    arrays = tiny.weights(tiny.SHAPES[shape])
    lm_head = arrays["model.embed_tokens.weight" if tiny.SHAPES[shape].tied else "lm_head.weight"]
    np.testing.assert_allclose(logits, theirs[NUM_CELLS - 1 :] @ lm_head.T, atol=AT_MOST)


def head_arrays(shape: str) -> tiny.Arrays:
    """The raw tensors behind `mtp.`."""
    return {
        k.removeprefix("mtp."): v for k, v in tiny.weights(tiny.SHAPES[shape]).items() if k.startswith("mtp.")
    }


def embeddings(shape: str, tokens: list[int]) -> np.ndarray:
    return tiny.weights(tiny.SHAPES[shape])["model.embed_tokens.weight"][tokens]


def test_against_modules_of_mlx_lm(zoo: Zoo, shape: str) -> None:
    check(zoo, shape, mlx_lm_head(shape), "mlx-lm's modules")


def mlx_lm_head(shape: str) -> Head:
    from mlx_lm.models.qwen3_5 import DecoderLayer, TextModelArgs

    s = tiny.SHAPES[shape]
    args = TextModelArgs.from_dict(tiny.text_config(s))
    return mtp_reference.mlx_lm_head(DecoderLayer(args, s.interval - 1), args.rms_norm_eps, tiny.weights(s))


@pytest.mark.torch
def test_against_modules_of_transformers(zoo: Zoo, shape: str) -> None:
    pytest.importorskip("torch", reason="needs PyTorch")
    pytest.importorskip("transformers", reason="needs transformers")
    from transformers_side import mtp_head

    check(zoo, shape, mtp_head(tiny.SHAPES[shape], head_arrays(shape), embeddings), "transformers' modules")


def test_against_mlx_vlm(zoo: Zoo, shape: str) -> None:
    drafter = pytest.importorskip("mlx_vlm.speculative.drafters.qwen3_5_mtp", reason="needs mlx-vlm")
    check(zoo, shape, mlx_vlm_head(drafter, shape), "mlx-vlm's drafter")


def mlx_vlm_head(drafter: Any, shape: str) -> Head:
    config = drafter.ModelConfig.from_dict({"text_config": tiny.text_config(tiny.SHAPES[shape])})
    model = drafter.Model(config)
    raw = {f"mtp.{k}": mx.array(v) for k, v in head_arrays(shape).items()}
    model.load_weights(list(model.sanitize(raw).items()), strict=True)
    table = nn.Embedding(1, 1)
    table.weight = mx.array(embeddings(shape, list(range(tiny.VOCAB))))
    holder = nn.Module()
    holder.embed_tokens = table

    def run(tokens: list[int], hiddens: np.ndarray) -> np.ndarray:
        model.reset(holder)  # its own cache, filled anew
        return to_numpy([model._forward_tokens(array(tokens)[None], mx.array(hiddens)[None], mx.int32)[0]])

    return run


def test_head_of_several_rows(zoo: Zoo, shape: str) -> None:
    """Ragged rows of one call equal each row alone."""
    head = zoo.ours(shape).mtp
    assert head is not None
    widths, hidden_size = (5, 1, 8), tiny.SHAPES[shape].hidden
    tokens = tokens_of(13, sum(widths), tiny.VOCAB)
    hidden = mx.array(np.random.default_rng(13).standard_normal((sum(widths), hidden_size), np.float32))
    rows = FlatRows(widths)
    together = head.forward(array(tokens), hidden, rows, head.make_cache(3), logits_at="last").logits
    for r, width in enumerate(widths):
        start, end = rows.starts[r], rows.starts[r + 1]
        alone = head.forward(
            array(tokens[start:end]), hidden[start:end], FlatRows((width,)), head.make_cache(1)
        ).logits
        np.testing.assert_allclose(to_numpy([together[r : r + 1]]), to_numpy([alone]), atol=1e-5)
