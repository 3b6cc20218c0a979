"""`mlxspec try`: how fast a model that is here answers on this machine, with drafting off and as it is by default, in about a minute.

With a file it is `mlxspec demo FILE`. Knows options and output; models are found by checkpoints, measured by bench.own, kept by
engine.measured.
"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from typing import NamedTuple

from mlxspec.cli import demo, options, saved, stats_line, terminal
from mlxspec.cli.progress_bar import Waiting
from mlxspec.cli.recommended import recommended
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.errors import ConfigError, MlxspecError, ModelError

_MOST_OWN = 3  # questions of a person's own
add_options = demo.add_options


class Here(NamedTuple):
    """A model of this machine. memory: bytes that it takes."""

    name: str
    memory: int


def run(args: argparse.Namespace) -> int:
    """Choose a model, measure it, keep and say what came out. Returns 0, or 1 where a text differed."""
    if args.file is not None or args.request or args.all or args.draft or args.vision:
        return demo.run(args)
    if not any(word.startswith(("-m", "--model")) for word in args.given):
        args.model = _chosen()
    engine = options.load_engine(args, SpecConfig(), draft="auto")
    from mlxspec.bench import own
    from mlxspec.engine import measured

    sampling, _ = recommended(args.model, args.revision)
    questions = _own_questions()
    wanted = own.kinds(SamplingParams(**sampling), questions)
    if not args.json and questions:
        chat = stats_line.counted(len(questions), "last question")
        terminal.note(f"chat: your {chat} (kept here, given to nobody)")
    with Waiting("measuring for about a minute", is_long=True) as wait:
        scores = own.measure(
            engine, wanted, told=lambda kind: wait.tell(what=f"measuring for about a minute: {kind}")
        )
    data = own.as_data(engine, stats_line.computer(), wanted, scores)
    measured.keep(engine.name, data)
    if args.json:
        terminal.say(json.dumps(data) + "\n")
    else:
        terminal.say(f"{engine.name} here: {measured.sentence(data)}.\n")
        if any(s.ratio.num_pairs and not s.ratio.is_settled for s in scores):
            terminal.note(
                "What is not settled differed from turn to turn: other programs were busy. Run it again when they rest."
            )
    return 1 if any(score.num_different for score in scores) else 0


def _chosen() -> str:
    """Return the model that was used last, of those on this disk that fit, else the largest of them. Raises ModelError where none is."""
    from mlxspec.loading.progress import amount
    from mlxspec.platform.memory import machine_memory

    machine = machine_memory()
    here = {h.name: h for h in _here() if h.memory <= machine}
    if not here:
        raise ModelError(_what_to_pull(machine))
    last = next((name for name in _last_used() if name in here), None)
    found = here[last] if last else max(here.values(), key=lambda h: h.memory)
    why = "the last that was used" if last else "the largest that fits"
    others = f"; of {len(here)} models here, {why}; -m names another" if len(here) > 1 else ""
    terminal.note(f"{found.name}, {amount(found.memory)}{others}")
    return found.name


def _here() -> list[Here]:
    """Return the models of the hub's cache and of LM Studio's, and folders that models were loaded from."""
    from mlxspec.checkpoints.cache import listing
    from mlxspec.checkpoints.inspect import inspect
    from mlxspec.checkpoints.inspect_report import InspectReport
    from mlxspec.loading import hub

    found = [Here(e.name, e.memory) for e in listing().entries if e.is_complete and e.memory is not None]
    for name in _last_used():
        with suppress(MlxspecError):
            if name not in options.DEMO_FAMILY and hub.is_local(name):
                report = inspect(name)
                found += [Here(name, report.memory.total)] if isinstance(report, InspectReport) else []
    return found


def _last_used() -> list[str]:
    """Return names of models as they were loaded, the last first."""
    from mlxspec.loading.short_names import repository
    from mlxspec.policy.cost_file import models_used

    return [repository(name) for name in models_used()]


def _own_questions() -> list[str]:
    """Return the first questions of the last conversations."""
    found = []
    for path in saved.kept_files():
        with suppress(ConfigError):
            first = saved.load(path).messages[:1]
            found += [str(m["content"]) for m in first if m["content"] and not m.get("images")]
    return list(dict.fromkeys(found))[:_MOST_OWN]


def _what_to_pull(machine: int) -> str:
    from mlxspec.checkpoints.fitting import fitting
    from mlxspec.loading.progress import amount

    first = next(iter(fitting(machine)), None)
    none = "No model that fits is on this disk: neither in Hugging Face's cache nor in LM Studio's folders."
    if first is None:
        return f"{none} `mlxspec demo` needs no download."
    return f"{none} `mlxspec pull {first.name}` fetches one ({amount(first.size)}), `mlxspec try -m demo` needs none."
