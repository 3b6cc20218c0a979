"""The prefix cache on disk by itself, on snapshots whose numbers say which text they belong to: what is found is right, whatever was
damaged or dropped, and for its owner and its model alone. The engine's thread waits for no file."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planting import catches, rewritten

from mlxspec.engine.kept_files import KeptFiles
from mlxspec.engine.prefix import disk as disk_module
from mlxspec.engine.prefix.tree import TARGET, KeyedText, PrefixTree
from tests.engine.kept_on_disk import PLENTY, ROOTS, bytes_in, check, disk, found, keep, settle
from tests.engine.marked_texts import NAMES, put

texts = st.lists(st.integers(0, 2), min_size=1, max_size=14)
mixed = st.one_of(
    st.tuples(st.just("keep"), texts, st.sampled_from([NAMES, NAMES[:1], NAMES[:2], NAMES[::2]])),
    st.tuples(st.just("find"), texts),
    st.tuples(st.just("restart")),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(mixed, max_size=10), st.sampled_from([0, 8000, 20000, PLENTY]))
def test_whatever_is_kept_and_dropped_is_right(tmp_path_factory, operations: list[tuple], limit: int) -> None:
    """Rows of any drafters, folders of any size: what is found is right, and no drafter is left behind. Where there is room, the longest
    beginning that was ever kept is found, behind restarts too."""
    folder = tmp_path_factory.mktemp("prefix")
    made, tree, twin = disk(folder, limit), PrefixTree(PLENTY), set()
    for what, *args in operations:
        if what == "keep":
            tokens, names = args
            if keep(made, tree, tokens, names):
                twin.add(tuple(tokens))
        elif what == "find":
            (text,) = args
            longest = max((len(t) for t in twin if tuple(text[: len(t)]) == t), default=0)
            length = check(found(made, text), text)
            assert length == longest or limit < PLENTY
        else:
            made.close(tree, 5.0)
            made, tree = disk(folder, limit), PrefixTree(PLENTY)
        assert bytes_in(folder) <= limit
    made.close(tree, 5.0)


@catches(
    "the key of a text has no owner",
    "mlxspec.engine.prefix.tree:KeyedText.__init__",
    lambda right: lambda self, tokens, owner="", scales=(): right(self, tokens, "", scales),
)
def test_another_owner_finds_nothing(tmp_path: Path) -> None:
    text = list(range(9))
    made = disk(tmp_path)
    keep(made, PrefixTree(PLENTY), text, owner="alice")
    again = disk(tmp_path)
    assert check(found(again, text, owner="alice"), text) == 9
    assert found(again, text) is None
    assert found(again, text, owner="bob") is None
    (name,) = again.files.found
    told = again.files.metadata(name)
    assert told["model"] == "test"
    assert told["signature"] == ROOTS[TARGET]
    assert told["tokens"] == "9"
    assert "alice" not in str(told)


@catches(
    "what a file says of its text is not compared",
    "mlxspec.engine.prefix.disk:PrefixDisk._is_of",
    lambda right: lambda *_: True,
)
def test_a_file_under_another_texts_name_is_not_served(tmp_path: Path) -> None:
    made, tree = disk(tmp_path), PrefixTree(PLENTY)
    keep(made, tree, [1] * 9)
    keep(made, tree, [2] * 9)
    one, two = (tmp_path / f"{made._name(KeyedText([i] * 9), 9)}.safetensors" for i in (1, 2))
    one.replace(two)
    again = disk(tmp_path)
    assert found(again, [2] * 9) is None
    assert again.stats.num_missed == 1


def test_another_signature_finds_nothing(tmp_path: Path) -> None:
    """States of another model, quantization or version; of another drafter that needs no hiddens only what is the target's is found."""
    text = list(range(11))
    keep(disk(tmp_path), PrefixTree(PLENTY), text)
    assert found(disk(tmp_path, roots={**ROOTS, TARGET: "f" * 64}), text) is None
    hit = found(disk(tmp_path, roots={**ROOTS, "draft": "e" * 64}), text)
    assert set(hit.parts) == {TARGET, "mtp"}


