"""The tape leaves what plain decoding leaves: bit for bit for one layer in every dtype, in whole models as far as matrix products allow
(test_cache_contract.py). Tokens that run at once are forgiven last bits."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from mlxspec.cache.model_cache import ModelCache
from tests import tiny_models
from tests.cache.mixers import FORMS, NEAR, Mixer, as_numpy, computed, same_outputs, same_state, tiny
from tests.cache.test_cache_contract import MAX_ROWS, PROBE, STEPS, Driver, operations

DTYPES = ("float32", "float16", "bfloat16")


class MixerDriver(Driver):
    """The contract's driver over one layer: every token's output is compared, and nothing forgiven but last bits of the form "at once"."""

    def __init__(self, mixer: Mixer, form: str = "by steps") -> None:
        self.mixer, self.is_near = mixer, form == "at once"
        self.cache, self.known = self.fresh(1), [[]]

    def fresh(self, num_rows: int) -> ModelCache:
        return self.mixer.make_cache(num_rows)

    def run(self, cache: ModelCache, pieces: list[list[int]], *, certain: bool, known=None) -> None:
        out = self.mixer.run(pieces, cache, certain=certain)
        near = NEAR[self.mixer.dtype] if self.is_near else 0.0
        same_outputs(out, self.known if known is None else known, pieces, self.mixer, near)

    def certain(self, pieces: list[list[int]], repeat: int, aborted: bool) -> None:
        super().certain([(p * repeat)[:STEPS] for p in pieces], 1, aborted)

    def onward(
        self, cache: ModelCache, pieces: list[list[int]], known: list[list[int]], *, certain: bool
    ) -> None:
        self.run(cache, pieces, certain=certain, known=known)

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
        same_state(self.cache, self.known, self.mixer, NEAR[mx.float32] if self.is_near else 0.0)


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
@pytest.mark.parametrize("form", FORMS)
@_settings(15)
@given(script=operations)
def test_any_rounds_leave_the_layer_as_plain_decoding_does(
    form: str, dtype: str, script: list[tuple]
) -> None:
    with computed(form):
        play(MixerDriver(tiny(dtype), form), script)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@_settings(100)
@given(script=operations)
def test_the_layer_for_many_more(form: str, dtype: str, script: list[tuple]) -> None:
    with computed(form):
        play(MixerDriver(tiny(dtype), form), script)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_every_partial_length_of_every_width(form: str, dtype: str) -> None:
    """Row 0 keeps n of w tokens for all n and w, row 1 sits out, row 2 keeps another part; then a round on top of it."""
    mixer, rng = tiny(dtype), np.random.default_rng(3)
    draw = lambda n: rng.integers(0, tiny_models.VOCAB, n).tolist()  # noqa: E731
    with computed(form):
        for width in range(1, 7):
            for kept in range(width + 1):
                driver = MixerDriver(mixer, form)
                for length in (4, 2):
                    driver.join(draw(length), 1)
                driver.draft([draw(width), [], draw(2)], [kept, 0, 1], False)
                driver.draft([draw(2), draw(1), []], [1, 1, 0], False)
                driver.check_states()


@pytest.mark.parametrize("kept", [0, 1, 17, 63, 64])
@pytest.mark.parametrize("form", FORMS)
def test_a_draft_of_64_is_as_good_as_one_of_2(form: str, kept: int) -> None:
    with computed(form):
        driver = MixerDriver(tiny("float32"), form)
        rng = np.random.default_rng(kept)
        driver.draft([[1, 2]], [1], False)
        piece = rng.integers(0, tiny_models.VOCAB, 64).tolist()
        driver.draft([piece], [kept], False)
        driver.draft([[5, 6]], [2], False)
        driver.check_states()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chunked_prefill_behind_a_pending_draft_is_near_to_steps(dtype: str) -> None:
    """Certain tokens wider than steps take another order of additions."""
    mixer = tiny(dtype)
    cache = mixer.make_cache(2)
    mixer.run([[1, 2, 3], [4]], cache)
    cache.commit([1, 1])
    mixer.run([list(range(40)), [7] * 3], cache, certain=True)
    cache.commit()
    mixer.run([[8, 9], [1, 2]], cache)
    cache.commit([1, 2])
    cache.flush()
    wanted = as_numpy(mixer.plainly((1, *range(40), 8))[1][0][0])
    got = as_numpy(cache.recurrent(0).current.state[0])
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2 * NEAR[mx.float32] * np.abs(wanted).max())


def test_a_forward_behind_a_flush_has_the_bits_of_one_that_replays() -> None:
    mixer, found = tiny("float32"), []
    for flushes in (False, True):
        cache = mixer.make_cache(2)
        mixer.run([[1, 2, 3], [4, 5, 6, 7, 8, 9]], cache)
        cache.commit([2, 5])
        if flushes:
            cache.flush()
        found.append(mixer.run([[8], [1, 2]], cache))
    np.testing.assert_array_equal(*found)
