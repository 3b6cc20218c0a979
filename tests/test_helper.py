"""Helper processes: they are ended at their limits and replaced, end with the process that started them, and hold nothing of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from planting import catches

from mlxspec.errors import HelperError
from mlxspec.platform import helper

LONG = 60.0
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
_PROGRAM = """
import os, sys, time

def run(ask, body):
    what = ask["what"]
    if what == "pid":
        return {"pid": os.getpid()}, body
    if what == "burn":
        open(ask["flag"], "w").close()
        sum(range(10**15))  # one call in C
    if what == "hold":
        return {"size": len(bytearray(ask["size"]))}, b""
    if what == "fail":
        raise ValueError("of the program")
    if what == "exit":
        os._exit(7)
    if what == "lie":
        os.write(0, bytes.fromhex(ask["raw"]))
        time.sleep(60)
    if what == "modules":
        return {"modules": sorted(sys.modules)}, b""
    return {}, b"x" * ask["size"]
"""


@pytest.fixture
def program(tmp_path: Path) -> helper.Program:
    file = tmp_path / "program.py"
    file.write_text(_PROGRAM, encoding="utf-8")
    return helper.Program(file=file, what="The program", seconds=LONG, memory=64 << 20, most=1 << 20)


def quick(program: helper.Program) -> helper.Program:
    return helper.Program(
        file=program.file, what=program.what, seconds=0.4, memory=program.memory, most=program.most
    )


def pid_of(program: helper.Program) -> int:
    return int(helper.run(program, {"what": "pid"}, b"")[0]["pid"])


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_there(pid: int) -> bool:
    """Whether a process runs. One that has ended and that nobody has waited for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_bytes_come_back_and_the_process_stays(program: helper.Program) -> None:
    body = os.urandom(1 << 20)
    said, out = helper.run(program, {"what": "pid"}, body)
    assert out == body
    assert said["pid"] not in (0, os.getpid())
    assert pid_of(program) == said["pid"]


@catches(
    "a call has no limit of time",
    "mlxspec.platform.helper:_Worker.run",
    lambda right: (
        lambda self, program, ask, body: right(
            self,
            program
            if ask["what"] == "pid"
            else helper.Program(
                file=program.file, what=program.what, seconds=4.0, memory=program.memory, most=program.most
            ),
            ask,
            body,
        )
    ),
)
def test_a_call_that_does_not_end_is_ended_and_replaced(program: helper.Program, tmp_path: Path) -> None:
    before = pid_of(program)
    with pytest.raises(HelperError, match=r"The program takes more than 0\.4 seconds and was ended\."):
        helper.run(quick(program), {"what": "burn", "flag": str(tmp_path / "flag")}, b"")
    assert not is_there(before)
    assert pid_of(program) != before


def test_a_call_that_waits_for_a_processor_is_not_ended(program: helper.Program) -> None:
    """A helper that is stopped for longer than its limit, as on a machine with too much work, gives its answer all the same."""
    pid, short = pid_of(program), quick(program)
    found: list[bytearray] = []
    os.kill(pid, signal.SIGSTOP)
    thread = threading.Thread(
        target=lambda: found.append(helper.run(short, {"what": "size", "size": 3}, b"")[1])
    )
    thread.start()
    time.sleep(3 * short.seconds)
    os.kill(pid, signal.SIGCONT)
    thread.join(LONG)
    assert found == [b"xxx"]
    assert pid_of(program) == pid


@LINUX
def test_memory_is_bounded(program: helper.Program) -> None:
    before = pid_of(program)
    assert helper.run(program, {"what": "hold", "size": 32 << 20}, b"")[0] == {"size": 32 << 20}
    with pytest.raises(HelperError, match="needs more than 64 MiB and was ended"):
        helper.run(program, {"what": "hold", "size": 1 << 30}, b"")
    assert pid_of(program) != before


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        ({"what": "fail"}, "failed: ValueError: of the program"),
        ({"what": "exit"}, "its helper process has ended"),
        ({"what": "size", "size": (1 << 20) + 1}, "gives more than it may"),
        ({"what": "lie", "raw": "ffffffff00000000"}, "gives more than it may"),
        ({"what": "lie", "raw": "00000000ffffffff"}, "gives more than it may"),
        ({"what": "lie", "raw": "020000000000000041"}, "takes more than"),
        ({"what": "lie", "raw": "02000000000000005b5d"}, "its helper process has ended"),
        ({"what": "lie", "raw": "01000000000000007b"}, "its helper process has ended"),
    ],
)
def test_whatever_a_helper_does_is_one_sentence(program: helper.Program, ask: dict, why: str) -> None:
    with pytest.raises(HelperError, match=why) as caught:
        helper.run(quick(program), ask, b"")
    assert "\n" not in str(caught.value)
    assert pid_of(program)


