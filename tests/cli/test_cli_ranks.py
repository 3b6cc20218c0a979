"""Which model ranks serve."""

from __future__ import annotations

import pytest

from mlxspec.cli import options
from mlxspec.cli.serve import served_alone
from mlxspec.errors import ConfigError


def test_ranks_serve_one_model() -> None:
    assert served_alone(options.parse(["serve"])).model == "demo"
    assert served_alone(options.parse(["serve", "-m", "a=demo-gemma"])).model == "demo-gemma"
    with pytest.raises(ConfigError, match="Ranks serve one model"):
        served_alone(options.parse(["serve", "-m", "a=demo", "-m", "b=demo-gemma"]))
