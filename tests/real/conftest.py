"""The real models and the real vocabulary, where scripts/real_model has put them; a test that needs one is skipped without it."""

from pathlib import Path

import pytest
from real_parts import places


def _folder(name: str) -> Path:
    reason = places.missing(name)
    if reason:
        pytest.skip(reason)
    return places.place(name)


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Gemma 3 270M, in bfloat16, as it is published."""
    return _folder(places.MODEL)


@pytest.fixture(scope="session")
def smollm() -> Path:
    """SmolLM2-135M-Instruct, in bfloat16. It runs by mlx-lm's code, and it chats."""
    return _folder(places.SMOLLM)


@pytest.fixture(scope="session")
def coder() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct, in bfloat16. It runs by mlx-lm's code, and it writes code."""
    return _folder(places.CODER)


@pytest.fixture(scope="session")
def qwen_vocabulary() -> Path:
    """Qwen3.6's tokenizer of 248,077 tokens, without a model."""
    return _folder(places.VOCABULARY)
