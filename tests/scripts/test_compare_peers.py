"""The comparison's words between processes, its page, and that it says what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from peers import llama_cpp, tables
from peers.folders import export
from peers.talk import PeerError, Worker

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
DOCS = SCRIPTS.parent / "docs"
ECHO = """
from peers.talk import serve
def twice(x): print("chatter"); return {"y": 2 * x}
def fail(): raise ValueError("no such thing")
def leave(): raise SystemExit
serve({"twice": twice, "fail": fail, "leave": leave})
"""


@pytest.fixture
def worker(tmp_path: Path) -> Any:
    made = Worker([sys.executable, "-c", ECHO], SCRIPTS, tmp_path / "log")
    yield made
    made.close()


def test_a_worker_answers_and_its_chatter_does_not(worker: Worker) -> None:
    assert [worker.ask("twice", x=x) for x in (1, 2)] == [{"y": 2}, {"y": 4}]


def test_a_failure_is_an_answer_and_the_worker_goes_on(worker: Worker) -> None:
    with pytest.raises(PeerError, match="no such thing"):
        worker.ask("fail")
    assert worker.ask("twice", x=3) == {"y": 6}


def test_a_worker_that_ended_is_said_to_have(worker: Worker) -> None:
    with pytest.raises(PeerError, match="ended"):
        worker.ask("leave")


def test_a_server_that_does_not_start_is_said_so(tmp_path: Path) -> None:
    server = tmp_path / "llama-server"
    server.write_text("#!/bin/sh\nexit 3\n")
    server.chmod(0o755)
    peer = llama_cpp.LlamaCpp(server=server, model=tmp_path, draft=tmp_path, threads=1, log=tmp_path / "log")
    with pytest.raises(PeerError, match="did not start for plain"):
        peer.ask("run", prompts=[[1]], num_tokens=[1], method="plain")
    with pytest.raises(PeerError, match="not asked for eagle"):
        peer.ask("run", prompts=[[1]], num_tokens=[1], method="eagle")


def test_a_source_that_does_not_build_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="could not be built"):
        llama_cpp.build(tmp_path / "nothing", tmp_path / "build", tmp_path / "log")


def test_an_export_has_room_for_long_prompts(tmp_path: Path) -> None:
    from mlxspec.demo import TARGET

    config = json.loads((export(TARGET, tmp_path / "out", model_type="other") / "config.json").read_text())
    assert (config["max_position_embeddings"], config["model_type"]) == (4096, "other")


def _cell(speedup: float, same: int) -> dict[str, Any]:
    return {
        "tok/s": 100.0,
        "speed-up": speedup,
        "same text": [same, 2],
        "acceptance": 0.5,
        "tokens a round": 2.0,
        "host busy": 0.3,
        "evaluating": 0.6,
    }


FOUND: dict[str, Any] = {
    "machine": {"device": "a CPU", "threads": 2, "blas": "OpenBLAS", "system": "Linux"},
    "missing": {"llama.cpp": "no checkout was given"},
    "dtypes": {
        "float32": {
            "versions": {"mlxspec": "1", "mlx-vlm": "2"},
            "prefill": {"64": {n: {"seconds": 0.1, "over ours": 1.0} for n in ("mlxspec", "mlx-vlm")}},
            "decode": {
                n: {"tok/s": 10.0, "over ours": 0.5, "host busy": None, "evaluating": None}
                for n in ("mlxspec", "mlx-vlm")
            },
            "nodes": {"mlxspec": {"nodes": {"1": 395}}, "mlx-vlm": {"error": "?"}},
            "memory": {"mlxspec": {"bytes": 5_000_000}, "mlx-vlm": {"error": "?"}},
            "rows 1": {
                "edit": {
                    "mlxspec": {"plain": _cell(1, 2), "fixed:mtp": _cell(2.5, 2)},
                    "mlx-vlm": {"mtp": _cell(9, 1)},
                }
            },
            "rows 4": {"edit": {"mlxspec": {"plain": _cell(1, 2)}}},
            "said 1": "2 prompts.",
            "said 4": "4 prompts.",
            "lacks": {"mlx-vlm mtp, 4 rows": "it fell"},
        }
    },
}


def test_the_page_gives_no_speedup_for_texts_that_differ() -> None:
    page = tables.page(FOUND)
    assert "**2.50x**" in page
    assert "9.00x" not in page
    assert "text differs in 1 of 2" in page
    assert "**llama.cpp is missing:** no checkout was given" in page
    assert "mlx-vlm mtp, 4 rows: it fell" in page


def test_the_picture_shows_the_speeds_of_the_page(tmp_path: Path) -> None:
    """Where a drafted text differs from the plain one there is no drafted speed."""
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    page = tables.page(FOUND)
    edit = tables.speeds(page)["float32"]["edit"]
    assert edit["mlxspec"] == tables.Speeds(plain=100.0, drafted=100.0, speedup=2.5)
    assert edit["mlx-vlm"] == tables.Speeds()
    tables.plot(page, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_of_the_docs_has_the_figures_of_its_short_form() -> None:
    """docs/benchmarks.md gives each engine's best drafting method as the log has it."""
    log = (DOCS / "log" / "2026-11-23-side-by-side.md").read_text(encoding="utf-8")
    short = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    found = tables.speeds(log)["float32"]
    for engine in ("mlxspec", "mlx-vlm", "llama.cpp"):
        best = " | ".join(f"{by[engine].speedup:.2f}" for by in found.values())
        assert f"| {engine}, one row | {best} |" in short, (engine, best)


@pytest.mark.slow
def test_without_peers_it_says_which_are_missing(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(SCRIPTS / "compare_peers.py"),
        "--work",
        str(tmp_path),
        "--dtype",
        "float32",
    ]
    command += ["--rounds", "1", "--tokens", "8", "--skip", "mlx-lm", "mlx-vlm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "**mlx-lm is missing:** left out" in done.stdout
    assert "**llama.cpp is missing:** no checkout" in done.stdout
    assert "mlxspec auto ngram-simple,mtp" in done.stdout
