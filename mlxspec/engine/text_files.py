"""Earlier texts on disk, for the drafter `suffix` of later processes: one file for each text, in a folder of kept_files.py.

    VOCABULARY-OWNER-TIME.safetensors      tokens (n,) int32; TIME: nanoseconds, so that names differ

Vocabularies and owners are named by digests. The engine's thread hands texts over; the thread for files writes them. A write that the disk
refuses costs the texts of the next minute, and no answer; refused texts are counted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlxspec.drafters.text_index import TextIndex
from mlxspec.engine.kept_files import KeptFiles, Stored
from mlxspec.engine.thread import JobThread
from mlxspec.errors import ConfigError
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.platform.folders import wanted_cache_folder

_AT_ONCE = 1 << 18  # tokens that are indexed at once


def texts_folder() -> Path:
    """Return the folder of earlier texts."""
    return wanted_cache_folder() / "texts"


def keep_texts(
    index: TextIndex, disk: int | None, tokenizer: Tokenizer | None, thread: JobThread
) -> TextFiles | None:
    """Fill an index with the texts on disk, write the texts that it learns to disk from now on, and return their files. disk: most bytes
    of the files; None or 0: keep no files and return None. thread: writes the files. Raises ConfigError where files cannot be kept."""
    if not disk:
        return None
    if tokenizer is None:
        raise ConfigError("Without a tokenizer no texts are kept on disk; leave past_texts_disk out.")
    texts = TextFiles(
        KeptFiles(texts_folder(), disk, "The store of earlier texts"), thread, tokenizer.digest[:16]
    )
    texts.fill(index)
    index.keep = texts.append
    return texts


class TextFiles:
    """The files of earlier texts of one vocabulary. digest: the vocabulary's."""

    def __init__(self, files: KeptFiles, thread: JobThread, digest: str) -> None:
        self._files, self._thread, self._digest = files, thread, digest

    @property
    def num_failed(self) -> int:
        """Return the number of texts that could not be written to the disk."""
        return self._files.num_failed

    @property
    def rests(self) -> bool:
        """Return whether texts are not written now because the disk has refused one."""
        return self._files.rests

    def fill(self, index: TextIndex) -> None:
        """Read the latest texts from disk, as many as the index may hold, and add them by owner, the latest last. Called before an
        engine runs."""
        owners: dict[str, list[np.ndarray]] = {}
        left = index.room
        for name, _ in sorted(self._files.found.items(), key=lambda item: -item[1].used):
            vocabulary, _, rest = name.partition("-")
            if vocabulary == self._digest and left > 0 and (text := self._read(name)) is not None:
                owners.setdefault(rest.rpartition("-")[0], []).append(text)
                left -= len(text)
        for owner, texts in reversed(owners.items()):
            self._add(index, owner, texts[::-1])

    def append(self, owner: str, tokens: NDArray[np.int32]) -> None:
        """Queue a text (n,) to be written to a file of its own, and return at once. owner: digest of the text's owner."""
        text = tokens.astype("<i4")
        if len(text):
            self._thread.run(partial(self._write, f"{self._digest}-{owner}-{time.time_ns()}", text))

    def _write(self, name: str, text: np.ndarray) -> None:
        self._files.write(name, {"tokens": Stored("I32", text.shape, [text.view(np.uint8)])}, {})

    def _read(self, name: str) -> np.ndarray | None:
        found: list[np.ndarray] = []

        def take(_: str, tensor: Stored) -> bool:
            found.append(tensor.data.view("<i4").astype(np.int32))
            return True

        return found[0] if self._files.read(name, take) is not None and len(found) == 1 else None

    def _add(self, index: TextIndex, owner: str, texts: Sequence[np.ndarray]) -> None:
        """Add texts to the index, with a border token after each, in pieces that the index takes at once."""
        most = min(_AT_ONCE, index.room // 8)
        waiting: list[np.ndarray] = []
        for text in texts:
            if waiting and sum(map(len, waiting)) + len(text) > most:
                index.add(owner, np.concatenate(waiting))
                waiting = []
            waiting += [text, np.full(1, -1, np.int32)]
        if waiting:
            index.add(owner, np.concatenate(waiting))
        while index.has_work:
            index.work()
