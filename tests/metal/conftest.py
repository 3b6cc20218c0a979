"""Where kernel tests run: on the GPU on a Mac or with MLX's CUDA backend, in the emulator on other Linux machines, else skipped with the
reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import emulator
import pytest

from mlxspec.kernels import launch
from mlxspec.platform import device

ON_GPU = device.backend() != "cpu"


@pytest.fixture(scope="session", autouse=True)
def _compile_cache(pytestconfig: pytest.Config) -> None:
    if getattr(pytestconfig, "cache", None) is not None:  # pytest may run without its cache plugin
        emulator.build_cache(pytestconfig.cache.mkdir("metal-emulator"))


@contextmanager
def running(**settings: Any) -> Iterator[None]:
    """Launchers use the emulator with these settings, or the GPU where there is one."""
    with ExitStack() as stack:
        if not ON_GPU:
            stack.enter_context(launch.using(emulator.metal_kernel))
            stack.enter_context(emulator.settings(**settings))
        yield


@pytest.fixture
def metal() -> Callable[..., AbstractContextManager[None]]:
    """`with metal(order=..., contract=...)`: kernels run; the settings mean something in the emulator only."""
    if not ON_GPU and (reason := emulator.missing_compiler()):
        pytest.skip(reason)
    return running


@pytest.fixture
def emulated(
    metal: Callable[..., AbstractContextManager[None]],
) -> Callable[..., AbstractContextManager[None]]:
    """As `metal`, for what only the emulator can tell."""
    if ON_GPU:
        pytest.skip("only the emulator checks this")
    return metal
