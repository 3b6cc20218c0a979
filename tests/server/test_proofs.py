"""`prove: true`: the server decodes an answer again without drafts and says whether the text is the same."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mlxspec
from mlxspec.config import SamplingParams
from mlxspec.engine.engine import Engine
from mlxspec.engine.record import Record
from mlxspec.engine.request import Request
from mlxspec.engine.worker import Worker
from mlxspec.errors import ConfigError
from mlxspec.server import answers_file
from mlxspec.server.answers_file import AnswersFile
from tests.server.serving import QUESTION, Served

_CHAT = {"messages": [{"role": "user", "content": QUESTION}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**_CHAT, "max_tokens": 24},
    "/v1/completions": {"prompt": "def main():", "max_tokens": 24},
    "/v1/completion": {"prompt": "def main():", "max_tokens": 24},
    "/v1/messages": {**_CHAT, "max_tokens": 24},
    "/v1/responses": {"input": QUESTION, "max_output_tokens": 24},
    "/api/chat": {**_CHAT, "stream": False},
}
DRAFTED = {"policy": "fixed", "draft": "mtp", "n_max": 3, "temperature": 0.8, "seed": 7}


def _receipts(said: dict[str, Any]) -> list[dict[str, Any]]:
    receipts: list[dict[str, Any]] = said["mlxspec"]["receipts"]
    return receipts


@pytest.mark.parametrize("route", ROUTES)
def test_every_api_proves_an_answer(demo: Served, route: str) -> None:
    proved: dict[str, Any] = {**DRAFTED, "prove": True}
    asked: dict[str, Any] = dict(DRAFTED)
    if route == "/api/chat":  # Ollama's options have a place of their own
        proved, asked = {"options": {**proved, "num_predict": 24}}, {"options": {**asked, "num_predict": 24}}
    status, said = demo.post(route, {**ROUTES[route], **proved})
    assert status == 200, said
    (receipt,) = _receipts(said)
    assert receipt["equal"]
    assert receipt["difference"] is None
    assert receipt["num_tokens"] == 24
    assert receipt["num_accepted"] > 0
    status, said = demo.post(route, {**ROUTES[route], **asked})
    assert status == 200
    assert "receipts" not in said["mlxspec"]


def test_a_stream_ends_with_the_receipts_of_all_its_answers(demo: Served) -> None:
    body = {**ROUTES["/v1/chat/completions"], **DRAFTED, "n": 2, "prove": True}
    chunks, _, _ = demo.stream("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    said = [c for c in chunks if "receipts" in c.get("mlxspec", {})][-1]
    assert [r["equal"] for r in _receipts(said)] == [True, True]
    text, _, _ = demo.stream("/v1/chat/completions", {**body, "prove": False})
    assert len([c for c in text if c["choices"]]) > 2


PLANT = """
import mlxspec.engine.round as rounds
right = rounds.match
rounds.match = lambda drafted, sampled: min(len(drafted), right(drafted, sampled) + 1)
"""


def test_one_draft_accepted_too_many_is_found() -> None:
    body = {**ROUTES["/v1/completions"], **DRAFTED, "max_tokens": 60, "seed": 3, "prove": True}
    with Served(plant=PLANT) as served:
        status, said = served.post("/v1/completions", body)
    assert status == 200
    (receipt,) = _receipts(said)
    found = receipt["difference"]
    assert not receipt["equal"]
    assert found["answer"] != found["plain"]
    assert found["plain_logprob"] is not None
    assert 0 <= found["place"] < receipt["num_tokens"]


def test_a_call_and_an_object_are_proved_too(demo: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    status, said = demo.post(
        "/v1/chat/completions",
        {**ROUTES["/v1/chat/completions"], **DRAFTED, "json_schema": schema, "prove": True},
    )
    assert status == 200
    assert [r["equal"] for r in _receipts(said)] == [True]


@pytest.mark.parametrize("plant", ["", PLANT], ids=["right", "one too many"])
def test_recorded_answers_are_proved_by_the_command(tmp_path: Path, plant: str) -> None:
    """Of streams, of several answers to one request and of every API; a later server goes on in the same file."""
    path = tmp_path / "answers.jsonl"
    for seed in (3, 4):
        body = {**DRAFTED, "max_tokens": 60, "seed": seed}
        with Served("--record", str(path), plant=plant) as served:
            served.stream("/v1/chat/completions", {**ROUTES["/v1/chat/completions"], **body, "n": 2})
            served.post("/v1/completions", {**ROUTES["/v1/completions"], **body})
            assert served.post("/v1/messages", {**ROUTES["/v1/messages"], "temperature": "hot"})[0] == 400
    assert path.stat().st_mode & 0o077 == 0
    ran = subprocess.run(
        [sys.executable, "-m", "mlxspec", "prove", str(path), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    equal = [json.loads(line)["equal"] for line in ran.stdout.splitlines()]
    assert len(equal) == 6, ran.stderr
    assert (all(equal), ran.returncode) == (not plant, int(bool(plant)))


def test_a_record_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    with Served("--record", str(tmp_path / "none" / "file"), wait=False) as served:
        served.wait_for("Answers cannot be recorded in .*: No such file or directory")
        assert served.process.wait(30) == 2


class _Disk:
    """`os.write` of a disk that takes so many bytes of each call, and after `full` of them nothing."""

    def __init__(self, each: int, full: int) -> None:
        self.each, self.left, self._write = each, full, os.write

    def __call__(self, number: int, data: bytes) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = self._write(number, data[: min(self.each, self.left)])
        self.left -= done
        return done


@pytest.fixture(scope="module")
def answer() -> Iterator[tuple[Engine, Worker, Request]]:
    """One that has ended, with its engine and the engine's worker."""
    with Worker(lambda: mlxspec.load("demo")) as worker:
        stream = worker.submit("def main():", SamplingParams(max_tokens=4))
        assert [*stream]
        assert stream.request is not None
        yield worker.wait_ready(), worker, stream.request


