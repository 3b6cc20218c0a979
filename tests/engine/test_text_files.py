"""Earlier texts on disk: they come back, whatever killed the process that wrote; they are private, bounded, and each owner's own."""

from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from planting import catches

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.text_index import TextIndex
from mlxspec.engine.text_files import TextFiles, clear_texts, open_texts, texts_folder, texts_size
from mlxspec.errors import ConfigError
from tests.engine import equality

BUDGET = 8 << 20


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))


def text(seed: int, length: int = 300) -> list[int]:
    return np.random.default_rng(seed).integers(0, 5000, length).tolist()


def filled(folder: Path, digest: str = "v", limit: int = 1 << 20) -> TextIndex:
    index = TextIndex(BUDGET)
    TextFiles(folder, limit, digest).fill(index)
    return index


def knows(index: TextIndex, owner: str, said: list[int]) -> bool:
    found = index.find(owner, said[100:150], 4)
    return found is not None and found.tokens == said[150:154]


def test_texts_come_back_to_their_owner_and_vocabulary_alone(tmp_path: Path) -> None:
    files = TextFiles(tmp_path / "texts", 1 << 20, "v")
    files.append("a", text(1))
    files.append("b", text(2))
    files.append("a", text(3))
    index = filled(tmp_path / "texts")
    assert knows(index, "a", text(1))
    assert knows(index, "a", text(3))
    assert knows(index, "b", text(2))
    assert not knows(index, "a", text(2))
    assert not knows(index, "b", text(1))
    assert filled(tmp_path / "texts", "w").nbytes == 0
    modes = {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "texts").iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE((tmp_path / "texts").stat().st_mode) == 0o700


@catches(
    "what follows a damaged piece is not looked for",
    "mlxspec.engine.text_files:_pieces",
    lambda right: lambda data: right(data[: data.find(b"mlxtext1", 1200)]),
)
@pytest.mark.parametrize("cut", [1, 9, 17, 400])
def test_only_a_piece_that_was_cut_off_is_lost(tmp_path: Path, cut: int) -> None:
    files = TextFiles(tmp_path, 1 << 20, "v")
    for seed in range(3):
        files.append("a", text(seed))
    (file,) = tmp_path.glob("*.tokens")
    os.truncate(file, file.stat().st_size - cut)
    files.append("a", text(3))  # behind what is damaged
    index = filled(tmp_path)
    assert [knows(index, "a", text(seed)) for seed in range(4)] == [True, True, False, True]


def test_bytes_that_changed_are_not_read(tmp_path: Path) -> None:
    files = TextFiles(tmp_path, 1 << 20, "v")
    for seed in range(2):
        files.append("a", text(seed))
    (file,) = tmp_path.glob("*.tokens")
    data = bytearray(file.read_bytes())
    data[700] ^= 1
    file.write_bytes(data)
    index = filled(tmp_path)
    assert [knows(index, "a", text(seed)) for seed in range(2)] == [False, True]


WRITER = """
import sys
from pathlib import Path
from mlxspec.engine.text_files import TextFiles
files = TextFiles(Path(sys.argv[1]), 1 << 30, "v")
for i in range(1 << 30):
    files.append("a", [i, *range(1, 3000)])
    print(i, flush=True)
"""


def test_a_writer_that_is_killed_loses_the_last_piece_at_most(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
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
    from mlxspec.engine.text_files import _pieces

    (file,) = tmp_path.glob("*.tokens")
    firsts = [int(p[0]) for p in _pieces(file.read_bytes())]
    assert firsts == list(range(len(firsts)))
    assert len(firsts) > max(last, default=20)
    TextFiles(tmp_path, 1 << 30, "v").append("a", text(1))  # its lock is gone with it


@catches(
    "no room is made",
    "mlxspec.engine.text_files:TextFiles._make_room",
    lambda right: lambda self, more, own: None,
)
def test_files_keep_to_their_limit_and_the_oldest_go(tmp_path: Path) -> None:
    files, limit = TextFiles(tmp_path, 20_000, "v"), 20_000
    files.append("old", text(0))
    for seed in range(1, 60):
        files.append("a", text(seed))
        assert sum(p.stat().st_size for p in tmp_path.glob("*.tokens")) <= limit
    index = filled(tmp_path)
    assert not knows(index, "old", text(0))
    assert knows(index, "a", text(59))
    assert knows(index, "a", text(56))
    assert not knows(index, "a", text(1))
    assert {p.suffix for p in tmp_path.iterdir()} == {".tokens", ""}


def test_a_disk_that_refuses_costs_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = TextFiles(tmp_path / "texts", 1 << 20, "v")
    files.append("a", text(1))
    (tmp_path / "texts" / "v-b.tokens").mkdir()
    with caplog.at_level(logging.WARNING, "mlxspec"):
        files.append("b", text(2))
        files.append("b", text(2))
    assert caplog.text.count("no longer kept") == 1
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be kept"):
        TextFiles(tmp_path / "file", 1 << 20, "v")


def test_what_cannot_be_read_costs_its_own_texts_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "texts"
    files = TextFiles(folder, 1 << 20, "v")
    files.append("a", text(1))
    files.append("b", text(2))
    os.mkfifo(folder / "v-c.tokens")  # opening it would wait for ever
    real = open

    def refused(file: object, *mode: str) -> object:
        if str(file).endswith("v-b.tokens"):
            raise PermissionError(13, "Permission denied")
        return real(file, *mode)  # type: ignore[call-overload]

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr("builtins.open", refused)
        index = filled(folder)
    assert knows(index, "a", text(1))
    assert [r.getMessage() for r in caplog.records] == [
        f"Texts in {folder / 'v-b.tokens'} cannot be read: Permission denied."
    ]


def test_a_later_engine_drafts_what_an_earlier_one_said() -> None:
    params, spec = (
        SamplingParams(max_tokens=40, ignore_eos=True),
        SpecConfig(drafters=("suffix",), policy="fixed"),
    )
    (prompt,) = equality.prompts(1, 3)
    first = equality.engine(past_texts_disk=1 << 20)
    wanted = first.generate(prompt, params, spec=spec)
    first.close()
    assert texts_size() > 0
    again = equality.engine(past_texts_disk=1 << 20).generate(prompt, params, spec=spec)
    assert again.tokens == wanted.tokens
    assert again.stats.num_rounds < 8
    assert clear_texts()[0] == 1
    assert texts_size() == 0
    fresh = equality.engine(past_texts_disk=1 << 20).generate(prompt, params, spec=spec)
    assert fresh.stats.num_drafted == 0


def test_nothing_is_written_unasked_and_ids_without_meaning_are_not_kept() -> None:
    equality.engine().generate([1, 2, 3], SamplingParams(max_tokens=4), spec=SpecConfig(drafters=("suffix",)))
    assert not texts_folder().exists()
    assert clear_texts() == (0, 0)
    with pytest.raises(ConfigError, match="past_texts_disk"):
        open_texts(BUDGET, 1 << 20, None)
