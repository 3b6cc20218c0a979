"""Tape, snapshots and checkpoint leave what plain decoding leaves: bit for bit for one layer in every dtype, and for whole models as far as
matrix products allow (bit for bit where their BLAS does not look at the number of rows). Tokens that run at once are forgiven last bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.rollback import Checkpoint, Rollback, Snapshots
from mlxspec.kernels.flat import FlatRows
from tests import tiny_models
from tests.cache.mixers import AT_ONCE, NEAR, WAYS, Mixer, as_numpy, same_outputs, same_state, tiny
from tests.cache.test_cache_contract import EXACT, MAX_ROWS, PROBE, STEPS, Driver, operations
from tests.rounding import of_model

DTYPES = ("float32", "float16", "bfloat16")
ALL_WAYS = {**WAYS, "at once": AT_ONCE}


class MixerDriver(Driver):
    """The contract's driver over one layer: every token's output is compared, and nothing forgiven but last bits of `AT_ONCE`."""

    def __init__(self, mixer: Mixer, rollback: Rollback) -> None:
        self.mixer, self.rollback = mixer, rollback
        self.cache, self.known = self.fresh(1), [[]]

    def fresh(self, num_rows: int) -> ModelCache:
        return self.mixer.make_cache(num_rows, self.rollback)

    def run(self, cache: ModelCache, pieces: list[list[int]], *, certain: bool, known=None) -> None:
        out = self.mixer.run(pieces, cache, certain=certain)
        near = NEAR[self.mixer.dtype] if self.rollback == AT_ONCE else 0.0
        same_outputs(out, self.known if known is None else known, pieces, self.mixer, near)

    def certain(self, pieces: list[list[int]], repeat: int, aborted: bool) -> None:
        super().certain([(p * repeat)[:STEPS] for p in pieces], 1, aborted)

    def draft(self, pieces: list[list[int]], kept: list[int], aborted: bool) -> None:
        pieces = self._fit(pieces)
        super().draft(pieces, self._allowed(pieces, kept), aborted)

    def fork(self, pieces: list[list[int]], kept: list[int], certain: bool) -> None:
        pieces = self._fit(pieces)
        allowed = self._allowed(pieces, kept)
        super().fork(pieces, allowed, certain)

    def onward(
        self, cache: ModelCache, pieces: list[list[int]], known: list[list[int]], *, certain: bool
    ) -> None:
        self.run(cache, pieces, certain=certain, known=known)

    def _allowed(self, pieces: list[list[int]], kept: list[int]) -> list[int]:
        """As the contract's driver wants it (a number a row, taken modulo width + 1), within what the rollback takes back."""
        limit = self.rollback.max_rollback
        wanted = [kept[r % len(kept)] % (len(p) + 1) for r, p in enumerate(pieces)]
        return (
            wanted if limit is None else [max(k, len(p) - limit) for k, p in zip(wanted, pieces, strict=True)]
        )

    def join(self, piece: list[int], repeat: int) -> None:
        if len(self.known) >= MAX_ROWS:
            return
        other, tokens = self.fresh(1), (piece * repeat)[:STEPS]
        if tokens:
            self.run(other, [tokens], certain=True, known=[[]])
            other.commit()
        self.cache.join(other)
        self.known.append(tokens)

    def check_logits(self, cache: ModelCache, known: list[list[int]]) -> None:
        assert cache.lengths == [len(k) for k in known]
        self.run(cache.fork(), [[PROBE]] * len(known), certain=False, known=known)

    def check_states(self) -> None:
        same_state(self.cache, self.known, self.mixer)


class ModelDriver(Driver):
    """The contract's driver over whole models with another rollback."""

    def __init__(self, stack: str, rollback: Rollback) -> None:
        self.rollback = rollback
        super().__init__(stack)

    def fresh(self, num_rows: int) -> ModelCache:
        return self.model.make_cache(num_rows, self.rollback)


def play(driver: Driver, script: list[tuple]) -> None:
    for name, *arguments in script:
        getattr(driver, name)(*arguments)
    driver.check_logits(driver.cache, driver.known)
    driver.check_states()
    driver.check_logits(driver.cache, driver.known)


def _settings(num_examples: int) -> settings:
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=num_examples, deadline=None, derandomize=True, suppress_health_check=slow)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ALL_WAYS)
@_settings(15)
@given(script=operations)
def test_any_rounds_leave_the_layer_as_plain_decoding_does(way: str, dtype: str, script: list[tuple]) -> None:
    play(MixerDriver(tiny(dtype), ALL_WAYS[way]), script)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ALL_WAYS)
@_settings(100)
@given(script=operations)
def test_the_layer_for_many_more(way: str, dtype: str, script: list[tuple]) -> None:
    play(MixerDriver(tiny(dtype), ALL_WAYS[way]), script)


