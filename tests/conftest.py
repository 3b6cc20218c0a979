"""What every test shares: the device layer comes before MLX, markers that need hardware skip with their reason.

MLX compiles nothing here unless --compiled is given: on a CPU each fused kernel is a run of g++, and a thousand little models would spend
the whole budget on that. `test_compiled.py` runs what depends on compiling in a process where MLX compiles.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

# before anything imports MLX, as folders that are given by name do before there are options; workers inherit it
if "--compiled" not in sys.argv and "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["MLX_DISABLE_COMPILE"] = "1"

import fast_tier
import gpu_rounding
import planting
import shards
import skipped

from mlxspec.loading import lm_studio
from mlxspec.platform import device, folders

os.environ["MLXSPEC_CONFIG"] = ""  # no user's settings
lm_studio.PLACES = ()  # nor models

if "PYTEST_XDIST_WORKER" not in os.environ:
    # what rounds cost beside other tests is nothing that later loads should start from: only libraries are kept for them
    _users, _own = folders.wanted_cache_folder(), Path(tempfile.mkdtemp(prefix="mlxspec-tests-"))
    atexit.register(shutil.rmtree, _own, ignore_errors=True)
    for _name in ("blas", "kernels"):
        with suppress(OSError):
            folders.make_private(_users / _name)
            (_own / _name).symlink_to(_users / _name)
    (_own / "real").symlink_to(
        _users / "real"
    )  # where scripts/real_model puts what it assembles; it need not be there
    os.environ["MLXSPEC_CACHE"] = str(_own)


def pytest_addoption(parser: pytest.Parser) -> None:
    fast_tier.pytest_addoption(parser)
    planting.pytest_addoption(parser)
    shards.pytest_addoption(parser)
    gpu_rounding.pytest_addoption(parser)
    parser.addoption("--compiled", action="store_true", help="let MLX compile, as it does for users")
    parser.addoption(
        "--backend", choices=("metal", "cuda", "cpu"), help="fail at once where MLX has another backend"
    )


def pytest_configure(config: pytest.Config) -> None:
    planting.pytest_configure(config)
    shards.pytest_configure(config)
    gpu_rounding.pytest_configure(config)
    config.pluginmanager.register(skipped)
    # a busy machine fails no test; the fast tier tries the same examples each time, all other runs try new ones
    settings.register_profile("mlxspec", deadline=None, derandomize=config.getoption("--fast"))
    settings.load_profile("mlxspec")
    if config.getoption("--compiled"):
        device.compile_kernels()
    wanted = config.getoption("--backend")
    if wanted is not None and device.backend() != wanted:
        raise pytest.UsageError(
            f"--backend {wanted} was asked for, and MLX computes with {device.backend()} here."
        )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of -m smoke only the files that have the mark are read: reading all takes longer than the tests."""
    if config.getoption("markexpr") != "smoke" or collection_path.suffix != ".py":
        return None
    return "pytest.mark.smoke" not in collection_path.read_text(encoding="utf-8") or None


def _missing(marker: str) -> str | None:
    """Why tests with `marker` cannot run here, or None."""
    if marker == "mac" and sys.platform != "darwin":
        return "needs a Mac with Apple Silicon"
    if marker == "gpu" and device.backend() == "cpu":
        return "needs a GPU that MLX can use"
    if marker == "torch" and importlib.util.find_spec("torch") is None:
        return "needs PyTorch"
    if marker == "node" and shutil.which("node") is None:
        return "needs node"
    if marker == "terminal" and not _has_terminals():
        return "needs pseudo-terminals, which this machine or container does not have"
    return None


def _has_terminals() -> bool:
    try:
        ends = os.openpty()
    except (AttributeError, OSError):
        return False
    for end in ends:
        os.close(end)
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:  # workers that run side by side would collect different tests
        raise pytest.UsageError(f"a test's name holds an address, give it ids: {unstable[0]}")
    items.sort(
        key=lambda item: item.path.name != "test_compiled.py"
    )  # a minute of g++: not what everybody waits for at the end
    for item in items:
        for marker in ("mac", "gpu", "torch", "node", "terminal"):
            if item.get_closest_marker(marker) is not None:
                reason = _missing(marker)
                if reason is not None:
                    item.add_marker(pytest.mark.skip(reason=reason))
    fast_tier.pytest_collection_modifyitems(config, items)


@pytest.fixture(autouse=True, scope="session")
def _private_kernels() -> Iterator[None]:
    """Tests that evaluate without the engine compile into the private folder too."""
    with device.private_kernels():
        yield


@pytest.fixture(autouse=True, scope="module")
def _no_exact_engine_before() -> Iterator[None]:
    """An exact engine changes how its whole process multiplies. It does so for the tests of its own module only."""
    from mlxspec.kernels import exactness

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exactness, "is_demanded", False)
        yield


@pytest.fixture(autouse=True, scope="session")
def _engines_end() -> Iterator[None]:
    """Engines that tests share are closed behind the last test."""
    yield
    if "tests.engines" in sys.modules:
        sys.modules["tests.engines"].close_all()
