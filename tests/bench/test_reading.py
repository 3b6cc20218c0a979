"""How fast prompts are read: each is read anew and whole, by both engines."""

from __future__ import annotations

import json
import re

import pytest

import mlxspec
from mlxspec.bench import reading
from mlxspec.cli.main import main
from mlxspec.demo import TARGET
from mlxspec.engine.engine import Engine

LENGTHS = (40, 300)


def test_each_prompt_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = mlxspec.load("demo")
    read: list[tuple[int, int]] = []
    generate = Engine.generate

    def noted(self: Engine, *given: object) -> object:
        result = generate(self, *given)
        read.append((result.stats.num_prompt, result.stats.num_read))
        return result

    monkeypatch.setattr(Engine, "generate", noted)
    found = reading.read(engine, LENGTHS, 2, TARGET)
    assert read == [(num, num) for num in LENGTHS for _ in range(3)]
    assert set(found) == {"mlxspec", "mlx-lm"}
    for readings in found.values():
        assert [r.num_tokens for r in readings] == [*LENGTHS]
        assert all(r.seconds > 0 and r.peak_bytes > 1 << 20 for r in readings)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--model", "demo", "--prompt", "40,90", "--repeat", "1", "--draft", "off"]) == 0
    said = capsys.readouterr()
    assert re.findall(r"mlxspec +(\d+) tokens +[\d,]+ tokens/s, peak [\d.]+ MB", said.out) == ["40", "90"]
    assert "drafters that read too: none" in said.err
    assert main(["bench", "--model", "demo", "--prompt", "40", "--repeat", "1", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["mlxspec"]
    assert found["num_tokens"] == 40


@pytest.mark.parametrize(
    ("lengths", "part"),
    [("6x", "takes numbers of tokens"), ("1,90", "between 2 and"), ("9999", "between 2 and")],
)
def test_lengths_that_are_none(lengths: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--model", "demo", "--prompt", lengths]) != 0
    assert part in capsys.readouterr().err