def test_a_helper_that_somebody_kills_is_replaced(program: helper.Program) -> None:
    before = pid_of(program)
    os.kill(before, signal.SIGKILL)
    until(lambda: not is_there(before))
    assert pid_of(program) != before


@catches("there is one helper", "mlxspec.platform.helper:_places", lambda right: threading.Semaphore(1))
def test_a_call_that_burns_holds_nobody_up(program: helper.Program, tmp_path: Path) -> None:
    flag, ended = tmp_path / "flag", threading.Event()
    burns = helper.Program(file=program.file, what="It", seconds=2.0, memory=program.memory, most=0)

    def burn() -> None:
        with pytest.raises(HelperError):
            helper.run(burns, {"what": "burn", "flag": str(flag)}, b"")
        ended.set()

    thread = threading.Thread(target=burn)
    thread.start()
    try:
        until(flag.exists)
        assert pid_of(program)
        assert not ended.is_set()
    finally:
        thread.join(LONG)


def test_more_callers_than_processes_take_turns(program: helper.Program) -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(pid_of(program))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert len(found) == 12
    assert len(set(found)) <= helper.MOST_PROCESSES


@LINUX
def test_a_helper_has_nothing_of_this_process(
    program: helper.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No MLX, no descriptors but its line, no secrets in its variables, no terminal."""
    monkeypatch.setenv("MLXSPEC_API_KEY", "secret")
    with open(program.file) as file:  # noqa: F841  (a descriptor that is open)
        before = pid_of(program)
        os.kill(before, signal.SIGKILL)
        until(lambda: not is_there(before))
        pid = pid_of(program)
    modules = helper.run(program, {"what": "modules"}, b"")[0]["modules"]
    assert not {"mlx", "mlx.core", "numpy", "mlxspec"} & set(modules)
    assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    links = {os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")}
    assert len([link for link in links if link.startswith("socket:")]) == 1
    assert len(links) == 2  # and the null device
    assert os.getsid(pid) == pid
    os.kill(pid, signal.SIGINT)
    assert pid_of(program) == pid


_PARENT = """
import sys, threading
from pathlib import Path
from mlxspec.platform import helper

program = helper.Program(file=Path(sys.argv[1]), what="It", seconds=1.0, memory=64 << 20, most=1 << 20)
print(helper.run(program, {"what": "pid"}, b"")[0]["pid"], flush=True)
if len(sys.argv) > 2:
    helper.run(program, {"what": "burn", "flag": sys.argv[2]}, b"")
threading.Event().wait()
"""


@LINUX
@pytest.mark.parametrize("burns", [False, True])
def test_a_helper_ends_with_its_parent(program: helper.Program, tmp_path: Path, burns: bool) -> None:
    """Killed at once, while the helper waits and while it is inside a call. The script has no guard for its main module."""
    script, flag = tmp_path / "script.py", tmp_path / "flag"
    script.write_text(_PARENT, encoding="utf-8")
    command = [sys.executable, str(script), str(program.file), *([str(flag)] if burns else [])]
    root = str(Path(__file__).resolve().parent.parent)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root}
    ) as parent:
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            if burns:
                until(flag.exists)
            assert is_there(pid)
        finally:
            parent.kill()
    until(lambda: not is_there(pid))


def test_a_fork_has_a_helper_of_its_own(program: helper.Program) -> None:
    script = (
        _PARENT.split("if len")[0]
        + """
import os
child = os.fork()
if not child:
    print(helper.run(program, {"what": "pid"}, b"")[0]["pid"], flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(helper.run(program, {"what": "pid"}, b"")[0]["pid"], flush=True)
"""
    )
    command = [sys.executable, "-c", script, str(program.file)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=True)
    first, forks, again = map(int, found.stdout.split())
    assert first == again != forks
    assert not found.stderr
