"""`mlxspec demo`: every prompt off and on, in turns; exit code 0 only when all token ids are the same."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_checkpoints import write_checkpoint
from cli_runs import Ran, Run, refused

import mlxspec
from mlxspec.bench import demo_prompts, demo_runs
from mlxspec.bench.demo_prompts import PROMPTS, DemoPrompt
from mlxspec.engine.engine import Engine
from mlxspec.engine.stats import DrafterStats, RequestStats
from mlxspec.loading import hub

SHORT = ("--max-tokens", 6, "--repeat", 1)
RATIO = r"(not settled )?(\d+\.\d\dx )?\(\d+\.\d\dx to \d+\.\d\dx\)"
CONTEXT = 1024  # the prompts are longer than the other tests' context


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft model with room for the demo's prompts."""
    folder = tmp_path_factory.mktemp("demo")
    made = (
        write_checkpoint(folder / "target"),
        write_checkpoint(folder / "draft", hidden=32, mtp=False, seed=3),
    )
    for path in made:
        config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": CONTEXT}
        (path / "config.json").write_text(json.dumps(config))
    return made


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_runs, "_MOST_TURNS", 1)
    monkeypatch.setattr(demo_prompts, "PROMPTS", (PROMPTS[1], PROMPTS[-1]))


@pytest.fixture
def as_demo(monkeypatch: pytest.MonkeyPatch, roomy: tuple[Path, Path], quick: None) -> None:
    """The built-in family is the tiny one."""
    resolve = hub.resolve
    places = {hub.DEMO: roomy[0], hub.DEMO_DRAFT: roomy[1]}
    monkeypatch.setattr(hub, "resolve", lambda name, **more: places.get(name) or resolve(name, **more))


def check_table(ran: Ran, num_rows: int) -> None:
    assert ran.code == 0, ran.err
    assert ran.out.count(" identical ") == num_rows
    assert ran.out.splitlines()[-1].startswith(f"Same text in {num_rows} of {num_rows}. ")
    assert "differ" not in ran.out
    assert "\x1b" not in ran.out
    assert ran.err == ""


def test_a_row_a_prompt_and_a_conclusion(run: Run, as_demo: None) -> None:
    """By default policy auto is beside plain decoding: the text, one row, and a last line that says what follows."""
    ran = run("demo", *SHORT)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("2 prompts for demo, in turns with drafting off and auto, the default.")
    rows = [line for line in ran.out.splitlines() if line.startswith("    same text · ")]
    assert len(rows) == 2
    assert all(
        re.fullmatch(rf"    same text · (off +\d+ tok/s · auto +\d+ tok/s · {RATIO}|[a-z].+)", row)
        for row in rows
    )
    middle = r" \d+\.\d\d times as fast as without drafting \((\w+ \d+\.\d\d to )?\w+( \d+\.\d\d)?\)\."
    last = rf"Same text in 2 of 2\.({middle})?( Not settled: [12] of 2; a larger --repeat asks again\.)?"
    assert re.fullmatch(last, ran.out.splitlines()[-1])


def test_a_file_is_edited_both_ways(run: Run, quick: None, roomy: tuple[Path, Path], tmp_path: Path) -> None:
    code = tmp_path / "own.py"
    code.write_text("def f(x):\n    return x\n")
    ran = run("demo", code, "--request", "do it", "--model", roomy[0], "--max-tokens", 6, "--repeat", 1)
    assert ran.code == 0, ran.err
    assert "\nown.py: do it\n" in ran.out
    assert ran.out.splitlines()[-1].startswith("Same text in 1 of 1.")
    data = json.loads(run("demo", code, "--model", roomy[0], "--repeat", 1, "--json").out)
    assert len(data["prompts"][0]["tokens"]) <= 200
    refused(run("demo", tmp_path / "absent"), "cannot be read: No such file")
    refused(run("demo", "--request", "x"), "--request", "file")
    (tmp_path / "empty").write_text("\n")
    refused(run("demo", tmp_path / "empty"), "is empty")
    refused(run("demo", code, "--vision"), "--vision")


@pytest.mark.parametrize("prompt", [p for p in PROMPTS if p.temperature == 0], ids=lambda p: p.name)
def test_the_built_in_model_answers_the_prompts_right(demo: Engine, prompt: DemoPrompt) -> None:
    assert prompt.wanted
    assert demo.chat(prompt.text, max_tokens=96).text == prompt.wanted


@pytest.fixture(scope="module")
def demo() -> Engine:
    return mlxspec.load("demo", draft="off")


def test_the_family_with_all(run: Run, as_demo: None) -> None:
    ran = run("demo", "--all", *SHORT)
    check_table(ran, 4)
    assert "draft-model" in ran.out
    assert "mtp" in ran.out
    told, steps = ran.out.split("\nGo on with:\n")
    assert "tiny" in "".join(told.splitlines()[-2:])
    assert [line.split()[:2] for line in steps.splitlines()[:-2]] == [
        ["mlxspec", "chat"],
        ["mlxspec", "generate"],
        ["mlxspec", "pull"],
    ]


