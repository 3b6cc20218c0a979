"""What n-gram drafters cost on the host: microseconds for a committed token and for a proposal, with a long history of code.

    python scripts/bench_ngram.py [--tokens 32768] [--repeats 5]

The history is Python's own standard library, split into words and signs, one id each: real code, nothing to download. Rounds go
as in the engine: propose, then commit what stood and one token more. Medians over --repeats runs, drafters taking turns.
The last columns say what came of it, as a check that work was done: tokens a round and tokens in an average draft.
Times on a machine that does other work at the same time are noisy.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mlxspec.config import SamplingParams, SpecConfig  # noqa: E402
from mlxspec.drafters.base import Ask, Drafter  # noqa: E402
from mlxspec.engine.load import make_ngram_drafter  # noqa: E402
from mlxspec.sampling.sampler import BatchSampler, RowSampler  # noqa: E402

NAMES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
MODULES = (
    "argparse.py",
    "dataclasses.py",
    "typing.py",
    "inspect.py",
    "datetime.py",
    "_pydatetime.py",
    "tarfile.py",
    "zipfile.py",
)
VOCAB = 1 << 18
GOAL = 50.0  # microseconds a token
NUM_ROUNDS_TOKENS = 2048  # tokens committed by rounds, behind the history


def code_tokens(count: int) -> list[int]:
    """`count` ids of words, numbers, signs and indentations."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [folder / name for name in MODULES if (folder / name).is_file()]
    paths += sorted(p for p in folder.glob("*.py") if p not in paths)
    ids: dict[str, int] = {}
    tokens: list[int] = []
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        tokens += [ids.setdefault(word, len(ids)) for word in re.findall(r"\n *|\w+|[^\w\s]", text)]
        if len(tokens) >= count:
            return tokens[:count]
    raise SystemExit(f"The standard library here has only {len(tokens)} tokens; ask for fewer.")


class Run:
    """One drafter over one history: seconds reading it, in proposals and in commits, and what the rounds gave."""

    def __init__(self, make: Callable[[], Drafter], history: list[int], rest: list[int]) -> None:
        drafter = make()
        drafter.begin(0)
        gc.collect()
        start = time.perf_counter()
        for i in range(0, len(history), 512):  # as prefill hands them over
            drafter.observe(0, history[i : i + 512], None)
        self.reading = (time.perf_counter() - start) / len(history)
        sampler = RowSampler(SamplingParams(), [], VOCAB)
        batch = BatchSampler([sampler], VOCAB)
        self.proposals: list[float] = []
        self.commits: list[float] = []
        self.seconds = 0.0
        self.num_rounds = self.num_drafts = self.num_drafted = done = 0
        while done < len(rest):
            ask = [Ask(0, history, 16, sampler)]
            start = time.perf_counter()
            (draft,) = drafter.propose(ask, batch)
            proposed = time.perf_counter()
            tokens = draft.tokens if isinstance(draft.tokens, list) else []
            kept = next(
                (i for i, t in enumerate(tokens) if rest[done + i : done + i + 1] != [t]), len(tokens)
            )
            new = rest[done : done + kept + 1]
            committing = time.perf_counter()
            drafter.observe(0, new, None)
            committed = time.perf_counter()
            self.commits.append((committed - committing) / len(new))
            self.proposals.append(proposed - start)
            self.seconds += committed - committing + proposed - start
            self.num_rounds += 1
            self.num_drafts += bool(tokens)
            self.num_drafted += len(tokens)
            done += len(new)
        self.nbytes = drafter.nbytes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of history")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.tokens < 1 or options.repeats < 1:
        parser.error("--tokens and --repeats must be at least 1")
    tokens = code_tokens(options.tokens + NUM_ROUNDS_TOKENS)
    history, rest = tokens[: options.tokens], tokens[options.tokens :]
    runs: dict[str, list[Run]] = {name: [] for name in NAMES}
    for _ in range(options.repeats):
        for name in NAMES:
            runs[name].append(Run(lambda n=name: make_ngram_drafter(n, SpecConfig(), VOCAB), history, rest))  # type: ignore[misc]
    print(
        f"History of {len(history)} tokens, {len(set(tokens))} different; times in microseconds, goal {GOAL:g} a token.\n"
    )
    print(
        f"{'':14}{'read':>7}{'commit':>8}{'propose':>9}{'p99':>8}{'sum':>7}{'MB':>7}{'tok/round':>11}{'tok/draft':>11}"
    )
    slow = []
    for name, own in runs.items():
        read, commit, propose, late = (
            1e6 * statistics.median(values)
            for values in (
                [r.reading for r in own],
                [statistics.median(r.commits) for r in own],
                [statistics.median(r.proposals) for r in own],
                [sorted(r.proposals)[int(0.99 * len(r.proposals))] for r in own],
            )
        )
        # what a committed token costs altogether: its own commit and its share of a proposal
        total = 1e6 * statistics.median(r.seconds / len(rest) for r in own)
        last = own[-1]
        print(
            f"{name:14}{read:7.1f}{commit:8.1f}{propose:9.1f}{late:8.1f}{total:7.1f}{last.nbytes / 1e6:7.1f}"
            f"{len(rest) / last.num_rounds:11.2f}{last.num_drafted / max(1, last.num_drafts):11.1f}"
        )
        if max(total, read) >= GOAL:
            slow.append(name)
    print(
        "\nread, commit: a token observed while reading the prompt, in a round. propose: a call, median and p99. sum: all of a round's"
    )
    print("work for each committed token. MB: state of the row, about.")
    print(f"Above the goal: {', '.join(slow) or 'none'}.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