@pytest.mark.parametrize("way", [Snapshots(8), Checkpoint()], ids=lambda w: type(w).__name__)
@_settings(15)
@given(script=operations)
def test_any_rounds_leave_the_model_as_plain_decoding_does(way: Rollback, script: list[tuple]) -> None:
    play(ModelDriver("hybrid", way), script)


@pytest.mark.slow
@pytest.mark.parametrize("stack", sorted(tiny_models.STACKS))
@pytest.mark.parametrize("way", [Snapshots(8), Checkpoint()], ids=lambda w: type(w).__name__)
@_settings(150)
@given(script=operations)
def test_the_same_for_many_more(way: Rollback, stack: str, script: list[tuple]) -> None:
    play(ModelDriver(stack, way), script)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ALL_WAYS)
def test_every_partial_length_of_every_width(way: str, dtype: str) -> None:
    """Row 0 keeps n of w tokens for all n and w, row 1 sits out, row 2 keeps another part; then a round on top of it."""
    mixer, rng, limit = tiny(dtype), np.random.default_rng(3), ALL_WAYS[way].max_rollback
    draw = lambda n: rng.integers(0, tiny_models.VOCAB, n).tolist()  # noqa: E731
    for width in range(1, 7):
        for kept in range(0 if limit is None else max(0, width - limit), width + 1):
            driver = MixerDriver(mixer, ALL_WAYS[way])
            for length in (4, 2):
                driver.join(draw(length), 1)
            driver.draft([draw(width), [], draw(2)], [kept, 0, 1], False)
            driver.draft([draw(2), draw(1), []], [1, 1, 0], False)
            driver.check_states()


@pytest.mark.parametrize("kept", [0, 1, 17, 63, 64])
@pytest.mark.parametrize("way", ["tape", "snapshots", "checkpoint", "at once"])
def test_a_draft_of_64_is_as_good_as_one_of_2(way: str, kept: int) -> None:
    rollback = Snapshots(65) if way == "snapshots" else ALL_WAYS[way]
    driver = MixerDriver(tiny("float32"), rollback)
    rng = np.random.default_rng(kept)
    driver.draft([[1, 2]], [1], False)
    piece = rng.integers(0, tiny_models.VOCAB, 64).tolist()
    driver.draft([piece], [kept], False)
    driver.draft([[5, 6]], [2], False)
    driver.check_states()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ways_agree_behind_a_chunked_prefill(dtype: str) -> None:
    """Facts wider than steps take another order of additions, the same for all ways; behind a pending draft too."""
    mixer, found = tiny(dtype), []
    for rollback in WAYS.values():
        cache = mixer.make_cache(2, rollback)
        outs = [mixer.run([[1, 2, 3], [4]], cache)]
        cache.commit([1, 1])
        outs.append(mixer.run([list(range(40)), [7] * 3], cache, certain=True))
        cache.commit()
        outs.append(mixer.run([[8, 9], [1, 2]], cache))
        cache.commit([1, 2])
        cache.flush()
        found.append([*outs, as_numpy(cache.recurrent(0).current.state)])
    for other in found[1:]:
        for got, wanted in zip(other, found[0], strict=True):
            np.testing.assert_array_equal(got, wanted)
    steps = mixer.plainly((1, *range(40), 8))[1][0]
    wanted = as_numpy(steps[0])
    np.testing.assert_allclose(
        found[0][-1][0], wanted, rtol=0, atol=2 * NEAR[mx.float32] * np.abs(wanted).max()
    )


def test_compiled_rounds_are_those_of_their_rollback() -> None:
    """Caches of different ways take turns on one model: no compiled stretch serves another's states."""
    model = tiny_models.stack("hybrid")
    caches = {name: model.make_cache(2, way) for name, way in WAYS.items()}
    rng = np.random.default_rng(1)
    for _ in range(4):
        widths, kept = (3, int(rng.integers(1, 4))), [int(rng.integers(1, 4)), 1]
        tokens = mx.array(rng.integers(0, tiny_models.VOCAB, sum(widths)).astype(np.int32))
        logits = {}
        for name, cache in caches.items():
            logits[name] = np.asarray(model.forward(tokens, FlatRows(widths), cache).logits)
            cache.commit(kept)
        for name, got in logits.items():
            most = of_model(3, 128) * np.abs(logits["tape"]).max()
            np.testing.assert_allclose(got, logits["tape"], rtol=0, atol=most, err_msg=name)


@pytest.mark.skipif(EXACT, reason="this process computes with MLX's own BLAS already")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="MLX's own BLAS is a Linux matter")
def test_models_bit_for_bit_where_the_blas_does_not_look_at_the_number_of_rows() -> None:
    here = Path(__file__)
    only = "leave_the_model or of_their_rollback"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", only]
    done = subprocess.run(
        [*command, str(here)],
        env={**os.environ, "MLXSPEC_BLAS": "wheel"},
        cwd=here.parents[2],
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
