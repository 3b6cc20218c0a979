"""Another server measured next to ours: what is measured, when a ratio is named, and one sentence for each rival that misbehaves."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planting import catches

from mlxspec.bench.rival import Rival, TimedAnswer, TimedPiece
from mlxspec.bench.versus import BothAnswers, Contest, contest
from mlxspec.errors import ConfigError, RivalError
from mlxspec.platform import processes
from tests.bench import rivals
from tests.bench.rivals import Answer, Handler, rival, saying

MESSAGES = [{"role": "user", "content": "hello"}]


def words(text: str) -> int:
    return len(text.split())


def answer(text: str, first: float = 0.1, each: float = 0.1, num_said: int | None = None) -> TimedAnswer:
    """Return an answer whose words come at a steady pace."""
    pieces = [TimedPiece(first + i * each, f"{word} ") for i, word in enumerate(text.split())]
    return TimedAnswer(pieces=tuple(pieces), num_said=num_said)


def held(*turns: tuple[TimedAnswer, TimedAnswer]) -> Contest:
    made = Contest(name="any", count=words)
    for one, other in turns:
        made.add(BothAnswers(one, other), is_measured=True)
    return made


# ---- what is asked and measured


def test_a_stream_is_read_with_its_times_and_its_usage() -> None:
    with rival(saying("a ", "b ", "c", tokens=7, seconds=0.02)) as (url, asked):
        found = Rival(url=url, model="other", key="secret").answer(MESSAGES, 5)
    assert [piece.text for piece in found.pieces] == ["a ", "b ", "c"]
    assert found.num_said == 7
    assert 0.02 <= found.first_seconds <= found.pieces[1].seconds <= found.pieces[2].seconds
    body = asked[0]
    assert (body["model"], body["max_tokens"], body["temperature"], body["stream"]) == ("other", 5, 0, True)
    assert body["key"] == "Bearer secret"


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/v1/chat/completions"])
def test_an_address_may_have_its_path(path: str) -> None:
    with rival(saying("a")) as (url, asked):
        assert Rival(url=url + path).models() == ["other"]
        Rival(url=url + path).answer(MESSAGES, 5)
    assert asked[0]["path"] == "/v1/chat/completions"


def test_thinking_is_a_part_of_the_text() -> None:
    def thinks(body: dict[str, Any], reply: Handler) -> None:
        reply.begin(200, rivals.STREAM)
        reply.event({"choices": [{"delta": {"reasoning_content": "hm "}}]})
        reply.piece("yes", finish_reason="stop")

    with rival(thinks) as (url, _):
        assert Rival(url=url).answer(MESSAGES, 5).text == "hm yes"


def test_sides_take_turns_and_the_first_turn_is_not_measured() -> None:
    order: list[str] = []

    def noting(side: str) -> Answer:
        right = saying("a ", "b ", "c")

        def noted(body: dict[str, Any], reply: Handler) -> None:
            order.append(f"{side} {body['messages'][0]['content']}")
            right(body, reply)

        return noted

    with rival(noting("rival")) as (one, _), rival(noting("own")) as (other, _):
        found = contest(Rival(url=one), Rival(url=other), [("any", "why?")], words, max_tokens=9, repeat=2)
    assert order == [
        "own Question 1. why?",
        "rival Question 1. why?",
        "rival Question 2. why?",
        "own Question 2. why?",
        "own Question 3. why?",
        "rival Question 3. why?",
    ]
    assert len(found[0].turns) == 2


# ---- what is said of it


def test_the_first_piece_is_no_part_of_the_speed() -> None:
    assert held().speed(answer("a b c d e", first=9.0, each=0.5)) == pytest.approx(2.0)
    assert held().speed(answer("a")) == 0.0


@catches(
    "a ratio is named of different texts",
    "mlxspec.bench.versus:BothAnswers.is_same",
    lambda right: property(lambda self: True),
)
def test_no_ratio_is_named_of_texts_that_differ() -> None:
    same = held(*[(answer("a b c", each=0.2), answer("a b c", each=0.1))] * 3)
    assert same.ratio.median == pytest.approx(2.0)
    other = held(*[(answer("a b c"), answer("a b d"))] * 3)
    assert other.ratio.refusal == "the texts differ"
    assert other.common == len("a b ")
    assert other.data()["same_text"] is False


def test_a_first_turn_that_differs_counts() -> None:
    made = Contest(name="any", count=words)
    made.add(BothAnswers(answer("a b"), answer("a c")), is_measured=False)
    made.add(BothAnswers(answer("a b"), answer("a b")), is_measured=True)
    assert made.ratio.refusal


@given(st.lists(st.tuples(st.floats(0.01, 9), st.floats(0.01, 9)), min_size=1, max_size=9))
def test_a_settled_ratio_lies_within_its_range(each: list[tuple[float, float]]) -> None:
    found = held(*[(answer("a b c", each=a), answer("a b c", each=b)) for a, b in each]).ratio
    assert found.least <= found.median <= found.most
    assert found.is_settled == (len(each) >= 3 and found.most <= 1.3 * found.least)


@pytest.mark.parametrize(
    ("said", "is_told"), [(None, False), (20, False), (27, False), (60, True), (3, True)]
)
def test_a_rival_that_counts_wrongly_is_told(said: int | None, is_told: bool) -> None:
    text = "word " * 20
    found = held((answer(text, num_said=said), answer(text))).miscounted
    assert found == ((said, 20) if is_told else None)


def test_what_is_given_away_holds_no_text() -> None:
    data = str(held((answer("secret words"), answer("secret words"))).data())
    assert "secret" not in data


# ---- rivals that misbehave


def hanging(body: dict[str, Any], reply: Handler) -> None:
    reply.begin(200, rivals.STREAM)
    reply.piece("a")
    threading.Event().wait(3)


def html(body: dict[str, Any], reply: Handler) -> None:
    reply.begin(200, {"Content-Type": "text/html"})
    reply.wfile.write(b"<html>hello</html>")


def closing(body: dict[str, Any], reply: Handler) -> None:
    reply.begin(200, rivals.STREAM)
    reply.piece("a")


def refusing(body: dict[str, Any], reply: Handler) -> None:
    reply.begin(400, {"Content-Type": "application/json"})
    reply.wfile.write(b'{"error": {"message": "no such\\nmodel."}}')


def a_page_of_errors(body: dict[str, Any], reply: Handler) -> None:
    reply.begin(502, {"Content-Type": "text/html"})
    reply.wfile.write(b"<html>bad gateway</html>")


def breaking(body: dict[str, Any], reply: Handler) -> None:
    reply.begin(200, rivals.STREAM)
    reply.event("{no json")


def listing(body: dict[str, Any], reply: Handler) -> None:
    reply.begin(200, rivals.STREAM)
    reply.event("[1, 2]")


def failing(body: dict[str, Any], reply: Handler) -> None:
    reply.begin(200, rivals.STREAM)
    reply.piece("a")
    reply.event({"error": {"message": "out of memory"}})


def endless(body: dict[str, Any], reply: Handler) -> None:
    reply.begin(200, rivals.STREAM)
    for _ in range(20):
        reply.wfile.write(b"x" * (1 << 20))


MISBEHAVING: list[tuple[Answer, str]] = [
    (hanging, "said nothing for 0.2 seconds"),
    (html, "answers with text/html where a stream was requested"),
    (closing, "ended its answer in the middle, without a finish_reason"),
    (refusing, "answers /chat/completions with status 400: no such model"),
    (a_page_of_errors, "answers /chat/completions with status 502: a page of HTML"),
    (breaking, "sends a stream whose events are not JSON"),
    (listing, "sends a stream whose events are not objects"),
    (failing, "ends its answer with an error: out of memory"),
    (saying(), "gave an answer without a text"),
    (endless, "sends an answer without an end"),
]


@pytest.mark.parametrize(
    ("faulty", "sentence"),
    MISBEHAVING,
    ids=lambda given: given.replace(" ", "-")[:24] if isinstance(given, str) else given.__name__,
)
def test_each_fault_of_a_rival_is_one_sentence(faulty: Answer, sentence: str) -> None:
    with rival(faulty) as (url, _), pytest.raises(RivalError) as raised:
        Rival(url=url, silence=0.2).answer(MESSAGES, 5)
    assert str(raised.value) == f"The server at {url} {sentence}."


def test_a_server_that_does_not_run_is_said() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(RivalError, match="does not run: the connection is refused"):
        Rival(url=url).models()


@pytest.mark.parametrize("listed", [b"<html>", b"[]", b'{"data": 3}', b'{"data": [{"name": "x"}]}'])
def test_a_list_of_models_that_is_none_is_said(listed: bytes) -> None:
    with rival(saying("a"), listed) as (url, _), pytest.raises(RivalError, match="does not list its models"):
        Rival(url=url).models()


@pytest.mark.parametrize(
    "url", ["", "localhost:8080", "ftp://127.0.0.1", "http://", "http://[::1", "http://127.0.0.1:99999"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a server"):
        Rival(url=url)


@pytest.mark.parametrize("host", ["192.168.1.7", "example.org", "127.0.0.1.example.org", "0.0.0.0"])
def test_another_machine_needs_a_flag(host: str) -> None:
    with pytest.raises(ConfigError, match="is another machine, which would see the prompts; --any-host"):
        Rival(url=f"http://{host}:8080")
    assert not Rival(url=f"http://{host}:8080", any_host=True).is_here


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.8.9.10"])
def test_this_machine_needs_none(host: str) -> None:
    assert Rival(url=f"http://{host}:8080").is_here


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(Rival(url="http://127.0.0.1:1", key="secret"))


# ---- memory of processes


def test_the_process_behind_a_port_is_found() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert processes.listening(port) == os.getpid()
    assert processes.listening(port) is None
    size = processes.resident_bytes(os.getpid())
    assert size is not None
    assert size > 10 << 20
    assert processes.resident_bytes(1 << 30) is None


def test_without_proc_lsof_and_ps_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, str] = {"lsof": "4711\n", "ps": " 2048\n"}
    run: Callable[..., str] = lambda *command: said[command[0]]  # noqa: E731
    monkeypatch.setattr(processes.sys, "platform", "darwin")
    monkeypatch.setattr(processes, "_said", run)
    assert processes.listening(8080) == 4711
    assert processes.resident_bytes(4711) == 2048 << 10
    said.update(lsof="", ps="")
    assert processes.listening(8080) is None
    assert processes.resident_bytes(4711) is None
