"""What an endpoint keeps of a request that has failed."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
from planting import catches
from starlette.requests import Request

from mlxspec.server.errors import ApiError
from mlxspec.server.http.body import parse, read
from mlxspec.server.http.endpoint import Asked, Endpoint, Reply
from mlxspec.server.http.fairness import Gate, Lanes
from mlxspec.server.http.limits import ServerLimits
from mlxspec.server.metrics import Metrics

SCOPE = {
    "type": "http",
    "method": "GET",
    "path": "/x",
    "headers": [],
    "query_string": b"",
    "client": ("here", 1),
}


class Held:
    """Stands for a large body."""


def test_a_failed_request_is_freed_without_the_garbage_collector() -> None:
    """The collector counts objects, not bytes: bodies in cycles took hundreds of megabytes before it looked."""
    seen: list[weakref.ref[Held]] = []
    said: list[dict[str, Any]] = []

    async def work(asked: Asked, reply: Reply) -> None:
        held = Held()
        seen.append(weakref.ref(held))
        raise ApiError("There are too many.")

    async def receive() -> dict[str, Any]:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: Any) -> None:
        said.append(message)

    lanes = Lanes()
    endpoint = Endpoint(work, ServerLimits(), Metrics(), Gate(ServerLimits()), lanes, path="/x")

    async def run() -> None:
        await endpoint(dict(SCOPE), receive, send)  # type: ignore[arg-type]

    gc.collect()
    gc.disable()
    try:
        asyncio.run(run())
        assert said[0]["status"] == 400
        assert [ref() for ref in seen] == [None]
    finally:
        gc.enable()
        lanes.close()


def test_requests_that_one_exception_ends_are_all_told_why() -> None:
    """Several wait for the same future, such as the loading of a model: each is told, also one whose frames still run."""
    why, said = ApiError("The model cannot be loaded.", status=503), list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: Any) -> None:
        said.append(message)

    async def run() -> None:
        loading: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def work(asked: Asked, reply: Reply) -> None:
            await asyncio.shield(loading)

        endpoint = Endpoint(work, ServerLimits(), Metrics(), Gate(ServerLimits()), lanes, path="/x")
        asking = [asyncio.create_task(endpoint(dict(SCOPE), receive, send)) for _ in range(8)]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        loading.set_exception(why)
        await asyncio.gather(*asking)

    lanes = Lanes()
    try:
        asyncio.run(run())
    finally:
        lanes.close()
    assert [m["status"] for m in said if "status" in m] == [503] * 8


def _by_path(right: Any) -> Any:
    async def call(self: Any, scope: Any, receive: Any, send: Any) -> None:
        self._path = scope["path"]
        await right(self, scope, receive, send)

    return call


@catches("requests are counted by their path", "mlxspec.server.http.endpoint:Endpoint.__call__", _by_path)
def test_no_client_names_a_label_of_the_metrics() -> None:
    """Some versions of Starlette leave the route out of the scope."""
    metrics, lanes = Metrics(), Lanes()

    async def work(asked: Asked, reply: Reply) -> None:
        await reply.text("here", "text/plain")

    async def receive() -> dict[str, Any]:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: Any) -> None:
        pass

    endpoint = Endpoint(work, ServerLimits(), metrics, Gate(ServerLimits()), lanes, path="/v1/models/{name}")

    async def run() -> None:
        for name in "abc":
            scope = {"type": "http", "method": "GET", "path": f"/v1/models/{name}", "headers": []}
            await endpoint({**scope, "query_string": b"", "client": ("here", 1)}, receive, send)  # type: ignore[arg-type]

    try:
        asyncio.run(run())
    finally:
        lanes.close()
    assert 'requests_total{route="/v1/models/{name}",status="200"} 3\n' in metrics.text({})
    assert "/v1/models/a" not in metrics.text({})


def test_half_a_surrogate_pair_is_one_sentence() -> None:
    for raw in (b'{"a": "\\ud800"}', b'{"a": ["\\udfff"]}'):
        with pytest.raises(ApiError, match="no valid JSON"):
            parse(raw, ServerLimits())
    assert parse(b'{"a": "\\ud83d\\ude00"}', ServerLimits()) == {"a": "\U0001f600"}


@pytest.mark.parametrize("more", [0, 1])
def test_a_body_may_have_just_as_many_bytes_as_the_limit_says(more: int) -> None:
    limits, taken = ServerLimits(max_body=1 << 20), list[int]()
    pieces = [b"x" * (limits.max_body - 9), b"x" * (9 + more)]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def run() -> int:
        return len(await read(Request(dict(SCOPE), receive), limits, taken.append))

    if more:
        with pytest.raises(ApiError, match="may have"):
            asyncio.run(run())
    else:
        assert asyncio.run(run()) == limits.max_body == sum(taken)
