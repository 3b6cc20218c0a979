"""Ten prompts of the ten kinds that llama.cpp's MTP benchmark has. The texts are our own.

Knows texts; knows no model and no timing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Task:
    """One prompt, asked in the model's chat format."""

    name: str
    prompt: str


_REVIEWED = '''\
import json
import os
import time


class ResultStore:
    """Keeps results of runs as JSON files in one folder, newest first."""

    def __init__(self, folder, keep=50, cache={}):
        self.folder = folder
        self.keep = keep
        self.cache = cache

    def save(self, name, result):
        path = self.folder + "/" + name + ".json"
        f = open(path, "w")
        f.write(json.dumps({"time": time.time(), "result": result}))
        self.cache[name] = result
        self.trim()

    def load(self, name):
        if name in self.cache:
            return self.cache[name]
        try:
            with open(os.path.join(self.folder, name + ".json")) as f:
                data = json.load(f)
        except:
            return None
        self.cache[name] = data
        return data["result"]

    def names(self):
        found = []
        for name in os.listdir(self.folder):
            if name.endswith("json"):
                found.append(name[:-4])
        found.sort(key=lambda n: os.path.getmtime(os.path.join(self.folder, n + ".json")))
        return found

    def trim(self):
        names = self.names()
        for i in range(len(names)):
            if i > self.keep:
                os.remove(os.path.join(self.folder, names[i] + ".json"))

    def merge(self, other):
        for name in other.names():
            mine, theirs = self.load(name), other.load(name)
            if mine == None:
                self.save(name, theirs)
            elif theirs["time"] > mine["time"]:
                self.save(name, theirs)
        return self.names()
'''

TASKS = (
    Task(
        name="code_python",
        prompt="Write a Python class for a bounded queue that several threads can use: put and get with a timeout, a "
        "way to close it, and type hints and docstrings throughout.",
    ),
    Task(
        name="code_cpp",
        prompt="Write a C++17 header for a least-recently-used cache as a template over key and value, with get, "
        "put, erase and a capacity set when it is made. Use the standard library only.",
    ),
    Task(
        name="explain_concept",
        prompt="Explain what a write-ahead log is, why databases keep one, and what happens with it after a crash. "
        "The reader programs but has never looked inside a database.",
    ),
    Task(
        name="summarize",
        prompt="Summarize in two sentences: The harbour's new breakwater was planned to take three years. Winter "
        "storms washed out the first foundation, and the rock that was to replace it came from a quarry that "
        "had to close for a season. The builders used the wait to test a smaller section, found that a "
        "gentler slope breaks waves better, and changed the drawings. The breakwater opened two years late, "
        "cost a tenth less than planned, and the ferry has missed no crossing since.",
    ),
    Task(
        name="qa_factual",
        prompt="Which planets of the solar system have rings, which of those rings can be seen with a small "
        "telescope, and what are they made of?",
    ),
    Task(
        name="translation",
        prompt="Translate into French: The library closes at six today, but you may return books through the slot "
        "beside the door at any time.",
    ),
    Task(
        name="creative_short",
        prompt="Write a short story of about two hundred words about a lighthouse keeper who finds out that the "
        "light has been answering.",
    ),
    Task(
        name="stepwise_math",
        prompt="A tank holds 240 litres. One pump fills it in 6 hours, a second one in 4 hours, and a leak would "
        "empty the full tank in 12 hours. All three run together from an empty tank. After how many hours is "
        "it full, and how many litres has the leak lost by then? Work it out step by step.",
    ),
    Task(
        name="high_entropy",
        prompt="Make up forty different words that stand in no dictionary, each with a meaning of at most six words. No two may begin "
        "with the same two letters, and no meaning may have to do with another one.",
    ),
    Task(
        name="long_code_review",
        prompt="Review this module. List what is wrong, most serious first, with the line it is in and how you would "
        "change it; then give the corrected module."
        f"\n\n```python\n{_REVIEWED}```",
    ),
)
