"""`serve --hosts`: what is written for mlx.launch, read by mlx.launch's own reader."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlx._distributed_utils.common import Hostfile
from planting import catches

from mlxspec.cli import ranks
from mlxspec.errors import ConfigError

pytestmark = pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning"
)  # mlx.launch's reader leaves its file open
ADDRESSES = {"a.local": "10.0.0.1", "b.local": "10.0.0.2", "localhost": "127.0.0.1", "me": "127.0.1.1"}


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str, *_: object, **__: object) -> list[Any]:
        address = ADDRESSES.get(name, name)
        try:
            socket.inet_aton(address)
        except OSError:
            raise socket.gaierror("unknown") from None
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", find)
    monkeypatch.delenv("MLX_METAL_FAST_SYNCH", raising=False)


def read(hosts: str, folder: Path) -> Hostfile:
    path = folder / "hosts.json"
    path.write_text(json.dumps(ranks.host_file(hosts)))
    return Hostfile.from_file(path)


def test_names_are_reached_by_ssh_and_their_addresses_by_the_ring(tmp_path: Path) -> None:
    found = read("a.local, b.local", tmp_path)
    assert [(h.ssh_hostname, h.ips) for h in found.hosts] == [
        ("a.local", ["10.0.0.1"]),
        ("b.local", ["10.0.0.2"]),
    ]
    assert (found.backend, found.envs) == ("ring", ["MLX_METAL_FAST_SYNCH=1"])


def test_addresses_stay_as_they_are(tmp_path: Path) -> None:
    assert [h.ips for h in read("10.1.1.1,10.1.1.2", tmp_path).hosts] == [["10.1.1.1"], ["10.1.1.2"]]


def test_processes_of_one_machine_need_no_ssh(tmp_path: Path) -> None:
    found = read("localhost,localhost", tmp_path)
    assert [h.ssh_hostname for h in found.hosts] == ["127.0.0.1", "127.0.0.1"]


def test_a_users_own_value_of_the_variable_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_METAL_FAST_SYNCH", "0")
    assert read("10.1.1.1,10.1.1.2", tmp_path).envs == ["MLX_METAL_FAST_SYNCH=0"]


@pytest.mark.parametrize(
    ("hosts", "word"),
    [("a.local,", "missing"), ("", "missing"), ("a.local,nowhere", "nowhere"), ("a.local,me", "me")],
)
def test_what_is_wrong_is_one_sentence(hosts: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as failure:
        ranks.host_file(hosts)
    assert "--hosts" in str(failure.value)
    assert str(failure.value).endswith(".")


@catches(
    "the launcher ends with 0 whatever became of the ranks",
    "mlxspec.cli.ranks:_LAUNCH",
    lambda right: right.replace("any(Kept.codes)", "0"),
    case="3",
)
@pytest.mark.parametrize("codes", [(0, 0), (0, 3)], ids=lambda codes: f"{codes[0]} and {codes[1]}")
def test_the_launcher_ends_as_its_ranks_do(codes: tuple[int, int]) -> None:
    """mlx.launch itself ends with 0."""
    program = f"import os, sys; sys.exit({list(codes)}[int(os.environ['MLX_RANK'])])"
    command = [sys.executable, "-c", ranks._LAUNCH, "-n", "2", "--", sys.executable, "-c", program]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.wait(120) == int(any(codes))
    finally:
        process.kill()
        process.communicate()


def test_one_model_without_an_adapter() -> None:
    assert (ranks.one_model(None), ranks.one_model(["a=o/m"]), ranks.one_model(["o/m"])) == (
        "demo",
        "o/m",
        "o/m",
    )
    for given, says in ((["a", "b"], "several"), (["a=demo+x"], "adapter"), (["demo+x"], "adapter")):
        with pytest.raises(ConfigError, match=says):
            ranks.one_model(given)
