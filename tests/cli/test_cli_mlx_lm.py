"""Models that run by mlx-lm's code, through the command line: answers, grammars, what inspect says, conversions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import Run

from tests.models.adapted_zoo import write

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
PROMPT = "def add(a, b):\n    return a + b\n\ndef add(a, b):\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("lfm2", tmp_path_factory.mktemp("models") / "lfm2")


def test_drafting_does_not_change_an_answer(run: Run, folder: Path) -> None:
    common = (
        "generate",
        "-p",
        PROMPT,
        "--ignore-chat-template",
        "--model",
        folder,
        "--max-tokens",
        96,
        "--json",
    )
    drafted, plain = (
        run(*common, "--policy", "fixed", "--draft", "ngram-simple", "--ngram-n", "1", "--ngram-m", "5"),
        run(*common, "--draft", "off"),
    )
    assert (drafted.code, plain.code) == (0, 0)
    mine, theirs = json.loads(drafted.out), json.loads(plain.out)
    assert mine["tokens"] == theirs["tokens"]
    assert mine["stats"]["num_drafted"] > 0


def test_an_answer_follows_a_schema(run: Run, folder: Path) -> None:
    ran = run(
        "generate",
        "-p",
        PROMPT,
        "--ignore-chat-template",
        "--model",
        folder,
        "--json-schema",
        json.dumps(SCHEMA),
        "--max-tokens",
        200,
    )
    assert ran.code == 0
    assert json.loads(ran.out)["a"] in ("x", "y")


def test_inspect_says_what_does_not_work(run: Run, folder: Path) -> None:
    ran = run("inspect", folder)
    assert ran.code == 0
    assert "by mlx-lm" in ran.out
    assert "4: 2 attention, 2 recurrent" in ran.out
    for what in (
        "--exact is refused",
        "--kv-bits is refused",
        "Ranks are refused",
        " no mtp: mlx-lm's code",
        " no eagle3: reads layers",
    ):
        assert what in ran.out
    for name in ("ngram-simple", "forced"):
        assert f"yes {name}" in ran.out
    data = json.loads(run("inspect", folder, "--json", "--draft-model", folder).out)
    assert data["memory"]["drafter_weights"] == data["memory"]["weights"] > 0
    assert data["parameters"] == sum(data["formats"].values())
    assert {d["name"]: d["usable"] for d in data["drafters"]}["draft-model"]


def test_a_conversion_loads_and_takes_less(run: Run, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "packed"
    ran = run("convert", folder, "-o", out, "--bits", 4, "--group-size", 32)
    assert (ran.code, ran.err) == (0, "")
    assert (out / "model.safetensors").stat().st_size < (folder / "model.safetensors").stat().st_size / 3
    again = run(
        "generate", "-p", PROMPT, "--ignore-chat-template", "--model", out, "--max-tokens", 8, "--json"
    )
    assert (again.code, len(json.loads(again.out)["tokens"])) == (0, 8)
    refused = run("convert", out, "-o", tmp_path / "twice", "--bits", 4)
    assert refused.code == 2
    assert "quantized already" in refused.err
    assert not (tmp_path / "twice").exists()
    head = run("convert", folder, "-o", tmp_path / "head", "--mtp-bits", 4)
    assert head.code == 2
    assert "no MTP head" in head.err
