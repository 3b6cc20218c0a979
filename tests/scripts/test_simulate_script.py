"""What cannot be simulated is said in one sentence."""

from __future__ import annotations

import sys

import pytest
import simulate


@pytest.mark.parametrize(
    "words",
    [
        ("--rows", "0"),
        ("--requests", "-3"),
        ("--curves", "M9"),
        ("--workloads", "edit,essay"),
        ("--lengths", "256,many"),
        ("--drafters", "mtp,oracle"),
        ("--fixed", "--rows=4"),
        ("--traces", "nowhere.npz"),
        ("--alone", "--drafters=ngram-simple"),
        ("--like", "dflash=mtp"),
        ("--alone", "--like=mtp"),
        ("--rates", "mtp=94:86"),
        ("--alone", "--rates=mtp=94:96"),
        ("--alone", "--rates=ngram-simple=94"),
        ("--alone", "--rates=mtp=many"),
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
