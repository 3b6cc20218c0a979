"""Earlier texts on disk: they come back, whatever killed the process that wrote; they are private, bounded, and each owner's own."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from planting import catches, rewritten

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.text_index import TextIndex
from mlxspec.engine.kept_files import LOCK, KeptFiles
from mlxspec.engine.text_files import TextFiles, keep_texts, texts_folder
from mlxspec.engine.thread import JobThread
from mlxspec.errors import ConfigError
from tests.engine import equality

BUDGET = 8 << 20


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))


def text(seed: int, length: int = 300) -> list[int]:
    return np.random.default_rng(seed).integers(0, 5000, length).tolist()


def made(folder: Path, digest: str = "v", limit: int = 1 << 20) -> tuple[TextFiles, JobThread]:
    thread = JobThread("files")
    return TextFiles(KeptFiles(folder, limit, "The store"), thread, digest), thread


def append(folder: Path, *texts: tuple[str, list[int]], limit: int = 1 << 20) -> None:
    files, thread = made(folder, limit=limit)
    for owner, tokens in texts:
        files.append(owner, np.array(tokens, np.int32))
    thread.close()
    assert thread.join(60)


def filled(folder: Path, digest: str = "v") -> TextIndex:
    index = TextIndex(BUDGET)
    made(folder, digest)[0].fill(index)
    return index


def knows(index: TextIndex, owner: str, said: list[int]) -> bool:
    found = index.find(owner, said[100:150], 4)
    return found is not None and found.tokens == said[150:154]


def test_texts_come_back_to_their_owner_and_vocabulary_alone(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    append(folder, ("a", text(1)), ("b", text(2)), ("a", text(3)))
    index = filled(folder)
    assert knows(index, "a", text(1))
    assert knows(index, "a", text(3))
    assert knows(index, "b", text(2))
    assert not knows(index, "a", text(2))
    assert not knows(index, "b", text(1))
    assert filled(folder, "w").nbytes == 0
    assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("how", ["cut", "changed"])
def test_only_a_text_that_was_damaged_is_lost(tmp_path: Path, how: str) -> None:
    append(tmp_path, *(("a", text(seed)) for seed in range(4)))
    file = sorted(tmp_path.glob("*.safetensors"))[2]
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data[:-7] if how == "cut" else data)
    index = filled(tmp_path)
    assert [knows(index, "a", text(seed)) for seed in range(4)] == [True, True, False, True]
    assert not file.exists()


@catches(
    "texts come back in another order",
    "mlxspec.engine.text_files:TextFiles.fill",
    rewritten("texts[::-1]", "texts"),
)
@pytest.mark.parametrize("seeds", [(1, 2, 3), (3, 2, 1)])
def test_the_latest_text_is_the_latest_again(tmp_path: Path, seeds: tuple[int, ...]) -> None:
    """Where texts of one owner go on in different ways, the latest one is followed in the next process as in this one."""
    index, shared = TextIndex(BUDGET), text(0, 80)
    for seed in seeds:
        append(tmp_path, ("a", [*shared, *text(seed, 20)]))
        index.add("a", [*shared, *text(seed, 20)])
        while index.has_work:
            index.work()
    for each in (index, filled(tmp_path)):
        found = each.find("a", shared, 4)
        assert found is not None
        assert found.tokens[0] == text(seeds[-1], 20)[0]


WRITER = """
import sys
import numpy as np
from pathlib import Path
from mlxspec.engine.kept_files import KeptFiles
from mlxspec.engine.thread import JobThread
from mlxspec.engine.text_files import TextFiles
thread = JobThread("files")
files = TextFiles(KeptFiles(Path(sys.argv[1]), 1 << 30, "The store"), thread, "v")
for i in range(1 << 30):
    files.append("a", np.array([i, *range(1, 3000)], np.int32))
    while not thread.is_idle:
        pass
    print(i, flush=True)
