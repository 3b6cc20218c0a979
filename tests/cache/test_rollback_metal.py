"""Rollback over the Metal kernels' own text, in the emulator (on a Mac: on the GPU).

Bit for bit what plain decoding by the same kernels leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import mlx.core as mx
import pytest

from mlxspec.kernels import launch
from tests import tiny_models
from tests.cache.mixers import Mixer
from tests.cache.test_rollback import MixerDriver
from tests.metal import emulator

ON_GPU = mx.metal.is_available()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both kernels of the mixer are used, self-checks aside."""
    if not ON_GPU and (reason := emulator.missing_compiler()):
        pytest.skip(reason)
    used = {
        name: launch.KernelReport(name=name, in_use=True, reason="under test")
        for name in ("gdn_round", "conv_qkv")
    }
    monkeypatch.setattr(launch, "_reports", used)
    with ExitStack() as stack:
        if not ON_GPU:
            stack.enter_context(launch.using(emulator.metal_kernel))
        yield


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounds_over_the_kernels_leave_what_plain_decoding_leaves(kernels: None, dtype: str) -> None:
    driver = MixerDriver(Mixer(tiny_models.config(), getattr(mx, dtype)))
    driver.join([3, 1, 4, 1, 5], 1)
    driver.join([9, 2], 1)
    emulator.runs.clear()
    driver.draft([[2, 7, 1, 8], [], [3]], [2, 0, 0], False)
    driver.draft([[5, 5, 5], [6, 6], [7]], [1, 2, 1], True)
    driver.fork([[1, 2, 3], [4], []], [2, 1, 0], False)
    driver.draft([[8, 2, 8], [1, 8, 2], [4]], [3, 1, 1], False)
    driver.certain([[4, 5], [9], [0]], 1, False)
    driver.draft([[1], [2, 3], [3, 5, 8]], [1, 1, 2], False)
    driver.snapshot(1, True)
    driver.check_states()
    assert ON_GPU or {r.kernel for r in emulator.runs} >= {"mlxspec_gdn_round", "mlxspec_conv_qkv"}
