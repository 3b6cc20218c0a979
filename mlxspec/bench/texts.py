"""Reads the texts that `tune` and `bench` are given, out of files and folders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from mlxspec.errors import ConfigError

_LARGEST = 1 << 24  # bytes of a file; larger ones are data
_HIDDEN = "."


def texts_in(paths: Iterable[Path]) -> Iterator[str]:
    """Read the text of every file among `paths` and in the folders among them, in the order of their names. A file in a folder that is not
    UTF-8, is empty or is larger than 16 MiB is left out. Raises ConfigError for a path that cannot be read or is no text."""
    for path in paths:
        if path.is_dir():
            files = (file for file in sorted(path.rglob("*")) if file.is_file())
            shown = (f for f in files if not any(p.startswith(_HIDDEN) for p in f.relative_to(path).parts))
            yield from filter(None, map(_text, shown))
            continue
        try:
            text = _text(path, is_named=True)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
        if text is None:
            raise ConfigError(f"{path} is no UTF-8 text of up to {_LARGEST >> 20} MiB.")
        yield text


def _text(file: Path, *, is_named: bool = False) -> str | None:
    """Return the text of a file; None where it is no text. Raises OSError for a file that was named itself."""
    try:
        if file.stat().st_size > _LARGEST:
            return None
        data = file.read_bytes()
    except OSError:
        if is_named:
            raise
        return None
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None
