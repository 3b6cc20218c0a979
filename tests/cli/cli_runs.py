"""What a command left behind, and the check that it refused what it should."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Ran(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


def refused(ran: Ran, *words: str) -> str:
    """Check that a command ended with exit code 2 and nothing but one sentence on stderr; returns the sentence."""
    assert ran.code == 2, ran
    assert ran.out == ""
    assert ran.err.startswith("mlxspec: error: ")
    assert ran.err.count("\n") == 1
    assert ran.err.endswith((".\n", "?\n"))
    assert "Traceback" not in ran.err
    for word in words:
        assert word in ran.err, ran.err
    return ran.err
