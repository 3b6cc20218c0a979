"""The models of the machine that a server runs on: those in the hub's cache, those that fit into memory, and the one that is being
downloaded.

A server shows and downloads them only if this machine's user alone can reach it (`check_is_own`). A download is a process of its
own (checkpoints/fetching.py): it delays no answer, and can be ended at any point. It writes into the hub's cache and nowhere else.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from mlxspec.checkpoints.cache import Entry, listing
from mlxspec.checkpoints.fitting import fitting
from mlxspec.errors import ModelError
from mlxspec.loading.repositories import check_repo
from mlxspec.loading.short_names import repository
from mlxspec.platform.memory import machine_memory
from mlxspec.server.errors import ApiError
from mlxspec.server.http.security import is_own
from mlxspec.server.settings import ServerConfig

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine

_CHILD = "mlxspec.checkpoints.fetching"
_TOLD_SECONDS = 0.25
_OF_PROXIES = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
Maker = Callable[[str], Callable[[], "Engine"]]


def check_is_own(config: ServerConfig, headers: Headers) -> None:
    """Raise ApiError unless only this machine's user can have sent the request: from a program on this machine, or from this server's
    page."""
    origin = headers.get("origin")
    is_private = config.is_local and config.api_key is None and not config.allowed_hosts
    is_foreign = origin is not None and not is_own(origin, headers.get("host"))
    if not is_private or is_foreign or any(name in headers for name in _OF_PROXIES):
        raise ApiError(
            "The models of this machine are shown and fetched only on a server without a key that nobody else can reach; "
            "use `mlxspec models` and `mlxspec pull` at its terminal.",
            status=403,
            code="not_private",
        )


class Pull:
    """A download of a model that runs in a process of its own. error: the sentence on its failure, empty without one. told: the newest
    progress, in Ollama's form. notices: sentences on files that are missing in addition to the model."""

    def __init__(self, repo: str) -> None:
        self.repo, self.error = repo, ""
        self.told: dict[str, Any] = {"status": f"pulling {repo}"}
        self.notices: list[str] = []
        self._process: asyncio.subprocess.Process | None = None
        self._is_ended = False  # by `cancel`, which may come before there is a process
        self._task = asyncio.create_task(self._run())

    @property
    def is_running(self) -> bool:
        return not self._task.done()

    async def _run(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", _CHILD, self.repo,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        if self._is_ended:
            self.cancel()
        told_by = self._process.stdout
        while told_by is not None and (line := await told_by.readline()):
            told = json.loads(line)
            if "notice" in told:
                self.notices.append(told["notice"])
            elif "error" in told:
                self.error = told["error"]
            else:
                self.told = told
        if await self._process.wait() and not self.error:
            self.error = (
                f"{self.repo} was not fetched: its download was ended. Files that are whole are kept."
            )

    async def updates(self) -> AsyncIterator[dict[str, Any]]:
        """Yield each new progress of the download, in Ollama's form, until it has ended."""
        told: dict[str, Any] = {}
        while self.is_running or told is not self.told:
            if told is not self.told:
                told = self.told
                yield told
            await asyncio.wait({self._task}, timeout=_TOLD_SECONDS)
        await self._task

    def cancel(self) -> None:
        self._is_ended = True
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()


class Library:
    """The models of this machine: those in the hub's cache, those that fit into memory, and the running download. served: the model by
    the name under which it is served. maker: returns, for a model that is to be served too, the function that loads it; raises
    ConfigError where the server's options apply to one model only."""

    def __init__(self, served: Mapping[str, str], maker: Maker) -> None:
        self.maker = maker
        self._served = dict(served)
        self._fetch: Pull | None = None

    def model_of(self, name: str) -> str:
        """Return the model that is served under this name; the name itself where none is."""
        return self._served.get(name, name)

    def listed(self) -> dict[str, Any]:
        """Return the models of this machine as the answer of /api/library. Reads the cache from disk, so call it outside of the event
        loop."""
        machine, entries = machine_memory(), self._entries()
        named = {repository(model): name for name, model in self._served.items()}
        here = [
            {
                "name": e.name,
                "size": e.size,
                "memory": e.memory,
                "fits": e.memory is not None and e.memory <= machine,
                "problem": e.problem,
                "served_as": named.get(e.name),
            }
            for e in entries.values()
        ]
        whole = {e.name for e in entries.values() if e.is_complete}
        fetching = (
            self._fetch.told | {"model": self._fetch.repo} if self._fetch and self._fetch.is_running else None
        )
        rows = [m._asdict() for m in fitting(machine) if m.repo not in whole]
        return {"machine": machine, "here": here, "fitting": rows, "fetching": fetching}

    def _entries(self) -> dict[str, Entry]:
        """Return the models of the cache by name, incomplete downloads included. Of each model it is the newest revision that a branch
        names."""
        found: dict[str, Entry] = {}
        for entry in listing().entries:
            if entry.memory is not None or entry.problem:
                found.setdefault(entry.name, entry)
        return found

    def fetch(self, model: str) -> Pull:
        """Begin the download of a model, or join the one that runs for this model, and return it. Raises ApiError while another model is
        downloaded."""
        _check_named(model)
        repo = repository(model)
        try:
            check_repo(repo)
        except ModelError as error:
            raise ApiError(str(error), param="model") from error
        running = self._fetch
        if running is not None and running.is_running:
            if running.repo == repo:
                return running
            raise ApiError(f"{running.repo} is being fetched; one model is fetched at a time.", param="model")
        self._fetch = Pull(repo)
        return self._fetch

    def cancel(self) -> None:
        if self._fetch is not None:
            self._fetch.cancel()

    def to_serve(self, model: str) -> Callable[[], Engine]:
        """Add a model of the cache to the served ones, and return the function that loads it. Reads the disk. Raises ApiError for a
        model that is not in the cache, ConfigError."""
        _check_named(model)
        entry = self._entries().get(model)
        if entry is None or not entry.is_complete:
            raise ApiError(
                f"{model} is not here; `mlxspec pull` fetches it.",
                status=404,
                param="model",
                code="model_not_found",
            )
        made = self.maker(model)
        self._served = {**self._served, model: model}  # a new table: threads read it
        return made


def _check_named(model: str) -> None:
    """Raise ApiError where a request has no model name."""
    if not model:
        raise ApiError("model is missing.", param="model")
