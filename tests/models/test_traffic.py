"""Ranks send as many messages and bytes as is computed from a config: counted at the model, in an engine's rounds, and on the sockets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import pytest
import rank_side
import traffic_side
from published_shapes import CONFIGS
from rank_side import CountedRanks
from test_ranks import ON_FOUR, ON_TWO, free_ports

import mlxspec.demo
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine
from mlxspec.kernels.flat import FlatRows
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.models.assemble import assemble
from mlxspec.models.folder import ModelFolder
from mlxspec.models.registry import architecture
from mlxspec.models.traffic import Traffic, of_forward, of_head, of_mtp_drafts
from mlxspec.platform import device

ITEM = 4  # bytes of a float32
SECONDS = 120


def told(traffic: Traffic) -> tuple[int, int, int]:
    """Messages, and what is put into sums and into gathers, in bytes."""
    return traffic.messages, ITEM * traffic.summed, ITEM * traffic.gathered


def counted(sent: list[tuple[str, int]]) -> tuple[int, int, int]:
    of = {kind: sum(num for k, num in sent if k == kind) for kind in ("sum", "gather")}
    return len(sent), of["sum"], of["gather"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("tied", "gemma4-e") else pytest.mark.slow)
        for name in ON_TWO
        if name != "quantized"  # as `grouped`
    ],
)
def test_a_forward(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one token as for four, with all logits, the last one's and none."""
    monkeypatch.setattr(device, "compile_enabled", lambda: False)
    folder, sent = ON_TWO[name](tmp_path / name), []
    made = rank_side.load(folder, CountedRanks(rank=0, size=2, group=sent))
    for width in (1, 4):
        for logits_at, num_logits in (("all", width), ("last", 1), ("none", 0)):
            sent.clear()
            rows = FlatRows((width,))
            tokens = mx.array([1] * width, mx.int32)
            made.model.forward(tokens, rows, made.model.make_cache(1), logits_at=logits_at)
            assert counted(sent) == told(of_forward(made.config, 2, width, num_logits=num_logits))
    assert of_forward(made.config, 2, 4).messages == of_forward(made.config, 2, 1).messages


def test_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain rounds, and rounds with drafts of the MTP head at fixed depths, in an engine: the sums are over one rank, so the text means
    nothing, but rounds are rounds."""
    monkeypatch.setattr(device, "compile_enabled", lambda: False)
    monkeypatch.setattr(
        Engine, "_exact_width", lambda _: 4
    )  # which widths are exact depends on the machine's BLAS
    folder, sent = ModelFolder(mlxspec.demo.TARGET), []
    made = assemble(folder.config(), folder.read, ranks=CountedRanks(rank=0, size=2, group=sent))
    engine = Engine(
        made.model,
        Tokenizer.from_folder(folder.path),
        drafters=[Mtp(made.mtp, made.model.max_context)],
        config=EngineConfig(exact=True),  # no round is launched behind an unread one with drafts
    )
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    for depth in (0, 1, 3):
        spec = SpecConfig(drafters=("mtp",) if depth else (), policy="fixed", n_max=max(depth, 1))
        engine.submit("def add(a, b):\n    return", params, spec=spec)
        known, seen = 0, 0
        while not engine.is_idle:
            sent.clear()
            emitted, verified = engine.stats.num_emitted, engine.stats.num_verified
            engine.step()
            width = engine.stats.num_verified - verified
            # known 0: the prompt was read as well. A plain round is launched before the last one is read, so none is left for the last step
            if known and sent:
                expected = of_mtp_drafts(made.config, 2, width - 1, known) + of_forward(made.config, 2, width)
                assert counted(sent) == told(expected), (depth, width, known)
                seen += width == depth + 1
            known = engine.stats.num_emitted - emitted
        assert seen >= 5, depth


def test_what_is_sent() -> None:
    """Of a sum of 12 numbers and a gather of 5 from each rank."""
    one = Traffic(sums=1, gathers=1, summed=12, gathered=5)
    assert [one.sent(size, 2) for size in (2, 3, 4)] == [2 * (12 + 5), 2 * (16 + 10), 2 * (18 + 15)]
    assert [one.sent(size, 2, "mesh") for size in (2, 4)] == [2 * 17, 2 * 3 * 17]
    assert (one + one).messages == 4


@pytest.mark.parametrize(
    ("name", "size", "messages", "kilobytes"),
    [
        ("Qwen3.5-27B", 2, 130, 1569),
        ("Qwen3.5-27B", 4, 130, 2354),
    ],
)
def test_published_models(name: str, size: int, messages: int, kilobytes: int) -> None:
    config = CONFIGS[name][1]
    parsed = architecture(config).parse(config)
    found = of_forward(parsed, size)
    assert (found.messages, round(found.sent(size, 2) / 1000)) == (messages, kilobytes)
    assert of_head(parsed, size, 0) == Traffic()


# -- on the sockets ----------------------------------------------------------------------------------------------------------------------


class Gate:
    """Passes the bytes of one connection on and counts those of each direction."""

    def __init__(self, to: int) -> None:
        self._to, self._listener = to, socket.create_server(("127.0.0.1", 0))
        self.port, self.nbytes = self._listener.getsockname()[1], 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = self._connected()
            for s in (near, far):
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(a, b), daemon=True).start()

    def _connected(self) -> socket.socket:
        until = time.monotonic() + SECONDS
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self._to))
            except OSError:  # it does not listen yet
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)

    def _pass(self, given: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):  # a rank has ended
            while data := given.recv(1 << 16):
                with self._lock:
                    self.nbytes += len(data)
                to.sendall(data)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_on_the_sockets(size: int, tmp_path: Path) -> None:
    """What all ranks send in a forward of one token and of four, whose hiddens can be divided evenly among them."""
    folder = (ON_TWO if size == 2 else ON_FOUR)["tied"](tmp_path / "tied")
    ports = free_ports(size)
    gates = [Gate(port) for port in ports]
    processes = []
    for rank in range(size):
        hosts = tmp_path / f"hosts-{rank}.json"  # everybody but oneself is behind a gate
        listed = [[f"127.0.0.1:{ports[r] if r == rank else gates[r].port}"] for r in range(size)]
        hosts.write_text(json.dumps(listed))
        processes.append(
            subprocess.Popen(
                [sys.executable, traffic_side.__file__, str(folder)],
                env=os.environ
                | {
                    "MLX_RANK": str(rank),
                    "MLX_HOSTFILE": str(hosts),
                    "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )

    def all_say(word: str) -> int:
        for process in processes:
            assert process.stdout.readline().strip() == word
        return sum(gate.nbytes for gate in gates)

    config = json.loads((folder / "config.json").read_text())
    parsed = architecture(config).parse(config)
    timer = threading.Timer(SECONDS, lambda: [process.kill() for process in processes])
    timer.start()
    try:
        for width in traffic_side.WIDTHS:
            before = all_say("ready")
            for process in processes:
                process.stdin.write("go\n")
                process.stdin.flush()
            found = all_say("done") - before
            assert found == size * of_forward(parsed, size, width).sent(size, ITEM), width
    finally:
        timer.cancel()
        for process in processes:
            process.kill()
            process.communicate()
