"""The prefix store on disk by itself, on snapshots whose numbers say which text they belong to: what is found is right, whatever crashed,
was damaged or was dropped, and the folder never has more bytes than it may."""

from __future__ import annotations

import os
import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import catches

from mlxspec.engine.prefix_disk import disk as disk_module
from mlxspec.engine.prefix_disk import mover as mover_module
from mlxspec.engine.prefix_disk.disk import PrefixDisk
from mlxspec.engine.prefix_disk.folder import LOCK, DiskFiles, PieceFolder
from mlxspec.engine.prefix_disk.mover import Mover
from mlxspec.engine.prefix_disk.plan import PieceNames
from mlxspec.engine.prefix_store import TARGET, PrefixStore
from mlxspec.errors import ConfigError
from tests.engine.crashing import Crash, InlineMover, WatchedFiles, bytes_in
from tests.engine.kept_on_disk import BLOCK, PLENTY, ROOTS, check, disk, found, fresh, keep
from tests.engine.test_prefix_store import NAMES, put

texts = st.lists(st.integers(0, 2), min_size=1, max_size=14)
operation = st.one_of(
    st.tuples(st.just("keep"), texts),
    st.tuples(st.just("keep"), texts),
    st.tuples(st.just("find"), texts),
    st.tuples(st.just("restart")),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(operation, max_size=14))
def test_it_finds_what_a_dictionary_finds(operations: list[tuple]) -> None:
    """Nothing is dropped where there is room: the longest beginning that was ever kept is found, behind restarts too."""
    with fresh() as folder:
        made, store, twin = disk(folder), PrefixStore(PLENTY), set()
        for what, *args in operations:
            if what == "keep":
                assert keep(made, store, *args)
                twin.add(tuple(args[0]))
            elif what == "find":
                (text,) = args
                longest = max((len(t) for t in twin if tuple(text[: len(t)]) == t), default=0)
                assert check(found(made, text), text) == longest
            else:
                made.close(store, 1.0)
                made, store = disk(folder), PrefixStore(PLENTY)
        made.close(store, 1.0)


mixed = st.one_of(
    st.tuples(
        st.just("keep"), texts, st.sampled_from([NAMES, NAMES[:1], NAMES[:2], NAMES[::2]]), st.integers(0, 14)
    ),
    st.tuples(st.just("find"), texts),
    st.tuples(st.just("restart")),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(mixed, max_size=14), st.sampled_from([0, 3000, 6000, 12000, PLENTY]))
def test_whatever_is_kept_and_dropped_is_right(operations: list[tuple], limit: int) -> None:
    """Rows of any drafters, folders of any size: what is found is right, and no drafter is left behind."""
    with fresh() as folder:
        limit = max(limit, 8)
        made, store = disk(folder, limit), PrefixStore(PLENTY)
        for what, *args in operations:
            if what == "keep":
                tokens, names, num_sources = args
                keep(made, store, tokens, names, min(num_sources, len(tokens)))
            elif what == "find":
                check(found(made, *args), *args)
            else:
                made.close(store, 1.0)
                made, store = disk(folder, limit), PrefixStore(PLENTY)
            assert bytes_in(folder) <= limit
            assert made.nbytes + 8 >= bytes_in(folder)
        made.close(store, 1.0)


def _play(folder: Path, files: DiskFiles, seed: int, limit: int) -> list[tuple[int, ...]]:
    """Keep texts until the files crash; returns those that were on disk by then."""
    rng, done = random.Random(seed), []
    with suppress(Crash):
        made, store = disk(folder, limit, files), PrefixStore(PLENTY)
        for _ in range(6):
            text = [rng.randint(0, 2) for _ in range(rng.randint(1, 14))]
            if keep(made, store, text) and made.stats.num_failed == 0:
                done.append(tuple(text))
    return done