def test_each_record_has_a_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: tuple[Engine, Worker, Request]
) -> None:
    """Behind a line that a killed writer left, on a disk that takes parts, and behind a record that the disk cut."""
    path = tmp_path / "answers.jsonl"
    path.write_text('{"model": "de')
    file = AnswersFile(str(path))
    monkeypatch.setattr(os, "write", _Disk(each=100, full=10**6))
    file.append(*answer)
    monkeypatch.setattr(os, "write", _Disk(each=100, full=150))
    file.append(*answer)
    monkeypatch.undo()
    file.append(*answer)
    left, first, cut, last, end = path.read_text().split("\n")
    assert (left, len(cut), end) == ('{"model": "de', 150, "")
    assert Record.read(first) == Record.read(last)


def test_an_answer_without_a_record_is_logged_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: tuple[Engine, Worker, Request]
) -> None:
    def fails(*_: object) -> None:
        raise ConfigError("no record is like this.")

    path = tmp_path / "answers.jsonl"
    file = AnswersFile(str(path))
    lines: list[str] = []
    monkeypatch.setattr(answers_file, "record", fails)
    monkeypatch.setattr(answers_file.log, "line", lines.append)
    file.append(*answer)
    assert lines == ["An answer was not recorded: no record is like this."]
    monkeypatch.undo()
    file.append(*answer)
    assert len(path.read_text().splitlines()) == 1


def test_an_empty_file_and_one_of_whole_lines_get_no_empty_line(
    tmp_path: Path, answer: tuple[Engine, Worker, Request]
) -> None:
    path = tmp_path / "answers.jsonl"
    for num in (1, 2):
        AnswersFile(str(path)).append(*answer)
        assert len(path.read_text().splitlines()) == num


@pytest.mark.parametrize("wrong", ["yes", 1, {}])
def test_prove_is_a_flag(demo: Served, wrong: Any) -> None:
    status, said = demo.post("/v1/chat/completions", {**ROUTES["/v1/chat/completions"], "prove": wrong})
    assert status == 400
    assert "prove" in said["error"]["message"]
