"""How many drafted tokens are accepted behind a prefix hit, beside the same answers in a cold run. By counts, not by times.

Each conversation has two turns. The second prompt begins with the first prompt and its answer. It is read whole (cold), continues what the
prefix cache has in memory, or continues what an earlier engine has left in files (disk). The drafter's state is kept with the target's, so
it should be right as often.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import mlxspec
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.demo import workload
from mlxspec.engine.engine import Engine

# by drafter: what is loaded beside the demo's target
DEMO = {"mtp": None, "draft-model": "demo-draft", "eagle3": "demo-eagle3", "dflash": "demo-dflash"}
MOST = 0.02  # of the share of accepted tokens that a hit may change
_MEMORY, _DISK = 1 << 28, 1 << 30


class Turn(NamedTuple):
    """prompt: the first; more: tokens that follow the first answer in the second prompt."""

    prompt: list[int]
    more: list[int]


class Counted(NamedTuple):
    """Of all second turns together. cached: tokens of prompts that the store had."""

    drafted: int
    accepted: int
    cached: int

    @property
    def share(self) -> float:
        return self.accepted / max(1, self.drafted)


def measure(
    make: Callable[[EngineConfig], Engine],
    drafter: str,
    turns: Sequence[Turn],
    params: SamplingParams,
    folder: Path,
    *,
    n_max: int = 3,
) -> dict[str, Counted]:
    """By store. make: an engine with this drafter, for such options; folder: an empty one, for the files."""
    spec = SpecConfig(policy="fixed", drafters=(drafter,), n_max=n_max)
    on_disk = EngineConfig(prefix_budget=_MEMORY, prefix_disk=_DISK, prefix_dir=folder)
    first = make(on_disk)
    answers = [first.generate(turn.prompt, params, spec=spec).tokens for turn in turns]
    prompts = [[*turn.prompt, *a, *turn.more] for turn, a in zip(turns, answers, strict=True)]
    first.prefix.flush(60.0)

    def second(engine: Engine) -> Counted:
        found = [engine.generate(prompt, params, spec=spec).stats for prompt in prompts]
        work = [stats.drafters[drafter] for stats in found]
        return Counted(
            sum(w.num_drafted for w in work),
            sum(w.num_accepted for w in work),
            sum(s.num_cached for s in found),
        )

    out = {"cold": second(make(EngineConfig(prefix_budget=0)))}
    out["memory"] = second(first)
    first.close()
    again = make(on_disk)
    out["disk"] = second(again)
    again.close()
    return out


def check(figures: dict[str, Counted], least: int) -> str:
    """What falls short, "" if nothing does. least: tokens that must have been drafted for the figures to mean anything."""
    cold = figures["cold"]
    if cold.drafted < least or not cold.accepted or cold.cached:
        return f"cold: {cold}"
    for store in ("memory", "disk"):
        found = figures[store]
        if not found.cached or abs(found.share - cold.share) > MOST:
            return f"{store}: {found}, cold: {cold}"
    return ""


def demo_turns(engine: Engine, conversations: int) -> list[Turn]:
    """First turns of the demo's recorded explanations."""
    found = []
    for item in json.loads(workload("explain").read_text())["items"][:conversations]:
        prompt = engine.chat_prompt(item["messages"])
        ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        found.append(Turn(ids, ids[-20:]))
    return found


def demo_engine(drafter: str, draft_model: str | Path | None) -> Callable[[EngineConfig], Engine]:
    """Engines of the demo's target with one drafter."""

    def make(config: EngineConfig) -> Engine:
        spec = SpecConfig(policy="fixed", drafters=(drafter,))
        return mlxspec.load("demo", draft=drafter, draft_model=draft_model, spec=spec, config=config)

    return make


def demo_figures(
    drafter: str, draft_model: str | Path | None, *, conversations: int = 12, tokens: int = 64
) -> dict[str, Counted]:
    """Of one drafter of the demo family. Sampled at 0.7 with one seed; a block drafter drafts whole blocks."""
    make = demo_engine(drafter, draft_model)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=tokens, ignore_eos=True)
    turns = demo_turns(make(EngineConfig(prefix_budget=0)), conversations)
    depth = 7 if drafter == "dflash" else 3
    with tempfile.TemporaryDirectory() as folder:
        return measure(make, drafter, turns, params, Path(folder), n_max=depth)
