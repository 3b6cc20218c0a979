"""Demo servers for all tests that only ask them something; over several ranks where TESTED_RANKS says so, as test_over_ranks.py does.

And the page in a browser.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlxspec.demo
from tests.server import chromium
from tests.server.page_window import PLANT, home_of
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


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with Served("--max-rows", "4", "--policy", "fixed", "--draft", "mtp", plant=PLANT) as found:
        yield found


@pytest.fixture(scope="session")
def program() -> str:
    found = chromium.find()
    if found is None:
        pytest.skip("needs Chromium")
    return found


@pytest.fixture(scope="session")
def window(program: str, served: Served) -> Iterator[chromium.Browser]:
    with chromium.Browser(program) as browser:
        yield browser


@pytest.fixture
def browser(window: chromium.Browser, served: Served) -> Iterator[chromium.Browser]:
    """The page, with nothing kept. Afterwards nothing was complained of, and nothing was asked of any other server."""
    home = home_of(served.port)
    window.resize(1000, 800)
    window.prefer("light")
    window.forget(home)
    window.open(home)
    window.until("document.querySelector('#model-facts').textContent")
    window.complaints.clear()
    window.requested.clear()
    window.posted.clear()
    window.js(
        "addEventListener('securitypolicyviolation', (event) => console.error(event.violatedDirective))"
    )
    yield window
    assert window.complaints == []
    assert {address for address in window.requested if not address.startswith(home)} == set()
