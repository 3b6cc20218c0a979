"""scripts/_env.sh: which Python it takes, on a pretended Mac as well."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = Path("/usr/bin/python3")


def found(folder: Path, *, has_tools: bool) -> str:
    """Return the Python that _env.sh finds with /usr/bin first on the path of a pretended Mac. The system's Python is a stand-in that
    writes a file when it is run, as the real one opens a dialog."""
    stubs = {
        "uname": '[ "$1" = -s ] && echo Darwin || echo arm64',
        "xcode-select": f"exit {0 if has_tools else 2}",
    }
    for name, text in stubs.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    script = f'. {ROOT}/scripts/_env.sh; python_fits() {{ printf "%s\\n" "$1" >>{folder}/ran; [ "$1" != none ]; }}; find_python'
    ran = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": f"{folder}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.strip()


@pytest.mark.skipif(not SYSTEM.exists(), reason="there is no /usr/bin/python3")
def test_a_macs_stand_in_for_python_is_never_run(tmp_path: Path) -> None:
    assert found(tmp_path, has_tools=False) != str(SYSTEM)
    ran = (tmp_path / "ran").read_text().split() if (tmp_path / "ran").exists() else []
    assert str(SYSTEM) not in ran
    assert found(tmp_path, has_tools=True) == str(SYSTEM)
