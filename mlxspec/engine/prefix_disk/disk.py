"""The engine's side of the prefix store on disk: chooses the texts that are written, copies them in slices between rounds, and fetches
what continues a prompt.

All of it runs in the engine's thread; files are the mover's. See the package for the invariants.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence

import mlx.core as mx

from mlxspec.cache.model_cache import ModelCache, Snapshot
from mlxspec.engine.prefix_disk.mover import DiskStats, Mover, Reading
from mlxspec.engine.prefix_disk.piece import Label, Stored
from mlxspec.engine.prefix_disk.plan import SOURCES, PieceNames, Planner, PrefixPlan, Stretch, label_of
from mlxspec.engine.prefix_store import TARGET, Hit, PrefixStore
from mlxspec.platform import host

SLICE = 16 << 20  # bytes that are copied at once
BUSY_SHARE = 50  # while rows decode, one part of so many of the time goes into copying
TEXTS_AT_MOST = 64  # that wait to be written
_HIDDEN = "hidden"
_HALF, _SCALE = ".half", ".scale"
_NAMES: dict[mx.Dtype, str] = {
    mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8", mx.uint16: "U16", mx.int16: "I16", mx.float16: "F16", mx.bfloat16: "BF16",
    mx.uint32: "U32", mx.int32: "I32", mx.float32: "F32", mx.uint64: "U64", mx.int64: "I64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_log = logging.getLogger("mlxspec")


class _Open:
    """A piece of which some arrays have been copied to the host. left: names and arrays, lazy."""

    def __init__(self, label: Label, left: list[tuple[str, mx.array]]) -> None:
        self.label, self.left = label, deque(left)
        self.done: dict[str, Stored] = {}


class Fetch:
    """A text's pieces on their way from the disk. length: tokens that will be known. nbytes: of the files."""

    def __init__(self, plan: PrefixPlan, reading: Reading) -> None:
        self.length, self.nbytes = plan.length, plan.nbytes
        self._plan, self._reading = plan, reading
        self._found: dict[str, tuple[Label, dict[str, mx.array]]] = {}
        self.started = time.perf_counter()

    @property
    def has_failed(self) -> bool:
        return self._reading.has_failed

    @property
    def is_done(self) -> bool:
        return len(self._found) == len(self._plan.keys)

    def take(self, most: int) -> None:
        """Turn what has come into arrays, `most` bytes or one piece."""
        taken = 0
        while taken < most and (piece := self._reading.take()) is not None:
            label, tensors = piece
            arrays = {
                name: host.from_bytes(s.data, _DTYPES[s.dtype], s.shape)
                for name, s in tensors.items()
                if s.dtype in _DTYPES
            }
            self._found[label.key] = label, arrays
            taken += sum(len(s.data) for s in tensors.values())

    def wait(self, seconds: float) -> None:
        """Until there is something to take."""
        self._reading.wait(seconds)

    def cancel(self) -> None:
        self._reading.cancel()
        self._found.clear()

    def hit(self) -> Hit | None:
        """What the pieces hold; None where they are not what was asked for."""
        try:
            return self._hit()
        except (KeyError, ValueError, IndexError):
            return None

    def _hit(self) -> Hit:
        parts = {name: self._snapshot(name) for name in self._plan.parts}
        end = self._plan.parts[TARGET].end
        if end is None:
            raise ValueError("the target has no end")
        return Hit(self.length, parts, self._found[end][1][_HIDDEN], self._sources())

    def _sources(self) -> list[mx.array | None]:
        """Cut where a part ends, for the drafter that goes on from there."""
        plan = self._plan
        if not plan.sources:
            return []
        whole = mx.concatenate([self._layers(self._found[key][1])[0][0] for key in plan.sources])
        whole = whole[len(whole) - (plan.length - plan.heard) :]
        inner = {part.length for part in plan.parts.values() if plan.heard < part.length < plan.length}
        places = [plan.heard, *sorted(inner), plan.length]
        return [whole[a - plan.heard : b - plan.heard] for a, b in zip(places, places[1:], strict=False)]

    def _snapshot(self, part: str) -> Snapshot:
        plan = self._plan.parts[part]
        segments, point = [], []
        for key in plan.keys:
            label, arrays = self._found[key]
            if label.key != key or label.part != part:
                raise ValueError("a piece of another part")
            if label.num_tokens:
                segments.append([tuple(kv) for kv in self._layers(arrays)])
        if plan.end is not None:
            point = _points(self._found[plan.end][1])
        return Snapshot(plan.length, segments, point)

    @staticmethod
    def _layers(arrays: Mapping[str, mx.array]) -> list[list[mx.array]]:
        return _numbered(arrays, "t")