def _crash(seed: int) -> None:
    """One crash at a random operation, of the process or of the machine; then another process looks at what is left."""
    rng = random.Random(seed)
    limit = rng.choice([5000, 9000, PLENTY])
    with fresh() as folder:
        whole = WatchedFiles(folder, limit)
        _play(folder, whole, seed, limit)
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
        crash_at = rng.randint(1, whole.num_done)
        files = WatchedFiles(folder, limit, crash_at=crash_at, loses_unsynced=rng.random() < 0.5, seed=seed)
        done = _play(folder, files, seed, limit)
        again = WatchedFiles(folder, limit)
        after = disk(folder, limit, again)
        assert not list(folder.glob("*.partial"))
        for text in done:
            length = check(found(after, list(text)), list(text))
            if limit == PLENTY:
                assert length == len(text), "what was on disk before the crash is gone"
        for _ in range(10):
            text = [rng.randint(0, 2) for _ in range(rng.randint(1, 14))]
            check(found(after, text), text)
        assert after.stats.num_missed == 0 or files.num_done < crash_at
        assert keep(after, PrefixStore(PLENTY), [9] * 5)
        assert bytes_in(folder) <= limit


@pytest.mark.parametrize("seed", range(30))
def test_a_crash_loses_only_what_was_not_written(seed: int) -> None:
    _crash(seed)


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand_crashes_lose_only_what_was_not_written(hundred: int) -> None:
    for seed in range(100):
        _crash(1000 + 100 * hundred + seed)


def test_a_full_disk_costs_the_piece_and_is_told(tmp_path: Path, caplog) -> None:
    """Whichever operation finds it full: nothing half is left, what is found is right, and writing rests."""
    text = list(range(11))
    for at in range(1, 24):
        folder = tmp_path / str(at)
        folder.mkdir(mode=0o700)
        probe = WatchedFiles(folder, PLENTY)
        made = disk(folder, files=WatchedFiles(folder, PLENTY, full_at=frozenset({at + 3})))
        keep(made, PrefixStore(PLENTY), text)
        assert not list(folder.glob("*.partial"))
        check(found(made, text), text)
        assert made.stats.num_failed <= 1
        if made.stats.num_failed:
            assert not made.can_work
        made.close(PrefixStore(0), 0.1)
        again = disk(folder, files=probe)
        keep(again, PrefixStore(PLENTY), text)
        assert check(found(again, text), text) == len(text)
    assert "could not be written (No space left on device)" in caplog.text


def test_no_end_follows_a_piece_that_could_not_be_written(tmp_path: Path, monkeypatch) -> None:
    """Also where writing goes on at once."""
    monkeypatch.setattr(mover_module, "REST_SECONDS", 0.0)
    made = disk(tmp_path, files=WatchedFiles(tmp_path, PLENTY, full_at=frozenset({2})))
    keep(made, PrefixStore(PLENTY), list(range(11)))
    assert (made.stats.num_failed, made.stats.num_lost) == (1, 1)
    assert not [e for e in made._mover.folder.entries if (e.label.part, e.label.kind) == (TARGET, "end")]
    keep(made, PrefixStore(PLENTY), list(range(11)))
    assert check(found(made, list(range(11))), list(range(11))) == 11


def test_some_of_the_disk_is_left_to_others(tmp_path: Path) -> None:
    class Low(WatchedFiles):
        def free(self, path: Path) -> int:
            return 200 << 20

    made = disk(tmp_path, files=Low(tmp_path, PLENTY))
    keep(made, PrefixStore(PLENTY), [1, 2, 3])
    assert made.stats.num_failed == 1
    assert made.nbytes == 0


