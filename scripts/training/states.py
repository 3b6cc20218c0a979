"""Pieces of text with the target's hidden states, in files of a folder that is removed at the end. Bounded in bytes."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

import mlx.core as mx
import numpy as np

from mlxspec.errors import StorageError
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.registry import Trunk

LENGTH = 256  # tokens of a piece
HELD_OUT = 16  # of so many texts one is held out to choose a head by, and one to report on
_WINDOW, _COPIED = (
    24,
    0.5,
)  # tokens; a held-out piece is a copy if this share of its windows stands in training texts, too
_SPARE = 256 << 20  # bytes of the disk to be left alone
Use = Literal["training", "choosing", "reporting"]


class Batch(NamedTuple):
    """tokens (B, T) int32; hidden (B, T, H) of the target, after its final norm; streams (B, T, layers * H): its residual streams behind
    the layers that the drafter reads; mass (B, T) float32: log of the sum of exp of its logits over all tokens, with which those of a few
    tokens are probabilities. Both are None where the drafter reads no streams."""

    tokens: mx.array
    hidden: mx.array
    streams: mx.array | None = None
    mass: mx.array | None = None

    @classmethod
    def of(cls, target: Trunk, layers: Sequence[int], tokens: Sequence[Sequence[int]]) -> Batch:
        """Of texts of one length, each read by itself. layers: that the drafter reads."""
        rows = FlatRows(tuple(map(len, tokens)))
        given = mx.array(tokens, mx.int32)
        cache = target.make_cache(len(tokens))
        out = target.forward(given.reshape(-1), rows, cache, certain=True, logits_at="none", taps=layers)
        found = [out.hidden, *([mx.concatenate([out.taps[i] for i in layers], axis=-1)] if layers else [])]
        made = cls(given, *(x.reshape(*given.shape, -1) for x in found))
        if not layers:
            return made
        masses = [mx.logsumexp(target.head(x).astype(mx.float32), axis=-1) for x in mx.split(out.hidden, 4)]
        return made._replace(mass=mx.concatenate(masses).reshape(given.shape))


class States:
    """Use as a context manager: what was written is removed, and what killed processes have left. layers: of the target, that the drafter
    reads. most: bytes in all. Raises StorageError where the disk is full."""

    def __init__(self, target: Trunk, layers: Sequence[int], most: int) -> None:
        self._target, self._layers, self._most = target, layers, most
        _sweep()
        made = Path(tempfile.mkdtemp(prefix="mlxspec-begun-"))
        self._held = _hold(made)
        self._folder = made.rename(made.with_name(made.name.replace("begun", "adapt")))
        self.training: list[Path] = []
        self.choosing: list[Path] = []
        self.reporting: list[Path] = []
        self.nbytes = 0

    def __enter__(self) -> States:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._held is not None:
            os.close(self._held)

    def add(self, tokens: Sequence[int], use: Use = "training") -> bool:
        """Read a piece of LENGTH tokens with the target. False where there is no more room."""
        batch = Batch.of(self._target, self._layers, [list(tokens)])
        arrays = {name: x[0] for name, x in batch._asdict().items() if x is not None}
        mx.eval(arrays)
        size = sum(array.nbytes for array in arrays.values())
        if self.nbytes + size > self._most:
            return False
        num = len(self.training) + len(self.choosing) + len(self.reporting)
        path = self._folder / f"{num:06d}.safetensors"
        write(path, arrays)
        self.files(use).append(path)
        self.nbytes += size
        return True

    def pieces(self, size: int, rng: random.Random) -> Iterator[list[Path]]:
        """`size` training pieces at a time, without end, each piece once before any comes again."""
        while True:
            order = rng.sample(self.training, len(self.training))
            for begin in range(0, len(order) - size + 1, size):
                yield order[begin : begin + size]

    def files(self, use: Use) -> list[Path]:
        return {"training": self.training, "choosing": self.choosing, "reporting": self.reporting}[use]

    def batches(self, use: Use, size: int) -> list[Batch]:
        files = self.files(use)
        return [self.read(files[i : i + size]) for i in range(0, len(files), size)]

    def read(self, paths: Iterable[Path]) -> Batch:
        loaded = [mx.load(str(path)) for path in paths]
        return Batch(**{name: mx.stack([each[name] for each in loaded]) for name in loaded[0]})


def _hold(folder: Path) -> int | None:
    """Hold a folder of this user's until the handle is closed or the process ends. None where somebody holds it."""
    handle = None
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if os.fstat(handle).st_uid == os.getuid():
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
    except OSError:
        pass
    if handle is not None:
        os.close(handle)
    return None


def _sweep() -> None:
    """Remove the folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob("mlxspec-adapt-*"):
        handle = _hold(folder)
        if handle is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)


def write(path: Path, arrays: dict[str, mx.array]) -> None:
    """Raises StorageError, where the disk is full before anything is written."""
    folder = path.parent
    try:
        if shutil.disk_usage(folder).free < sum(x.nbytes for x in arrays.values()) + _SPARE:
            raise StorageError(f"The disk of {folder.parent} is full; free some space, or use fewer texts.")
        mx.save_safetensors(str(path), arrays)
    except (OSError, RuntimeError) as error:
        raise StorageError(f"Hidden states cannot be written to {folder}: {error}.") from error


class Piece(NamedTuple):
    """LENGTH tokens, and what they are used for."""

    tokens: list[int]
    use: Use


def pieces_of(texts: Sequence[Sequence[int]]) -> list[Piece]:
    """Cut texts into pieces. Of every HELD_OUT texts one is for choosing and one for reporting; where there are fewer than twice as many,
    such shares of each text's end are. Texts of one use follow one another without a gap. A text that is given twice counts once, and
    held-out pieces that are copies of other texts are left out: they would show what was learned by heart."""
    texts = list(dict.fromkeys(map(tuple, texts)))
    by_use: dict[Use, list[int]] = {"training": [], "choosing": [], "reporting": []}
    for i, text in enumerate(texts):
        if len(texts) >= 2 * HELD_OUT:
            by_use[{0: "choosing", HELD_OUT - 1: "reporting"}.get(i % HELD_OUT, "training")].extend(text)
            continue
        share = len(text) // HELD_OUT
        cuts = 0, len(text) - 2 * share, len(text) - share, len(text)
        for tokens, begin, end in zip(by_use.values(), cuts, cuts[1:], strict=False):
            tokens.extend(text[begin:end])
    found, seen = list[Piece](), np.zeros(0, np.uint64)
    for use, tokens in by_use.items():
        found += [
            Piece(piece, use)
            for piece in cut(tokens)
            if use == "training" or np.isin(_windows(piece), seen).mean() < _COPIED
        ]
        seen = np.union1d(seen, _windows(tokens))
    return found


def cut(tokens: Sequence[int]) -> list[list[int]]:
    """Pieces of LENGTH tokens; what is left at the end is dropped."""
    return [list(tokens[i : i + LENGTH]) for i in range(0, len(tokens) - LENGTH + 1, LENGTH)]


def _windows(tokens: Sequence[int]) -> np.ndarray:
    """A hash of each _WINDOW tokens in a row, uint64."""
    given, num = np.array(tokens, np.uint64), max(0, len(tokens) - _WINDOW + 1)
    hashes = np.zeros(num, np.uint64)
    for i in range(_WINDOW):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + given[i : i + num] + np.uint64(1)
    return hashes
