"""`mlxspec prove`: recorded answers are decoded again without drafts."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Run, refused
from planting import catches

from mlxspec.cli import options
from mlxspec.config import SpecConfig
from mlxspec.demo import PICTURES
from mlxspec.errors import ConfigError

PROMPTS = ("abcabcabcabcab", "xyxyxyxyxy")
SAMPLED = ("--temp", 0.8, "--top-k", 5, "--json-schema", '{"type": "integer"}', "--bad-word", "7")


@pytest.fixture
def lines(run: Run, model: Path) -> list[dict[str, Any]]:
    """Records of two greedy answers and two sampled ones."""
    asked = [arg for prompt in PROMPTS for arg in ("-p", prompt)]
    given = ("generate", *asked, "--model", model, "--max-tokens", 30, "--json")
    out = run(*given).out + run(*given, *SAMPLED).out
    return [json.loads(line) for line in out.splitlines()]


def written(folder: Path, lines: list[dict[str, Any]]) -> Path:
    path = folder / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


def test_recorded_answers_are_proved(run: Run, tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    ran = run("prove", written(tmp_path, lines))  # the records name the model
    assert ran.code == 0
    assert len(ran.out.splitlines()) == 4
    assert ran.out.startswith("line 1: proved: plain decoding gives the same 30 tokens, in ")
    assert "4 of 4 answers are the same." in ran.err


def test_answers_of_several_models_are_proved_by_each(
    run: Run, tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    """A server with several models writes such a file."""
    other = json.loads(run("generate", "-p", PROMPTS[0], "-n", 5, "--json").out)
    other["tokens"][2] ^= 1
    quantized = json.loads(run("generate", "-p", PROMPTS[0], "-n", 5, "--kv-bits", 8, "--json").out)
    ran = run("prove", written(tmp_path, [lines[0], other, lines[1], quantized]), "--json")
    found = {each["line"]: each["equal"] for each in map(json.loads, ran.out.splitlines())}
    assert found == {1: True, 2: False, 3: True, 4: True}
    assert "3 of 4 answers are the same." in ran.err
    assert "decodes them again" not in ran.err


def test_a_wrong_answer_is_found_at_its_first_place(
    run: Run, tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    lines[1]["tokens"][4] ^= 1
    ran = run("prove", written(tmp_path, lines), "--json")
    found = [json.loads(line) for line in ran.out.splitlines()]
    assert ran.code == 1
    assert [each["equal"] for each in found] == [True, False, True, True]
    assert (found[1]["line"], found[1]["difference"]["place"]) == (2, 4)
    assert "3 of 4 answers are the same." in ran.err


def test_another_text_or_another_end_is_not_proved(
    run: Run, tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    lines[0]["text"] = "another text"
    lines[1]["finish_reason"] = "stop"
    ran = run("prove", written(tmp_path, lines))
    assert ran.code == 1
    assert "line 1 is not proved: The answer's text is not what its tokens say" in ran.err
    assert "line 2: NOT THE SAME: both end after 30 tokens" in ran.out
    assert "2 of 4 answers are the same." in ran.err


@catches(
    "other weights are taken for those of the answer",
    "mlxspec.cli.prove:_of_these_weights",
    lambda right: lambda engine, records: iter(records.items()),
)
def test_other_weights_prove_nothing(run: Run, tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    """A folder under the same name may have got other weights since; a person who names the model wants these compared all the same."""
    lines[0]["weights"] = 64 * "0"
    lines[2]["weights"] = None
    path = written(tmp_path, lines)
    ran = run("prove", path)
    assert ran.code == 1
    assert "line 1 is not proved: " in ran.err
    assert "had other weights, or another dtype" in ran.err
    assert "3 of 4 answers are the same." in ran.err
    assert run("prove", path, "--model", lines[0]["model"]).code == 0


def test_weights_that_are_no_digest_are_no_record(
    run: Run, tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    lines[1]["weights"] = 7
    refused(run("prove", written(tmp_path, lines)), "weights must be a digest, not 7.")


def test_what_cannot_be_proved_is_no_success(run: Run, tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    lines[0] |= {"finish_reason": "error", "error": "it broke"}
    ran = run("prove", written(tmp_path, lines))
    assert ran.code == 1
    assert "line 1 is not proved: An answer that failed cannot be proved: it broke" in ran.err
    assert len(ran.out.splitlines()) == 3


def test_a_record_without_its_prompt_holds_up_no_other(run: Run, tmp_path: Path) -> None:
    """An answer about an image is recorded without it."""
    given = ("generate", "-p", "Read it.", "--model", "demo-vision", "--max-tokens", 4, "--json")
    picture = sorted(PICTURES.glob("*.png"))[0]
    found = [json.loads(run(*given, *more).out) for more in (("--image", picture), ())]
    assert (found[0]["prompt_tokens"], found[0]["params"]) == (None, {})
    ran = run("prove", written(tmp_path, found))
    assert ran.code == 1
    assert "line 1 is not proved: It holds no prompt" in ran.err
    assert "1 of 2 answers are the same." in ran.err


def test_keys_and_values_have_the_bits_of_the_answers(
    run: Run, tmp_path: Path, lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def load(args: argparse.Namespace, spec: SpecConfig) -> None:
        taken.append(args.kv_bits)
        raise ConfigError("That is enough.")

    monkeypatch.setattr(options, "load_engine", load)
    path = written(tmp_path, [line | {"kv_bits": 8} for line in lines])
    for more in ((), ("--kv-bits", 4)):
        refused(run("prove", path, *more), "That is enough.")
    assert taken == [8, 4]


def test_an_answer_that_the_context_ended_is_proved_in_a_larger_one(
    run: Run, tmp_path: Path, model: Path
) -> None:
    options = ("--max-tokens", 300, "--max-context", 40, "--json")
    recorded = json.loads(run("generate", "-p", PROMPTS[0], "--model", model, *options).out)
    assert recorded["finish_reason"] == "length"
    assert len(recorded["tokens"]) < 40
    assert run("prove", written(tmp_path, [recorded])).code == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt_tokens": ["a"]}, "prompt_tokens must be a list of token ids"),
        ({"tokens": [-1]}, "tokens must be a list of token ids"),
        ({"text": 3}, "text must be a text, not 3"),
        ({"finish_reason": "tired"}, "no answer ends with 'tired'"),
        ({"tokens": [2**31]}, "tokens must be a list of token ids"),
        ({"model": None}, "Line 1 of .* model must be a name, not None"),
        ({"params": {"temprature": 1}}, "did you mean temperature"),
        ({"params": {"self": 1}}, "its params or stats are of another kind"),
        ({"params": {"seed": float("inf")}}, "its params or stats are of another kind"),
        ({"stats": {"decode_seconds": 10**400}}, "its params or stats are of another kind"),
        ({"kv_bits": 3}, "Line 1 of .* kv_bits must be one of 4, 8, 16, not 3"),
        ({"params": {"top_k": "x"}}, "top_k must be"),
        ({"params": [1]}, "its params or stats are of another kind"),
        ({"stats": 3}, "its params or stats are of another kind"),
        ({"model": "another"}, "There is no folder another"),
    ],
)
def test_a_bad_record_is_one_sentence(
    run: Run, tmp_path: Path, lines: list[dict[str, Any]], change: dict[str, Any], said: str
) -> None:
    lines[0] |= change
    assert re.search(said, refused(run("prove", written(tmp_path, lines))))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty. `mlxspec generate --json`"),
        ("12:00:01 127.0.0.1 POST /v1/completions 200 31 ms\n", "Line 1 of"),
        ("[1]\n", "is no JSON object"),
        ("[" * 100_000, "is no JSON object"),
        ('{"model": "demo"}\n', "it has no prompt_tokens"),
        ("\udcff", "it is no UTF-8 text"),
    ],
)
def test_a_file_that_holds_no_records(run: Run, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    refused(run("prove", path), said)


def test_a_file_that_is_not_there(run: Run, tmp_path: Path) -> None:
    refused(run("prove", tmp_path / "none"), "cannot be read: No such file or directory.")
