"""Pieces of text with the target's hidden states, in files of a folder that is removed at the end. Bounded in bytes."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import mlx.core as mx

from mlxspec.errors import StorageError
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.qwen3_5 import Qwen35

LENGTH = 256  # tokens of a piece
HELD_OUT = 8  # of so many pieces one is held out
_SPARE = 256 << 20  # bytes of the disk to be left alone


class Batch(NamedTuple):
    """tokens (B, T) int32; hidden (B, T, H) of the target, after its final norm."""

    tokens: mx.array
    hidden: mx.array


class States:
    """Use as a context manager: what was written is removed. most: bytes in all. Raises StorageError where the disk is full."""

    def __init__(self, target: Qwen35, most: int) -> None:
        self._target, self._most = target, most
        self._folder = Path(tempfile.mkdtemp(prefix="mlxspec-adapt-"))
        self.training: list[Path] = []
        self.held_out: list[Path] = []
        self.nbytes = 0

    def __enter__(self) -> States:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, tokens: Sequence[int], *, held_out: bool) -> bool:
        """Read a piece of LENGTH tokens with the target. False where there is no more room."""
        given, rows = mx.array(list(tokens), mx.int32), FlatRows((len(tokens),))
        out = self._target.forward(given, rows, self._target.make_cache(1), certain=True, logits_at="none")
        arrays = {"tokens": given, "hidden": out.hidden}
        mx.eval(arrays)
        size = sum(array.nbytes for array in arrays.values())
        if self.nbytes + size > self._most:
            return False
        files = self.held_out if held_out else self.training
        path = self._folder / f"{len(self.training) + len(self.held_out):06d}.safetensors"
        try:
            if shutil.disk_usage(self._folder).free < size + _SPARE:
                raise StorageError(
                    f"The disk of {self._folder.parent} is full; free some space, or use fewer texts."
                )
            mx.save_safetensors(str(path), arrays)
        except (OSError, RuntimeError) as error:
            raise StorageError(f"Hidden states cannot be written to {self._folder}: {error}.") from error
        files.append(path)
        self.nbytes += size
        return True

    def batches(self, size: int, rng: random.Random) -> Iterator[Batch]:
        """Of `size` training pieces, without end, each piece once before any comes again."""
        while True:
            order = rng.sample(self.training, len(self.training))
            for begin in range(0, len(order) - size + 1, size):
                yield self.read(order[begin : begin + size])

    def batches_held_out(self, size: int) -> list[Batch]:
        return [self.read(self.held_out[i : i + size]) for i in range(0, len(self.held_out), size)]

    def read(self, paths: Iterable[Path]) -> Batch:
        loaded = [mx.load(str(path)) for path in paths]
        return Batch(*(mx.stack([each[name] for each in loaded]) for name in ("tokens", "hidden")))


def pieces_of(texts: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], bool]]:
    """Pieces of LENGTH tokens, and whether each is held out: of every HELD_OUT texts one, or the end of each where there are fewer. Texts
    follow one another without a gap, so a piece may hold the end of one and the beginning of the next."""
    own, held = list[int](), list[int]()
    for i, text in enumerate(texts):
        cut = (
            len(text) - len(text) // HELD_OUT
            if len(texts) < HELD_OUT
            else len(text) * (i % HELD_OUT != HELD_OUT - 1)
        )
        own.extend(text[:cut])
        held.extend(text[cut:])
        for tokens, is_held_out in ((own, False), (held, True)):
            while len(tokens) >= LENGTH:
                yield tokens[:LENGTH], is_held_out
                del tokens[:LENGTH]
