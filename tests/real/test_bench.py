"""bench_real_model.py's texts: a row of each mode and what is said at the end."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import bench_real_model
import pytest
from real_parts import real_page
from real_parts.prompts import Prompt

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", ["float32", "4bit"])
def test_a_mode_gives_rows_and_a_summary(real_model: Path, tmp_path: Path, mode: str) -> None:
    """Two prompts together; in float32 mlx-lm decodes and reads what our engine says."""
    options = Namespace(mode=mode, folder=tmp_path, tokens=8)
    encode = bench_real_model._tokenizer().encode
    texts = ("one two three four\none two three four\none two", "The capital of France is")
    asked = [
        Prompt(kind="copying", name=f"copying-{i:02}", tokens=tuple(encode(text)))
        for i, text in enumerate(texts)
    ]
    run = bench_real_model._ours(options)
    next(run)
    rows = run.send((asked, [None, None]))
    assert [row["same_drafted"] for row in rows] == [True, True]
    assert rows[0]["accepted"] > 2
    assert [len(row["tokens"]) for row in rows] == [8, 8]
    summary = run.send(None)
    assert summary["weight_bytes"] > 10**9  # float32, unpacked too
    assert summary["peak_bytes"] > summary["weight_bytes"]
    run.close()
    if mode == "4bit":
        return
    peer = bench_real_model._mlx_lm(options)
    next(peer)
    wrong = [rows[0]["tokens"], [*rows[1]["tokens"][:-1], 5]]  # as if our engine had said something else
    read = peer.send((asked, wrong))
    assert [row["tokens"] for row in read] == [row["tokens"] for row in rows]
    assert [row["decoded"] for row in read] == [False, True]
    assert [row["read"]["sure"] for row in read] == [True, False]
    peer.close()


def test_peaks_are_kept(real_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_real_model, "MEMORY_PROMPTS", {"long-00": 600})
    options = Namespace(folder=tmp_path, modes=["float32"])
    for _ in range(2):  # the second time it is known
        bench_real_model._memory(options)
    (found,) = real_page.read(tmp_path / "memory.jsonl")
    assert (found["mode"], found["prompt"]) == ("float32", 600)
    assert found["weight_bytes"] < found["peak_bytes"] < found["resident_bytes"]
