"""What only macOS tells or does, on a pretended Mac: memory pressure, sleep, power mode; and what an engine makes of it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
from planting import catches

import mlxspec
from mlxspec.cli import checkup
from mlxspec.config import SamplingParams
from mlxspec.errors import MemoryBudgetError
from mlxspec.platform import macos


class Mac:
    """The functions of the system's libraries that are called. level: of memory pressure; held: assertions against sleep."""

    def __init__(self) -> None:
        self.level = 1
        self.held: set[int] = set()
        self.texts = 0
        self._next = 7
        self.CFStringCreateWithCString = self._text  # has a restype, which a method cannot have

    def sysctlbyname(self, name: bytes, found: Any, size: Any, new: Any, length: Any) -> int:
        assert name == b"kern.memorystatus_vm_pressure_level"
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = self.level
        return 0

    class _Text:
        restype: Any = None

        def __init__(self, mac: Mac) -> None:
            self._mac = mac

        def __call__(self, allocator: None, text: bytes, encoding: Any) -> int:
            assert encoding.value == 0x08000100
            self._mac.texts += 1
            return 1000 + self._mac.texts

    @property
    def _text(self) -> _Text:
        return self._Text(self)

    def CFRelease(self, text: Any) -> None:
        self.texts -= 1

    def IOPMAssertionCreateWithName(self, kind: Any, level: Any, reason: Any, number: Any) -> int:
        assert level.value == 255
        self._next += 1
        self.held.add(self._next)
        ctypes.cast(number, ctypes.POINTER(ctypes.c_uint32))[0] = self._next
        return 0

    def IOPMAssertionRelease(self, number: Any) -> int:
        self.held.remove(number.value)
        return 0


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Mac:
    found = Mac()
    monkeypatch.setattr(macos.sys, "platform", "darwin")
    monkeypatch.setattr(macos, "_library", lambda path: found)
    return found


@pytest.fixture
def engine(mac: Mac) -> Iterator[mlxspec.Engine]:
    with mlxspec.load("demo", dtype="float32") as loaded:
        yield loaded


PROMPT = list(range(5, 45))
PARAMS = SamplingParams(max_tokens=4)


@pytest.mark.parametrize(
    ("level", "said"), [(1, "normal"), (2, "warn"), (4, "critical"), (0, "normal"), (9, "normal")]
)
def test_pressure_is_the_systems_own(level: int, said: str, mac: Mac) -> None:
    mac.level = level
    assert macos.memory_pressure() == said


def test_elsewhere_there_is_no_pressure_and_nothing_to_hold() -> None:
    assert macos.memory_pressure() == "normal"
    awake = macos.Awake()
    awake.hold(True)
    awake.hold(False)


@catches(
    "stores keep what they have",
    "mlxspec.engine.memory:memory_pressure",
    lambda right: lambda: "normal",
)
def test_a_store_gives_back_what_it_holds_at_warn(engine: mlxspec.Engine, mac: Mac) -> None:
    engine.generate(PROMPT, PARAMS)
    assert engine.prefix.tree.nbytes > 0
    mac.level = 2
    engine.generate([1, 2], PARAMS)
    assert engine.prefix.tree.nbytes == 0
    mac.level = 1
    engine.generate(PROMPT, PARAMS)
    assert engine.prefix.tree.nbytes > 0


@catches(
    "rows are taken whatever the system says",
    "mlxspec.engine.memory:memory_pressure",
    lambda right: lambda: "normal",
    errors=(pytest.fail.Exception,),
)
def test_no_new_row_at_critical_and_those_that_are_here_go_on(engine: mlxspec.Engine, mac: Mac) -> None:
    running = engine.submit(PROMPT, PARAMS)
    engine.step()
    waiting = engine.submit([3, 4], PARAMS)
    mac.level = 4
    with pytest.raises(MemoryBudgetError, match="critically short of memory"):
        engine.submit([1, 2], PARAMS)
    order = []
    while engine.num_running or engine.num_waiting:
        assert engine.num_running <= 1  # alone, what was taken before has its turn
        order += [event.request for event in engine.step() if type(event).__name__ == "FinishEvent"]
    assert order == [running.number, waiting.number]


@catches("a Mac may sleep", "mlxspec.platform.macos:Awake.hold", lambda right: lambda self, wanted: None)
def test_a_mac_stays_awake_while_it_answers(engine: mlxspec.Engine, mac: Mac) -> None:
    engine.submit(PROMPT, PARAMS)
    engine.step()
    assert len(mac.held) == 1
    while engine.num_running:
        engine.step()
    assert mac.held == set()
    assert mac.texts == 0
    engine.submit(PROMPT, PARAMS)
    engine.step()
    engine.close()
    assert mac.held == set()


@pytest.mark.parametrize(
    ("says", "low"),
    [
        (" lowpowermode         1\n", True),
        (" lowpowermode         0\n", False),
        (" powermode            1\n", True),
        ("", False),
    ],
)
def test_doctor_names_power_mode_pressure_and_drivers_that_restart_macs(
    says: str, low: bool, mac: Mac, monkeypatch: pytest.MonkeyPatch
) -> None:
    mac.level = 2
    monkeypatch.setattr(macos, "told", lambda *command: says if command[0] == "pmset" else "")
    monkeypatch.setattr(checkup.platform, "mac_ver", lambda: ("26.4.1", ("", "", ""), "arm64"))
    found = {finding.name: finding for look in (checkup._power, checkup._memory) for finding in look()}
    assert (found["power"].status == "note") == low
    assert found["memory pressure"].status == "note"
    assert "mlx #3186" in found["GPU driver"].found
    monkeypatch.setattr(checkup.platform, "mac_ver", lambda: ("27.1", ("", "", ""), "arm64"))
    assert "GPU driver" not in {finding.name for finding in checkup._power()}
