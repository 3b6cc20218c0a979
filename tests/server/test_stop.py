"""A signal ends the process in time whatever the engine is doing, and a fault ends the request it hits, not the others."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from mlxspec.server import run
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
    "draft": SLOW.format(module="round", where="module.Drafting.propose"),
    "verify": SLOW.format(module="round", where="module._forward"),
    "sampling": SLOW.format(module="pipeline", where="module.read"),
    "loading": SLOW.format(module="load", where="module.load"),
}
IN_TIME = 5.0  # seconds


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
        asking = threading.Thread(target=_ask, args=(served, answers))
        if stage != "loading":
            asking.start()
        served.wait_for("here it is")
        assert served.stop() == 0, served.lines
        if stage != "loading":
            asking.join()
            assert answers  # an error, or a connection that ended; nobody waits for ever
        assert not [line for line in served.lines if "Traceback" in line], served.lines


def _ask(served: Served, answers: list[Any]) -> None:
    try:
        answers.append(served.ask("POST", "/v1/completions", {"prompt": "def main():", "draft": "auto"}))
    except (OSError, ValueError) as error:
        answers.append(error)
    except Exception as error:
        answers.append(error)


def test_the_process_waits_for_nobody_longer_than_promised() -> None:
    """The tests above show that it ends although the engine never returns. How long it waits is not measured: two numbers say it."""
    assert run._STREAMS_END_SECONDS < run._EXIT_SECONDS < IN_TIME


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


FAULTS = """
import mlxspec.drafters.ngram_simple as ngram, mlxspec.sampling.constraints as constraints
real = ngram.NgramSimple.propose
def propose(self, asks, sampler):
    if any(5 in a.sampler.params.logit_bias for a in asks):
        raise RuntimeError("planted in a drafter")
    return real(self, asks, sampler)
ngram.NgramSimple.propose = propose
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
