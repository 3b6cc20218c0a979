"""Workloads: prompts of one kind, as token ids of a loaded model; recorded ones of the demo family, and ten tasks, each one of its own.

Knows the files' layout; knows no timing. Reference answers in the files are for whoever measures quality; nothing here reads them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxspec.bench.tasks import TASKS
from mlxspec.demo import WORKLOADS, workload
from mlxspec.engine.engine import Engine
from mlxspec.errors import ConfigError

MTP = "mtp"  # the name that stands for the ten tasks


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Recorded prompts of one kind. prompts: token ids. temperature: of the answers, 0 for greedy."""

    name: str
    what: str
    prompts: Sequence[Sequence[int]]
    temperature: float = 0.0


def read_workloads(
    engine: Engine, names: Sequence[str] = WORKLOADS, folder: Path | None = None
) -> list[Workload]:
    """Read workloads of the demo family, or those of `folder`. Raises ConfigError for a name or a file that cannot be used."""
    found = []
    for name in names:
        if name == MTP:
            found += [
                Workload(
                    name=t.name,
                    what="",
                    prompts=[engine.chat_prompt([{"role": "user", "content": t.prompt}])],
                )
                for t in TASKS
            ]
        else:
            found.append(_read(engine, folder / f"{name}.json" if folder else workload(name)))
    return found


def _read(engine: Engine, path: Path) -> Workload:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Workload(
            name=str(data["name"]),
            what=str(data["what"]),
            prompts=[_prompt(engine, item) for item in data["items"]],
            temperature=float(data.get("temperature", 0.0)),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path.name} is no workload that can be read.") from error


def _prompt(engine: Engine, item: dict[str, Any]) -> list[int]:
    if "prompt_ids" in item:
        return [int(t) for t in item["prompt_ids"]]
    if "prompt" in item and engine.tokenizer is not None:
        return engine.tokenizer.encode(item["prompt"])
    return engine.chat_prompt(item["messages"])
