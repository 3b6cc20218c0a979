"""What every test shares: the device layer comes before MLX, markers that need hardware skip with their reason."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator

import pytest

from mlxspec import device


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
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in ("mac", "gpu", "torch", "node"):
            if item.get_closest_marker(marker) is not None:
                reason = _missing(marker)
                if reason is not None:
                    item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="session")
def _private_kernels() -> Iterator[None]:
    """Tests that evaluate without the engine compile into the private folder too."""
    with device.private_kernels():
        yield
