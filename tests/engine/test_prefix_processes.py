"""Real processes that share a folder of the prefix cache on disk, some of which are killed in the middle of whatever they do."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlxspec.engine.prefix.disk import open_files
from mlxspec.engine.prefix.tree import PrefixTree
from tests.engine.folder_user import text
from tests.engine.kept_on_disk import PLENTY, bytes_in, check, disk, found, keep

pytestmark = pytest.mark.slow
LIMIT = 100_000
ROOT = Path(__file__).resolve().parents[2]


def start(folder: Path, seed: int, num_texts: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.engine.folder_user", *map(str, (folder, LIMIT, seed, num_texts))]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_on_one_folder(tmp_path: Path) -> None:
    """All that anybody finds is right, the folder never has more bytes than it may, and what one wrote the other finds."""
    folder = tmp_path / "prefix"
    both = [start(folder, seed, 150) for seed in (1, 2)]
    for one, (said, complaints) in [(p, p.communicate(timeout=600)) for p in both]:
        assert one.returncode == 0, complaints
        end = json.loads(said.splitlines()[-1])
        assert end["failed"] == 0, complaints
        assert 0 < end["most"] <= LIMIT
        assert end["others"] > 0


def test_a_hundred_kills_while_writing(tmp_path: Path) -> None:
    """A process is forked for each, so that it writes at once; it is killed at a random moment of its writing."""
    folder = tmp_path / "prefix"
    killer = """
import os, random, signal, sys, time
from pathlib import Path
from mlxspec.engine.prefix.disk import open_files
from mlxspec.engine.prefix.tree import PrefixTree
from tests.engine.folder_user import text
from tests.engine.kept_on_disk import PLENTY, disk, keep
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
for seed in range(100):
    rng, (told, tell) = random.Random(seed), os.pipe()
    child = os.fork()
    if not child:
        made, tree = disk(folder, limit), PrefixTree(PLENTY)
        os.write(tell, b"x")
        while True:
            keep(made, tree, [*text(rng), *range(rng.randint(0, 400))])
    os.close(tell)
    os.read(told, 1)
    os.close(told)
    time.sleep(rng.random() * 0.03)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
print(len(list(folder.glob("*.new"))))
"""
    done = subprocess.run(
        [sys.executable, "-c", killer, str(folder), str(LIMIT)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    after = disk(folder, LIMIT)
    num = 0
    for seed in range(100):
        again = random.Random(seed)
        for _ in range(3):
            wanted = [*text(again), *range(again.randint(0, 400))]
            num += check(found(after, wanted), wanted) > 0
    assert num > 0
    assert after.stats.num_missed == 0  # no file with a name is a part of one
    assert not list(folder.glob("*.new"))
    assert keep(after, PrefixTree(PLENTY), [9] * 5)
    assert bytes_in(folder) <= LIMIT


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    folder = tmp_path / "prefix"
    victim = start(folder, 1, 1 << 20)
    until = time.monotonic() + 60
    while not list(folder.glob("*.new")) and time.monotonic() < until:
        time.sleep(0.0005)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    (folder / "1-2-t-3.safetensors.77.new").write_bytes(b"half")
    open_files(folder, None).tidy()
    assert not list(folder.glob("*.new"))
