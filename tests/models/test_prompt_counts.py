"""Pieces of prompts cost no more than mlx-lm's, counted; and what nobody reads of the last layer changes nothing else."""

from __future__ import annotations

import mlx.core as mx
import mlx_lm.models.qwen3_5 as theirs
import numpy as np
import pytest
from planting import catches
from published_shapes import CONFIGS

from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import LogitsAt
from tests import tiny_models
from tests.models import prompt_counts
from tests.models.metal_graph import as_on_metal


@pytest.mark.parametrize("name", ["Qwen3.5-0.8B", "Qwen3.5-4B", "Qwen3.5-27B", "Qwen3.5-35B-A3B"])
@catches(
    "the last layer computes hiddens that nobody reads",
    "mlxspec.models.row_attention:attend_in_places",
    lambda right: lambda *given, at_end=False: right(*given),
)
def test_a_piece_costs_no_more_than_mlx_lms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In launches and bytes. In multiplications within a hundredth: here all tokens have queries and gates in the last layer, which are one
    product with keys and values. A head adds a twentieth at most to launches and bytes. To multiplications it adds a fiftieth and the last
    layer, of which it needs the hiddens of all tokens."""
    monkeypatch.setattr(theirs, "gated_delta_update", prompt_counts.gated_delta_stub)
    with as_on_metal(monkeypatch):
        found = prompt_counts.table(CONFIGS[name][1])
    for who, counts in found.items():
        each = counts.multiplied / prompt_counts.PIECE / 1e6
        print(
            f"\n{name} | {who} | {counts.launches} | {counts.moved / prompt_counts.PIECE / 1e6:.2f} MB | {each:.0f} million"
        )
    ours, headed, other = found["ours"], found["ours with a head"], found["mlx-lm"]
    assert ours.launches <= other.launches
    assert ours.moved <= other.moved
    assert ours.multiplied <= 1.01 * other.multiplied
    assert headed.launches <= 1.05 * ours.launches
    assert headed.moved <= 1.05 * ours.moved
    last = 1 / CONFIGS[name][1]["text_config"]["num_hidden_layers"]
    assert headed.multiplied <= (1.02 + last) * ours.multiplied


@pytest.mark.parametrize("stack", ["hybrid", "recurrent"])
@pytest.mark.parametrize("widths", [(9,), (3, 0, 5), (1,)])
def test_the_end_alone(stack: str, widths: tuple[int, ...]) -> None:
    """Caches have the same bits, and the last hiddens are those of a forward that gives all."""
    model = tiny_models.stack(stack)
    rows = FlatRows(widths)
    tokens = mx.arange(rows.num_tokens) % tiny_models.VOCAB

    def run(logits_at: LogitsAt) -> tuple[np.ndarray, list[np.ndarray]]:
        cache = model.make_cache(len(widths))
        out = model.forward(tokens, rows, cache, certain=True, logits_at=logits_at)
        cache.commit()
        return np.array(out.hidden), [np.array(x) for x in cache.arrays]

    (whole, caches), (end, others) = run("none"), run("end")
    np.testing.assert_allclose(end, whole[np.array(rows.last_indices)], rtol=1e-4, atol=1e-5)
    for one, other in zip(caches, others, strict=True):
        np.testing.assert_array_equal(one, other)
