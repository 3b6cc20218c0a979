#!/usr/bin/env python3
"""Replays texts that were said before, without a model: tokens a round and wrong drafted tokens with and without the drafter `suffix`.

    .venv/bin/python scripts/replay_texts.py [--large N]

Texts are made of Python's standard library with the demo's tokenizer. Under "lookup" rounds draft by `ngram-simple` alone, under "suffix"
by `suffix` and, where it says nothing, by `ngram-simple`. Every answer is learned when it has ended. --large: builds an index of N tokens
and times its look-ups.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mlxspec import load
from mlxspec.config import SamplingParams
from mlxspec.drafters.base import Ask
from mlxspec.drafters.lookup import EarlierRow, Lookup, ngram_lookup
from mlxspec.drafters.text_index import TextIndex
from mlxspec.engine.kept_files import KeptFiles
from mlxspec.engine.text_files import TextFiles
from mlxspec.engine.thread import JobThread
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler

LIB = Path(sysconfig.get_paths()["stdlib"])
SEED, BUDGET = 11, 64 << 20
Turn = tuple[str, str]  # prompt and answer
Encode = Callable[[str], list[int]]


class Replay:
    """Drafters that live through conversations, and what came of their drafts."""

    def __init__(self, most: int, *, uses_suffix: bool) -> None:
        self.texts, self.own = TextIndex(BUDGET), ngram_lookup("ngram-simple", 3, most)
        self.suffix = Lookup("suffix") if uses_suffix else None
        self.most, self.row = most, 0
        self.tokens = self.rounds = self.wrong = 0
        self.seconds: list[float] = []

    def answer(self, prompt: list[int], answer: list[int]) -> None:
        self.row += 1
        self.own.begin(self.row)
        drafters = [d for d in (self.suffix, self.own) if d is not None]
        if self.suffix is not None:
            self.suffix.open(self.row, EarlierRow(self.texts, "", len(prompt)))
        sampler = RowSampler(SamplingParams(), prompt, 1 << 20)
        for drafter in drafters:
            drafter.observe(self.row, [*prompt, answer[0]], None)
        done = 1
        while done < len(answer):
            draft: Sequence[int] = []
            ask = Ask(self.row, (), self.most, sampler)  # these drafters keep what they have heard
            for drafter in drafters:
                started = time.perf_counter()
                (found,) = drafter.propose([ask], BatchSampler([sampler], 1 << 20))
                if drafter is self.suffix:
                    self.seconds.append(time.perf_counter() - started)
                if found.length and not draft:
                    draft = list(found.tokens)  # type: ignore[arg-type]
            pairs = zip(draft, answer[done : len(answer) - 1], strict=False)
            room = min(len(draft), len(answer) - 1 - done)
            matched = next((i for i, (a, b) in enumerate(pairs) if a != b), room)
            self.rounds, self.wrong = self.rounds + 1, self.wrong + len(draft) - matched
            for drafter in drafters:
                drafter.observe(self.row, answer[done : done + matched + 1], None)
            done += matched + 1
        self.tokens += len(answer) - 1
        for drafter in drafters:
            drafter.close(self.row)

    def figures(self) -> str:
        return f"{self.tokens / self.rounds:6.2f} / {self.wrong / self.tokens:4.2f}"


def chat(*turns: str) -> str:
    """Turns of a user and an assistant, in the form of many templates."""
    roles = ("user", "assistant")
    said = "".join(f"<|im_start|>{roles[i % 2]}\n{t}<|im_end|>\n" for i, t in enumerate(turns))
    return f"{said}<|im_start|>assistant\n"


def files(rng: random.Random, num: int) -> list[str]:
    paths = [p for p in sorted(LIB.glob("*.py")) if p.stat().st_size > 9000]
    return [p.read_text(errors="replace")[2000:5000] for p in rng.sample(paths, num)]


def edited(text: str, rng: random.Random) -> str:
    """One rename, one line gone and one new one."""
    names = [n for n in set(re.findall(r"\b[a-z_]{5,}\b", text)) if text.count(n) > 2] or ["self"]
    lines = re.sub(rf"\b{rng.choice(sorted(names))}\b", "new_name", text).splitlines(keepends=True)
    place = rng.randrange(len(lines) // 2)
    return "".join(
        [*lines[:place], "    # a new line of code, which was not here before\n", *lines[place + 2 :]]
    )


def questions(rng: random.Random) -> tuple[list[Turn], list[Turn]]:
    """40 questions, and the same ones in new conversations, each behind another one."""
    texts = files(rng, 40)
    asked = [f"Explain what part {i} of the module does. {rng.random()}" for i in range(40)]
    first = [(chat(q), text[:1800]) for q, text in zip(asked, texts, strict=True)]
    again = [
        (chat(f"hello {i}", "Hello!", q), text[:1800])
        for i, (q, text) in enumerate(zip(asked, texts, strict=True))
    ]
    return first, again


def agent(rng: random.Random, sources: Sequence[str]) -> list[Turn]:
    """30 turns: a tool call, its result in the next prompt, and a file that is returned with an edit."""
    turns, said = [], ["You are an agent with the tools read_file and write_file. Improve these files."]
    for i in range(15):
        name, text = f"module_{i % len(sources)}.py", sources[i % len(sources)]
        call = json.dumps(
            {"name": "read_file", "arguments": {"path": f"/repository/{name}", "encoding": "utf-8"}}
        )
        turns.append((chat(*said), f"<tool_call>\n{call}\n</tool_call>"))
        said += [turns[-1][1], f"<tool_response>\n{text}\n</tool_response>"]
        write = json.dumps(
            {"name": "write_file", "arguments": {"path": f"/repository/{name}", "content": edited(text, rng)}}
        )
        turns.append((chat(*said), f"<tool_call>\n{write}\n</tool_call>"))
        said += [turns[-1][1], "<tool_response>\nwritten\n</tool_response>"]
    return turns


def edits(rng: random.Random) -> list[Turn]:
    """A file in a fenced block of the prompt, to be returned with a change."""
    asked = [(f"Change this file:\n```python\n{text}\n```\n", text) for text in files(rng, 20)]
    return [(chat(question), f"```python\n{edited(text, rng)}\n```") for question, text in asked]


def others(rng: random.Random) -> list[Turn]:
    """Answers that have nothing to do with the file in their prompt."""
    pairs = zip(files(rng, 20), files(rng, 20), strict=True)
    return [(chat(f"Leave this aside:\n```\n{a}\n```\n"), b) for a, b in pairs if a != b]


def replay(title: str, conversations: Sequence[Sequence[Turn]], encode: Encode) -> None:
    """One line for each conversation and length of drafts. Conversations before it have been learned."""
    encoded = [[(encode(prompt), encode(answer)) for prompt, answer in turns] for turns in conversations]
    for most in (16, 63):
        plain, with_suffix = (Replay(most, uses_suffix=uses) for uses in (False, True))
        for i, turns in enumerate(encoded, 1):
            for each in (plain, with_suffix):
                each.tokens = each.rounds = each.wrong = 0
                for prompt, answer in turns:
                    each.answer(prompt, answer)
            line = f"| {title}, conversation {i}, {most} | {plain.figures()} | {with_suffix.figures()} |"
            print(line, flush=True)
    if with_suffix.seconds:
        micro, size = np.array(with_suffix.seconds) * 1e6, with_suffix.texts.nbytes / 1e6
        times = f"median {np.median(micro):.0f} us, 99 % within {np.percentile(micro, 99):.0f} us"
        print(f"  {len(micro)} drafts of suffix: {times}; {size:.1f} MB of texts", flush=True)


def large(num: int) -> None:
    """An index of so many random tokens with the frequencies of words, and its file."""
    rng, index = np.random.default_rng(SEED), TextIndex(num * 30)
    started, text, most = time.perf_counter(), [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        thread = JobThread("files")
        disk = TextFiles(KeptFiles(Path(folder), 8 * num, "The store"), thread, "v")
        index.keep = disk.append
        for _ in range(num // 10_000):
            text = np.minimum(rng.zipf(1.2, 10_000), 150_000).tolist()
            before = time.perf_counter()
            index.add("", text)
            most = max(most, time.perf_counter() - before)
        thread.close()
        thread.join(60.0)
        built = time.perf_counter() - started
        size = sum(p.stat().st_size for p in Path(folder).iterdir())
        started = time.perf_counter()
        again = TextIndex(num * 30)
        disk.fill(again)
        read = time.perf_counter() - started
    print(f"{num} tokens: {index.nbytes / 1e6:.0f} MB, {index.num_segments('')} segments, built in {built:.1f} s, one text of 10,000 in "
          f"{most * 1e3:.0f} ms at most; {size / 1e6:.0f} MB on disk, read in {read:.1f} s")  # fmt: skip
    for kind in ("said before", "new"):
        micro = []
        for _ in range(3000):
            end = rng.integers(100, 9000)
            tail = text[:end] if kind == "said before" else np.minimum(rng.zipf(1.2, 80), 150_000).tolist()
            before = time.perf_counter()
            index.find("", tail, 16)
            micro.append((time.perf_counter() - before) * 1e6)
        print(
            f"  {kind}: median {np.median(micro):.0f} us, 99th percentile {np.percentile(micro, 99):.0f} us"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--large", type=int, default=0, metavar="N")
    args = parser.parse_args()
    if args.large:
        return large(args.large)
    tokenizer, rng = load("demo", draft="off").tokenizer, random.Random(SEED)
    if tokenizer is None:
        raise SystemExit("The demo has a tokenizer.")

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, special=False)

    print("| texts, tokens a draft | lookup: tokens a round / wrong | suffix |\n|---|---|---|")
    replay("questions asked again", questions(rng), encode)
    replay("file in the prompt", [edits(rng)], encode)
    replay("another text", [others(rng)], encode)
    sources = files(rng, 6)
    replay("agent of 30 turns", [agent(rng, sources), agent(rng, sources)], encode)
    return None


if __name__ == "__main__":
    main()
