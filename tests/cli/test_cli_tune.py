"""`mlxspec tune` on the demo: a table, a verdict that follows from it, and costs where policy auto reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_runs import Run, refused

from mlxspec.bench.turns import Score, TimedTurn
from mlxspec.cli import tune
from mlxspec.kernels.flat import LADDER

QUICK = ("--repeat", "1", "--max-tokens", "8")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))


def test_a_table_a_verdict_and_costs_that_are_kept(run: Run, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("what does os.path.join do?\n\n", encoding="utf-8")
    ran = run(
        "tune", *QUICK, "--prompts", tmp_path / "prompts.txt", "--draft", "mtp", "--plot", tmp_path / "p.png"
    )
    assert ran.code == 0, ran.err
    assert (tmp_path / "p.png").stat().st_size > 10_000
    assert "tokens verified" in ran.out
    assert ran.err.index("measuring what rounds cost here\n") < ran.err.index("measuring every drafter: ")
    assert "measuring every drafter: 18 of 18 answers\n" in ran.err
    assert ran.out.count("mtp") >= 7
    assert re.search("^(Best: |Nothing (beats|is settled to beat) plain decoding)", ran.out, re.MULTILINE)
    kept = list((tmp_path / "cache" / "costs").glob("*.json"))
    assert len(kept) == 1
    costs = json.loads(kept[0].read_text(encoding="utf-8"))
    (curve,) = costs["curves"]
    assert {int(width) for width in curve["seconds"]} >= set(LADDER[:5])  # by rounds, not by a guess
    assert [name for name, *_ in costs["drafts"]] == ["mtp"]


def test_lists_counted_from_texts_are_found_again(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.py").write_text("def close(self):\n    self.file.close()\n" * 9, encoding="utf-8")
    (folder / "data.bin").write_bytes(b"\0\1\2")
    (tmp_path / "p.txt").write_text("what is a list?", encoding="utf-8")
    ran = run(
        *("tune", *QUICK, "--draft", "mtp", "--draft-vocab", "512", "--prompts", tmp_path / "p.txt"),
        *("--texts", folder, "--json"),
    )
    assert ran.code == 0, ran.err
    assert "counted from your own texts" in ran.err
    (kept,) = (tmp_path / "cache" / "tokens").glob("*.ids")
    data = json.loads(ran.out)
    found = {r["depth"]: r for r in data["reduced_vocabulary"]}
    assert found.keys() == {1, 3}
    assert all(0 < r["read_bytes"] < r["whole_read_bytes"] and r["num_rows"] == 512 for r in found.values())
    again = run("generate", "-p", "x", "--max-tokens", "4", "--draft", "mtp", "--draft-vocab", "300")
    assert "counted from your own texts" in again.err
    for wrong, says in ((tmp_path / "none", "cannot be read"), (folder / "data.bin", "no UTF-8 text")):
        refused(run("tune", *QUICK, "--texts", wrong), says)
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(run("tune", *QUICK, "--texts", empty), "no text")
    assert kept.is_file()


@pytest.mark.slow
def test_everything_as_json_with_messages(run: Run, tmp_path: Path) -> None:
    lines = [{"prompt": "what is a list?"}, {"messages": [{"role": "user", "content": "what is a dict?"}]}]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(x) for x in lines), encoding="utf-8")
    ran = run("tune", *QUICK, "--prompts", tmp_path / "p.jsonl", "--draft", "ngram-simple", "--json")
    data = json.loads(ran.out)
    assert (ran.code, data["model"], data["num_prompts"]) == (0, "demo", 2)
    assert [c["name"] for c in data["scores"]] == ["ngram-simple", "policy fixed", "policy auto"]
    assert Path(data["kept"]).is_file()
    assert {(c["bucket"], c["rows"]) for c in data["costs"]["curves"]} == {(0, 1)}
    assert len(data["costs"]["curves"][0]["seconds"]) > 5


def score(name: str, *ratios: float, depth: int | None = None) -> Score:
    """Return a score of turns with these ratios, over plain decoding with 100 tokens a second."""
    turns = [TimedTurn(num_decoded=100, seconds=1 / r, num_plain=100, plain_seconds=1.0) for r in ratios]
    counts = {"num_rounds": 4, "num_drafted_rounds": 4 * bool(ratios)}
    return Score(name=name, depth=depth, drafters=("mtp",), turns=turns, **counts)


def test_verdicts() -> None:
    plain = score("plain", 1.0)
    steady = (1.4, 1.5, 1.6)
    assert "Nothing beats plain decoding" in tune.verdict(None, plain)
    assert "--draft off" in tune.verdict(None, plain)
    assert "Nothing is settled" in tune.verdict(None, plain, [score("mtp", 1.0, 2.0, 3.0)])
    best = tune.verdict(score("mtp", *steady, depth=3), plain)
    assert best == (
        "Best: --policy fixed --draft mtp --draft-max 3, 1.50x (1.40x to 1.60x) plain decoding (100.0 -> 150.0 tokens a second)."
    )
    assert tune.verdict(score("policy auto", *steady), plain).startswith(
        "Best: --policy auto with mtp, 1.50x"
    )
    auto, fixed = score("policy auto", 1.2, 1.3, 1.4, 1.1), score("policy fixed", 1.5, 1.6, 1.7, 1.2)
    auto.num_answers, auto.num_decoded = 4, 160
    assert "came to 1.25x (1.10x to 1.40x): answers of 40 tokens end" in tune.verdict(
        fixed, plain, [auto, fixed]
    )
    auto.num_decoded = 4000
    assert "texts that are all like these only" in tune.verdict(fixed, plain, [auto, fixed])
    fixed.turns = score("", 1.1, 1.2, 1.6, 1.7).turns
    assert "within the spread" in tune.verdict(fixed, plain, [auto, fixed])
    assert "--policy auto, the default" not in tune.verdict(auto, plain, [auto, fixed])
    whole = score("mtp", *steady, depth=3)
    whole.whole = True
    assert "--draft-max 3 --draft-vocab 0, 1.50x" in tune.verdict(whole, plain)
    assert tune.table([whole])[0][0] == "mtp, whole vocabulary"
    rows = tune.table([score("mtp", *steady, depth=3), score("ngram-map-k")])
    assert rows[0][:4] == ["mtp", "3", "150.0", "1.50x (1.40x to 1.60x)"]
    assert rows[1][3:5] == ["nothing was drafted", "nothing drafted"]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("none.txt", None, "cannot be read"),
        ("empty.txt", b"\n \n", "no prompt"),
        ("bytes.txt", b"\xff\xfe", "UTF-8"),
        ("bad.jsonl", b"{}", "line 1"),
        ("bad2.jsonl", b'{"prompt": "a"}\n[1]', "line 2"),
        ("bad3.jsonl", b'{"prompt": ""}', "line 1"),
        ("bad4.jsonl", b'{"messages": [1]}', "line 1"),
        ("bad5.jsonl", b"[" * 100_000, "line 1"),
    ],
)
def test_prompts_that_are_none(run: Run, tmp_path: Path, name: str, data: bytes | None, says: str) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    refused(run("tune", "--prompts", tmp_path / name), "--prompts", says)
