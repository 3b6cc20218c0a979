"""The shipped demo family: its text is the same with every drafter, alone and in ragged batches, and its drafters are of use."""

from __future__ import annotations

from functools import cache

import pytest

import mlxspec
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine, Result
from mlxspec.platform.resources import demo_folder
from tests.engine.equality import ALL, PLAIN, same, spec

pytestmark = pytest.mark.skipif(
    not (demo_folder("target") / "config.json").is_file()
    or not (demo_folder("draft") / "config.json").is_file(),
    reason="the demo family is not in this checkout",
)
PROMPTS = (
    "def read(self, path):\n    with open(path",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path, size):\n        self.path = path\n        self.size = size\n",
    "for i in range(10):\n    print(i, i * i)\nfor i in range(10):\n    print(i, i",
    "# Returns the largest of two numbers.\ndef",
    "a",
    "What is a list in Python?",
    "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [1, 2,",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "def test_",
    "    return self.assertEqual(first, second)\n",
)
ASKED = (
    {},
    {"temperature": 0.8, "top_p": 0.95},
    {"repetition_penalty": 1.1},
    {"temperature": 1.0, "top_k": 40},
    {},
)


@cache
def engine() -> Engine:
    return mlxspec.load("demo", draft=ALL, spec=SpecConfig(policy="fixed"))


@cache
def batch(number: int) -> tuple[list[str], list[SamplingParams], list[Result]]:
    prompts = list(PROMPTS[5 * number : 5 * number + 5])
    params = [SamplingParams(max_tokens=24 + 6 * i, seed=i, **asked) for i, asked in enumerate(ASKED)]
    return (
        prompts,
        params,
        [engine().generate(p, s, spec=PLAIN) for p, s in zip(prompts, params, strict=True)],
    )


def check(number: int, results: list[Result], what: str) -> None:
    for prompt, params, wanted, got in zip(*batch(number), results, strict=True):
        same(wanted, got, engine().tokenizer.encode(prompt), params, what, engine().model)
        assert not got.stats.notices


@pytest.mark.parametrize("number", range(2))
def test_rows_together_are_the_rows_alone(number: int) -> None:
    prompts, params, _ = batch(number)
    check(number, engine().generate(prompts, params, spec=PLAIN), "demo, plain, 5 rows")


@pytest.mark.parametrize(
    ("drafters", "number"),
    [(("mtp",), 0), (("draft-model",), 1), (ALL, 0), (ALL, 1)],
    ids=["mtp", "draft-model", "all", "all of another batch"],
)
def test_ragged_rows_drafted_are_the_rows_plain(drafters: tuple[str, ...], number: int) -> None:
    prompts, params, _ = batch(number)
    check(number, engine().generate(prompts, params, spec=spec(*drafters)), f"demo, {drafters}, 5 rows")


def test_one_row_drafted_is_the_row_plain() -> None:
    prompts, params, _ = batch(0)
    one = spec(*ALL, p_min=0.3, n_max=6)
    results = [engine().generate(p, s, spec=one) for p, s in zip(prompts, params, strict=True)]
    check(0, results, "demo, all drafters, 1 row")


@pytest.mark.parametrize("name", ["mtp", "draft-model"])
def test_drafts_of_the_family_mostly_stand(name: str) -> None:
    """At depth 1 and greedy the first drafted token stands more often than not."""
    params = SamplingParams(max_tokens=48)
    alone = SpecConfig(drafters=(name,), policy="fixed", n_max=1)
    results = engine().generate(list(PROMPTS[:5]), params, spec=alone)
    drafted, accepted = sum(r.stats.num_drafted for r in results), sum(r.stats.num_accepted for r in results)
    assert accepted > 0.5 * drafted > 0
