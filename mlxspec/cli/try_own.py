"""`mlxspec try`: measures in about a minute how fast a model on this disk answers, with drafting off and with the default.

With a file it is `mlxspec demo FILE`. Knows options and output; models are found by checkpoints, measured by bench.own, kept by
engine.measured.
"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress

from mlxspec.cli import demo, here, options, saved, stats_line, terminal
from mlxspec.cli.progress_bar import Waiting
from mlxspec.cli.recommended import recommended
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.errors import ConfigError, ModelError

_MOST_OWN = 3  # questions of a person's own
_WITH_PROMPTS = (
    "--max-tokens",
    "--repeat",
)  # options of `demo` that have no meaning in a measurement of a minute
add_options = demo.add_options


def run(args: argparse.Namespace) -> int:
    """Choose a model, measure it with drafting and without, keep the result and print it. Returns 0, or 1 where a text differs."""
    if args.file is not None or args.request or args.all or args.draft or args.vision:
        return demo.run(args)
    demo.check_numbers(args)
    if idle := [flag for flag in _WITH_PROMPTS if any(word.partition("=")[0] == flag for word in args.given)]:
        raise ConfigError(
            f"{idle[0]} needs FILE: without one, answers are measured until their ratios are settled or a minute is over."
        )
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
    """Choose the best model on this disk, print which, and return its name. Raises ModelError where none fits."""
    found = here.best()
    if found is None:
        none = (
            "No model that fits is on this disk: neither in Hugging Face's cache nor in LM Studio's folders."
        )
        raise ModelError(f"{none} {here.to_pull('`mlxspec try -m demo` needs no download')}")
    terminal.note(f"{found.told}; -m names another" if found.num_here > 1 else found.told)
    return found.name


def _own_questions() -> list[str]:
    """Return the first questions of the user's last conversations, at most _MOST_OWN, without those with images."""
    found = []
    for path in saved.kept_files():
        with suppress(ConfigError):
            first = saved.load(path).messages[:1]
            found += [str(m["content"]) for m in first if m["content"] and not m.get("images")]
    return list(dict.fromkeys(found))[:_MOST_OWN]
