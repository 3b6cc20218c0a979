"""Tiny checkpoints for all tests of models."""

from __future__ import annotations

import pytest
from zoo import Zoo


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("checkpoints"))
