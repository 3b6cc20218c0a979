"""Kernels that choosing tokens takes on Metal, counted on the graph at Qwen3.5's vocabulary; and that the same tokens come out."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

from mlxspec.config import SamplingParams
from mlxspec.sampling import noise, survivors
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler
from mlxspec.sampling.truncate import room
from tests.models.metal_graph import as_on_metal, blank, bytes_moved, launches

VOCAB = 248_320
QWEN, GEMMA = {"top_k": 20, "top_p": 0.95}, {"top_k": 64, "top_p": 0.95}


def check_kernels(
    asked: dict[str, Any], drafted: int, verified: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most so many for one drafted token with its confidence, and for the choices of a verify of four."""
    row = RowSampler(SamplingParams(**asked), [1], VOCAB)
    sampler = BatchSampler([row], VOCAB)
    with as_on_metal(monkeypatch):
        one, four = (blank((num, VOCAB), mx.bfloat16) for num in (1, 4))
        draft = sampler.draft(one, [0], [10])
        assert launches([draft.tokens, draft.confidence]).total() <= drafted
        assert launches([sampler.sample(four, [0] * 4, range(10, 14))]).total() <= verified


@catches(
    "survivors are found step by step, not in a compiled function",
    "mlxspec.sampling.survivors:_compiled_draw",
    lambda right: survivors._draw,
)
@pytest.mark.parametrize(
    "asked",
    [
        QWEN | {"temperature": 1.0},
        GEMMA | {"temperature": 1.0},
        {"min_p": 0.05, "top_k": 40, "temperature": 0.6},
    ],
    ids=["Qwen", "Gemma", "min-p"],
)
def test_choosing_by_top_k_takes_few_kernels(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check_kernels(asked, 25, 40, monkeypatch)


@catches(
    "noise is drawn step by step, not in a compiled function",
    "mlxspec.sampling.noise:_compiled_noisiest",
    lambda right: noise._noisiest,
)
@pytest.mark.parametrize(
    ("asked", "drafted"),
    [({"top_p": 0.9, "temperature": 0.7}, 25), ({"temperature": 0.7}, 10)],
    ids=["top-p", "temperature"],
)
def test_choosing_among_all_takes_few_kernels(
    asked: dict[str, Any], drafted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_kernels(asked, drafted, 40, monkeypatch)


@catches(
    "noise, top-p and the draw see all tokens, not the survivors",
    "mlxspec.sampling.survivors:has_survivors",
    lambda right: lambda *_: False,
)
def test_choosing_by_top_k_moves_few_bytes() -> None:
    """MiB a position: beside what a verify and a draft read of the logits, one row of random bits."""
    row = RowSampler(SamplingParams(**QWEN, temperature=1.0), [1], VOCAB)
    sampler = BatchSampler([row], VOCAB)

    def draft(logits: mx.array) -> list[mx.array]:
        made = sampler.draft(logits, [0], [10])
        return [made.tokens, made.confidence]

    one, four = (mx.zeros((num, VOCAB), mx.bfloat16) for num in (1, 4))
    drafted = bytes_moved(draft, one) / 2**20
    verified = bytes_moved(lambda logits: sampler.sample(logits, [0] * 4, range(10, 14)), four) / 2**20
    print(f"\nMiB: a drafted token and its confidence {drafted:.1f}, a verify of four {verified:.1f}")
    assert drafted <= 8
    assert verified <= 4 * 8


def test_bytes_are_those_of_whole_kernels() -> None:
    x = mx.zeros((1, 1000))  # 4,000 bytes
    assert bytes_moved(lambda x: mx.exp(x + 1) * x, x) == 4000 + 4 + 4000
    assert bytes_moved(lambda x: (y := mx.exp(x)) / mx.sum(y), x) == 8000 + 4004 + 8004
    assert bytes_moved(lambda x: mx.take_along_axis(x, mx.array([[3, 4]], mx.uint32), axis=1), x) == 8 + 8 + 8
    assert bytes_moved(lambda x: mx.exp(mx.exp(x)[:, :500]), x) == 8000 + 2000 + 2000


def test_clients_choose_among_few_compiled_widths() -> None:
    """Whatever k is asked for; each width has the room that k needs, and at most an eighth more."""
    widths = {
        k: survivors.cuts([SamplingParams(temperature=1.0, top_k=k)], VOCAB).width for k in range(1, 60_000)
    }
    assert len(set(widths.values())) <= 96
    assert all(room(k) <= width <= max(room(k) + 15, room(k) * 9 // 8 + 32) for k, width in widths.items())


def test_a_row_is_sampled_alike_alone_and_beside_others() -> None:
    """Greedy rows and rows with top-k go one way, the others another: each place gets what it would get alone."""
    asked = [{}, QWEN, {"top_p": 0.9, "temperature": 0.7}, GEMMA, {"temperature": 0.8}]
    rows = [
        RowSampler(SamplingParams(**{"temperature": 1.0, **a} if a else {}, seed=i), [], 4000)
        for i, a in enumerate(asked)
    ]
    owners = [0, 1, 1, 2, 3, 4, 2]
    logits = mx.array(np.random.default_rng(0).standard_normal((7, 4000)).astype(np.float32) * 3)
    for dtype in (mx.float32, mx.bfloat16):
        x = logits.astype(dtype)
        together = BatchSampler(rows, 4000).sample(x, owners, range(7)).tolist()
        drafted = BatchSampler(rows, 4000).draft(x, owners, range(7)).tokens.tolist()
        for i, owner in enumerate(owners):
            alone = BatchSampler([rows[owner]], 4000)
            assert alone.sample(x[i : i + 1], [0], [i]).item() == together[i] == drafted[i]
