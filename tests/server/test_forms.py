"""Every API's form of a chat: its stream follows the API's published grammar, and all forms give the same answer to the same chat."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mlxspec.engine.stats import RequestStats
from mlxspec.parsers.formats import THINK, ChatFormat
from mlxspec.server.answer_format import held_schema
from mlxspec.server.chat_api import ChatCompletionRequest, ChatWriter
from mlxspec.server.errors import BadField
from mlxspec.server.forms.base import review
from mlxspec.server.job_run import Delta, End, Progress, Update
from mlxspec.server.messages_api import MessagesRequest, MessagesWriter
from mlxspec.server.ollama_api import OllamaChatRequest, OllamaChatWriter, OllamaOptions
from mlxspec.server.responses_api import ResponsesRequest, writer
from tests.server import readers
from tests.server.api_forms import (
    FORMS,
    QUESTIONS,
    TOOL_NAMES,
    Scenario,
    ask,
    ask_streamed,
    expire,
    forms_of,
    leave,
    scenario,
    streamed,
)
from tests.server.jobs import one_answer
from tests.server.published_fields import honoured
from tests.server.serving import Served

_TOOLS = [{"type": "function", "function": {"name": name}} for name in TOOL_NAMES]


def written(rng: random.Random) -> str:
    """A text that a model may write: thinking, words and calls, some of them broken."""
    out = ""
    if rng.random() < 0.5:
        thought = rng.choice(["", "because", "a < b", "so\n\n"])
        out += f"<think>\n{thought}\n</think>\n\n"
    for _ in range(rng.randrange(4)):
        arguments = json.dumps({"name": rng.choice(["x", 'a "b"', "é\n"]), "full": True})
        out += rng.choice(
            [
                "Some words. ",
                " \n",
                f'\n<tool_call>\n{{"name": "{rng.choice(TOOL_NAMES)}", "arguments": {arguments}}}\n</tool_call>',
                f'<tool_call>{{"arguments": {arguments}, "name": "look_up"}}</tool_call>',
                "<tool_call>nothing</tool_call>",
                "<tool_",
            ]
        )
    return out


def updates(rng: random.Random) -> tuple[list[Update], str]:
    """What a job may tell of an answer, and the text it is made of."""
    text = written(rng)
    is_cut = rng.random() < 0.3
    if is_cut:
        text = text[: rng.randrange(len(text) + 1)]
    parser = ChatFormat(thinking=THINK, tools="json").parser("", _TOOLS)
    stats = RequestStats(num_prompt=7, num_cached=3, num_generated=len(text))
    out: list[Update] = [Progress(choice=0, num_done=7, num_total=7, num_cached=3, seconds=0.1)]
    while text:
        length = rng.randrange(1, 9)
        out.append(Delta(choice=0, pieces=parser.push(text[:length]), stats=stats, tokens=(1,)))
        text = text[length:]
    rest = parser.finish(cut=is_cut)
    out.append(Delta(choice=0, pieces=rest, stats=stats))
    has_calls = any("CallStart" in type(p).__name__ for u in out if isinstance(u, Delta) for p in u.pieces)
    stopped = not is_cut and not has_calls and rng.random() < 0.3
    reason: Any = "length" if is_cut else "tool_calls" if has_calls else "stop"
    cause: Any = rng.choice(["limit", "context"]) if is_cut else "stop_string" if stopped else "end"
    said = "zzz" if stopped else None
    out.append(End(choice=0, reason=reason, cause=cause, stats=stats, stop_string=said))
    return out, reason


def protocols() -> dict[str, Any]:
    return {
        "chat": lambda: ChatWriter("m", one_answer(usage=True)),
        "messages": lambda: MessagesWriter("m", one_answer()),
        "ollama": lambda: OllamaChatWriter("m", one_answer()),
        "responses": lambda: writer(review(ResponsesRequest, {"input": "x"})[0])("m", one_answer()),
    }


@pytest.mark.parametrize("name", protocols())
def test_streams_of_500_random_answers_follow_the_grammar(name: str) -> None:
    """Without a model: every order of thinking, text, whole and broken calls, in pieces of every length."""
    form = next(f for f in FORMS if f.name == name)
    for seed in range(500):
        rng = random.Random(seed)
        told, reason = updates(rng)
        writer, whole = protocols()[name](), protocols()[name]()
        data = b"".join(map(writer.wire.frame, writer.begin()))
        for update in told:
            pause = writer.pause() if rng.random() < 0.1 else None
            data += b"" if pause is None else writer.wire.frame(pause)
            data += b"".join(map(writer.wire.frame, writer.chunks(update)))
            whole.take(update)
        data += b"".join(map(writer.wire.frame, writer.end())) + writer.wire.last
        found = streamed(form, data)
        assert found == form.whole(json.loads(json.dumps(whole.whole()))), seed
        assert found.reason == reason, seed


def check(served: Served, s: Scenario, rng: random.Random) -> None:
    """All forms, streamed and whole, say the same; streams that the client leaves, or whose time is over, follow the grammar too."""
    wanted = ask(served, FORMS[0], s)
    for form in forms_of(s):
        assert ask(served, form, s) == wanted, (form.name, s)
        assert ask_streamed(served, form, s) == wanted, (form.name, s)
        if rng.random() < 0.2:
            leave(served, form, s, rng.randrange(3000))
        if rng.random() < 0.1:
            expire(served, form, s, rng.choice([0.001, 0.02, 0.1]))
    if s.tool not in (None, "auto") and wanted.reason != "length" and not s.stop:
        assert wanted.reason == "tool_calls"


FIXED = (
    Scenario(question=QUESTIONS[0]),
    Scenario(question=QUESTIONS[0], stop=("path", "zzz"), thinks=False),
    Scenario(question=QUESTIONS[1], tool="required", thinks=False, max_tokens=80),
    Scenario(question=QUESTIONS[1], tool=TOOL_NAMES[0], thinks=True, budget=4, max_tokens=80),
    Scenario(question=QUESTIONS[2], tool="auto", called=True, thinks=False, system="Answer shortly."),
)


def test_all_forms_give_the_same_answer(thinker: Served) -> None:
    for s in FIXED:
        check(thinker, s, random.Random(0))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_all_forms_give_the_same_answer_to_100_random_chats(thinker: Served, part: int) -> None:
    with clean(thinker):
        for seed in range(50 * part, 50 * part + 50):
            rng = random.Random(seed)
            check(thinker, scenario(rng), rng)


@contextmanager
def clean(served: Served) -> Iterator[None]:
    """What is asked inside leaves nothing behind, and no answer is an error of the server's."""

    def errors(found: dict[str, float]) -> float:
        return sum(v for name, v in found.items() if "requests_total" in name and 'status="5' in name)

    before = errors(served.metrics())
    yield
    left = served.settle()
    for gauge in ("rows_running", "rows_waiting", "open_requests", "state_bytes"):
        assert left[f"mlxspec_{gauge}"] == 0, gauge
    assert errors(left) == before


