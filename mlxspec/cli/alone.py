"""`mlxspec` without a command, at a terminal: serves the chat page with the best model on this disk on a free port, and prints its address.

serve.py serves, here.py finds the model.
"""

from __future__ import annotations

import socket
import sys
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from mlxspec.cli import here, options, serve, terminal
from mlxspec.server.settings import ServerConfig

if TYPE_CHECKING:
    from mlxspec.server.models import Loaded


def is_wanted() -> bool:
    """Return whether stdin, stdout and stderr are all terminals, so that a person uses the command."""
    return all(terminal.is_terminal(stream) for stream in (sys.stdin, sys.stdout, sys.stderr))


def run() -> int:
    """Serve the chat page until Ctrl-C, with the config file's options for `serve`, and with the best model on this disk where the file
    names none. Returns the exit code. Raises MlxspecError."""
    args = options.parse(["serve"])
    if args.model is None:
        found = here.best()
        toy = here.to_pull("as does the page under Models")
        told = (
            f"demo, a toy: no other model that fits is on this disk. {toy}"
            if found is None
            else f"{found.told}."
        )
        args.model = [options.DEMO if found is None else found.name]
    else:
        told = f"{args.model[0]}, as the config file names it."
    port = ServerConfig().port
    is_taken = args.port is None and not _is_free(port)
    if is_taken:
        args.port = 0
    kept = f"Port {port} is taken: conversations of the page there are not shown here. " if is_taken else ""
    return serve.run(args, partial(_tell, told, kept))


def _tell(told: str, kept: str, url: str, loaded: Loaded) -> None:
    terminal.note(told)
    terminal.note(f"Open {url.removesuffix('v1')} to chat; programs use {url}.")
    terminal.note(f"{kept}Ctrl-C ends it; `mlxspec --help` lists the commands.")


def _is_free(port: int) -> bool:
    with closing(socket.socket()) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return tried.connect_ex((ServerConfig().host, port)) != 0
