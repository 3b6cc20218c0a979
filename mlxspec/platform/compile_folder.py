"""A private folder for the kernels MLX compiles for the CPU.

On Linux `mx.compile` writes C++ below the C library's temporary folder (`$TMPDIR/mlx/VERSION/cpu`), runs g++ there
and loads the result. Under /tmp that path is shared and predictable: whoever makes it first can have code run as us,
and a g++ that was killed leaves a broken library that every later run trips over. So each process compiles in a folder
of its own, which starts with links to everything compiled before, and hands on the libraries it really loaded.
Knows nothing of models and imports no MLX.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from mlxspec.platform import folders

_UNQUOTABLE = set('"$`\\\n')  # MLX puts the path into a shell command between double quotes
_STOCKED = "stocked"  # a file beside the kept libraries
_ABANDONED_SECONDS = 24 * 3600  # since a folder was last entered


class KernelFolder:
    """One process's folder for compiled kernels: made when first entered, removed when the process ends."""

    def __init__(self) -> None:
        self.path: Path | None = None  # this run's folder
        self.notice: str | None = None
        self._mutex = threading.Lock()
        self._depth = self._pid = self._seen = 0
        self._store = Path()
        self._filled: list[Path] = []  # where MLX puts libraries, once it has compiled or found any
        self._asked = False

    def ask(self) -> None:
        """Let this process compile all kernels that it needs. If it ends without a fault, later processes find them."""
        self._asked = True

    def is_stocked(self, version: str) -> bool:
        """Return whether this process compiles for MLX `version`, or an earlier one did and ended without a fault."""
        return self._asked or (_find_store()[0] / "mlx" / version / _STOCKED).is_file()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Compile kernels into the private folder inside the `with` block. Reentrant, shared by threads, a few microseconds.

        Sets TMPDIR in the C library's environment alone: `tempfile` and `os.environ` never see it. A child process started meanwhile with
        the inherited environment does.
        """
        with self._mutex:
            if self._depth == 0:
                os.putenv("TMPDIR", str(self._made()))
            self._depth += 1
        try:
            yield
        finally:
            with self._mutex:
                self._depth -= 1
                if self._depth == 0:
                    _restore_tmpdir()
                    self._hand_on()

    def _made(self) -> Path:
        if self.path is None or self._pid != os.getpid() or not self.path.is_dir():
            import tempfile

            self._store, self.notice = _find_store()
            _sweep(self._store)
            self.path, self._pid = Path(tempfile.mkdtemp(prefix="run-", dir=self._store)), os.getpid()
            _link(self._store.glob("mlx/*/cpu/*.so"), self._store, self.path)
            self._filled = []
            self._seen = self._changes()
            atexit.register(self._close, self._pid, self.path)
        os.utime(self.path)
        return self.path

    def _libraries(self) -> list[Path]:
        return list(self.path.glob("mlx/*/cpu/*.so")) if self.path and self._pid == os.getpid() else []

    def _changes(self) -> int:
        """Return a number that changes when a library is added, without listing the libraries."""
        if not self._filled and self.path is not None:
            self._filled = list(self.path.glob("mlx/*/cpu"))
        return sum(os.stat(folder).st_mtime_ns for folder in self._filled)

    def _hand_on(self) -> None:
        """Keep for later processes the libraries that were compiled since the last call and are mapped by this process, so are known to
        be whole."""
        with contextlib.suppress(OSError):
            if self.path is not None and self._pid == os.getpid() and self._changes() != self._seen:
                maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
                _link((p for p in self._libraries() if str(p) in maps), self.path, self._store)
                self._seen = self._changes()

    def _close(self, pid: int, run: Path) -> None:
        import shutil

        if os.getpid() == pid:
            self._hand_on()
            for version in {path.parts[-3] for path in self._libraries()} if self._asked else ():
                with contextlib.suppress(OSError):
                    (self._store / "mlx" / version / _STOCKED).touch(mode=0o600)
            shutil.rmtree(run, ignore_errors=True)


def compiler() -> str | None:
    """Return the path of the g++ that MLX runs for kernels on the CPU; None where there is none, and off Linux."""
    import shutil

    return shutil.which("g++") if sys.platform.startswith("linux") else None


def _restore_tmpdir() -> None:
    before = os.environ.get("TMPDIR")
    if before is None:
        os.unsetenv("TMPDIR")
    else:
        os.putenv("TMPDIR", before)


def _find_store() -> tuple[Path, str | None]:
    store, notice = folders.private_folder("kernels")
    if not _UNQUOTABLE & set(str(store)):
        return store, notice
    notice = f"MLX cannot compile kernels below {store}, whose name has a character that the shell reads."
    store = folders.temporary_folder().resolve() / "kernels"
    store.mkdir(mode=0o700, exist_ok=True)
    return store, notice


def _sweep(store: Path) -> None:
    """Remove the folders of killed processes: those that no process has entered for a long time."""
    import shutil

    for run in store.glob("run-*"):
        with contextlib.suppress(OSError):
            if time.time() - run.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(run, ignore_errors=True)


def _link(libraries: Iterator[Path], source: Path, target: Path) -> None:
    """Make hard links below `target` to libraries below `source`. One that cannot be linked will be compiled again."""
    for path in libraries:
        link = target / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # FileExistsError: it is there already
            os.link(path, link)
