"""Records the benchmark workloads: held-out prompts with the reference text, as small JSON files.

Knows the data set and the finished target. `edit`, `explain`, `continue` and `ask` hold messages and the reference answer
(what a perfect model would say), `ask` also the target's greedy answer; `sampled` holds openings of held-out code and the
target's own text at temperature 1.
Every file states the distinct-4-gram share of its text: a low one would mean loops, which flatter any drafter.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import torch
from demo_data.chat import ANSWER, render
from demo_data.questions import HELD_OUT_FORMS, known_functions

from .batches import Data
from .export import read_member
from .generate import END_OF_TURN, complete
from .network import TARGET, LanguageModel

ITEMS = 16
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.S)


def _distinct(texts: list[list[int]]) -> float:
    shares = []
    for ids in texts:
        grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
        if grams:
            shares.append(len(set(grams)) / len(grams))
    return round(float(np.mean(shares)), 4)


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in _TURN.findall(text)]


def _chat_items(texts: list[str], count: int) -> list[dict[str, object]]:
    items = []
    for text in texts[:count]:
        messages = _messages(text)[:2]
        items.append({"messages": messages[:-1], "reference": messages[-1]["content"]})
    return items


@torch.no_grad()
def _add_greedy(model: LanguageModel, data: Data, items: list[dict]) -> None:  # type: ignore[type-arg]
    """The target's own greedy answer beside each reference, as computed here: an engine must give the same text."""
    prompts = [
        data.tokenizer.encode(render(("user", item["messages"][0]["content"])) + ANSWER).ids for item in items
    ]
    for item, ids in zip(items, complete(model, prompts, [96] * len(prompts)), strict=True):
        item["greedy"] = data.tokenizer.decode([i for i in ids if i != END_OF_TURN])


def write_workloads(work: Path, out: Path) -> None:
    """Write `out/workloads/{edit,explain,continue,ask,sampled}.json`."""
    data = Data(work)
    held = json.loads((work / "held.json").read_text())
    folder = out / "workloads"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = data.tokenizer
    edits = [held[kind][300 + i] for i in range(4) for kind in ("rename", "rename_function", "literal")]
    edits += held["docstring"][100:104]
    rnd = random.Random(3)
    known = rnd.sample(known_functions(), ITEMS)
    asked: list[dict[str, object]] = []
    for i, k in enumerate(known):
        question = HELD_OUT_FORMS[i % len(HELD_OUT_FORMS)].format(n=k.name)
        asked.append({"messages": [{"role": "user", "content": question}], "reference": k.answer})
    sets = {
        "edit": (
            "One edit of a pasted function: renames, a literal, a docstring.",
            _chat_items(edits, ITEMS),
        ),
        "explain": (
            "What a pasted function does, from its docstring.",
            _chat_items(held["explain"][100:], ITEMS),
        ),
        "continue": ("The rest of a function.", _chat_items(held["continue"][300:], ITEMS)),
        "ask": ("What a well-known function does, in question forms not trained on.", asked),
    }
    for name, (what, items) in sets.items():
        ids = tokenizer.encode_batch([str(item["reference"]) for item in items])
        content = {
            "name": name,
            "what": what,
            "distinct_4gram": _distinct([e.ids for e in ids]),
            "items": items,
        }
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    model = read_member(out / "target", TARGET)
    _add_greedy(model, data, asked)
    content = json.loads((folder / "ask.json").read_text()) | {"items": asked}
    (folder / "ask.json").write_text(json.dumps(content, indent=1) + "\n")
    step = (len(data.held_raw) - 512) // ITEMS
    openings = [data.held_raw[i * step + 200 : i * step + 248].tolist() for i in range(ITEMS)]
    with torch.no_grad():
        texts = complete(model, openings, [208] * ITEMS, temperature=1.0, stop=None, seed=17)
    sampled = {
        "name": "sampled",
        "what": "Held-out code continued by the target itself at temperature 1; no chat template.",
        "temperature": 1.0,
        "distinct_4gram": _distinct(texts),
        "items": [
            {
                "prompt": tokenizer.decode(opening, skip_special_tokens=False),
                "prompt_ids": opening,
                "reference": tokenizer.decode(text, skip_special_tokens=False),
                "reference_ids": text,
            }
            for opening, text in zip(openings, texts, strict=True)
        ],
    }
    (folder / "sampled.json").write_text(json.dumps(sampled, indent=None, separators=(",", ":")) + "\n")
