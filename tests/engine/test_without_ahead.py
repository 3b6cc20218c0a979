"""What runs ahead can be taken out: an engine that reads each round before it launches the next gives the same texts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlxspec.cache import model_cache
from mlxspec.config import SamplingParams
from mlxspec.engine import engine as engines
from mlxspec.engine import round as rounds
from mlxspec.engine.engine import Engine
from tests.engine import equality
from tests.engine.equality import prompts, same, spec
from tests.engine.without_ahead import rounds_alone

ROOT = Path(__file__).parents[2]
OF_AHEAD = re.compile(r"\b(unread|behind|blind|holds)\b", re.IGNORECASE)
PROMPTS = prompts(4, 3)


def texts(monkeypatch: pytest.MonkeyPatch, *, ahead: bool) -> tuple[Engine, list]:
    """Answers of one and of several rows, plain and drafted, greedy and sampled."""
    with monkeypatch.context() as patch:
        if not ahead:
            patch.setattr(engines, "Pipeline", rounds_alone)
        own = equality.engine(["mtp"], prefix_budget=0)
    params = [SamplingParams(max_tokens=16, temperature=0.8 * (i % 2), seed=i) for i in range(4)]
    found = []
    for wish in (spec(), spec("mtp", n_max=3)):
        found += [own.generate(PROMPTS[i], params[i], spec=wish) for i in range(2)]
        found += own.generate(PROMPTS, params, spec=wish)
    return own, found


def test_an_engine_without_it_gives_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    (own, found), (alone, wanted) = texts(monkeypatch, ahead=True), texts(monkeypatch, ahead=False)
    assert own.stats.num_synchronised < own.stats.num_rounds
    assert alone.stats.num_synchronised == alone.stats.num_rounds > 0
    assert not alone.drafts.drafters["mtp"]._made
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        number = [0, 1, *range(4)][i % 6]
        asked = SamplingParams(max_tokens=16, temperature=0.8 * (number % 2), seed=number)
        same(other, one, PROMPTS[number], asked, f"answer {i}")


@pytest.mark.parametrize(("module", "most"), [(rounds, 300), (model_cache, 270)], ids=["round", "cache"])
def test_the_heart_does_not_name_it(module: object, most: int) -> None:
    text = Path(str(module.__file__)).read_text(encoding="utf-8")  # type: ignore[attr-defined]
    assert len(text.splitlines()) <= most
    assert not OF_AHEAD.findall(text)


def test_its_files_are_few() -> None:
    files = ("engine/pipeline.py", "cache/unread.py", "drafters/behind_unread.py")
    assert sum(len((ROOT / "mlxspec" / f).read_text().splitlines()) for f in files) <= 450
    named = [
        p for p in (ROOT / "mlxspec").rglob("*.py") if "engine.pipeline" in p.read_text(encoding="utf-8")
    ]
    assert [p.name for p in named] == ["engine.py"]


# Equality of texts, rows that come and go, ends, prefixes, own drafters and policies. Tests of what runs ahead itself are not among them
OTHERS = (
    "engine/test_demo_equality.py",
    "engine/test_equality.py",
    "engine/test_rows.py",
    "engine/test_endings.py",
    "engine/test_prefix_tree.py",
    "engine/test_own_drafters.py",
    "policy/test_own_policy.py",
)


@pytest.mark.slow
def test_other_tests_pass_without_it() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.engine.without_ahead",
        "--fast",
    ]
    done = subprocess.run(
        [*command, *(f"tests/{name}" for name in OTHERS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
