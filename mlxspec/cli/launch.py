"""`mlxspec launch`: runs an agent that was installed from npm with a server on this machine in place of its maker's.

A server that runs already and serves the model is used. Otherwise one is started on a free port, with a key of its own, and ends with the
agent. Knows processes and addresses; what an agent is told is agents.py's.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxspec.cli import options, terminal
from mlxspec.cli.agents import AGENTS, Agent, ServedModel
from mlxspec.cli.interrupt import clearing_away
from mlxspec.cli.parser import choice, declare
from mlxspec.cli.progress_bar import Waiting
from mlxspec.cli.run import fetch_absent
from mlxspec.errors import ConfigError
from mlxspec.option import check_number
from mlxspec.server.settings import KEY_VARIABLE

_HERE = "127.0.0.1"
_STOP_SECONDS = 8.0  # in which a process that was asked to end does so
_ASK_SECONDS = 5.0  # in which a server that was found says what it serves
_OWN_SECONDS = 60.0  # the same for one that was started here, on a busy machine
_TIMED, _NUM_IDS = 512, 400  # tokens of the piece, and how many differ; each vocabulary has that many
_UNSET = "none"  # for a server that asks for none
# The server ends with whoever started it, however that ends: its standard input is a pipe that closes then.
_SERVER = """
import os, signal, sys, threading
from mlxspec.__main__ import main

def end():
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end, daemon=True).start()
sys.exit(main())
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s AGENT [-m MODEL] [options] [-- ARGUMENTS OF THE AGENT]"
    parser.add_argument("agent", metavar="AGENT", type=choice("AGENT", tuple(AGENTS)), help=", ".join(AGENTS))
    options.add_model(
        parser,
        about=f"demo-agent (the default: one call of a tool, without a download), {options.NAMES}",
    )
    options.add_drafting(parser)
    declare(
        parser, ("--port", int, "N", "where a server that runs already is looked for (default 8080)", 8080)
    )
    options.add_debug(parser)
    parser.set_defaults(model=None)


def run(args: argparse.Namespace) -> int:
    """Run the agent with a model on this machine, until the agent ends. Returns the agent's exit code."""
    agent, wanted = AGENTS[args.agent], args.model
    check_number("--port", args.port, 1, 65535, integer=True)
    args.model = options.DEMO_AGENT if wanted is None else wanted
    options.spec_config(args)
    options.engine_config(args)
    program = shutil.which(args.agent)
    if program is None:
        raise ConfigError(
            f"There is no command {args.agent}: `npm install -g {agent.package}` installs {agent.title}."
        )
    with clearing_away():
        found = _running(args.port, wanted)
        if found is not None:
            _check(agent, found)
            terminal.note(
                f"{agent.title} uses {found.model} of the server at {found.root}, as that was started."
            )
            return _run(agent, program, found, args.behind)
        if args.model == options.DEMO_AGENT:
            terminal.note(
                "demo-agent plays one call of a tool, without a download; -m names a model that works."
            )
        fetch_absent(args)
        with started(args) as found:
            _check(agent, found)
            _say_how_long(agent, found)
            return _run(agent, program, found, args.behind)


