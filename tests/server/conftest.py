"""Demo servers for all tests that only ask them something; over several ranks where TESTED_RANKS says so, as test_over_ranks.py does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlxspec.demo
from tests.server.serving import Served

RANKS = int(os.environ.get("TESTED_RANKS", "1"))


@pytest.fixture(scope="session")
def demo() -> Iterator[Served]:
    with Served("--max-rows", "4", "--prefill-chunk", "64", num_ranks=RANKS) as served:
        yield served
        assert served.process.poll() is None, "the server has ended:\n" + "\n".join(served.lines[-20:])


@pytest.fixture(scope="session")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo model with a template that opens thinking unless the request says otherwise, and takes tools."""
    made = tmp_path_factory.mktemp("models") / "demo"
    shutil.copytree(Path(mlxspec.demo.__file__).parent / "target", made)
    template = made / "chat_template.jinja"
    opened = "<|im_start|>assistant\\n"
    source = template.read_text()
    assert source.count(f"{{{{- '{opened}' }}}}") == 1
    thinking = "{% if enable_thinking is not defined or enable_thinking %}{{- '<think>\\n' }}{% endif %}{# </think> #}"
    template.write_text(source.replace(f"{{{{- '{opened}' }}}}", f"{{{{- '{opened}' }}}}{thinking}"))
    with Served("--model", str(made), "--max-rows", "4", "--prefill-chunk", "64") as served:
        yield served
        assert served.process.poll() is None, "the server has ended:\n" + "\n".join(served.lines[-20:])
