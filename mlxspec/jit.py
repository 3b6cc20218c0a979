"""A private folder for the kernels MLX compiles for the CPU, and whether it can compile them at all.

On Linux `mx.compile` writes C++ below the C library's temporary folder (`$TMPDIR/mlx/VERSION/cpu`), runs g++ and loads the result.
Under /tmp that path is shared and predictable, so whoever makes it first can have code run as us; and a g++ that was killed leaves
a broken library that every later run trips over. So each process compiles in a folder of its own that starts with links to
everything compiled before, and at its end hands on the libraries it really loaded. Knows nothing of models and imports no MLX.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from mlxspec import folders

_UNQUOTABLE = set('"$`\\\n')  # MLX puts the path into a shell command between double quotes


class KernelFolder:
    """One process's folder for compiled kernels. Made at the first `entered()`; removed when the process ends."""

    def __init__(self) -> None:
        self.notice: str | None = None
        self._lock = threading.Lock()
        self._depth = 0
        self._run: Path | None = None
        self._store: Path | None = None
        self._held: IO[bytes] | None = None

    @property
    def path(self) -> Path:
        """This run's folder, created if need be."""
        with self._lock:
            return self._made()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Kernels compiled inside go to the private folder. Reentrant, shared by threads, a few microseconds.

        Sets TMPDIR in the C library's environment alone: `tempfile` and `os.environ` never see it. A child process that another
        thread starts meanwhile with the inherited environment does.
        """
        with self._lock:
            if self._depth == 0:
                os.putenv("TMPDIR", str(self._made()))
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0:
                    before = os.environ.get("TMPDIR")
                    if before is None:
                        os.unsetenv("TMPDIR")
                    else:
                        os.putenv("TMPDIR", before)

    def _made(self) -> Path:
        if self._run is None or not self._run.is_dir():
            store, self.notice = folders.private_folder("kernels")
            if _UNQUOTABLE & set(str(store)):
                self.notice = f"MLX cannot compile kernels below {store}: its name has a character the shell would read."
                store = folders.temporary_folder() / "kernels"
                store.mkdir(mode=0o700, exist_ok=True)
            _sweep(store)
            self._store = store
            self._run = Path(tempfile.mkdtemp(prefix="run-", dir=store))
            self._held = (self._run / "lock").open("wb")
            fcntl.flock(self._held, fcntl.LOCK_EX)
            _link_all(store / "mlx", self._run / "mlx")
            atexit.register(self._close, os.getpid())
        return self._run

    def _close(self, pid: int) -> None:
        if os.getpid() != pid or self._run is None or self._store is None:
            return
        with contextlib.suppress(OSError):
            _hand_on(self._run / "mlx", self._store / "mlx")
        shutil.rmtree(self._run, ignore_errors=True)


def _link_all(source: Path, target: Path) -> None:
    """Hard links in `target` to every library in `source`; what cannot be linked will be compiled again."""
    for path in source.glob("*/cpu/*.so"):
        link = target / path.relative_to(source)
        link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            os.link(path, link)


def _hand_on(source: Path, target: Path) -> None:
    """Link into `target` the libraries below `source` that this process has loaded, and so are known to be whole."""
    loaded = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
            loaded.add(line.rpartition(" ")[2])
    for path in source.glob("*/cpu/*.so"):
        if str(path) in loaded:
            kept = target / path.relative_to(source)
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # FileExistsError: another process was first
                os.link(path, kept)


def _sweep(store: Path) -> None:
    """Remove the folders of processes that ended without doing so: those whose lock nobody holds."""
    for run in store.glob("run-*"):
        with contextlib.suppress(OSError), (run / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(run, ignore_errors=True)


def compiler() -> str | None:
    """The path of the g++ that MLX would run, None if there is none. Asked only on Linux CPU."""
    return shutil.which("g++") if sys.platform.startswith("linux") else None
