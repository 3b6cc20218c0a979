"""What is exported follows the rules of the speculators library, and conversations are used with the flag only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from planting import catches
from training import command, states
from training.export import accepted_at
from training.states import LENGTH, Batch

from mlxspec import load
from mlxspec.cli import saved

TEXT = "SELECT name FROM orders WHERE price > 3 ;\n" * 60
ANSWER = "It computes the mean of the values that it is given. " * 30


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))


def exported(folder: Path, *more: str) -> list[dict[str, list[int]]]:
    assert command.main(["demo", "--export", str(folder), "--minutes", "1", *more]) == 0
    return [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]


def keep(model: str, answer: str = ANSWER, **more: object) -> saved.Saved:
    path = saved.new_file()
    assert path is not None
    messages = [
        {"role": "user", "content": "what is a mean?", **more},
        {"role": "assistant", "content": answer},
    ]
    made = saved.Saved(model=model, system="Be brief.", messages=messages)
    saved.save(path.with_stem(f"{path.stem} {len(saved.kept_files())}"), made)
    return made


@pytest.mark.parametrize("name", [None, "demo-eagle3", "demo-dflash"])
def test_what_is_written_is_what_the_library_reads(name: str | None, tmp_path: Path) -> None:
    (tmp_path / "a.sql").write_text(TEXT)
    drafter = [] if name is None else ["--draft-model", name]
    rows = exported(tmp_path / "out", "--texts", str(tmp_path / "a.sql"), *drafter)
    assert len(rows) >= 2
    engine, every = load("demo", draft="off"), list[int]()
    for i, row in enumerate(rows):
        assert set(row) == {"input_ids", "loss_mask"}
        assert row["loss_mask"] == [1] * LENGTH
        held = mx.load(str(tmp_path / "out" / "hidden_states" / f"hs_{i}.safetensors"))
        assert held["token_ids"].dtype == mx.int64
        assert held["token_ids"].tolist() == row["input_ids"]
        states_of = held["hidden_states"]
        assert states_of.shape == (
            LENGTH,
            4 if name else 3,
            192,
        )  # the drafter's layers 1, 3, 5, else common ones
        assert mx.isfinite(states_of).all().item()
        batch = Batch.of(engine.model, (5,), [row["input_ids"]])
        assert mx.array_equal(states_of[:, -1], batch.streams[0])
        depth = 7 if name == "demo-dflash" else 3
        accepted, begins = held["accepted"].tolist(), int(name != "demo-dflash")
        assert len(accepted) == LENGTH
        assert accepted[:begins] == [-1] * begins
        assert accepted[LENGTH - depth + begins :] == [-1] * (depth - begins)
        assert all(0 <= n <= depth for n in accepted[begins : LENGTH - depth + begins])
        assert max(accepted) > 0
        every += row["input_ids"]
    tokens = engine.tokenizer.encode(TEXT, special=False)
    assert len(every) >= len(tokens) - 2 * LENGTH
    assert command.main(["demo", "--texts", str(tmp_path / "a.sql"), "--export", str(tmp_path / "out")]) == 2


@catches(
    "a draft counts tokens behind a rejected one",
    "mlx.core:cumprod",
    lambda right: lambda x, axis: x,
)
def test_accepted_counts_from_the_first_token_on() -> None:
    def logits(tokens: list[int]) -> mx.array:
        return mx.eye(5)[mx.array(tokens)][None]

    right = [3, 0, 1, 2, 4, 1]
    drafted = [[0, 1, 2, 3], [1, 2, 0, 1]]
    network = SimpleNamespace(
        depths=(1.0, 1.0),
        ids=None,
        begins_behind=1,
        scored=lambda *a, **k: [(logits(own), None, None) for own in drafted],
        logits=lambda hidden: logits(right)[0],
    )
    batch = Batch(mx.zeros((1, 6), mx.int32), mx.zeros((1, 6, 2)))
    assert accepted_at(network, {}, batch).tolist() == [-1, 2, 2, 1, 0, -1]


def test_conversations_are_used_with_the_flag_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = keep("demo")
    keep("demo-gemma", "Another model said this. " * 60)
    keep("demo", "This one is about a picture. " * 60, images=["a.png"])
    (tmp_path / "a.sql").write_text(TEXT)
    texts = ["--texts", str(tmp_path / "a.sql")]
    without = exported(tmp_path / "without", *texts)
    assert "uses the conversation" not in capsys.readouterr().err
    rows = exported(tmp_path / "with", "--from-conversations")
    told = capsys.readouterr().err
    assert told.count("uses the conversation") == 1
    assert "what is a mean?" in told
    messages = [{"role": "system", "content": kept.system}, *kept.messages]
    wanted = load("demo").chat_prompt(messages, {"add_generation_prompt": False})
    found = [t for row in rows for t in row["input_ids"]]
    assert found == wanted[: len(found)]
    assert found
    assert exported(tmp_path / "both", "--from-conversations", *texts)[: len(without)] != rows
    shutil.rmtree(tmp_path / "cache" / "chats")
    assert command.main(["demo", "--from-conversations"]) == 2
    assert "no conversation of text with this model" in capsys.readouterr().err


def test_a_full_disk_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.sql").write_text(TEXT)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(states.shutil, "disk_usage", lambda path: usage)
    arguments = ["demo", "--texts", str(tmp_path / "a.sql"), "--export", str(tmp_path / "out")]
    assert command.main(arguments) == 2
    assert "is full" in capsys.readouterr().err
    assert not (tmp_path / "out" / "data.jsonl").exists()