"""


def test_a_writer_that_is_killed_loses_the_last_text_at_most(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "texts")], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) > 20:
            break
    time.sleep(0.01)
    writer.send_signal(signal.SIGKILL)
    last = [int(line) for line in writer.stdout if line.endswith("\n")]
    writer.wait()
    writer.stdout.close()
    files, thread = made(tmp_path / "texts")
    firsts = sorted(int(files._read(name)[0]) for name in files._files.found)
    assert firsts == list(range(len(firsts)))
    assert len(firsts) > max(last, default=20)
    thread.close()
    assert thread.join(5)


@catches(
    "no room is made",
    "mlxspec.engine.kept_files:KeptFiles._make_room",
    lambda right: lambda self, size: None,
)
def test_files_keep_to_their_limit_and_the_oldest_go(tmp_path: Path) -> None:
    limit = 40_000
    append(tmp_path, ("old", text(0)), limit=limit)
    for seed in range(1, 20):
        append(tmp_path, ("a", text(seed)), limit=limit)
        assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= limit
    index = filled(tmp_path)
    assert not knows(index, "old", text(0))
    assert knows(index, "a", text(19))
    assert knows(index, "a", text(16))
    assert not knows(index, "a", text(1))


def test_a_disk_that_refuses_costs_no_answer_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, thread = made(tmp_path / "texts")

    def settle() -> None:
        while not thread.is_idle:
            time.sleep(0.001)

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda _: refuse())
        files.append("b", np.array(text(2), np.int32))
        files.append("b", np.array(text(3), np.int32))
        settle()
    assert caplog.text.count("could not be written (No space left on device)") == 1
    assert files.num_failed == 2
    assert files._files.rests
    monkeypatch.setattr("time.monotonic", lambda real=time.monotonic: real() + 61)
    files.append("b", np.array(text(4), np.int32))
    settle()
    assert knows(filled(tmp_path / "texts"), "b", text(4))
    thread.close()
    assert thread.join(5)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot use the folder"):
        made(tmp_path / "file")


def refuse() -> None:
    raise OSError(28, "No space left on device")


def test_another_process_that_keeps_the_lock_costs_nobody_an_answer(tmp_path: Path) -> None:
    """The engine's thread hands a text over and goes on; the text is written when the lock is free."""
    files, thread = made(tmp_path)
    descriptor = os.open(tmp_path / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    files.append("a", np.array(text(1), np.int32))  # returns although nobody can write
    assert not thread.is_idle
    assert not knows(filled(tmp_path), "a", text(1))
    os.close(descriptor)
    thread.close()
    assert thread.join(60)
    assert knows(filled(tmp_path), "a", text(1))


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """A pipe, a link or a folder under a text's name: opening a pipe would wait for ever."""
    append(tmp_path, ("a", text(1)))
    os.mkfifo(tmp_path / "v-c-1.safetensors")
    (tmp_path / "v-d-1.safetensors").mkdir()
    elsewhere = tmp_path.parent / "elsewhere"
    elsewhere.write_bytes(next(tmp_path.glob("v-a*")).read_bytes())
    (tmp_path / "v-e-1.safetensors").symlink_to(elsewhere)
    index = filled(tmp_path)
    assert knows(index, "a", text(1))
    assert not knows(index, "e", text(1))


def test_tidying_removes_what_killed_processes_left(tmp_path: Path) -> None:
    append(tmp_path, ("a", text(1)))
    (tmp_path / "v-a-7.safetensors.123.new").write_bytes(b"half")
    KeptFiles(tmp_path, None, "The store").tidy()
    assert not list(tmp_path.glob("*.new"))
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_a_later_engine_drafts_what_an_earlier_one_said() -> None:
    params, spec = (
        SamplingParams(max_tokens=40, ignore_eos=True),
        SpecConfig(drafters=("suffix",), policy="fixed"),
    )
    (prompt,) = equality.prompts(1, 3)
    first = equality.engine(past_texts_disk=1 << 20)
    wanted = first.generate(prompt, params, spec=spec)
    first.close()
    assert list(texts_folder().glob("*.safetensors"))
    again = equality.engine(past_texts_disk=1 << 20).generate(prompt, params, spec=spec)
    assert again.tokens == wanted.tokens
    assert again.stats.num_rounds < 8
    shutil.rmtree(texts_folder())
    fresh = equality.engine(past_texts_disk=1 << 20).generate(prompt, params, spec=spec)
    assert fresh.stats.num_drafted == 0


def test_nothing_is_written_unasked_and_ids_without_meaning_are_not_kept() -> None:
    equality.engine().generate([1, 2, 3], SamplingParams(max_tokens=4), spec=SpecConfig(drafters=("suffix",)))
    assert not texts_folder().exists()
    with pytest.raises(ConfigError, match="past_texts_disk"):
        keep_texts(TextIndex(BUDGET), 1 << 20, None, JobThread("files"))


@catches(
    "nobody is told that texts are not kept",
    "mlxspec.engine.engine:Engine.stores_off",
    lambda right: property(lambda self: ()),
)
def test_a_request_is_told_when_texts_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda _: refuse())
        engine = equality.engine(past_texts_disk=1 << 22)
        params, spec = SamplingParams(max_tokens=8, ignore_eos=True), SpecConfig(drafters=("suffix",))
        first = engine.generate([5, 9, 33], params, spec=spec)
        assert not first.stats.notices
        until = time.monotonic() + 60
        while not engine.stores_off and time.monotonic() < until:
            time.sleep(0.01)
        second = engine.generate([5, 9, 34], params, spec=spec)
        said = second.stats.notices
        assert said == ["Earlier texts: the disk refused, and is tried again within a minute"]
        engine.close()
