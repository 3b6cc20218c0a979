"""A user's machine beside the stand-in of the hub: a home for what is fetched, and processes that run our commands there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from hub_server import HubServer

_DRIVER = """
import contextlib, io, json, os, sys
from mlxspec.cli.main import main
for line in sys.stdin:
    command, token = json.loads(line)
    os.environ["HF_TOKEN"] = token
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(command)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Machine:
    """A user's machine: an HF_HOME of its own, and processes that talk to the stand-in only. `run` uses one process for all."""

    def __init__(self, hub: HubServer, home: Path, **environment: str) -> None:
        self.hub, self.home, self._more = hub, home, environment
        self._driver: subprocess.Popen[str] | None = None

    @property
    def environment(self) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        ours = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_XET": "1"}
        ours["HF_HUB_DOWNLOAD_TIMEOUT"] = "300"  # whoever waits for us may be stopped for long
        return clean | ours | self._more

    def run(self, *command: str, token: str = "") -> Ran:
        if self._driver is None:
            self._driver = self._process("-c", _DRIVER, stdin=subprocess.PIPE)
        stdin, stdout = self._driver.stdin, self._driver.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([command, token]) + "\n")
        stdin.flush()
        return Ran(*json.loads(stdout.readline()))

    def begin(self, *command: str) -> subprocess.Popen[str]:
        """One command in a process of its own, left running."""
        return self._process("-m", "mlxspec", *command)

    def close(self) -> None:
        if self._driver is not None:
            _, said = self._driver.communicate()
            assert not said, said  # nothing beside what commands print

    def _process(self, *arguments: str, stdin: int | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=self.environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
