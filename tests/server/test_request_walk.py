"""How far a field of a request goes before the engine has it: the files of the package whose functions are given it, in all threads.

A file that is left and entered again is a return. The profile is set before the server makes its threads: what is prepared off the event
loop would not be seen otherwise.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import httpx
import pytest
from planting import catches

import mlxspec
from mlxspec.server import chat_api
from mlxspec.server.app import Server
from mlxspec.server.http.fairness import Lanes
from mlxspec.server.library import Library
from mlxspec.server.models import Models
from mlxspec.server.settings import ServerConfig

ROOT = f"{Path(mlxspec.__file__).parent}/"
VALUE = 0.7654321  # the temperature that is looked for
DEPTH = 3  # of objects within objects
LAST = "engine/worker"
MOST_FILES, MOST_RETURNS = 12, 5

TEXT = [{"role": "user", "content": "what is a list?"}]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
FUNCTION = {"name": "read", "description": "Reads a file.", "parameters": SCHEMA}
TOOL = {"tools": [{"type": "function", "function": FUNCTION}]}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": TEXT, "max_tokens": 4}),
    "messages": ("/v1/messages", {"messages": TEXT, "max_tokens": 4, "model": "demo"}),
    "responses": ("/v1/responses", {"input": "what is a list?", "max_output_tokens": 4}),
    "ollama": ("/api/chat", {"messages": TEXT, "stream": False, "options": {"num_predict": 4}}),
    "completions": ("/v1/completions", {"prompt": "a list", "max_tokens": 4}),
}
TOOLS: dict[str, dict[str, Any]] = {
    "chat": TOOL,
    "messages": {"tools": [{"name": "read", "description": "Reads a file.", "input_schema": SCHEMA}]},
    "responses": {"tools": [{"type": "function", **FUNCTION}]},
    "ollama": TOOL,
}
CASES = [*BODIES, *(f"{name} with a tool" for name in TOOLS)]


class Call(NamedTuple):
    """A call of a function of the package that was given the value."""

    file: str
    function: str
    is_in_loop: bool


class Walk(NamedTuple):
    """The calls of one request, up to the engine's thread. stays: the files in which they are, one behind another."""

    calls: list[Call]

    @property
    def stays(self) -> list[str]:
        files = [call.file for call in self.calls]
        return [file for i, file in enumerate(files) if not i or files[i - 1] != file]

    @property
    def num_files(self) -> int:
        return len({*self.stays})

    @property
    def num_returns(self) -> int:
        return len(self.stays) - self.num_files


def holds(value: Any, depth: int = DEPTH) -> bool:
    """Whether the value that is looked for is within another one."""
    if isinstance(value, float):
        return value == VALUE
    if isinstance(value, bytes):
        return str(VALUE).encode() in value
    if depth <= 0:
        return False
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.values() if len(value) < 120 else ()
    elif isinstance(value, list | tuple):
        inner = value if len(value) < 20 else ()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, f.name, None) for f in dataclasses.fields(value)]
    elif hasattr(value, "model_fields_set"):
        return holds(value.__dict__, depth)
    return any(holds(each, depth - 1) for each in inner)


class Watch:
    """What `threading.setprofile` takes: it notes the calls in all threads that are started from then on."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._loop, self._lock = threading.get_ident(), threading.Lock()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOT) or code.co_name.startswith("<"):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = [frame.f_locals[name] for name in names if name in frame.f_locals]
        if any(map(holds, given)):
            file = code.co_filename.removeprefix(ROOT).removesuffix(".py")
            with self._lock:
                self.calls.append(Call(file, code.co_name, threading.get_ident() == self._loop))


async def walk_of(case: str, make: Callable[[], Any]) -> Walk:
    """make: the engine."""
    name, _, tool = case.partition(" with ")
    path, body = BODIES[name]
    body = {**body, **(TOOLS[name] if tool else {})}
    if name == "ollama":
        body["options"] = {**body["options"], "temperature": VALUE}
    else:
        body["temperature"] = VALUE
    watch = Watch()
    threading.setprofile(watch)
    try:
        models = Models({"demo": make})
        server = Server(models, ServerConfig(), Library({"demo": "demo"}, lambda _: make))
        transport = httpx.ASGITransport(app=server.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:8080", timeout=300
        ) as client:
            sys.setprofile(watch)
            answer = await client.post(path, json=body)
            sys.setprofile(None)
        await models.stop()
        server.close()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    files = [call.file for call in watch.calls]
    assert LAST in files, files
    return Walk(watch.calls[: files.index(LAST) + 1])


@pytest.fixture
def engine() -> mlxspec.Engine:
    """One of its own for each server: a thread of the one before may still have the last."""
    return mlxspec.load("demo", draft="off")


def read_twice(right: Any) -> Any:
    """What makes a job, behind another reading of the form."""
    return lambda form, *rest: (right(form, *rest), chat_api.conversation(form), right(form, *rest))[-1]


@catches(
    "an API reads its form again behind what all APIs share",
    "mlxspec.server.chat_api:chat_job",
    read_twice,
    case="chat",
)
@pytest.mark.parametrize("case", CASES)
def test_a_field_passes_few_files(engine: mlxspec.Engine, case: str) -> None:
    walk = asyncio.run(walk_of(case, lambda: engine))
    told = f"{walk.num_files} files, {walk.num_returns} returns: {' > '.join(walk.stays)}"
    print(told)
    assert walk.num_files <= MOST_FILES, told
    assert walk.num_returns <= MOST_RETURNS, told


async def in_the_loop(lanes: Lanes, client: str, work: Callable[[], Any], *, is_large: bool) -> Any:
    """In the place of `Lanes.run`."""
    return work()


@catches(
    "what is prepared in other threads is not seen",
    "mlxspec.server.http.fairness:Lanes.run",
    lambda right: in_the_loop,
)
@pytest.mark.parametrize("case", CASES)
def test_all_threads_are_seen(engine: mlxspec.Engine, case: str) -> None:
    """Requests are read off the event loop, so a walk without that part would say too little."""
    walk = asyncio.run(walk_of(case, lambda: engine))
    assert {call.is_in_loop for call in walk.calls} == {True, False}
    assert any("_api" in call.file for call in walk.calls if not call.is_in_loop)
