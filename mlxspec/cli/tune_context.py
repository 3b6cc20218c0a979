"""`mlxspec tune --context`: the longest context that fits here, kept for servers. What is measured is mlxspec.bench.context."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace

from mlxspec.cli import options, stats_line, terminal
from mlxspec.cli.progress_bar import Waiting
from mlxspec.errors import ConfigError

_ENDS = {
    "model": "as many as the model has",
    "estimate": "above which requests are refused here",
    "memory": "which is where the memory that was measured would have been full",
}


def run(args: argparse.Namespace) -> int:
    """Measure, keep, tell. Raises MlxspecError subclasses; nothing is kept then."""
    for flag in ("--prompts", "--texts", "--plot", "--max-context"):
        if getattr(args, flag[2:].replace("-", "_")):
            raise ConfigError(f"--context measures memory alone; leave {flag} out.")
    from mlxspec.bench.context import longest
    from mlxspec.policy.context_file import context_file, keep_context

    args.prefix_budget = 0  # what a store keeps goes where a row needs its memory
    engine = options.load_engine(args, replace(options.spec_config(args), policy="fixed"))
    with Waiting("growing a context", unit="tokens") as wait:
        found = longest(engine, wait.tell)
    path = context_file(
        engine.model, engine.chain.drafters.values(), engine.config, engine.memory.budget, engine.name
    )
    keep_context(path, engine.name, found.context)
    if args.json:
        data = {"model": engine.name, "model_context": engine.model.max_context, "kept": str(path)}
        terminal.say(json.dumps(data | asdict(found) | {"device": stats_line.device_data()}) + "\n")
        return 0
    terminal.say(
        f"{engine.name}: {found.context:,} tokens of context fit, {_ENDS[found.ended_by]}. MLX took up to "
        f"{stats_line.size(found.peak)} of the {stats_line.size(found.budget)} that it may have.\n"
    )
    terminal.note(f"kept in {path}; `mlxspec serve` ends contexts there unless --max-context says otherwise")
    return 0
