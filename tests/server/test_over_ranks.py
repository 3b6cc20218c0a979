"""The server over two ranks: the tests that it passes in one process, the same texts, and requests that end early."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import Served

ROOT = Path(__file__).resolve().parents[2]
FILES = "test_sdk.py", "test_conversation.py", "test_call_lead.py"
SECONDS = 1500


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_the_server_passes_its_tests_over_two_ranks(name: str) -> None:
    """With the openai SDK where the file uses it."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "not slow", f"tests/server/{name}"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"TESTED_RANKS": "2"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


@pytest.fixture(scope="module")
def ranks() -> Iterator[Served]:
    with Served("--max-rows", "3", num_ranks=2) as served:
        yield served
        served.stop()


def _asked(seed: int) -> dict[str, Any]:
    content = f"what does os.path.join do? {'x' * seed}"
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 12 + seed,
        "seed": seed,
        "temperature": 0.8 * (seed % 2),
        "ignore_eos": True,
    }


@pytest.mark.slow
def test_clients_beside_each_other_get_the_texts_of_one_process(ranks: Served) -> None:
    found: dict[int, str] = {}

    def ask(seed: int) -> None:
        status, answer = ranks.post("/v1/chat/completions", _asked(seed))
        found[seed] = answer["choices"][0]["message"]["content"] if status == 200 else str(answer)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Served("--draft", "off") as alone:
        for seed in range(6):
            _, answer = alone.post("/v1/chat/completions", _asked(seed))
            assert found[seed] == answer["choices"][0]["message"]["content"], seed


@pytest.mark.slow
def test_a_client_that_leaves_and_a_deadline(ranks: Served) -> None:
    """Its row leaves on all ranks; the server goes on, and finds what it kept of the text."""
    long = {"prompt": "def add(a, b):", "max_tokens": 1500, "ignore_eos": True}
    import http.client
    import json

    connection = http.client.HTTPConnection("127.0.0.1", ranks.port, timeout=60)
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps({**long, "stream": True}),
        {"Content-Type": "application/json"},
    )
    assert connection.getresponse().readline()
    connection.close()
    ranks.settle()
    began = time.monotonic()
    status, answer = ranks.post("/v1/completions", {**long, "timeout": 0.2})
    assert time.monotonic() - began < 30
    assert status != 200 or answer["choices"][0]["finish_reason"] != "length", answer
    assert "seconds were not enough" in str(answer)
    ranks.settle()
    prompt = {"messages": [{"role": "user", "content": "what does os.path.join do? " * 6}], "max_tokens": 4}
    first, second = (ranks.post("/v1/chat/completions", prompt)[1] for _ in range(2))
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert second["choices"][0]["message"] == first["choices"][0]["message"]


@pytest.mark.slow
def test_a_killed_rank_ends_the_answer_and_the_server() -> None:
    why = "Rank 0 cannot go on: [ring] connection to a peer was lost."
    with Served("--draft", "off", num_ranks=2) as served:
        long = {"prompt": "def add(a, b):", "max_tokens": 1900, "ignore_eos": True, "temperature": 1.0}
        threading.Timer(0.5, served.others[0].kill).start()
        status, answer = served.post("/v1/completions", long)
        assert (status, answer["error"]["message"]) == (500, why)
        assert served.process.wait(30) == 2
        served.wait_for("<end>")
        assert f"mlxspec: error: {why}" in served.lines
