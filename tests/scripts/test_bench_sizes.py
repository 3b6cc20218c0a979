"""The table of real sizes has all its ratios, each of the right pair of figures, and both engines run a tiny checkpoint for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_sizes
import pytest
import write_checkpoint
from bench_sizes import OURS, PEER, PEER_CAST, READING, THROUGH_A_BUFFER, WITH_DRAFTERS

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))

import tiny

LOADS = {
    READING: [1.0, 2.0, 1.0],
    THROUGH_A_BUFFER: [0.5, 0.5, 0.5],
    OURS: [2.0, 8.0, 3.0],
    WITH_DRAFTERS: [5.0, 5.0, 5.0],
    PEER: [4.0, 4.0, 4.0],
    PEER_CAST: [8.0, 16.0, 8.0],
}
MEMORY = {"peak": 12.0, "stays": 10.0, "mlx_peak": 9.0, "mlx_stays": 6.0}
FOUND: dict[str, Any] = {
    "load": {
        "taken": {
            "load": LOADS,
            "weights": {
                OURS: [1.0, 1.0, 1.0],
                PEER: [2.0, 2.0, 2.0],
                PEER_CAST: [4.0, 4.0, 4.0],
                READING: LOADS[READING],
            },
            "first": {OURS: [3.0, 3.0, 3.0], PEER: [6.0, 6.0, 6.0]},
        },
        "memory": {OURS: MEMORY, PEER: {"peak": 3.0, "stays": 2.0, "mlx_peak": 1.0, "mlx_stays": 1.0}},
        "bytes": 4_000_000_000,
    },
    "decode": {
        "taken": {
            "prefill": {OURS: [1.0], PEER: [4.0]},
            "plain": {OURS: [0.1], PEER: [0.3]},
            "verify": {"plain step": [0.2], "verify 4": [0.3], "verify 16": [0.5]},
        },
        "row_bytes": {OURS: 2_000_000, PEER: 4_000_000},
        "weights": 3_000_000_000,
        "prompt": 512,
        "answer": 32,
    },
}
RATIOS = {
    "load / reading": 3.0,  # of 2, 4 and 3
    "load / reading through a buffer": 6.0,
    "load / mlx-lm's load": 0.75,
    "load / mlx-lm's load, cast to float32": 0.375,
    "load with drafters / mlx-lm's load": 1.25,
    "weights / reading": 1.0,
    "weights / mlx-lm's": 0.5,
    "weights / mlx-lm's, cast to float32": 0.25,
    "first token / mlx-lm's": 0.5,
    "prefill / mlx-lm's": 0.25,
    "plain decoding, speed / mlx-lm's": 3.0,
    "verify of 4 / plain step": 1.5,
    "verify of 16 / plain step": 2.5,
    "peak / what stays": 1.2,
    "of MLX: peak / what stays": 1.5,
    "peak / what stays, mlx-lm": 1.5,
    "of MLX: peak / what stays, mlx-lm": 1.0,
    "files, GB": 4.0,
    "reading, GB/s": 4.0,
    "bytes of a row / mlx-lm's": 0.5,
    "a row, MB": 2.0,
    "weights in memory, GB": 3.0,
}


def test_each_ratio_is_of_its_pair() -> None:
    found = bench_sizes.summary(FOUND)
    assert found.pop("tokens of the prompt, answer") == "512, 32"
    assert found == pytest.approx(RATIOS)


def test_a_part_that_was_not_measured_is_left_out() -> None:
    found = bench_sizes.summary({"decode": FOUND["decode"]})
    assert set(found) == {
        "prefill / mlx-lm's",
        "plain decoding, speed / mlx-lm's",
        "verify of 4 / plain step",
        "verify of 16 / plain step",
        "bytes of a row / mlx-lm's",
        "a row, MB",
        "weights in memory, GB",
        "tokens of the prompt, answer",
    }
    without_cast = {name: times for name, times in LOADS.items() if name != PEER_CAST}
    taken = FOUND["load"]["taken"] | {"load": without_cast}
    found = bench_sizes.summary({"load": FOUND["load"] | {"taken": taken}})
    assert "load / mlx-lm's load, cast to float32" not in found


def test_the_table_has_a_line_for_each_measure_and_a_column_for_each_dtype() -> None:
    text = bench_sizes.table(
        {"0.8b, float32": {"load": 1.234, "both": "a, b"}, "0.8b-4bit, 4 bits": {"both": 2.0}}
    )
    assert text.splitlines() == [
        "| | 0.8b, float32 | 0.8b-4bit, 4 bits |",
        "|---|---|---|",
        "| load | 1.23 |  |",
        "| both | a, b | 2.00 |",
    ]


@pytest.mark.parametrize(("each", "expected"), [(0.001, 512), (0.02, 256), (0.5, 16), (9.0, 2)])
def test_lengths_fit_into_the_seconds(each: float, expected: int) -> None:
    assert bench_sizes._fitting(each, 8.0, 512) == expected


def test_turns_take_what_they_say_and_alternate() -> None:
    order: list[str] = []

    def turn(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    taken = bench_sizes._told({"a": lambda: turn("a", 2.0), "b": lambda: turn("b", 3.0)}, rounds=2)
    assert taken == {"a": [2.0, 2.0], "b": [3.0, 3.0]}
    assert order == ["a", "b", "b", "a"]


def test_reading_reads_all_files_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_sizes, "_BUFFER", 1000)
    for name in ("model-00001-of-00002.safetensors", "mtp.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(bytes(2500))
    names = [path.name for path in bench_sizes._files(tmp_path)]
    assert names == ["model-00001-of-00002.safetensors", "mtp.safetensors"]
    assert bench_sizes._read(tmp_path, keep=True) > 0
    assert bench_sizes._read(tmp_path, keep=False) > 0


@pytest.mark.slow
def test_both_engines_run_a_tiny_checkpoint(tmp_path: Path) -> None:
    """Floats in two dtypes and 4 bits; a second run measures nothing again."""
    config = write_checkpoint.cut(tiny.hub_config(tiny.SHAPES["tied"]), None, 3000)
    for bits in (None, 4):
        write_checkpoint.write(tmp_path / f"tiny-{bits}", config, bits=bits)
    command = [sys.executable, bench_sizes.__file__, str(tmp_path / "tiny-None"), str(tmp_path / "tiny-4")]
    command += ["--rounds", "1", "--prefill", "32", "--tokens", "4", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "out.json").read_text())
    assert list(kept) == ["tiny-None, float32", "tiny-None, bfloat16", "tiny-4, 4 bits"]
    for name, found in kept.items():
        measured = bench_sizes.summary(found)
        missing = {measure for measure in RATIOS if measure not in measured}
        assert missing == {
            measure for measure in RATIOS if "cast" in measure and name != "tiny-None, float32"
        }
        assert found["load"]["memory"][OURS]["peak"] >= found["load"]["memory"][OURS]["stays"] > 0
        assert found["decode"]["row_bytes"][OURS] > 0
    float32, bfloat16, packed = (found["decode"] for found in kept.values())
    assert (
        float32["row_bytes"][OURS] == float32["row_bytes"][PEER]
    )  # state, window of the convolution, keys and values
    assert bfloat16["row_bytes"][OURS] < float32["row_bytes"][OURS]
    assert packed["weights"] == float32["weights"]  # a CPU unpacks so small a model
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.stdout == done.stdout


@pytest.mark.parametrize("words", [[], ["--rounds", "0"], ["nowhere"]])
def test_bad_options_are_refused_in_a_sentence(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    given = words if not words or words == ["nowhere"] else [str(tmp_path), *words]
    monkeypatch.setattr(sys, "argv", ["bench_sizes.py", *given])
    with pytest.raises(SystemExit) as ended:
        bench_sizes.main()
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err
