"""What cannot be simulated is said in one sentence."""

from __future__ import annotations

import sys

import pytest
import simulate


@pytest.mark.parametrize(
    "words",
    [
        ("--rows", "0"),
        ("--count", "-3"),
        ("--curves", "M9"),
        ("--starts", "lukewarm"),
        ("--lengths", "256,many"),
        ("--temperatures", "warm"),
        ("--traces", "nowhere.npz"),
    ],
)
def test_bad_options(
    words: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate.py", *words])
    with pytest.raises(SystemExit) as stopped:
        simulate.main()
    assert stopped.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert words[0] in last or words[1] in last
