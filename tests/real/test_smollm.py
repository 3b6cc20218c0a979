"""SmolLM2-135M-Instruct, a real chat model that runs by mlx-lm's code: its chats and edits are mlx-lm's, drafted and plain."""

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
CHAT, EDIT = SamplingParams(max_tokens=10), SamplingParams(max_tokens=16)
QUESTIONS = (
    "What is the capital of France?",
    "Name three colors.",
    "Write a haiku about the sea.",
    "What is 2 plus 2?",
    "Who wrote Hamlet?",
    "How do plants make food?",
    "Translate 'good morning' to French.",
    "What is a prime number?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "List the days of the week.",
    "What does a compiler do?",
    "Tell me a joke.",
    "What is gravity?",
    "Describe a cat in one sentence.",
    "How far away is the moon?",
    "What is a haiku?",
    "Explain what a list is in Python.",
    "What language do people speak in Brazil?",
    "What is photosynthesis?",
)
LINES = (
    "def area(w, h):\n    return w * h",
    "for i in range(10):\n    print(i)",
    '{"name": "Ada", "age": 36}',
    "The quick brown fox jumps over the lazy dog.",
    "SELECT name FROM users WHERE age > 30;",
    "one, two, three, four, five, six, seven",
    "import os\nimport sys\nprint(os.getcwd())",
    "Dear Sir or Madam, I am writing to you about my order.",
    "class Point:\n    def __init__(self, x, y):\n        self.x, self.y = x, y",
    "Monday Tuesday Wednesday Thursday Friday",
)
EDITS = tuple(
    f"{what}\n\n{line}" for line in LINES for what in ("Repeat this text exactly:", "Write this again:")
)


@pytest.fixture(scope="module")
def engine(smollm: Path) -> Iterator[Engine]:
    made = load(str(smollm), dtype="float32")
    yield made
    made.close()


def test_it_knows_the_capital_of_france(engine: Engine) -> None:
    """The weights are where they belong: text of a wrong conversion would be equal to mlx-lm's too."""
    found = engine.generate(_asked(engine, QUESTIONS[0]), CHAT, spec=OFF)
    assert "Paris" in found.text


@pytest.fixture(scope="module")
def module(smollm: Path) -> Any:
    """mlx-lm's own, in the engine's dtype."""
    made, _ = load_model(smollm)
    made.update(tree_map(lambda p: p.astype(mx.float32), made.parameters()))
    return made


@pytest.mark.parametrize("part", range(8))
def test_forty_chats_and_edits_are_mlx_lms(part: int, module: Any, engine: Engine) -> None:
    """Twenty questions and twenty edits, in eight parts. Edits say their text again, so drafts of theirs are accepted."""
    texts = (*QUESTIONS, *EDITS)
    assert len(texts) == 40
    assert engine.tokenizer is not None
    drafted = accepted = 0
    for text in texts[5 * part : 5 * part + 5]:
        params, prompt = EDIT if text in EDITS else CHAT, _asked(engine, text)
        steps = generate_step(mx.array(prompt), module, max_tokens=params.max_tokens)
        wanted = [int(token) for token, _ in steps]
        end = next((i for i, t in enumerate(wanted) if t in engine.tokenizer.eos_ids), len(wanted))
        found = engine.generate(prompt, params, spec=LOOKUP)
        assert list(found.tokens) == wanted[:end], text
        drafted += found.stats.num_drafted
        accepted += found.stats.num_accepted
    if part >= 4:
        assert 0 < accepted <= drafted


def _asked(engine: Engine, text: str) -> list[int]:
    prompt = engine.chat_prompt([{"role": "user", "content": text}])
    assert engine.tokenizer is not None
    return list(prompt) if not isinstance(prompt, str) else engine.tokenizer.encode(prompt)
