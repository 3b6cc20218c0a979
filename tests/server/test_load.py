"""Many clients at once, drafting on, some of whom go away: completed texts are those of single runs, and no row stays behind."""

from __future__ import annotations

import json
import random
import socket
import threading
from typing import Any

import pytest

from tests.server.serving import LONG, Served, content, events

QUESTIONS = [
    "what does os.path.join do?",
    "what does sorted do?",
    "what does json.dumps do?",
    "what does shutil.copy do?",
]


def body(question: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "max_tokens": 20, "stream": True, **more}


def send(served: Served, asked: dict[str, Any]) -> socket.socket:
    data = json.dumps(asked).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=LONG)
    connection.sendall(head.encode() + data)
    return connection


def leave(served: Served, asked: dict[str, Any], num_bytes: int) -> None:
    """Job, read so many bytes, and go away without a word."""
    with send(served, asked) as connection:
        while num_bytes > 0 and (piece := connection.recv(min(num_bytes, 512))):
            num_bytes -= len(piece)


def client(served: Served, seed: int, num: int, wanted: dict[tuple[str, str], str], wrong: list[Any]) -> None:
    rng = random.Random(seed)
    try:
        for _ in range(num):
            question, draft = rng.choice(QUESTIONS), rng.choice(["auto", "mtp", "ngram-simple", "off"])
            if rng.random() < 0.4:
                leave(served, body(question, draft=draft, max_tokens=200), rng.choice([0, 1, 300, 900, 2000]))
                continue
            objects, _, done = served.stream("/v1/chat/completions", body(question, draft=draft))
            if content(objects) != wanted[question] or not done:
                wrong.append((question, draft, content(objects)))
    except Exception as error:
        wrong.append(error)


def run(served: Served, num_clients: int, num_requests: int) -> None:
    wanted: Any = {q: served.chat(q, max_tokens=20)["choices"][0]["message"]["content"] for q in QUESTIONS}
    wrong: list[Any] = []
    threads = [
        threading.Thread(target=client, args=(served, seed, num_requests, wanted, wrong))
        for seed in range(num_clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    left = served.settle()
    for gauge in ("rows_running", "rows_waiting", "open_requests"):
        assert left[f"mlxspec_{gauge}"] == 0, gauge


def test_clients_that_come_and_go(demo: Served) -> None:
    run(demo, 4, 3)


def test_aborts_leave_nothing(demo: Served) -> None:
    aborts(demo, 12)


def aborts(served: Served, num: int) -> None:
    before = served.settle()["mlxspec_cancelled_total"]
    rng = random.Random(1)
    for i in range(num):
        asked = body(
            rng.choice(QUESTIONS) + " word" * rng.choice([0, 300]), max_tokens=1000, stream=bool(i % 4)
        )
        leave(served, asked, rng.choice([0, 0, 200, 800]) if asked["stream"] else 0)
    left = served.settle()
    assert left["mlxspec_rows_running"] == left["mlxspec_open_requests"] == 0
    assert left["mlxspec_cancelled_total"] > before


def test_an_answer_that_got_too_little_time_is_the_clients_fault(demo: Served) -> None:
    status, said = demo.post("/v1/completions", {"prompt": "def main():", "max_tokens": 8, "timeout": 1e-9})
    assert (status, said["error"]["code"]) == (408, "timeout")
    assert demo.post("/v1/completions", {"prompt": "def main():", "max_tokens": 8, "timeout": 1e5})[0] == 200


def test_a_stop_sequence_of_events(demo: Served) -> None:
    """What comes over the wire, byte for byte: events, comments while the prompt is read, the end."""
    with send(demo, body(QUESTIONS[0] + " word" * 300, max_tokens=3)) as connection:
        data = b""
        while piece := connection.recv(1 << 16):
            data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    assert b"text/event-stream" in head
    plain = b"".join(rest.split(b"\r\n")[1::2])
    objects, comments, done = events(plain)
    assert done
    assert any(c.startswith("prompt ") for c in comments)
    assert objects[-1]["choices"][0]["finish_reason"] == "length"


MORE = [
    {},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.05, "n": 2},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logprobs": True, "top_logprobs": 2},
    {"response_format": {"type": "json_object"}},
    {"draft": "off", "stop": ["."]},
]


def mixed(served: Served, seed: int, num: int, wrong: list[Any]) -> None:
    """Requests of all lengths and manners, a third of which are left."""
    rng = random.Random(seed)
    try:
        for _ in range(num):
            question = "word " * rng.choice([0, 0, 30, 200, 500]) + rng.choice(QUESTIONS)
            asked = body(question, **rng.choice(MORE), max_tokens=rng.choice([1, 8, 40, 120]))
            if rng.random() < 0.35:
                leave(served, asked, rng.choice([0, 1, 300, 900, 2000]))
                continue
            objects, _, done = served.stream("/v1/chat/completions", asked)
            if not done or any("error" in o for o in objects):
                wrong.append((asked, objects[-1:]))
    except Exception as error:
        wrong.append(error)


def memory_comes_back(served: Served, num_clients: int, num_requests: int) -> None:
    served.chat()
    before, wrong = served.settle(), list[Any]()
    threads = [
        threading.Thread(target=mixed, args=(served, seed, num_requests, wrong))
        for seed in range(num_clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    left = served.settle()
    assert left["mlxspec_state_bytes"] == left["mlxspec_rows_running"] == left["mlxspec_open_requests"] == 0
    assert left["mlxspec_prefix_bytes"] <= BUDGET
    own, still = (m["mlxspec_memory_bytes"] - m["mlxspec_prefix_bytes"] for m in (before, left))
    assert still <= 1.05 * own


BUDGET = 4 << 20  # bytes of the prefix cache, of which 200 requests fill many times as much


@pytest.mark.slow
def test_memory_comes_back_after_200_mixed_requests() -> None:
    with Served("--prefix-budget", str(BUDGET)) as served:
        memory_comes_back(served, 5, 40)
        assert served.settle()["mlxspec_prefix_bytes"] > BUDGET / 4


@pytest.mark.slow
def test_memory_comes_back_where_nothing_is_kept() -> None:
    with Served("--prefix-budget", "0") as served:
        memory_comes_back(served, 4, 10)
        assert served.settle()["mlxspec_prefix_bytes"] == 0


@pytest.mark.slow
def test_eight_clients_with_25_requests_each() -> None:
    with Served("--max-rows", "8") as served:
        served.chat()
        run(served, 8, 25)


@pytest.mark.slow
def test_two_hundred_aborts() -> None:
    with Served("--max-rows", "8", "--prefill-chunk", "64") as served:
        served.chat()
        aborts(served, 200)
