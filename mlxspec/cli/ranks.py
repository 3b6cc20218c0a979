"""Commands in several processes, the ranks, that run one divided model: started by mlx.launch, or by `mlxspec serve --hosts`.

Rank 0 is the command as it is in a process alone. Every other rank loads its share by the same options and follows rank 0: it reads no
prompt, listens on no port and prints nothing but why it ended. Knows options and processes; knows no rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mlxspec.cli import options, terminal
from mlxspec.errors import ConfigError
from mlxspec.loading.names import printable

if TYPE_CHECKING:
    from mlxspec.engine.ranks.peers import Peers

# mlx.launch, wherever its script lies; a signal that ends it is no error. By itself it ends with 0 whatever became of the ranks
_LAUNCH = """
import sys
from contextlib import suppress
from mlx._distributed_utils import launch

class Kept(launch.RemoteProcess):
    codes = []

    @property
    def exit_status(self):
        code, was_killed = super().exit_status
        Kept.codes.append(code)
        return code, was_killed

launch.RemoteProcess = Kept
with suppress(KeyboardInterrupt):
    launch.main()
    sys.exit(any(Kept.codes))
"""
_STOP_SECONDS = 8.0  # in which ranks that were asked to end do so


def run(args: argparse.Namespace, command: Callable[[argparse.Namespace], int]) -> int:
    """The command, in this process alone or as one of the ranks. Raises what the command raises."""
    from mlxspec.engine.ranks import peers as ranks

    peers = ranks.join()
    args.peers = peers
    if peers is None:
        return command(args)
    if peers.leads:
        if args.command != "serve":  # which ends its answers first
            ranks.leave_on_fault(peers.line, terminal.complain)
        with peers.failing_together():
            code = command(args)
            peers.end()
            return code
    return _follow(args, peers)


def _follow(args: argparse.Namespace, peers: Peers) -> int:
    from mlxspec.engine.ranks.follow import follow
    from mlxspec.engine.ranks.peers import leave_on_fault

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's, which tells when to end
    leave_on_fault(peers.line, lambda why: None if peers.line.was_told else terminal.complain(why))
    with peers.failing_together():
        if args.command == "serve":
            args.model = one_model(args.model)
        engine = options.load_engine(args, options.spec_config(args), quiet=True)
    follow(engine, peers)
    peers.end()
    return 0


def one_model(given: Sequence[str] | None) -> str:
    """The model that ranks serve. Raises ConfigError for several, and for one with an adapter."""
    if given is not None and len(given) > 1:
        raise ConfigError("Ranks serve one model, and several were given.")
    whole = (given or [options.DEMO])[0]
    name, equals, model = whole.partition("=")
    found = model if equals and model and "/" not in name else whole
    if "+" in found and not os.path.exists(os.path.expanduser(found)):
        raise ConfigError("An adapter cannot be used with a model that is divided among ranks.")
    return found


def launch(arguments: Sequence[str], *, hosts: str | None, hostfile: str | None) -> int:
    """Start mlx.launch with this command on every host, without the options that name them, and wait for its end. A signal that ends this
    process ends the ranks first. Returns the exit code."""
    if hosts is not None and hostfile is not None:
        raise ConfigError("--hosts and --hostfile name the same; give one.")
    if hostfile is not None and not os.path.isfile(hostfile):
        raise ConfigError(f"There is no file {hostfile}, which --hostfile names.")
    with tempfile.TemporaryDirectory(prefix="mlxspec-hosts-") as folder:
        if hostfile is None:
            hostfile = os.path.join(folder, "hosts.json")
            with open(hostfile, "w", encoding="utf-8") as file:
                json.dump(host_file(hosts or ""), file)
        command = [sys.executable, "-c", _LAUNCH, "--hostfile", hostfile, "--"]
        command += [sys.executable, "-m", "mlxspec", *_without(arguments, ("--hosts", "--hostfile"))]
        return _watch(command)


def host_file(hosts: str) -> dict[str, Any]:
    """What mlx.launch reads of `hosts`, names or IPv4 addresses with commas between them: how each is reached by ssh, and the address that
    MLX's ring of sockets connects to, which takes no names. Raises ConfigError for a name that is missing or that has no address, and where
    one machine's address is its own loopback, which the others cannot reach."""
    names = [name.strip() for name in hosts.split(",")]
    if not all(names):
        raise ConfigError("--hosts names the machines with a comma between them, as a,b; a name is missing.")
    addresses = [_address(name) for name in names]
    own = [name for name, address in zip(names, addresses, strict=True) if address.startswith("127.")]
    if own and len(own) < len(names):
        raise ConfigError(
            f"{own[0]} is this machine's loopback to --hosts; give an address that the others can reach."
        )
    found = []
    for name, address in zip(names, addresses, strict=True):
        # mlx.launch starts a process without ssh for this address only
        found.append({"ssh": address if own else name, "ips": [address]})
    # MLX's faster way from the GPU to the CPU, which sends the messages
    quick = os.environ.get("MLX_METAL_FAST_SYNCH", "1")
    return {"backend": "ring", "envs": [f"MLX_METAL_FAST_SYNCH={quick}"], "hosts": found}


def _address(name: str) -> str:
    """IPv4 address of a host."""
    try:
        found = socket.getaddrinfo(name, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"No IPv4 address was found for {printable(name)}, which --hosts names.") from error
    return str(found[0][4][0])


def _watch(command: Sequence[str]) -> int:
    """Run mlx.launch until it ends. Returns the exit code."""
    # a group of its own: signals of the terminal come through us, in order; an input that never ends, for which mlx.launch would look again
    # and again
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    asked = threading.Event()

    def stop(number: int, frame: object) -> None:
        if asked.is_set():
            _signal(process, signal.SIGKILL)
            return
        asked.set()
        _signal(process, signal.SIGINT)
        threading.Thread(target=_make_end, args=(process,), daemon=True).start()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        code = process.wait()
    finally:
        _signal(process, signal.SIGKILL)  # nothing stays
    return 0 if asked.is_set() else 2 if code else 0


def _make_end(process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _STOP_SECONDS
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """To mlx.launch and all that it has started here."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _without(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Arguments without these options and their values."""
    found: list[str] = []
    skips = False
    for argument in arguments:
        if skips:
            skips = False
        elif argument in flags:
            skips = True
        elif not argument.startswith(tuple(f"{flag}=" for flag in flags)):
            found.append(argument)
    return found