def _say_how_long(agent: Agent, at: ServedModel) -> None:
    """Time how fast the server reads a short prompt, and print how long the agent's first prompt will take."""
    ids = [10 + i % _NUM_IDS for i in range(_TIMED)]
    body = json.dumps({"model": at.model, "prompt": ids, "max_tokens": 1})
    headers = {"Authorization": f"Bearer {at.key}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(_HERE, int(at.root.rpartition(":")[2]))
    with Waiting("timing how fast prompts are read"):
        connection.request("POST", "/v1/completions", body, headers)
        answer = json.loads(connection.getresponse().read())
    connection.close()
    if "timings" in answer:
        speed = answer["timings"]["prompt_per_second"]
        first = f"The first prompt of {agent.title}, about {agent.num_prompt:,} tokens,"
        terminal.note(
            f"{first} takes about {agent.num_prompt / speed:.0f} s here; later ones read what is new."
        )
    else:
        terminal.note(f"How long the first prompt takes is not known: {answer['error']['message']}")


def _check(agent: Agent, at: ServedModel) -> None:
    """Raise ConfigError where the agent's first prompt does not fit into the model's context. Print a note where the context is full
    before the agent would condense a conversation automatically."""
    if at.context is not None and at.context <= agent.num_prompt:
        raise ConfigError(
            f"{at.model} has {at.context:,} tokens of context, and the first prompt of {agent.title} takes about {agent.num_prompt:,}; "
            "-m names another model, and docs/agents.md which one fits this machine."
        )
    if at.context is not None and at.context < agent.least:
        terminal.note(
            f"{agent.title} condenses a conversation by itself at {agent.least:,} tokens at the earliest; "
            f"{at.model} has {at.context:,} here, so type /compact before."
        )


def _run(agent: Agent, program: str, at: ServedModel, behind: list[str]) -> int:
    """Run the agent in the foreground until it ends, and return its exit code. program: path of its executable; at: the model it is to
    use; behind: the user's own arguments for it."""
    told = agent.tell(at)
    local = ",".join(filter(None, (os.environ.get("NO_PROXY"), _HERE)))
    environment = {**os.environ, "NO_PROXY": local, "no_proxy": local, **told.environment}
    before = signal.signal(signal.SIGINT, lambda number, frame: None)  # Ctrl-C is the agent's
    process = subprocess.Popen([program, *told.arguments, *behind], env=environment)
    try:
        code = process.wait()
    finally:
        _end(process)
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code


def _running(port: int, wanted: str | None) -> ServedModel | None:
    """Return the wanted model of a mlxspec server that runs on this port, None where there is none. wanted: name of the model, None for
    any."""
    key = os.environ.get(KEY_VARIABLE) or _UNSET
    models = _models(port, key)
    for model in sorted(models or (), key=lambda m: "context_length" not in m):  # the one in memory first
        if wanted is None or model["id"] in (wanted, Path(wanted).name):
            return _endpoint(port, key, model)
    if models:
        names = ", ".join(str(m["id"]) for m in models)
        terminal.note(f"The server on port {port} serves {names}; another one is started.")
    return None


def served_here(port: int) -> list[tuple[str, bool]] | None:
    """Return the models of a mlxspec server on this port, and whether each is in memory; None where no such server answers."""
    found = _models(port, os.environ.get(KEY_VARIABLE) or _UNSET)
    return None if found is None else [(str(m["id"]), "context_length" in m) for m in found]


def _endpoint(port: int, key: str, model: Mapping[str, Any]) -> ServedModel:
    return ServedModel(
        root=f"http://{_HERE}:{port}", key=key, model=str(model["id"]), context=model.get("context_length")
    )


def _models(port: int, key: str, seconds: float = _ASK_SECONDS) -> list[dict[str, Any]] | None:
    """Return the models that a mlxspec server on this port lists; None where there is no such server or it refuses the key. seconds: the
    longest wait for the answer."""
    connection = http.client.HTTPConnection(_HERE, port, timeout=seconds)
    try:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        if answer.status == 401:
            terminal.note(
                f"The server on port {port} wants a key, which {KEY_VARIABLE} names; another one is started."
            )
        found = json.loads(answer.read(1 << 20))["data"] if answer.status == 200 else []
        return [m for m in found if m["owned_by"] == "mlxspec" and m["id"]] or None
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        return None
    finally:
        connection.close()


@contextmanager
def started(args: argparse.Namespace) -> Iterator[ServedModel]:
    """Start a mlxspec server on a free port of this machine, yield its model, and end the server after the block. Raises ConfigError
    with the server's last line where it does not start."""
    with tempfile.TemporaryDirectory(prefix="mlxspec-launch-") as folder:
        key, log = secrets.token_urlsafe(24), Path(folder) / "log"
        (Path(folder) / "key").write_text(key, encoding="utf-8")  # the folder is readable by its owner alone
        own = [f"--host={_HERE}", "--port=0", f"--api-key=@{folder}/key"]
        command = [sys.executable, "-P", "-c", _SERVER, "serve", *own, *_given(args)]
        with log.open("wb") as said:
            server = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=said, stderr=said, start_new_session=True
            )
        try:
            with Waiting(f"loading {args.model}"):
                port = _port(server, log)
            models = _models(port, key, _OWN_SECONDS)
            if not models:
                raise ConfigError(f"The server does not answer: {_last(log)}")
            yield _endpoint(port, key, models[0])
            if server.poll() is not None:
                terminal.complain(f"The server had ended before: {_last(log)}")
        finally:
            if server.stdin is not None:
                server.stdin.close()
            _end(server)


def _given(args: argparse.Namespace) -> list[str]:
    """Return the options that differ from their defaults, as arguments for `mlxspec serve`."""
    found = []
    for action in options.parser_of("serve")._actions:
        value = getattr(args, action.dest, action.default)
        if action.dest == "port" or value == action.default:
            continue
        flag = action.option_strings[-1]
        values = value if isinstance(value, list) else [value]
        found += [flag if one is True else f"{flag}={one}" for one in values]
    return found


def _port(server: subprocess.Popen[bytes], log: Path) -> int:
    """Wait until the server listens, and return its port. log: the file of its output. Raises ConfigError where the server has ended."""
    while True:
        has_ended = server.poll() is not None
        said = re.search(rf" at http://{re.escape(_HERE)}:(\d+)/v1 ", log.read_text(errors="replace"))
        if said:
            return int(said[1])
        if has_ended:
            raise ConfigError(_last(log))
        time.sleep(0.05)


def _last(log: Path) -> str:
    """Return the last line of a server's output."""
    lines = log.read_text(errors="replace").strip().splitlines() or ["it ended without a word."]
    return lines[-1].removeprefix("mlxspec: error: ")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process: send SIGTERM, and kill it where it has not ended after _STOP_SECONDS."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
