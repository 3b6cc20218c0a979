"""A signal ends the process in time whatever the engine is doing, and a fault ends the request it hits, not the others."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from mlxspec.server.http import log, run
from mlxspec.server.http.signals import EXIT_SECONDS
from tests.engine.rank_processes import free_ports
from tests.server.serving import LONG, QUESTION, Served

# What the engine's thread is made to do, and where, once the file named by MET is there: to wait for what never comes, so that only the
# process' end ends it. The model's first rounds, which the server runs before it is ready, pass.
SLOW = """
import os, sys, threading
from mlxspec.engine import {module} as module
real = {where}
def slow(*args, **kwargs):
    if os.path.exists(os.environ["MET"]):
        print("here it is", file=sys.stderr, flush=True)
        threading.Event().wait()
    return real(*args, **kwargs)
{where} = slow
"""
STAGES = {
    "prefill": SLOW.format(module="prefill", where="module.Prefill.advance"),
    "draft": SLOW.format(module="round", where="module.Drafts.propose"),
    "verify": SLOW.format(module="round", where="module._forward"),
    "sampling": SLOW.format(module="pipeline", where="module.read"),
    "loading": SLOW.format(module="load", where="module.load"),
}
IN_TIME = 2.0  # seconds


@pytest.mark.parametrize("stage", [pytest.param("prefill", marks=pytest.mark.slow), "loading"])
def test_a_signal_in_a_stage(stage: str, tmp_path: Path) -> None:
    stop_in(stage, tmp_path / "met")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["draft", "verify", "sampling"])
def test_a_signal_in_another_stage(stage: str, tmp_path: Path) -> None:
    stop_in(stage, tmp_path / "met")


def stop_in(stage: str, met: Path) -> None:
    if stage == "loading":
        met.touch()
    with Served(plant=STAGES[stage], wait=stage != "loading", env={"MET": str(met)}) as served:
        met.touch()
        answers: list[Any] = []
        asking = threading.Thread(target=_job, args=(served, answers))
        if stage != "loading":
            asking.start()
        served.wait_for("here it is")
        assert served.stop() == 0, served.lines
        if stage != "loading":
            asking.join()
            assert answers  # an error, or a connection that ended; nobody waits for ever
        assert not [line for line in served.lines if "Traceback" in line], served.lines


def _job(served: Served, answers: list[Any]) -> None:
    try:
        answers.append(served.ask("POST", "/v1/completions", {"prompt": "def main():", "draft": "auto"}))
    except (OSError, ValueError) as error:
        answers.append(error)
    except Exception as error:
        answers.append(error)


def test_the_process_waits_for_nobody_longer_than_promised() -> None:
    """The tests above show that it ends although the engine never returns. How long it waits is not measured: two numbers say it."""
    assert run._STREAMS_END_SECONDS < EXIT_SECONDS < IN_TIME


@pytest.mark.parametrize("number", [signal.SIGINT])
def test_an_idle_server_ends_at_once(number: int) -> None:
    with Served() as served:
        assert served.stop(number) == 0
        assert not [line for line in served.lines if "Traceback" in line]


def test_a_budget_below_the_weights_is_refused_before_anybody_asks() -> None:
    with Served("--memory-budget", "5M", wait=False) as served:
        said = served.wait_for(
            r"error: The weights take [\d.]+ MiB, drafters included, and --memory-budget is 5.0 MiB: raise it"
        )
        assert served.process.wait(LONG) == 2
        assert served.wait_for("<end>")
        assert [line for line in served.lines if "error" in line or "Traceback" in line] == [said.string]


HALF = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 500\r\nExpect: 100-continue\r\n\r\n"
)


def half_a_body(served: Served) -> socket.socket:
    """A connection whose request the server waits for, with a part of its body."""
    sent = socket.create_connection(("127.0.0.1", served.port), timeout=LONG)
    sent.sendall(HALF)
    assert b"100" in sent.recv(4096)
    sent.sendall(b'{"messages": [')
    return sent


TAKES_LONG = """
import threading, mlxspec.server.params as params
real = params._compiled
def compiled(ask, *rest):
    if ask.asks[0].params.seed == 77:
        threading.Event().wait(60)
    return real(ask, *rest)