def mixed(served: Served, num_clients: int, num_requests: int) -> None:
    """Clients of all forms side by side, some of whom leave: the others' answers are those of single requests, and no row stays."""
    scenarios = [scenario(random.Random(seed)) for seed in range(12)]
    wanted = {s: ask(served, FORMS[0], s) for s in scenarios}
    wrong: list[Any] = []

    def client(number: int) -> None:
        rng = random.Random(number)
        form = FORMS[number % len(FORMS)]
        own = [s for s in scenarios if form in forms_of(s)]
        try:
            for _ in range(num_requests):
                s = rng.choice(own)
                manner = rng.random()
                if manner < 0.2:
                    leave(served, form, s, rng.choice([0, 1, 300, 900, 2000]))
                    continue
                if manner < 0.3:
                    expire(served, form, s, rng.choice([0.001, 0.02, 0.1]))
                    continue
                found = (ask if manner < 0.6 else ask_streamed)(served, form, s)
                if found != wanted[s]:
                    wrong.append((form.name, s, found, wanted[s]))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(num_clients)]
    with clean(served):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[:2]


def test_clients_of_all_forms_side_by_side(thinker: Served) -> None:
    mixed(thinker, 4, 3)


@pytest.mark.slow
def test_eight_clients_of_all_forms_with_25_requests_each(thinker: Served) -> None:
    mixed(thinker, 8, 25)


def test_every_option_of_a_chat_is_honoured_or_refused_by_name_in_every_form() -> None:
    """Fields of OpenAI's chat that are honoured there: in each other form they are fields too, or in its table of refusals."""
    own = {"messages", "model"}
    for forms in (
        [MessagesRequest],
        [ResponsesRequest],
        [OllamaChatRequest],
        [OllamaOptions, OllamaChatRequest],
    ):
        found = {name for form in forms for name in honoured(form)}
        refused = {name for form in forms for name in form.refused}
        missing = set(honoured(ChatCompletionRequest)) - own - found - refused
        assert not missing, (forms[0], missing)


def test_a_strict_schema_that_cannot_be_held_is_refused_and_another_told() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for is_strict in (False, True):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": is_strict}}
        wanted = readers.wanted(response_format=form)
        assert wanted is not None
        if is_strict:
            with pytest.raises(BadField, match="uniqueItems"):
                held_schema(wanted)
        else:
            assert any("uniqueItems" in notice for notice in held_schema(wanted)[1])