@catches(
    "checksums of files are not compared",
    "mlxspec.engine.kept_files:_is_same",
    lambda right: lambda digest, checksum: True,
    case="data",
)
@pytest.mark.parametrize("where", ["header", "data"])
def test_a_flipped_bit_is_never_served(tmp_path: Path, where: str, caplog) -> None:
    text = list(range(11))
    made = disk(tmp_path)
    keep(made, PrefixTree(PLENTY), text)
    (path,) = tmp_path.glob("*.safetensors")
    whole = path.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    places = range(0, length, 7) if where == "header" else range(length, len(whole), 23)
    for place in places:
        data = bytearray(whole)
        data[place] ^= 1 << random.Random(place).randrange(8)
        path.write_bytes(data)
        again = disk(tmp_path)
        assert found(again, text) is None
        assert not path.exists()
    assert "removes a damaged file" in caplog.text


def test_what_is_no_whole_file_is_left_out(tmp_path: Path) -> None:
    """Files that are cut short, links, pipes and folders under a state's name: nothing is served, and nothing waits."""
    text = list(range(9))
    made = disk(tmp_path)
    keep(made, PrefixTree(PLENTY), text)
    (path,) = tmp_path.glob("*.safetensors")
    whole = path.read_bytes()
    elsewhere = tmp_path.parent / "elsewhere"
    elsewhere.write_bytes(whole)
    for make in (
        lambda: path.write_bytes(whole[: len(whole) // 2]),
        lambda: path.write_bytes(b""),
        lambda: path.symlink_to(elsewhere),
        lambda: os.mkfifo(path),
        lambda: path.mkdir(),
    ):
        path.unlink(missing_ok=True)
        make()
        assert found(disk(tmp_path), text) is None
    assert elsewhere.read_bytes() == whole


def test_the_least_recently_used_text_goes_first(tmp_path: Path) -> None:
    made, tree = disk(tmp_path, 8192), PrefixTree(PLENTY)
    keep(made, tree, [1] * 9)
    keep(made, tree, [2] * 9)
    assert check(found(made, [1] * 9), [1] * 9) == 9
    keep(made, tree, [3] * 9)
    assert [check(found(made, [i] * 9), [i] * 9) for i in (1, 2, 3)] == [9, 0, 9]


def test_a_state_that_a_conversation_has_left_behind_goes_first_but_not_the_system_prompt(
    tmp_path: Path,
) -> None:
    made, tree, text = disk(tmp_path, 6 * 4096), PrefixTree(PLENTY), list(range(30))
    keep(made, tree, [1] * 9)
    keep(made, tree, text[:10], is_shared=True)
    keep(made, tree, text[:20], supersedes=True)
    keep(made, tree, text, supersedes=True)
    for i in (2, 3):
        keep(made, tree, [i] * 9)
    assert [check(found(made, [i] * 9), [i] * 9) for i in (1, 2, 3)] == [9, 9, 9]
    assert check(found(made, text), text) == 30
    assert check(found(made, text[:25]), text) == 10


@catches(
    "a system prompt that waits is superseded like any other state",
    "mlxspec.engine.prefix.disk:PrefixDisk.offer",
    rewritten("not state.is_shared and state.length < length", "state.length < length"),
)
@catches(
    "nothing that waits is superseded",
    "mlxspec.engine.prefix.disk:PrefixDisk.offer",
    lambda right: (
        lambda self, text, length, *, is_shared=False, supersedes=False: right(
            self, text, length, is_shared=is_shared
        )
    ),
)
def test_a_state_that_waits_is_left_behind_too_but_not_the_system_prompt(tmp_path: Path) -> None:
    """A text of one turn may bring all of its states before the first of them is written."""
    made, tree, text = disk(tmp_path), PrefixTree(PLENTY), list(range(30))
    for num, more in ((10, {"is_shared": True}), (20, {"supersedes": True}), (30, {"supersedes": True})):
        put(tree, text[:num])
        made.offer(KeyedText(text[:num]), num, **more)
    made.flush(tree, 60.0)
    assert [check(found(made, text[:num]), text) for num in (30, 29, 19)] == [30, 10, 10]


@catches(
    "what has been taken still counts as waiting",
    "mlxspec.engine.prefix.disk:Fetch.take",
    rewritten("self._nbytes -= pieces[0].nbytes", "pass"),
)
def test_as_much_waits_as_may_however_large_a_state_is(tmp_path: Path, monkeypatch) -> None:
    """The file thread goes on as soon as something was taken, and reads no more than one tensor beyond the limit."""
    text = list(range(20))
    made = disk(tmp_path)
    keep(made, PrefixTree(PLENTY), text)
    settle(made)
    monkeypatch.setattr(disk_module, "READ_AHEAD", 1)
    fetch = made.fetch(KeyedText(text), 0, PLENTY, len(text))
    try:
        while not fetch.is_done:
            fetch.wait(60.0)
            with fetch._changed:
                assert len(fetch._waiting) <= 1
                assert fetch._nbytes == sum(tensor.nbytes for _, tensor in fetch._waiting)
            fetch.take(1)
        assert check(fetch.hit(), text) == 20
    finally:
        fetch.cancel()  # the file thread does not wait for a test that has failed


def test_a_smaller_limit_holds_from_the_start(tmp_path: Path) -> None:
    made, tree = disk(tmp_path), PrefixTree(PLENTY)
    for i in range(5):
        keep(made, tree, [i] * 9)
    again = disk(tmp_path, 8192)
    settle(again)
    assert bytes_in(tmp_path) <= 8192
    assert check(found(again, [4] * 9), [4] * 9) == 9


def test_a_text_that_is_larger_than_the_folder_may_be_is_told_of(tmp_path: Path, caplog) -> None:
    made, tree = disk(tmp_path, 8192), PrefixTree(PLENTY)
    keep(made, tree, [1] * 9)
    keep(made, tree, [2] * 400)
    assert check(found(made, [1] * 9), [1] * 9) == 9
    assert "larger than the prefix cache on disk may be" in caplog.text


def test_what_left_memory_before_it_was_written_is_counted(tmp_path: Path, caplog) -> None:
    made, tree = disk(tmp_path), PrefixTree(PLENTY)
    put(tree, [1] * 9)
    made.offer(KeyedText([1] * 9), 9)
    tree.clear()
    made.flush(tree, 5.0)
    assert made.stats.num_lost == 1
    assert "left memory before they were written" in caplog.text
    assert found(made, [1] * 9) is None


def test_a_state_that_is_dropped_while_it_is_written_is_not_written(tmp_path: Path, monkeypatch) -> None:
    """Its memory is wanted: it is held no longer than until the next tensor."""
    made, tree = disk(tmp_path), PrefixTree(PLENTY)
    real = disk_module.Stored.data.fget

    def slow(tensor):
        time.sleep(0.05)
        return real(tensor)

    monkeypatch.setattr(disk_module.Stored, "data", property(slow))
    put(tree, list(range(40)))
    made.offer(KeyedText(range(40)), 40)
    while made._thread.is_idle:
        made.work(tree)
    time.sleep(0.06)
    tree.clear()
    made.flush(tree, 10.0)
    assert made.stats.num_lost == 1
    assert made.files.num_failed == 0
    assert not list(tmp_path.glob("*.safetensors*"))


def test_what_cannot_be_copied_costs_the_text_alone(tmp_path: Path, monkeypatch, caplog) -> None:
    def fails(x: object) -> None:
        raise ValueError("no such dtype")

    made, tree = disk(tmp_path), PrefixTree(PLENTY)
    with monkeypatch.context() as patched:
        patched.setattr(disk_module.host, "memory", fails)
        keep(made, tree, [1] * 9)
    assert made.stats.num_lost == 1
    assert "could not be copied (ValueError: no such dtype)" in caplog.text
    keep(made, tree, [2] * 9)
    assert check(found(made, [2] * 9), [2] * 9) == 9


def test_whatever_goes_wrong_while_a_file_is_read_is_a_miss(tmp_path: Path, monkeypatch, caplog) -> None:
    """A row waits for each reading, so each ends."""

    def fails(*_: object) -> None:
        raise MemoryError("no room")

    made = disk(tmp_path)
    keep(made, PrefixTree(PLENTY), [1] * 9)
    monkeypatch.setattr(made.files, "read", fails)
    assert found(made, [1] * 9) is None
    assert made.stats.num_missed == 1
    assert "could not be read (MemoryError: no room)" in caplog.text


def test_two_stores_share_a_folder(tmp_path: Path) -> None:
    """What one has written the other finds; together they stay within the limit; what one drops is a miss for the other."""
    one, two = disk(tmp_path, 20000), disk(tmp_path, 20000)
    tree = PrefixTree(PLENTY)
    for i in range(12):
        keep((one, two)[i % 2], tree, [i] * 9)
        assert bytes_in(tmp_path) <= 20000
    for made in (one, two):
        settle(made)
        made.fetch(KeyedText([99]), 0, PLENTY, 1)  # which lets it look
        lengths = [check(found(made, [i] * 9), [i] * 9) for i in range(12)]
        assert lengths[-4:] == [9] * 4
        assert lengths[:6] == [0] * 6


def test_every_dtype_comes_back_bit_by_bit(tmp_path: Path) -> None:
    for dtype in disk_module._NAMES:
        x = (mx.arange(-24, 24) % 3).reshape(1, 2, 4, 6).astype(dtype)
        mx.eval(x)
        (data,) = disk_module.host.memory([x])
        assert disk_module.host.from_bytes(data.reshape(-1), dtype, x.shape).tolist() == x.tolist()


# ---- the engine's thread


SLOW = 0.05  # seconds that each operation of the stubbed file system takes
STEP = 0.010  # seconds that a step of the engine's thread may take


@catches(
    "files are looked at in the caller's thread",
    "mlxspec.engine.thread:JobThread.run",
    lambda right: lambda self, job, *, is_urgent=False: job(),
)
def test_no_call_waits_for_a_slow_disk(tmp_path: Path, monkeypatch) -> None:
    """Every call of the operating system that the files use takes SLOW seconds and holds the folder's lock; no call of the engine's thread
    does, however much it asks for. Its own time is counted by the calls it makes: none of them is one of those."""
    import threading

    made, tree = disk(tmp_path), PrefixTree(PLENTY)
    keep(made, tree, list(range(40)))
    own, called = threading.get_ident(), []

    def slow(name: str, real):
        def stub(*args, **more):
            if threading.get_ident() == own:
                called.append(name)
            else:
                time.sleep(SLOW)
            return real(*args, **more)

        return stub

    for name in ("open", "fsync", "scandir", "utime", "stat", "close"):
        monkeypatch.setattr(os, name, slow(name, getattr(os, name)))
    for name in ("stat", "lstat", "replace", "unlink", "iterdir", "open"):
        monkeypatch.setattr(Path, name, slow(name, getattr(Path, name)))
    for name in ("read", "write", "use", "look", "tidy"):
        monkeypatch.setattr(KeptFiles, name, slow(name, getattr(KeptFiles, name)))
    put(tree, list(range(60)))
    made.offer(KeyedText(range(60)), 60)
    fetch = made.fetch(KeyedText(range(50)), 0, PLENTY, 50)
    assert fetch is not None
    num_steps = 0
    while made.has_work or not (fetch.is_done or fetch.has_failed):
        made.work(tree)
        fetch.take(1)
        made.offer(KeyedText(range(40)), 40)
        num_steps += 1
        time.sleep(0.001)
    assert called == []
    assert num_steps > 20
    assert fetch.is_done
    settle(made)
    assert made.stats.num_written == 2
