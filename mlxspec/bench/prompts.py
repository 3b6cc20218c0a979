"""The prompts that drafting is measured with: a user's file of them, or built-in ones, as token ids. Knows files and chat formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxspec.bench.demo_prompts import PROMPTS
from mlxspec.bench.tasks import TASKS
from mlxspec.errors import ConfigError
from mlxspec.loading.hub import DEMO_TARGETS
from mlxspec.loading.progress import amount

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine

_MOST_BYTES = 1 << 24  # of a file of prompts


def read_prompts(path: Path) -> list[Any]:
    """Read prompts from a file: one a line; or, in a file that ends with .jsonl, JSON objects with "prompt" or "messages". Raises
    ConfigError."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"--prompts: {path} is larger than {amount(_MOST_BYTES)}; take fewer prompts.")
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--prompts: {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts: {path} is not UTF-8 text.") from error
    if not lines:
        raise ConfigError(f"--prompts: there is no prompt in {path}; write one a line.")
    if path.suffix != ".jsonl":
        return lines
    return [_from_json(path, i, line) for i, line in enumerate(lines, 1)]


def _from_json(path: Path, number: int, line: str) -> Any:
    try:
        found = json.loads(line)
        value = found["messages"] if "messages" in found else found["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f'--prompts: line {number} of {path} is no JSON object with "prompt" or "messages".'
        ) from error
    is_text = isinstance(value, str) and value
    if not is_text and not (isinstance(value, list) and value and all(isinstance(m, dict) for m in value)):
        raise ConfigError(
            f"--prompts: line {number} of {path} has an empty prompt, or messages that are none."
        )
    return value


def encoded(engine: Engine, texts: list[Any] | None) -> list[list[int]]:
    """Return the token ids of prompts in the model's chat format; of the built-in ones if there are none."""
    texts = built_in(engine.name) if texts is None else texts
    return [encode(engine, t) if isinstance(t, str) else engine.chat_prompt(t) for t in texts]


def encode(engine: Engine, text: str, *, is_chat: bool = True) -> list[int]:
    """Return the token ids of one prompt: in the model's chat format where it has one and `is_chat`, else unchanged. Raises ConfigError."""
    if engine.tokenizer is None:
        raise ConfigError(f"{engine.name} has no tokenizer.")
    if is_chat and engine.tokenizer.template is not None:
        return engine.chat_prompt([{"role": "user", "content": text}])
    return engine.tokenizer.encode(text)


def built_in(model: str) -> list[str]:
    """Return prompts about the demo models' training text for them, and the ten tasks of `bench --workloads mtp` for all others."""
    if model in DEMO_TARGETS:
        return [p.text for p in PROMPTS if p.is_chat and p.temperature == 0]
    return [t.prompt for t in TASKS]