@catches(
    "checksums of the prefix store are not compared",
    "mlxspec.engine.prefix_disk.piece:_digest",
    lambda right: lambda head, data: "0" * 32,
    case="[1",
)
@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_is_never_served(tmp_path: Path, seed: int, caplog) -> None:
    """Header or data: the piece is a miss, is removed, and is told of."""
    rng, text = random.Random(seed), list(range(11))
    made = disk(tmp_path)
    keep(made, PrefixStore(PLENTY), text)
    made.close(PrefixStore(0), 1.0)
    for path in sorted(tmp_path.glob("*.safetensors")):
        data = bytearray(path.read_bytes())
        place = rng.randrange(len(data)) if seed else rng.randrange(8)
        data[place] ^= 1 << rng.randrange(8)
        before = path.stat().st_mtime_ns
        path.write_bytes(data)
        os.utime(path, ns=(before, before))
    again = disk(tmp_path)
    assert found(again, text) is None
    assert "Damaged files" in caplog.text
    for _ in range(9):  # each reading finds one more
        keep(again, PrefixStore(PLENTY), text)
        hit = found(again, text)
        check(hit, text)
    assert hit is not None
    assert hit.length == len(text)


def test_truncated_and_foreign_files_are_left_out(tmp_path: Path, caplog) -> None:
    text = list(range(9))
    made = disk(tmp_path)
    keep(made, PrefixStore(PLENTY), text)
    made.close(PrefixStore(0), 1.0)
    whole = sorted(tmp_path.glob("*.safetensors"))
    for i, path in enumerate(whole):
        os.truncate(path, path.stat().st_size * i // len(whole))
    (tmp_path / ("0" * 64 + ".safetensors")).write_bytes(b"junk")
    (tmp_path / ("1" * 64 + ".7.partial")).write_bytes(b"half a piece")
    (tmp_path / "notes.txt").write_text("mine")
    elsewhere = tmp_path.parent / "elsewhere"
    elsewhere.write_text("not ours")
    (tmp_path / ("2" * 64 + ".safetensors")).symlink_to(elsewhere)
    again = disk(tmp_path)
    assert again.nbytes == 0
    assert found(again, text) is None
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {LOCK, "notes.txt", "2" * 64 + ".safetensors"}
    assert elsewhere.read_text() == "not ours"
    assert caplog.text.count("other files in the prefix store's folder") == 1
    assert caplog.text.count("Damaged files") == 1


def test_another_signature_finds_nothing(tmp_path: Path) -> None:
    """States of another model, quantization or version; of another drafter only what is the target's is found."""
    text = list(range(11))
    made = disk(tmp_path)
    keep(made, PrefixStore(PLENTY), text)
    assert found(disk(tmp_path, roots={**ROOTS, TARGET: "f" * 64}), text) is None
    other = {**ROOTS, "mtp": "e" * 64}
    assert found(disk(tmp_path, roots=other), text) is None, "a drafter would be left behind"
    hit = found(disk(tmp_path, roots=other, hearing=()), text)
    assert hit is not None
    assert set(hit.parts) == {TARGET, "draft"}


def test_texts_that_begin_alike_share_their_blocks(tmp_path: Path) -> None:
    made, store = disk(tmp_path, files=DiskFiles()), PrefixStore(PLENTY)
    long = [i % 7 for i in range(200)]
    keep(made, store, [*long, 1])
    alone = made.nbytes
    keep(made, store, [*long, 2])
    assert made.nbytes - alone < alone / 10


@catches(
    "the prefix store on disk has no limit",
    "mlxspec.engine.prefix_disk.folder:PieceFolder._make_room",
    lambda right: lambda *_: None,
)
def test_the_least_recently_used_text_goes_first(tmp_path: Path) -> None:
    probe = disk(tmp_path / "probe", files=WatchedFiles(tmp_path, PLENTY))
    keep(probe, PrefixStore(PLENTY), [1] * 9)
    made = disk(tmp_path / "own", 2 * probe.nbytes + 400, WatchedFiles(tmp_path / "own", PLENTY))
    store = PrefixStore(PLENTY)
    for text in ([1] * 9, [2] * 9):
        keep(made, store, text)
    assert check(found(made, [1] * 9), [1] * 9) == 9
    keep(made, store, [3] * 9)
    assert [check(found(made, [i] * 9), [i] * 9) for i in (1, 2, 3)] == [9, 0, 9]


def test_a_smaller_limit_holds_from_the_start(tmp_path: Path) -> None:
    made, store = disk(tmp_path), PrefixStore(PLENTY)
    for i in range(5):
        keep(made, store, [i] * 9)
    made.close(store, 1.0)
    limit = bytes_in(tmp_path) // 2
    again = disk(tmp_path, limit, WatchedFiles(tmp_path, PLENTY))
    assert bytes_in(tmp_path) <= limit
    assert check(found(again, [4] * 9), [4] * 9) == 9


def test_a_text_that_is_larger_than_the_folder_may_be_is_told_of(tmp_path: Path, caplog) -> None:
    made = disk(tmp_path, 3000)
    keep(made, PrefixStore(PLENTY), [1] * 9)
    before = made.nbytes
    keep(made, PrefixStore(PLENTY), [2] * 200)
    assert made.nbytes == before
    assert "larger than the prefix store on disk may be" in caplog.text


def test_what_left_memory_before_it_was_written_is_counted(tmp_path: Path, caplog) -> None:
    made, store = disk(tmp_path), PrefixStore(PLENTY)
    put(store, [1] * 9)
    made.offer([1] * 9)
    store.clear()
    made.flush(store, 1.0)
    assert made.stats.num_lost == 1
    assert "left memory before they were written" in caplog.text
    assert found(made, [1] * 9) is None


def test_what_cannot_be_copied_costs_the_text_alone(tmp_path: Path, monkeypatch, caplog) -> None:
    def fails(x: object) -> None:
        raise ValueError("no such dtype")

    made, store = disk(tmp_path), PrefixStore(PLENTY)
    with monkeypatch.context() as patched:
        patched.setattr(disk_module.host, "raw_bytes", fails)
        keep(made, store, [1] * 9)
    assert made.stats.num_lost == 1
    assert "could not be copied (ValueError: no such dtype)" in caplog.text
    keep(made, store, [2] * 9)
    assert check(found(made, [2] * 9), [2] * 9) == 9


def test_whatever_goes_wrong_while_a_piece_is_read_is_a_miss(tmp_path: Path, monkeypatch, caplog) -> None:
    """A row waits for each reading, so each ends."""

    def fails(key: str) -> None:
        raise MemoryError("no room")

    made = disk(tmp_path)
    keep(made, PrefixStore(PLENTY), [1] * 9)
    monkeypatch.setattr(made._mover.folder, "read", fails)
    fetch = made.fetch([1] * 9, 0, PLENTY)
    assert fetch is not None
    assert fetch.has_failed
    assert made.stats.num_missed == 1
    assert "could not be read (MemoryError: no room)" in caplog.text


def test_a_text_that_leaves_memory_half_way_leaves_no_end(tmp_path: Path, monkeypatch) -> None:
    made, store = disk(tmp_path), PrefixStore(PLENTY)
    put(store, list(range(11)))
    made.offer(list(range(11)))
    monkeypatch.setattr(disk_module, "SLICE", 1)
    for _ in range(5):
        made.work(store, is_busy=False)
    assert made.stats.num_written > 1
    store.clear()
    made.flush(store, 1.0)
    assert made.stats.num_lost == 1
    assert found(made, list(range(11))) is None


def test_rows_that_decode_are_held_up_for_a_small_part_of_the_time(tmp_path: Path, monkeypatch) -> None:
    clock = [0.0]

    def copy(self: PrefixDisk, store: PrefixStore) -> None:
        clock[0] += 0.004
        copied.append(clock[0])

    copied: list[float] = []
    monkeypatch.setattr(disk_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(PrefixDisk, "_copy", copy)
    made, store = disk(tmp_path), PrefixStore(PLENTY)
    made.offer([1])
    for _ in range(2000):
        clock[0] += 0.001
        made.work(store, is_busy=True)
    assert len(copied) > 2
    assert 0.004 * len(copied) < 1.1 * clock[0] / disk_module.BUSY_SHARE


def test_the_host_holds_one_piece(tmp_path: Path) -> None:
    """While the disk is slow nothing else is copied."""

    class Stuck(InlineMover):
        def _work(self) -> None:
            if not self.is_full:
                super()._work()

    made = PrefixDisk(
        Stuck(PieceFolder(tmp_path, PLENTY)), PieceNames(ROOTS, block=BLOCK), model="test", hearing=("mtp",)
    )
    store = PrefixStore(PLENTY)
    put(store, list(range(40)))
    made.offer(list(range(40)))
    for _ in range(9):
        made.work(store, is_busy=False)
    assert made._open is None
    assert not made.can_work
    assert made.has_work


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    """What one has written the other finds; together they stay within the limit; what one drops is a miss for the other."""
    one, two = disk(tmp_path, 9000), disk(tmp_path, 9000)
    store = PrefixStore(PLENTY)
    for i in range(12):
        keep((one, two)[i % 2], store, [i] * 9)
        assert bytes_in(tmp_path) <= 9000
    for i in range(12):
        for made in (one, two):
            check(found(made, [i] * 9), [i] * 9)
    one.offer([11] * 9)
    one.flush(store, 1.0)
    keep(one, store, [20] * 9)
    two.close(store, 1.0)
    assert check(found(disk(tmp_path, 9000), [20] * 9), [20] * 9) == 9


def test_a_folder_with_other_things_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "documents"
    folder.mkdir(mode=0o755)
    (folder / "letter.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds other files"):
        PieceFolder(folder, PLENTY)
    assert folder.stat().st_mode & 0o777 == 0o755
    with pytest.raises(ConfigError, match="cannot use the folder"):
        PieceFolder(folder / "letter.txt", PLENTY)


def test_a_piece_is_synced_before_it_has_its_name(tmp_path: Path) -> None:
    """Or a crash of the machine could leave a name without its bytes."""

    class Told(DiskFiles):
        def sync(self, descriptor: int) -> None:
            super().sync(descriptor)
            done.append("sync")

        def rename(self, path: Path, target: Path) -> None:
            super().rename(path, target)
            done.append("rename")

        def sync_folder(self, path: Path) -> None:
            super().sync_folder(path)
            done.append("sync folder")

    done: list[str] = []
    keep(disk(tmp_path, files=Told()), PrefixStore(PLENTY), [1, 2, 3])
    assert done == ["sync", "rename", "sync folder"] * 3


def test_the_folder_is_private(tmp_path: Path) -> None:
    made = disk(tmp_path / "prefix", files=WatchedFiles(tmp_path, PLENTY))
    keep(made, PrefixStore(PLENTY), [1] * 9)
    assert (tmp_path / "prefix").stat().st_mode & 0o777 == 0o700
    real = PieceFolder(tmp_path / "real", PLENTY)
    mover = Mover(real)
    piece = made._mover.folder.read(made._mover.folder.entries[0].label.key)
    assert piece is not None
    mover.write(*piece)
    assert mover.close(5.0)
    assert all(p.stat().st_mode & 0o077 == 0 for p in (tmp_path / "real").iterdir())


@catches(
    "the count of changes does not fit the lock file",
    "mlxspec.engine.prefix_disk.folder:PieceFolder._changes",
    lambda right: lambda self: self._files.count(self._descriptor, self._seen + 1),
    case="full",
    errors=(OverflowError,),
)
@pytest.mark.parametrize(
    "held", [b"\xff" * 8, b"\xff" * 7, b"\xff" * 80, b""], ids=["full", "short", "long", "empty"]
)
def test_whatever_the_lock_file_holds_the_folder_is_written_and_cleared(tmp_path: Path, held: bytes) -> None:
    (tmp_path / LOCK).write_bytes(held)
    store, made = PrefixStore(PLENTY), disk(tmp_path, files=DiskFiles())
    for tokens in ([1, 2, 3, 4, 5], [7, 2, 3, 4, 5, 6]):
        assert keep(made, store, tokens)
        assert check(found(disk(tmp_path, files=DiskFiles()), tokens), tokens) == len(tokens)
    num, _ = PieceFolder(tmp_path, None).clear()
    assert num > 0
    assert [p.name for p in tmp_path.iterdir()] == [LOCK]