class PrefixDisk:
    """Attributes: stats, limit, reserve (bytes of host memory that writing takes at most)."""

    def __init__(
        self,
        mover: Mover,
        names: PieceNames,
        *,
        model: str,
        hearing: Sequence[str] = (),
        near: int = 1,
        halves: Sequence[bool] = (),
        largest: int = 0,
    ) -> None:
        """model: for people. hearing: drafters that need the hiddens of every token. near: tokens; a state that saves less reading is
        neither written nor read. halves: by state of the target, whether its first array is kept in half of its bytes. largest:
        bytes of the largest piece."""
        self._mover, self._names, self._model = mover, names, model
        self._hearing, self._halves, self.near = tuple(hearing), tuple(halves), near
        self._planner = Planner(mover.folder, names, hearing)
        self.reserve = 2 * largest
        self._texts: deque[tuple[int, ...]] = deque()
        self._text: tuple[int, ...] = ()
        self._left: deque[Stretch] = deque()  # of `_text`
        self._open: _Open | None = None
        self._failures = 0
        self._rests_until = 0.0
        self._has_said: set[str] = set()

    @property
    def stats(self) -> DiskStats:
        return self._mover.stats

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return self._mover.folder.nbytes

    @property
    def path(self) -> str:
        return str(self._mover.folder.path)

    @property
    def names(self) -> PieceNames:
        return self._names

    # --- reading

    def fetch(self, tokens: Sequence[int], known: int, room: int) -> Fetch | None:
        """Begin to read the longest beginning of `tokens` that is worth reading where `known` of them are known. room: bytes that there
        are for it."""
        plan = self._planner.longest(tokens, known + self.near - 1)
        if plan is None or plan.nbytes > room:
            return None
        return Fetch(plan, self._mover.read(plan.keys))

    # --- writing

    def offer(self, tokens: Sequence[int]) -> None:
        """The state behind these tokens is to be on disk. Its pieces count as used."""
        self._texts.append(tuple(tokens))
        if len(self._texts) > TEXTS_AT_MOST:
            self._texts.popleft()
            self._lose("waited too long to be written")

    @property
    def has_work(self) -> bool:
        """Whether anything waits to be written, or is being written. Not while the disk refuses."""
        has_more = bool(self._texts or self._left or self._open)
        return (has_more or not self._mover.is_idle) and not self._mover.rests

    @property
    def can_work(self) -> bool:
        """Whether `work` would do anything now."""
        has_more = bool(self._texts or self._left or self._open)
        return has_more and not self._mover.is_full and not self._mover.rests

    def work(self, store: PrefixStore, *, is_busy: bool) -> None:
        """Copy a slice of what waits, if it is time for one. is_busy: rows decode."""
        if not self.can_work or (is_busy and time.perf_counter() < self._rests_until):
            return
        started = time.perf_counter()
        self._copy_safely(store)
        ended = time.perf_counter()
        self._rests_until = ended + (BUSY_SHARE - 1) * (ended - started)

    def flush(self, store: PrefixStore, seconds: float) -> bool:
        """Write all that waits, for so long at most. Returns whether it is all on disk."""
        until = time.monotonic() + seconds
        while self.has_work and time.monotonic() < until:
            if self.can_work:
                self._copy_safely(store)
            else:
                time.sleep(0.001)
        return not self.has_work

    def close(self, store: PrefixStore, seconds: float) -> None:
        """Write what can be written in this time, and end."""
        until = time.monotonic() + seconds
        if not self.flush(store, seconds / 2) and not self._mover.rests:
            num = len(self._texts) + bool(self._left or self._open)
            _log.warning("The prefix store on disk ends with %d texts that were not written.", num)
        self._texts.clear()
        self._left.clear()
        self._open = None
        self._mover.close(max(0.0, until - time.monotonic()))

    def _copy_safely(self, store: PrefixStore) -> None:
        """What goes wrong costs the text, and no row."""
        try:
            self._copy(store)
        except Exception as error:
            self._left.clear()
            self._open = None
            self._lose(f"could not be copied ({type(error).__name__}: {error})")

    def _copy(self, store: PrefixStore) -> None:
        size = 0
        while size < SLICE:
            if self._failures != self.stats.num_failed:  # no end may follow a piece that is not there
                self._failures = self.stats.num_failed
                self._left.clear()
                self._open = None
                self._lose("could not be written")
                return
            if self._open is None:
                if self._mover.is_full or not self._begin(store):
                    return
                continue
            name, array = self._open.left.popleft()
            data = host.raw_bytes(array)
            self._open.done[name] = Stored(_NAMES[array.dtype], tuple(array.shape), data)
            size += len(data)
            if not self._open.left:
                self._mover.write(self._open.label, self._open.done)
                self._open = None

    def _begin(self, store: PrefixStore) -> bool:
        """Open the next piece. False where there is none."""
        while not self._left:
            if not self._texts:
                return False
            self._text = self._texts.popleft()
            self._left = self._stretches(store)
        stretch = self._left.popleft()
        hit = store.peek(self._text)
        if hit is None:
            self._left.clear()
            self._lose("left memory before they were written")
            return bool(self._texts)
        arrays = self._arrays(hit, stretch)
        is_cuttable = stretch.part != SOURCES and not any(hit.parts[stretch.part].point)
        label = label_of(stretch, model=self._model, is_cuttable=is_cuttable)
        self._open = _Open(label, arrays)
        return True

    def _stretches(self, store: PrefixStore) -> deque[Stretch]:
        """Of the text, what is not on disk: the target's end last."""
        tokens, names, folder = self._text, self._names, self._mover.folder
        hit = store.peek(tokens)
        if hit is None:
            if self._planner.depth(tokens) < len(tokens):
                self._lose("left memory before they were written")
            return deque()
        digests = names.digests(tokens)
        wanted, ends = [], []
        for part in names.roots:
            if part in hit.parts:
                length = hit.parts[part].length
                wanted += list(names.blocks(part, digests, 0, length))
                ends.append(names.end(part, tokens, digests, length))
        heard = self._heard(hit)
        if heard < len(tokens):
            wanted += list(names.blocks(SOURCES, digests, heard, len(tokens)))
            if len(tokens) % names.block:
                wanted.append(names.end(SOURCES, tokens, digests, len(tokens), heard))
            if hit.sources_from(heard) is None:
                return deque()  # nobody could continue from it
        (own,) = (e for e in ends if e.part == TARGET)
        wanted += [e for e in ends if e.part != TARGET]
        lacking = [s for s in wanted if not self._is_there(s)]
        known = [s.key for s in (*wanted, own) if folder.get(s.key) is not None]
        self._mover.use(known)
        if not self._is_there(own):
            if len(tokens) - self._planner.depth(tokens) < self.near:
                return deque()
            lacking.append(own)
        if not lacking:
            return deque()
        if folder.limit is not None and sum(s.nbytes for s in hit.parts.values()) > folder.limit:
            self._say(
                "A text is larger than the prefix store on disk may be (--prefix-disk); it was not written."
            )
            return deque()
        return deque(lacking)

    def _heard(self, hit: Hit) -> int:
        """How many of the first tokens every drafter that hears hiddens has a state for."""
        return min((hit.parts[n].length if n in hit.parts else 0 for n in self._hearing), default=hit.length)

    def _is_there(self, stretch: Stretch) -> bool:
        entry = self._mover.folder.get(stretch.key)
        return entry is not None and entry.label.num_tokens >= stretch.end - stretch.begin

    def _arrays(self, hit: Hit, stretch: Stretch) -> list[tuple[str, mx.array]]:
        """What goes into a piece, by name; lazy."""
        begin, end, part = stretch.begin, stretch.end, stretch.part
        if part == SOURCES:
            heard = self._heard(hit)
            sources = hit.sources_from(heard)
            if sources is None:
                raise RuntimeError("hiddens that were there are not")
            return [("t.0.0", sources[begin - heard : end - heard])]
        snapshot = hit.parts[part]
        found = []
        if end > begin:
            for i, pieces in enumerate(zip(*_cut(snapshot, begin, end), strict=True)):
                for j, arrays in enumerate(zip(*pieces, strict=True)):
                    found.append(
                        (f"t.{i}.{j}", arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=2))
                    )
        if stretch.kind == "end":
            for i, state in enumerate(snapshot.point):
                for j, array in enumerate(state):
                    is_half = part == TARGET and j == 0 and i < len(self._halves) and self._halves[i]
                    found += _halved(f"p.{i}.{j}", array) if is_half else [(f"p.{i}.{j}", array)]
            if part == TARGET:
                found.append((_HIDDEN, hit.hidden))
        return found or [("empty", mx.zeros((1,), mx.uint8))]

    def _lose(self, why: str) -> None:
        self.stats.num_lost += 1
        self._say(f"Texts for the prefix store on disk {why}; metrics count them.")

    def _say(self, sentence: str) -> None:
        """Once."""
        if sentence not in self._has_said:
            self._has_said.add(sentence)
            _log.warning(sentence)


