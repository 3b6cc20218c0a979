"""Names the files (pieces) of a text in the prefix store on disk, and finds those that continue a prompt.

Knows tokens, digests and the index; reads no file. See the package for what blocks and ends are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mlxspec.engine.prefix_disk.folder import PieceEntry, PieceFolder
from mlxspec.engine.prefix_disk.piece import Kind, Label
from mlxspec.engine.prefix_store import TARGET

BLOCK = 256  # tokens
SOURCES = (
    "the sources"  # a part: the target's hiddens that tokens were sampled from; no drafter's name has spaces
)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A piece that a text has: tokens begin to end of a part. digest: of the text up to there."""

    part: str
    kind: Kind
    begin: int
    end: int
    key: str
    parent: str


class PieceNames:
    """What pieces are called. roots: by part, its signature. form: of states, which are not exchanged with those of another form."""

    def __init__(self, roots: Mapping[str, str], *, block: int = BLOCK, form: str = "") -> None:
        self.roots, self.block, self._form = dict(roots), block, form

    def digests(self, tokens: Sequence[int]) -> list[bytes]:
        """Of the beginnings of a text that are whole blocks, the empty one first."""
        data, size = _bytes(tokens), 8 * self.block
        found = [hashlib.sha256().digest()]
        for begin in range(0, len(data) - size + 1, size):
            found.append(hashlib.sha256(found[-1] + data[begin : begin + size]).digest())
        return found

    def of_block(self, part: str, digest: bytes) -> str:
        """digest: behind the block."""
        return _key(self.roots[part], "block", digest)

    def of_end(self, part: str, digest: bytes, rest: Sequence[int]) -> str:
        """digest: behind the last whole block; rest: the tokens behind it."""
        whole = hashlib.sha256(digest + b"end" + _bytes(rest)).digest()
        return _key(self.roots[part], f"end {self._form if part == TARGET else ''}", whole)

    def parent(self, part: str, digests: Sequence[bytes], num_blocks: int) -> str:
        """What pieces behind so many blocks call their parent."""
        return self.of_block(part, digests[num_blocks]) if num_blocks else self.roots[part]

    def blocks(self, part: str, digests: Sequence[bytes], begin: int, end: int) -> Iterator[Stretch]:
        """Those of tokens begin to end, the first one from `begin` on. The last one must be whole."""
        for i in range(begin // self.block, end // self.block):
            yield Stretch(
                part=part,
                kind="block",
                begin=max(begin, i * self.block),
                end=(i + 1) * self.block,
                key=self.of_block(part, digests[i + 1]),
                parent=self.parent(part, digests, i),
            )

    def end(
        self, part: str, tokens: Sequence[int], digests: Sequence[bytes], length: int, begin: int = 0
    ) -> Stretch:
        """The end of the first `length` tokens; its keys and values, or hiddens, begin behind the last whole block and not before
        `begin`."""
        num_blocks = length // self.block
        at = num_blocks * self.block
        return Stretch(
            part=part,
            kind="end",
            begin=max(at, begin),
            end=length,
            key=self.of_end(part, digests[num_blocks], tokens[at:length]),
            parent=self.parent(part, digests, num_blocks),
        )


@dataclass(frozen=True, kw_only=True)
class PartPlan:
    """The pieces of one part for its first `length` tokens: whole blocks, then its end, if there is one."""

    length: int
    blocks: tuple[str, ...]
    end: str | None

    @property
    def keys(self) -> list[str]:
        return [*self.blocks, *([] if self.end is None else [self.end])]


@dataclass(frozen=True, kw_only=True)
class PrefixPlan:
    """Pieces from which a text's first `length` tokens can be restored. sources: pieces with the hiddens of tokens `heard` to `length`.
    nbytes: of all their files."""

    length: int
    parts: Mapping[str, PartPlan]
    sources: tuple[str, ...]
    heard: int
    nbytes: int

    @property
    def keys(self) -> list[str]:
        return [key for part in self.parts.values() for key in part.keys] + list(self.sources)


class Planner:
    """Finds plans in a folder. hearing: drafters that need the hiddens of every token; a state behind which one of them could not begin is
    not used."""

    def __init__(self, folder: PieceFolder, names: PieceNames, hearing: Collection[str] = ()) -> None:
        self._folder, self._names, self._hearing = folder, names, tuple(hearing)

    def longest(self, tokens: Sequence[int], behind: int = 0) -> PrefixPlan | None:
        """For the longest beginning of `tokens` that has more than `behind` of them."""
        digests = self._names.digests(tokens)
        for length in self._lengths(TARGET, tokens, digests):
            if length <= behind:
                return None
            plan = self._plan(tokens, digests, length)
            if plan is not None:
                return plan
        return None

    def depth(self, tokens: Sequence[int]) -> int:
        """Tokens of the longest beginning that has an end of the target."""
        return next(self._lengths(TARGET, tokens, self._names.digests(tokens)), 0)

    def _lengths(self, part: str, tokens: Sequence[int], digests: Sequence[bytes]) -> Iterator[int]:
        """Lengths at which the part has an end, with all blocks before it, the longest first."""
        for num_blocks in range(len(self._present(part, digests, len(tokens))), -1, -1):
            at = num_blocks * self._names.block
            for entry in self._folder.ends(self._names.parent(part, digests, num_blocks)):
                length = entry.label.length
                if at <= length <= len(tokens):
                    key = self._names.of_end(part, digests[num_blocks], tokens[at:length])
                    if key == entry.label.key:
                        yield length

    def _present(self, part: str, digests: Sequence[bytes], length: int) -> list[PieceEntry]:
        """The part's whole blocks from the beginning on, without a gap."""
        found: list[PieceEntry] = []
        for stretch in self._names.blocks(part, digests, 0, length):
            entry = self._folder.get(stretch.key)
            if entry is None or entry.label.num_tokens != self._names.block:
                break
            found.append(entry)
        return found

    def _plan(self, tokens: Sequence[int], digests: Sequence[bytes], length: int) -> PrefixPlan | None:
        parts = {}
        for part in self._names.roots:
            found = None if part == SOURCES else self._part(part, tokens[:length], digests)
            if found is not None:
                parts[part] = found
        if TARGET not in parts or parts[TARGET].length != length:
            return None
        heard = min((parts[n].length if n in parts else 0 for n in self._hearing), default=length)
        sources = self._sources(tokens, digests, heard, length)
        if sources is None:
            return None
        keys = [key for part in parts.values() for key in part.keys] + sources
        entries = [self._folder.get(key) for key in keys]
        if any(e is None for e in entries):
            return None
        nbytes = sum(e.size for e in entries if e is not None)
        return PrefixPlan(length=length, parts=parts, sources=tuple(sources), heard=heard, nbytes=nbytes)

    def _part(self, part: str, tokens: Sequence[int], digests: Sequence[bytes]) -> PartPlan | None:
        """The longest beginning of these tokens that the part has."""
        blocks = self._present(part, digests, len(tokens))
        keys, size = [e.label.key for e in blocks], self._names.block
        length = next(self._lengths(part, tokens, digests), 0)
        if blocks and blocks[-1].label.is_cuttable and len(blocks) * size > length:
            return PartPlan(length=len(blocks) * size, blocks=tuple(keys), end=None)
        if not length:
            return None
        num_blocks = length // size
        end = self._names.of_end(part, digests[num_blocks], tokens[num_blocks * size : length])
        return PartPlan(length=length, blocks=tuple(keys[:num_blocks]), end=end)

    def _sources(
        self, tokens: Sequence[int], digests: Sequence[bytes], begin: int, end: int
    ) -> list[str] | None:
        """Pieces with the hiddens of tokens begin to end; None where they are not all there."""
        if begin >= end:
            return []
        stretches = list(self._names.blocks(SOURCES, digests, begin, end))
        if end % self._names.block:
            stretches.append(self._names.end(SOURCES, tokens, digests, end, begin))
        for stretch in stretches:
            entry = self._folder.get(stretch.key)
            if entry is None or entry.label.num_tokens < stretch.end - stretch.begin:
                return None
        return [stretch.key for stretch in stretches]


def label_of(stretch: Stretch, *, model: str, is_cuttable: bool) -> Label:
    """What a piece for a stretch says of itself."""
    return Label(
        key=stretch.key,
        parent=stretch.parent,
        kind=stretch.kind,
        model=model,
        part=stretch.part,
        length=stretch.end,
        num_tokens=stretch.end - stretch.begin,
        is_cuttable=is_cuttable,
    )


def _key(root: str, kind: str, digest: bytes) -> str:
    return hashlib.sha256(f"{root} {kind} ".encode() + digest).hexdigest()


def _bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int64).tobytes()
