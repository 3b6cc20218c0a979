"""bench_real_model.py's texts: a row of each mode and what is said at the end."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import bench_real_model
import pytest
from real_parts.prompts import Prompt

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", ["float32", "4bit"])
def test_a_mode_gives_rows_and_a_summary(real_model: Path, tmp_path: Path, mode: str) -> None:
    options = Namespace(mode=mode, folder=tmp_path, tokens=8)
    ids = bench_real_model._tokenizer().encode("one two three four\none two three four\none two")
    prompt = Prompt(kind="copying", name="copying-00", tokens=tuple(ids))
    run = bench_real_model._ours(options)
    next(run)
    row = run.send((prompt, [5]))  # as if mlx-lm had said something else
    assert row["same_drafted"]
    assert row["accepted"] > 2
    assert len(row["tokens"]) == 8
    assert ("peer_flip" in row) == (mode == "float32")
    summary = run.send(None)
    assert summary["weight_bytes"] > 10**9  # float32, unpacked too
    assert summary["peak_bytes"] > summary["weight_bytes"]
    run.close()