def test_another_model(run: Run, quick: None, roomy: tuple[Path, Path]) -> None:
    ran = run("demo", "--all", "--model", roomy[0], *SHORT)
    check_table(ran, 2)
    assert "tiny" not in ran.out


def test_choices_of_drafters(run: Run, quick: None, roomy: tuple[Path, Path]) -> None:
    ran = run(
        "demo",
        "--model",
        roomy[0],
        "--draft-model",
        roomy[1],
        "--draft",
        "mtp",
        "--draft",
        "draft-model,ngram-simple",
        "--json",
        *SHORT,
    )
    data = json.loads(ran.out)
    assert (ran.code, data["identical"]) == (0, True)
    drafters = [c["drafters"] for c in data["prompts"][0]["comparisons"]]
    assert drafters == [["mtp"], ["draft-model", "ngram-simple"]]
    first = data["prompts"][0]["comparisons"][0]
    assert first["ratio"]["least"] == first["ratio"]["most"]  # one turn
    assert first["ratio"]["least"] == pytest.approx(first["decode_speed"] / first["plain_speed"], rel=1e-2)
    assert not first["ratio"]["is_settled"]
    assert len(data["prompts"][0]["tokens"]) == 6


def test_every_prompt_fits_and_is_sampled_as_said(
    run: Run, roomy: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_runs, "_MOST_TURNS", 1)
    data = json.loads(run("demo", "--model", roomy[0], "--max-tokens", 2, "--repeat", 1, "--json").out)
    assert [p["prompt"] for p in data["prompts"]] == [p.name for p in PROMPTS]
    assert any(p["temperature"] > 0 for p in data["prompts"])


def test_a_difference_is_exit_code_1(run: Run, as_demo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = Engine.generate

    def flipping(self: Engine, prompts, params=None, *, spec=None):  # type: ignore[no-untyped-def]
        results = generate(self, prompts, params, spec=spec)
        if "mtp" in spec.drafters:
            results = [replace(r, tokens=(*r.tokens[:3], r.tokens[3] ^ 1, *r.tokens[4:])) for r in results]
        return results

    monkeypatch.setattr(Engine, "generate", flipping)
    ran = run("demo", *SHORT)
    assert ran.code == 1
    assert ran.out.count("    the texts differ\n") == 2
    assert ran.out.splitlines()[-1] == "Same text in 0 of 2."
    ran = run("demo", "--all", *SHORT)
    assert ran.code == 1
    assert ran.out.count(" differ ") == 2  # in the table
    assert "\nSame text in 2 of 4." in ran.out
    assert "at token 4 the answer says" in ran.out
    assert "plain decoding says" in ran.out
    data = json.loads(run("demo", "--all", "--json", *SHORT).out)
    assert data["identical"] is False
    flipped = data["prompts"][0]["comparisons"][0]
    assert "the texts differ" in flipped["ratio"]["refusal"]
    assert flipped["difference"]["place"] == 3


def test_speeds_are_medians_and_turns_alternate() -> None:
    calls: list[bool] = []
    totals = SimpleNamespace(round_seconds=0.0)

    def generate(groups, params, *, spec):  # type: ignore[no-untyped-def]
        calls.append(bool(spec.drafters))
        totals.round_seconds += 1.0
        work = DrafterStats(num_rounds=1, num_drafted=1)
        stats = RequestStats(num_rounds=1, num_generated=1 + len(calls), drafters={"mtp": work})
        return [SimpleNamespace(tokens=tuple(range(300)), stats=stats)]

    spec = mlxspec.SpecConfig(drafters=("mtp",))
    engine = SimpleNamespace(
        spec=spec,
        stats=totals,
        drafts=SimpleNamespace(drafters={}),
        generate=generate,
        tokenizer=SimpleNamespace(template=None, encode=lambda text: [1]),
    )
    prompt = DemoPrompt(name="x", what="x", text="x", is_chat=False)
    outcome = demo_runs.run_prompt(engine, prompt, [("mtp",)], max_tokens=300, repeat=3)  # type: ignore[arg-type]
    assert calls == [False, True, True, False, False, True, True, False]
    (c,) = outcome.scores
    assert (c.plain_speed, c.decode_speed) == (5.0, 6.0)  # of 4, 5, 8 and 3, 6, 7; the first two warmed up
    assert c.ratio.median == pytest.approx(7 / 8)  # of 3/4, 6/5, 7/8
    assert str(c.ratio) == "not settled (0.75x to 1.20x)"


def test_what_cannot_be_compared(run: Run, model: Path) -> None:
    refused(run("demo", "--model", model, "--draft", "off"), "off")
    refused(run("demo", "--model", model, "--draft", "auto", "--draft", "mtp"), "auto")
    refused(run("demo", "--model", model, "--draft", "frobnicate"), "frobnicate")
    refused(run("demo", "--model", model, "--draft", "draft-model"), "--draft-model")
