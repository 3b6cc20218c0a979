"""Real processes that share a folder of the prefix store on disk, some of which are killed in the middle of whatever they do."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlxspec.engine.prefix_store import PrefixStore
from tests.engine.crashing import bytes_in
from tests.engine.folder_user import text
from tests.engine.kept_on_disk import PLENTY, check, disk, found, keep

pytestmark = pytest.mark.slow
LIMIT = 12_000
ROOT = Path(__file__).resolve().parents[2]
NUM_TEXTS = 150


def start(folder: Path, seed: int) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "tests.engine.folder_user", str(folder), str(LIMIT), str(seed), str(NUM_TEXTS),
    ]  # fmt: skip
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_and_others_that_are_killed(tmp_path: Path) -> None:
    """All that anybody finds is right, the folder never has more bytes than it may, and what one wrote the other finds."""
    folder, rng = tmp_path / "prefix", random.Random(0)
    steady = [start(folder, seed) for seed in (1, 2)]
    for seed in range(3, 9):
        with start(folder, seed) as victim:
            until = time.monotonic() + 60
            while not list(folder.glob(f"*.{victim.pid}.partial")) and time.monotonic() < until:
                time.sleep(rng.random() * 0.002)
            victim.kill()
    for one in steady:
        said, complaints = one.communicate(timeout=300)
        assert one.returncode == 0, complaints
        end = json.loads(said)
        assert end["runs"], complaints
        assert end["failed"] == 0, complaints
        assert 0 < end["most"] <= LIMIT
        assert end["others"] > 0
    after = disk(folder, LIMIT)
    assert not list(folder.glob("*.partial"))
    for _ in range(200):
        wanted = text(rng)
        check(found(after, wanted), wanted)
    assert keep(after, PrefixStore(PLENTY), [9] * 5)
    assert bytes_in(folder) <= LIMIT