params._compiled = compiled
"""


def test_a_signal_ends_streams_and_half_bodies_with_a_sentence() -> None:
    """Streams that run, requests that wait for a place or are prepared, and bodies of which a part has come: none leaves a traceback."""
    stream = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 1900,
        "ignore_eos": True,
        "stream": True,
    }
    with Served("--max-rows", "4", plant=TAKES_LONG) as served:
        streams = [http.client.HTTPConnection("127.0.0.1", served.port, timeout=LONG) for _ in range(11)]
        for i, connection in enumerate(streams):
            body = json.dumps(stream | ({"seed": 77} if i == 10 else {}))
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        first = streams[0].getresponse()
        assert first.readline().startswith(b"data: ")
        halves = [half_a_body(served) for _ in range(30)]
        assert served.stop() == 0
        assert b"The engine is being stopped." in first.read()
        for connection in streams[1:]:
            with connection.getresponse() as answer:
                assert b"being stopped" in answer.read()
        for connection in streams:
            connection.close()
        first.close()
        told = [sent.recv(4096) for sent in halves]
        for sent in halves:
            sent.close()
        assert all(b"503" in answer and b"The server is being stopped." in answer for answer in told)
        assert not [line for line in served.lines if "Traceback" in line or "Exception" in line], served.lines


FAULTS = """
import mlxspec.drafters.lookup as lookup, mlxspec.sampling.constraints as constraints
real = lookup.Lookup.draft
def draft(self, asks, sampler):
    if any(5 in a.sampler.params.logit_bias for a in asks):
        raise RuntimeError("planted in a drafter")
    return real(self, asks, sampler)
lookup.Lookup.draft = draft
look = constraints.Constraints.push
def push(self, token):
    raise RuntimeError("planted in a processor")
constraints.Constraints.push = push
"""


def test_faults_of_one_request_leave_the_others_alone() -> None:
    with Served("--max-rows", "4", plant=FAULTS) as served:
        ask = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60}
        wanted = served.post("/v1/chat/completions", ask)[1]["choices"][0]["message"]["content"]
        found: dict[int, tuple[int, dict[str, Any]]] = {}

        def one(number: int, body: dict[str, Any]) -> None:
            found[number] = served.post("/v1/chat/completions", body)

        others = [{}, {"logit_bias": {"5": 0}}, {"bad_words": ["zzz"]}, {}]
        threads = [threading.Thread(target=one, args=(i, {**ask, **o})) for i, o in enumerate(others)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number in (0, 1, 3):
            status, answer = found[number]
            assert status == 200, json.dumps(answer)
            assert answer["choices"][0]["message"]["content"] == wanted
        assert any("planted in a drafter" in n for n in found[1][1]["mlxspec"]["notices"])
        status, answer = found[2]
        assert status == 500
        assert "planted in a processor" in answer["error"]["message"]
        assert served.post("/v1/chat/completions", ask)[1]["choices"][0]["message"]["content"] == wanted
        assert served.settle()["mlxspec_rows_running"] == 0


BLOCKED = """
import os
import mlxspec.server.app as module
async def blocked(self, asked, reply):
    reading, _ = os.pipe()
    os.read(reading, 1)  # waits for ever, in the event loop
module.Server._limits = blocked
"""


@pytest.mark.slow
def test_a_signal_while_the_event_loop_stands_still() -> None:
    with Served(plant=BLOCKED) as served:
        threading.Thread(target=_get, args=(served, "/limits"), daemon=True).start()
        served.wait_for("serves demo")
        time.sleep(1)
        assert served.stop() == 0


def _get(served: Served, path: str) -> None:
    with suppress(OSError, HTTPException):
        served.ask("GET", path)


@contextmanager
def unheard(stderr: int) -> Iterator[tuple[subprocess.Popen[bytes], http.client.HTTPConnection]]:
    """A server whose stderr goes to a file that nobody reads, and a connection to it."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "mlxspec", "serve", "--port", str(port)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG)
    with subprocess.Popen(command, stderr=stderr, env=environment) as process:
        try:
            until = time.monotonic() + LONG
            while _status(connection, "/health") != 200:
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.1)
            yield process, connection
        finally:
            connection.close()
            process.kill()


def _status(connection: http.client.HTTPConnection, path: str) -> int:
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        return response.status
    except ConnectionError:
        connection.close()
        return 0


def test_a_log_that_nobody_reads_holds_nobody_up() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    with unheard(writing) as (server, connection):
        assert {_status(connection, f"/no/{'x' * 180}") for _ in range(log.LINES_AT_ONCE + 100)} == {404}
        connection.request("GET", "/metrics")
        found = connection.getresponse().read().decode()
        assert int(found.split("\nmlxspec_log_left_out_total ")[1].split("\n")[0]) >= 50
        server.send_signal(signal.SIGTERM)
        assert server.wait(LONG) == 0
    os.close(reading)
    os.close(writing)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_the_log_does_not_end_the_server() -> None:
    with open("/dev/full", "wb") as full, unheard(full.fileno()) as (server, connection):
        assert _status(connection, "/nowhere") == 404
        assert _status(connection, "/health") == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(LONG) == 0
