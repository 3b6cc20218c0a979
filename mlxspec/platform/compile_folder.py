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
import fcntl
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from mlxspec.platform import folders

_UNQUOTABLE = set('"$`\\\n')  # MLX puts the path into a shell command between double quotes
_LOCK = "lock"
_STOCKED = "stocked"  # a file beside the kept libraries
_ABANDONED_SECONDS = 24 * 3600


class KernelFolder:
    """One process's folder for compiled kernels: made when first entered, removed when the process ends."""

    def __init__(self) -> None:
        self.notice: str | None = None
        self._mutex = threading.Lock()
        self._depth = 0
        self._pid = 0
        self._run: Path | None = None
        self._store = Path()
        self._lock_fd = -1  # open, and so locked, for as long as the process lives
        self._seen = 0
        self._asked = False
        self._filled: list[
            Path
        ] = []  # where MLX puts libraries: one folder, once it has compiled or found any

    @property
    def path(self) -> Path | None:
        """This run's folder, None before it was first entered."""
        return self._run

    @property
    def is_compiling(self) -> bool:
        """Whether g++ works for this process: MLX writes a kernel's source, and g++ the library."""
        if self._run is None or self._pid != os.getpid():
            return False
        with contextlib.suppress(OSError):
            sources = self._run.glob("mlx/*/cpu/*.cpp")
            return any(not (s.parent / f"lib{s.stem}.so").exists() for s in sources)
        return False

    def ask(self) -> None:
        """This process compiles whatever it needs; if it ends in peace, later ones find it."""
        self._asked = True

    def is_stocked(self, version: str) -> bool:
        """Whether this process was asked to compile for MLX `version`, or an earlier one was and came to its end."""
        return self._asked or (_find_store()[0] / "mlx" / version / _STOCKED).is_file()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Kernels compiled inside go to the private folder. Reentrant, shared by threads, a few microseconds.

        Sets TMPDIR in the C library's environment alone: `tempfile` and `os.environ` never see it. A child process
        started meanwhile with the inherited environment does.
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
        if self._run is None or self._pid != os.getpid() or not self._run.is_dir():
            self._store, self.notice = _find_store()
            _sweep(self._store)
            self._run, self._lock_fd = _make_run(self._store)
            self._pid = os.getpid()
            _link_all(self._store / "mlx", self._run / "mlx")
            self._filled = []
            self._seen = self._changes()
            atexit.register(self._close, self._pid, self._run)
        return self._run

    def _hand_on(self) -> None:
        """Keep for later runs what was compiled since the last time."""
        if self._run is None or self._pid != os.getpid():
            return
        with contextlib.suppress(OSError):
            changes = self._changes()
            if changes != self._seen:
                _keep_loaded(self._run / "mlx", self._store / "mlx")
                self._seen = changes

    def _changes(self) -> int:
        """A number that changes when a library is added. Raises OSError if the folder was taken away."""
        if not self._filled and self._run is not None:
            self._filled = list(self._run.glob("mlx/*/cpu"))
        return sum(os.stat(folder).st_mtime_ns for folder in self._filled)

    def _close(self, pid: int, run: Path) -> None:
        import shutil

        if os.getpid() == pid:
            self._hand_on()
            if self._asked:
                self._mark()
            shutil.rmtree(run, ignore_errors=True)

    def _mark(self) -> None:
        for folder in self._filled:
            with contextlib.suppress(OSError):
                (self._store / "mlx" / folder.parent.name / _STOCKED).touch(mode=0o600)


def compiler() -> str | None:
    """The g++ that MLX runs for kernels on the CPU; None where there is none, and off Linux."""
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


def _make_run(store: Path) -> tuple[Path, int]:
    """A new folder and the descriptor of the lock that says its process lives."""
    import tempfile

    while True:
        run = Path(tempfile.mkdtemp(prefix="run-", dir=store))
        held = os.open(run / _LOCK, os.O_CREAT | os.O_WRONLY, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks also keeps others from sweeping
            fcntl.flock(held, fcntl.LOCK_EX)
        if (run / _LOCK).exists():  # else another process swept it before it was locked
            return run, held
        os.close(held)


def _sweep(store: Path) -> None:
    """Remove the folders of processes that were killed: those whose lock nobody holds."""
    import shutil

    for run in store.glob("run-*"):
        with contextlib.suppress(OSError):
            try:
                with (run / _LOCK).open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(run, ignore_errors=True)
            except FileNotFoundError:  # just being made, or its maker was killed that very moment
                if time.time() - run.lstat().st_mtime > _ABANDONED_SECONDS:
                    shutil.rmtree(run, ignore_errors=True)


def _link_all(source: Path, target: Path) -> None:
    """Hard links in `target` to every library in `source`; what cannot be linked will be compiled again."""
    for path in source.glob("*/cpu/*.so"):
        link = target / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            os.link(path, link)


def _keep_loaded(source: Path, target: Path) -> None:
    """Link into `target` the libraries below `source` that this process has mapped, so are known to be whole."""
    lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    mapped = {fields[5] for line in lines if len(fields := line.split(None, 5)) == 6}
    for path in source.glob("*/cpu/*.so"):
        if str(path) in mapped:
            kept = target / path.relative_to(source)
            kept.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # FileExistsError: it is there already
                os.link(path, kept)
