"""Rows of a language-model head: their logits are the head's, packed rows stay packed, and only floats are quantized on the way."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxspec.models.head_rows import HeadRows
from mlxspec.models.layers import FusedLinear
from mlxspec.models.sizes import bytes_of
from mlxspec.platform.host import numbers
from tests import tiny_models
from tests.tiny_models import FORMS, VOCAB

pytestmark = pytest.mark.smoke

IDS = [2, 3, 17, 63, 64, 65, 70, 95]
OTHERS = np.asarray([0, 1, 94], np.int32)


def hiddens(model: tiny_models.Qwen35, num: int = 3) -> mx.array:
    rng = np.random.default_rng(0)
    return mx.array(rng.standard_normal((num, model.hidden_size), np.float32)).astype(model.dtype)


def error_of(form: str, got: mx.array, wanted: mx.array) -> float:
    """The largest difference, in roundings of the largest logit."""
    scale = mx.finfo(FORMS[form].dtype).eps * np.abs(numbers(wanted)).max()
    return float(np.abs(numbers(got) - numbers(wanted)).max() / scale)


def of(form: str, *, tied: bool = False, bits: int | None = None) -> tuple[tiny_models.Qwen35, HeadRows]:
    model = tiny_models.make(tiny_models.config(tied=tied), form=form)
    return model, HeadRows(model.head_module, IDS, VOCAB, bits=bits, capped=model.capped)


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
@pytest.mark.parametrize("form", FORMS)
def test_logits_of_rows_are_those_of_the_head(form: str, tied: bool) -> None:
    model, rows = of(form, tied=tied)
    x = hiddens(model)
    wanted = model.head(x)
    got, more = rows(x), rows(x, rows.of(OTHERS))
    assert got.shape == (3, len(IDS))
    assert got.dtype == wanted.dtype
    assert more.shape == (3, len(IDS) + len(OTHERS))
    assert error_of(form, got, wanted[:, mx.array(IDS)]) < 16
    assert error_of(form, more, wanted[:, mx.array([*IDS, *OTHERS.tolist()])]) < 16


@pytest.mark.parametrize("form", [f for f in FORMS if FORMS[f].bits])
def test_packed_rows_are_the_very_ones(form: str) -> None:
    model, rows = of(form)
    (whole,), (part,) = model.language_model.lm_head.parts, rows.rows.parts
    assert isinstance(part, nn.QuantizedLinear)
    assert (part.bits, part.group_size, part.mode) == (whole.bits, whole.group_size, whole.mode)
    for name in ("weight", "scales", "biases"):
        if whole.get(name) is not None:
            assert mx.array_equal(part[name], whole[name][mx.array(IDS)])
    assert bytes_of(rows) * VOCAB == bytes_of(model.language_model.lm_head) * len(IDS)


@pytest.mark.parametrize("form", FORMS)
def test_only_floats_are_quantized(form: str) -> None:
    model, rows = of(form, bits=4)
    is_packed = FORMS[form].bits > 0
    assert bool(rows.rows.parts)
    (part,) = rows.rows.parts
    wanted = FORMS[form].bits if is_packed else 4
    assert part.bits == wanted
    if not is_packed:
        unpacked = mx.dequantize(part.weight, part.scales, part.biases, group_size=64, bits=4)
        x = hiddens(model)
        assert error_of(form, rows(x), x @ unpacked.T) < 16
        assert bytes_of(rows) == len(IDS) * (model.hidden_size // 2 + 2 * FORMS[form].dtype.size)


def test_what_the_model_does_to_logits_is_done() -> None:
    model = tiny_models.target()
    rows = HeadRows(model.head_module, IDS, VOCAB, capped=lambda x: mx.tanh(x / 2) * 2)
    x = hiddens(model)
    np.testing.assert_allclose(
        np.asarray(rows(x)), 2 * np.tanh(np.asarray(model.head(x)[:, mx.array(IDS)]) / 2), atol=1e-5
    )


def test_a_fused_head_gives_rows_again() -> None:
    """Rows of rows, of floats and of what is packed."""
    for form in ("float32", "bfloat16", "4bit"):
        model, rows = of(form)
        again = HeadRows(rows.rows, [1, 4], len(IDS))
        x = hiddens(model)
        assert isinstance(again.rows, FusedLinear)
        assert error_of(form, again(x), rows(x)[:, mx.array([1, 4])]) < 16


@pytest.mark.parametrize("ids", [[], [1, 1], [-1, 2], [0, VOCAB]])
def test_ids_that_the_head_does_not_have(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="ids"):
        HeadRows(tiny_models.target().head_module, ids, VOCAB)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "4bit"])
def test_taking_rows_leaves_the_random_state_alone(form: str) -> None:
    """Rows are taken whenever a text brings new tokens; each key that is split is kept until somebody draws."""
    _, rows = of(form, bits=4)
    before = np.array(mx.random.state[0])
    rows.of(OTHERS)
    assert np.array_equal(np.array(mx.random.state[0]), before)
