"""The count of flips by width, with a planted difference."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from count_flips import HEADER, Counts, compare, count, cut

from tests import tiny_models


def test_what_differs_is_counted_where_it_differs() -> None:
    plain = np.array([[1.0, 0.0], [1.0, 0.9], [2.0, 0.0]], np.float32)
    verified = np.array([[1.0, 0.0], [1.0, 1.1], [2.1, 0.0]], np.float32)
    noise = np.array([[0.0, 0.0], [0.5, 0.0], [0.0, 2.05]], np.float32)
    found = compare(plain, verified, noise)
    assert found[:4] == (3, 2, 1, 1)  # greedy flips at the second position, sampled at the third
    np.testing.assert_allclose(found.largest, 0.2, atol=1e-6)
    assert found.plus(found)[:4] == (6, 4, 2, 2)
    assert len(found.line("bfloat16", 4)) == len(HEADER)


def test_a_model_whose_widths_keep_all_bits_has_no_flips() -> None:
    model, text = tiny_models.target("bfloat16"), list(range(60))
    found = count(model, [text, text[:30]], [3, 9])
    assert found == dict.fromkeys((3, 9), Counts(positions=44 + 14)) or mx.default_device() != mx.Device(
        mx.cpu
    )


def test_texts_are_cut_to_so_many_tokens() -> None:
    assert [len(t) for t in cut([[0] * 300, [0] * 100, [0] * 100], 340)] == [256, 84]
    assert cut([[0] * 10], 340) == []