def states_of(cache: ModelCache) -> list[bool]:
    """By state of a snapshot, whether it is a recurrent one. `cache` needs no rows."""
    return [layer.is_recurrent for layer in cache.layers if not layer.is_per_token]


def _cut(snapshot: Snapshot, begin: int, end: int) -> list[list[tuple[mx.array, ...]]]:
    """The parts of the segments that hold the tokens [begin, end)."""
    found, at = [], snapshot.start
    for segment in snapshot.segments:
        size = segment[0][0].shape[2] if segment else end - at
        low, high = max(begin, at), min(end, at + size)
        if low < high:
            found.append([tuple(x[:, :, low - at : high - at] for x in kv) for kv in segment])
        at += size
    return found


def _halved(name: str, x: mx.array) -> list[tuple[str, mx.array]]:
    """A float32 state as 16-bit integers with a scale for each row; as it is where a number in it is not finite."""
    most = mx.max(mx.abs(x), axis=-1, keepdims=True)
    if not mx.all(mx.isfinite(most)).item():
        return [(name, x)]
    scale = mx.where(most > 0, most / 32767, 1.0)
    return [(name + _HALF, mx.round(x / scale).astype(mx.int16)), (name + _SCALE, scale)]


def _numbered(arrays: Mapping[str, mx.array], letter: str) -> list[list[mx.array]]:
    """`t.0.0`, `t.0.1`, `t.1.0` ... as lists. Raises KeyError where a number is left out."""
    names = [n.split(".") for n in arrays if n.startswith(letter + ".") and not n.endswith(_SCALE)]
    shape: dict[int, int] = {}
    for _, i, j, *_half in names:
        shape[int(i)] = max(shape.get(int(i), 0), int(j) + 1)
    return [[_array(arrays, f"{letter}.{i}.{j}") for j in range(shape[i])] for i in range(len(shape))]


def _points(arrays: Mapping[str, mx.array]) -> list[tuple[mx.array, ...]]:
    return [tuple(state) for state in _numbered(arrays, "p")]


def _array(arrays: Mapping[str, mx.array], name: str) -> mx.array:
    if name in arrays:
        return arrays[name]
    return arrays[name + _HALF].astype(mx.float32) * arrays[name + _SCALE]
