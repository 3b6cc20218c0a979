"""Runs a server until a signal ends it: socket, event loop, first load of the model, shutdown.

    listen -> load -> say how to connect -> serve -> signal -> end all answers -> end

SIGTERM and SIGINT end every answer with a sentence and the process within seconds, whatever the engine is doing.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import uvicorn

from mlxspec.errors import ConfigError
from mlxspec.server.app import Server
from mlxspec.server.http import log
from mlxspec.server.http.connections import Connection, Door, raise_descriptors
from mlxspec.server.http.security import App
from mlxspec.server.http.signals import ending_on_signals, exit_later
from mlxspec.server.library import Library
from mlxspec.server.models import Loaded, Models
from mlxspec.server.settings import ServerConfig

_STREAMS_END_SECONDS = 1
_WRITTEN_SECONDS = 0.3  # in which the last lines of the log are written
_TOLD_SECONDS = 0.5  # in which answers that ended because the engine broke reach their clients
Watch = Callable[[Callable[[BaseException], None]], None]
# How long a thread that runs Python keeps the others waiting: those that prepare requests must not hold up the event loop and the engine.
_SWITCH_SECONDS = 0.001


class _Uvicorn(uvicorn.Server):
    """An uvicorn server without its own handling of signals and of accepting connections."""

    def __init__(self, config: uvicorn.Config, door: Door) -> None:
        super().__init__(config)
        self._door, self._accepting = door, set[asyncio.Task[None]]()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        make = partial(
            Connection, config=self.config, server_state=self.server_state, app_state={}, door=self._door
        )
        self._accepting = {asyncio.create_task(self._door.accept(s, make)) for s in sockets or ()}
        self.servers = []
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    models: Models,
    config: ServerConfig,
    library: Library,
    tell: Callable[[str, Loaded], None],
    watch: Watch | None = None,
) -> bool:
    """Run the server until a signal ends it. Returns whether all its threads have ended by themselves; where False, the caller must end
    the process.

    tell: called with the base URL and the loaded model once the server answers. watch: called with a function to which another thread
    can pass an error that has broken the engine; it ends all answers and the server. Raises ConfigError where the address cannot be
    used, the errors of loading the model, and the error that broke the engine.
    """
    listener = _listen(config)
    with listener:
        return asyncio.run(_serve(models, config, library, listener, tell, watch))


def _listen(config: ServerConfig) -> socket.socket:
    host = "127.0.0.1" if config.host == "localhost" else config.host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, config.port))
        listener.listen(512)
    except OSError as error:
        listener.close()
        why = error.strerror or str(error)
        raise ConfigError(f"Cannot listen on {host}:{config.port}: {why}; --port names another.") from error
    return listener


def base_url(config: ServerConfig, port: int) -> str:
    host = f"[{config.host}]" if ":" in config.host and not config.host.startswith("[") else config.host
    return f"http://{host}:{port}/v1"


def web_config(app: App) -> uvicorn.Config:
    """Return uvicorn's settings. They fix every setting that uvicorn would choose by installed packages, or that would trust a client:
    WebSockets are refused, and X-Forwarded-For is ignored."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        loop="asyncio",
        interface="asgi3",
        lifespan="off",
        proxy_headers=False,
        timeout_graceful_shutdown=_STREAMS_END_SECONDS,
        h11_max_incomplete_event_size=64 << 10,
    )


async def _serve(
    models: Models,
    config: ServerConfig,
    library: Library,
    listener: socket.socket,
    tell: Callable[[str, Loaded], None],
    watch: Watch | None,
) -> bool:
    raise_descriptors()
    log.take_over()
    sys.setswitchinterval(_SWITCH_SECONDS)
    server = Server(models, config, library)
    web = _Uvicorn(web_config(server.app), Door(config.limits))
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    with ending_on_signals(partial(loop.call_soon_threadsafe, stopping.set)):
        broken = _Broken(models, stopping)
        if watch is not None:
            watch(broken.tell)
        tasks = [asyncio.create_task(web.serve(sockets=[listener])), asyncio.create_task(stopping.wait())]
        unloading = asyncio.create_task(models.unload_when_idle())
        loading = asyncio.create_task(_first_load(models, base_url(config, listener.getsockname()[1]), tell))
        try:
            done, _ = await asyncio.wait([*tasks, loading], return_when=asyncio.FIRST_COMPLETED)
            if loading in done:
                loading.result()
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            web.should_exit = True  # connections end while the engine does
            ended = False if broken.why is not None else await models.stop()
            await asyncio.wait([tasks[0]])
            for task in (*tasks, unloading, loading):
                task.cancel()
            await asyncio.wait([*tasks, unloading, loading])
            server.close()
        if broken.why is not None:
            raise broken.why
    return log.writing.flush(_WRITTEN_SECONDS) and ended


class _Broken:
    """A switch for an engine that has failed and may never answer again: it ends the engine's streams at once, and the server after
    them. why: the error; None before."""

    def __init__(self, models: Models, stopping: asyncio.Event) -> None:
        self._models, self._stopping, self._loop = models, stopping, asyncio.get_running_loop()
        self.why: BaseException | None = None

    def tell(self, why: BaseException) -> None:
        """Record the error that has broken the engine, and end its streams and the server. May be called in any thread."""
        with suppress(RuntimeError):  # the loop has ended: so does the server
            self._loop.call_soon_threadsafe(self._end, why)

    def _end(self, why: BaseException) -> None:
        if self.why is None:
            self.why = why
            worker = self._models.worker
            if worker is not None:
                worker.fail(why)
            exit_later(2)
            self._loop.call_later(_TOLD_SECONDS, self._stopping.set)


async def _first_load(models: Models, url: str, tell: Callable[[str, Loaded], None]) -> None:
    async with models.use(models.names[0]) as loaded:
        log.writing.put(partial(tell, url, loaded))
