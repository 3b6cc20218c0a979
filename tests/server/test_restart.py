"""A server that is killed in the middle of a write and started again: conversations go on from the disk as if it had never ended."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import LONG, Served
from tests.server.test_conversation import DOCUMENT, NEXT

QUESTION = {"role": "user", "content": f"{DOCUMENT} what does os.path.join do?"}
ASKED = {"max_tokens": 60}
# The write that is under way when the flag is there stays half done.
PLANT = """
import time
from pathlib import Path
from mlxspec.engine import kept_files
_whole = kept_files._write
def _half(path, head, tensors, is_wanted):
    if Path({flag!r}).exists():
        path.write_bytes(head)
        Path({flag!r} + ".reached").touch()
        time.sleep(600)
    return _whole(path, head, tensors, is_wanted)
kept_files._write = _half
"""


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.02)


def turn(served: Served, *messages: dict[str, Any]) -> tuple[dict[str, Any], int, tuple[float, float]]:
    """(message, prompt tokens that were read, drafted and accepted tokens)."""
    before = served.metrics()
    status, answer = served.post("/v1/chat/completions", {"messages": messages, **ASKED})
    assert status == 200, answer
    after, usage = served.settle(), answer["usage"]
    read = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    counts = [
        sum(v - before.get(k, 0.0) for k, v in after.items() if k.startswith(f"mlxspec_{name}_tokens_total"))
        for name in ("drafted", "accepted")
    ]
    return answer["choices"][0]["message"], read, (counts[0], counts[1])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["demo-gemma", "demo"])
def test_a_conversation_goes_on_behind_a_kill(tmp_path: Path, form: str) -> None:
    folder, flag = tmp_path / "prefix", tmp_path / "half"
    # earlier texts are in the memory of a server that never ended, and would be drafted from
    drafters = "ngram-simple" if form == "demo-gemma" else "mtp,ngram-simple"
    args = ("--model", form, "--policy", "fixed", "--draft", drafters)
    disk = (*args, "--prefix-disk", "1G", "--prefix-dir", str(folder))
    with Served(*args) as steady, Served(*disk, plant=PLANT.format(flag=str(flag))) as first:
        wanted, _, _ = turn(steady, QUESTION)
        said, read, _ = turn(first, QUESTION)
        assert said == wanted
        assert read > 1000

        def is_written() -> bool:
            number = first.metrics()["mlxspec_prefix_disk_written_bytes_total"]
            time.sleep(0.3)
            return 0 < number == first.metrics()["mlxspec_prefix_disk_written_bytes_total"]

        until(is_written)
        flag.touch()
        turn(first, {"role": "user", "content": f"{DOCUMENT[:2000]} and then?"})
        until(Path(f"{flag}.reached").exists)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(LONG)
        assert list(folder.glob("*.new"))
        with Served(*disk) as again:
            wanted, warm_read, warm = turn(steady, QUESTION, said, NEXT)
            got, read, found = turn(again, QUESTION, said, NEXT)
            assert got == wanted
            assert read <= max(32, warm_read)
            assert read <= 32 or form == "demo-gemma"
            assert warm[0] > 10
            assert abs(found[1] / found[0] - warm[1] / warm[0]) <= 0.02
            # the second server may be writing one of its own
            left = [p for p in folder.glob("*.new") if p.name.split(".")[2] != str(again.process.pid)]
            assert not left
            assert again.metrics()["mlxspec_prefix_disk_read_bytes_total"] > 0
            assert again.stop() == 0
        assert not any("Traceback" in line for line in again.lines)


@pytest.mark.slow
def test_a_model_that_was_unloaded_goes_on_where_it_was(tmp_path: Path) -> None:
    disk = ("--prefix-disk", "1G", "--prefix-dir", str(tmp_path / "prefix"))
    with Served("--policy", "fixed", "--idle-unload", "0.5", *disk) as served:
        said, _, _ = turn(served, QUESTION)
        until(lambda: served.metrics()["mlxspec_ready"] == 0)
        _, read, _ = turn(served, QUESTION, said, NEXT)
        assert read <= 32


def test_a_folder_with_other_things_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    with Served("--prefix-disk", "1G", "--prefix-dir", str(tmp_path), wait=False) as served:
        assert served.process.wait(LONG) == 2
    assert any("holds other files" in line for line in served.lines)
    assert json.dumps([p.name for p in tmp_path.iterdir()]) == '["letter.txt"]'
