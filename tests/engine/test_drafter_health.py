"""A drafter that is hardly ever right is told of, once; one that is right is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planting import catches

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx

import mlxspec
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.drafter_health import LOW, DrafterHealth, is_low
from mlxspec.engine.engine import Engine
from mlxspec.engine.stats import DrafterStats, RequestStats
from mlxspec.policy.cost_file import write_followed

PROMPTS = [
    f"<|im_start|>user\nwhat does {what} do?<|im_end|>\n<|im_start|>assistant\n"
    for what in ("os.path.join", "len", "sorted", "zip", "json.dumps", "range", "open", "print")
]
SIZE = SamplingParams(max_tokens=60)


def damaged() -> Engine:
    """The demo with a draft model whose vocabulary is mixed up."""
    engine = mlxspec.load("demo", draft="draft-model")
    model: Any = engine.drafts.drafters["draft-model"].model  # type: ignore[attr-defined]
    order = mx.random.permutation(model.vocab_size, key=mx.random.key(0))
    embedding = model.language_model.model.embed_tokens
    embedding.weight = embedding.weight[order]
    mx.eval(embedding.weight)
    return engine


def told(notices: Any) -> list[str]:
    return [n for n in notices if "hardly ever right" in n]


def silent(right: Any) -> Any:
    return lambda judged, found: False


@catches("a drafter that is hardly ever right is not told of", "mlxspec.engine.drafter_health:is_low", silent)
@pytest.mark.parametrize("policy", ["auto", "fixed"])
def test_a_drafter_that_is_never_right_is_told_of_once(
    policy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`auto` asks it ever more rarely, so the first answers' counts are given here."""
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    with damaged() as engine:
        spec = SpecConfig(drafters=("draft-model",), policy=policy)
        if policy == "auto":
            assert engine.health is not None
            engine.health.counts["draft-model"] = 26, 0
        plain = [engine.generate(p, SIZE, spec=SpecConfig(drafters=())).tokens for p in PROMPTS]
        notices: list[str] = []
        for _ in range(20):  # `auto` asks a drafter that is wrong ever more rarely
            answers = [engine.generate(p, SIZE, spec=spec) for p in PROMPTS]
            assert [a.tokens for a in answers] == plain
            first = not notices
            notices += [n for answer in answers for n in told(answer.stats.notices)]
            if not first:
                break
        assert len(notices) == 1
        assert told(engine.notices) == notices


@pytest.mark.parametrize("draft", ["mtp", "draft-model"])
def test_a_drafter_that_is_right_is_not_told_of(draft: str) -> None:
    with mlxspec.load("demo", draft=draft) as engine:
        for policy in ("auto", "fixed"):
            spec = SpecConfig(drafters=(draft,), policy=policy)
            for prompt in PROMPTS:
                assert not told(engine.generate(prompt, SIZE, spec=spec).stats.notices)
        assert engine.health is not None
        judged, right = engine.health.counts[draft]
        assert judged > 30
        assert right / judged > 2 * LOW


def test_what_was_found_is_kept_and_inspected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlxspec.cli.main import main

    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    with mlxspec.load("demo", draft="mtp") as engine:
        # costs are learned by one policy, drafts are sure to be judged by the other
        for policy in ("auto", "fixed"):
            for prompt in PROMPTS[:2]:
                engine.generate(prompt, SIZE, spec=SpecConfig(drafters=("mtp",), policy=policy))
        assert engine.health is not None
        judged, right = engine.health.counts["mtp"]
        write_followed()  # as the process does at its end
    assert main(["inspect", "demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["here"] == {"mtp": {"judged": judged, "right": right}}
    assert main(["inspect", "demo"]) == 0
    assert (
        f"mtp: the first token of {judged} drafts was accepted in {right / judged:.0%}"
        in capsys.readouterr().out
    )
    with mlxspec.load("demo", draft="mtp") as engine:
        assert engine.health is not None
        assert engine.health.counts["mtp"] == (judged, right)


@given(judged=st.integers(1, 100_000), share=st.floats(0, 1))
def test_only_what_is_sure_is_low(judged: int, share: float) -> None:
    """By Wilson's interval: never at a share of LOW or more, and for a smaller share from some number of drafts on."""
    right = round(judged * share)
    if right >= LOW * judged:
        assert not is_low(judged, right)
    assert is_low(judged, right) <= is_low(10 * judged, 10 * right)
    assert not is_low(20, 0)
    assert is_low(30, 0)


def test_old_drafts_count_for_less() -> None:
    """A drafter that was right for thousands of drafts and has become useless is told of."""
    health = DrafterHealth({"mtp"})

    def answer(right: int) -> list[str]:
        work = DrafterStats(num_judged=100, num_right=right)
        return health.heard(
            RequestStats(drafters={"mtp": work, "ngram-simple": DrafterStats(num_judged=100)})
        )

    assert not any(answer(90) for _ in range(100))
    assert sum(bool(answer(0)) for _ in range(60)) == 1
