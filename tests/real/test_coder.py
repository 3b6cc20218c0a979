"""Qwen2.5-Coder-0.5B-Instruct, a real model of code that runs by mlx-lm's code: its answers and edits are mlx-lm's, drafted and plain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from mlxspec import Engine, SamplingParams, SpecConfig, load

pytestmark = pytest.mark.slow

OFF, LOOKUP = SpecConfig(drafters=()), SpecConfig(drafters=("ngram-simple",), policy="fixed")
PARAMS = SamplingParams(max_tokens=24)
CODE = (
    "def area(width, height):\n    return width * height",
    "class Point:\n    def __init__(self, x, y):\n        self.x, self.y = x, y",
    "SELECT name FROM users WHERE age > 30;",
    "for (let i = 0; i < 10; i++) {\n  console.log(i);\n}",
)
EDITS = tuple(f"Repeat this code exactly, without explaining it:\n\n```\n{code}\n```" for code in CODE)
QUESTIONS = (
    "Write a Python function that adds two numbers.",
    "What does git rebase do?",
    "Name three sorting algorithms.",
    "Write a regular expression for an integer.",
)


@pytest.fixture(scope="module")
def engine(coder: Path) -> Iterator[Engine]:
    made = load(str(coder), dtype="float32")
    yield made
    made.close()


@pytest.fixture(scope="module")
def module(coder: Path) -> Any:
    """mlx-lm's own, in the engine's dtype."""
    made, _ = load_model(coder)
    made.update(tree_map(lambda p: p.astype(mx.float32), made.parameters()))
    return made


def _asked(engine: Engine, text: str) -> list[int]:
    prompt = engine.chat_prompt([{"role": "user", "content": text}])
    assert engine.tokenizer is not None
    return list(prompt) if not isinstance(prompt, str) else engine.tokenizer.encode(prompt)


def test_it_writes_a_function(engine: Engine) -> None:
    """The weights are where they belong: text of a wrong conversion would be equal to mlx-lm's too."""
    found = engine.generate(_asked(engine, QUESTIONS[0]), SamplingParams(max_tokens=120), spec=OFF)
    assert "def " in found.text
    assert "return" in found.text


@pytest.mark.parametrize("part", range(4))
def test_answers_and_edits_are_mlx_lms(part: int, module: Any, engine: Engine) -> None:
    """Edits say their text again, so drafts of theirs are accepted."""
    assert engine.tokenizer is not None
    accepted = 0
    for text in (QUESTIONS[part], EDITS[part]):
        prompt = _asked(engine, text)
        wanted = [int(t) for t, _ in generate_step(mx.array(prompt), module, max_tokens=PARAMS.max_tokens)]
        end = next((i for i, t in enumerate(wanted) if t in engine.tokenizer.eos_ids), len(wanted))
        found = engine.generate(prompt, PARAMS, spec=LOOKUP)
        assert list(found.tokens) == wanted[:end], text
        accepted += found.stats.num_accepted
    assert accepted > 0
