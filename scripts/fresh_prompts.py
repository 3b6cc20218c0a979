#!/usr/bin/env python3
"""Prompts of the demo family's five workloads that none of the shipped ones has, to record held-out traces with.

    python scripts/fresh_prompts.py FOLDER [--items 24] [--seed 101]
    scripts/record_traces --workloads FOLDER --out tests/speculation/held_traces.npz

Made from the held-out side of the standard library, as the shipped ones are, with other functions, other requests and another seed.
Needs no model; what it writes depends on this Python's library.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

from demo_data import edits
from demo_data.corpus import Function, functions, read_library
from demo_data.questions import known_functions, training_question

from mlxspec.demo import WORKLOADS, workload

EDITS = ("rename", "rename_function", "literal", "docstring")
OPENING = 700  # characters of held-out code before the model goes on


def _shipped() -> str:
    """The text of every shipped prompt, in one."""
    return "\n".join(workload(name).read_text(encoding="utf-8") for name in WORKLOADS)


def _user(text: str) -> str:
    """The user's message of a rendered conversation."""
    return text.split("<|im_start|>user\n", 1)[1].split("<|im_end|>", 1)[0]


def _chats(found: list[Function], make: Callable[[Function], str | None], count: int) -> list[object]:
    items: list[object] = []
    for function in found:
        text = make(function)
        if text and len(items) < count:
            items.append({"messages": [{"role": "user", "content": _user(text)}]})
    return items


def prompts(count: int, seed: int) -> dict[str, list[object]]:
    """By workload."""
    rnd = random.Random(seed)
    files = read_library()
    all_functions = functions(files)
    shipped = _shipped()
    # a function's first line names it; JSON escapes only quotes and line ends
    fresh = [f for f in all_functions if f.held and json.dumps(f.source.split("\n")[0])[1:-1] not in shipped]
    rnd.shuffle(fresh)
    pool = edits.identifiers([f for f in all_functions if not f.held])
    quarter = -(-count // len(EDITS))
    out: dict[str, list[object]] = {"edit": []}
    for i, kind in enumerate(EDITS):
        some = fresh[i :: len(EDITS)]
        out["edit"] += _chats(some, lambda f, kind=kind: edits.edit_chat(kind, f, pool, rnd), quarter)  # type: ignore[misc]
    rnd.shuffle(out["edit"])
    out["explain"] = _chats(fresh[::2], lambda f: edits.explain_chat(f, rnd), count)
    out["continue"] = _chats(fresh[1::2], lambda f: edits.continue_chat(f, rnd), count)
    known = [k for k in known_functions() if f"{k.name}(" not in shipped]
    out["ask"] = [
        {"messages": [{"role": "user", "content": training_question(k, rnd)}]}
        for k in rnd.sample(known, count)
    ]
    held = "\n".join(f.text for f in files if f.held and not f.is_test)
    places = [rnd.randrange(len(held) - OPENING) for _ in range(count)]
    out["sampled"] = [{"prompt": held[p : p + OPENING][-160:]} for p in places]
    return {name: items[:count] for name, items in out.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--items", type=int, default=24)
    parser.add_argument("--seed", type=int, default=101)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, items in prompts(options.items, options.seed).items():
        content = {"name": name, "what": json.loads(workload(name).read_text())["what"], "items": items}
        if name == "sampled":
            content["temperature"] = 1.0
        (options.folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        print(f"{name}: {len(items)} prompts")


if __name__ == "__main__":
    main()
