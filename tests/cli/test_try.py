"""`mlxspec try`: which model it takes, how long it measures, what it says and keeps, on disks with a model of LM Studio's, of the hub's
cache, of a folder, and with nothing; killed in the middle."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_checkpoints import write_checkpoint
from cli_runs import Run, refused
from planting import catches

from mlxspec.bench import own
from mlxspec.bench.turns import Score, Taken
from mlxspec.cli import launch, saved
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine import measured
from mlxspec.engine.stats import DrafterStats, RequestStats
from mlxspec.loading import lm_studio
from mlxspec.platform import kept_json

STUDIO, HUB = "lmstudio-community/tiny-4bit", "owner/larger"
COMMIT = "0" * 40


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose context holds the prompts."""
    made = write_checkpoint(tmp_path_factory.mktemp("try") / "target")
    config = json.loads((made / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (made / "config.json").write_text(json.dumps(config))
    (made / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.7}')
    return made


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without models, and one turn that warms up and three that count, of short answers."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
    for module in ("repositories", "hub"):
        monkeypatch.setattr(f"mlxspec.loading.{module}.cache_folder", lambda: tmp_path / "hub")
    monkeypatch.setattr(lm_studio, "PLACES", ("~/.lmstudio/models",))
    monkeypatch.setattr(own, "SECONDS", 0.0)
    return tmp_path


def studio(home: Path, model: Path) -> None:
    shutil.copytree(model, home / ".lmstudio" / "models" / STUDIO)


def hub(home: Path, model: Path) -> None:
    folder = home / "hub" / f"models--{HUB.replace('/', '--')}"
    shutil.copytree(model, folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)


def test_nothing_on_the_disk(run: Run) -> None:
    said = refused(run("try"), "neither in Hugging Face's cache nor in LM Studio's folders", "`mlxspec pull ")
    assert " GB)" in said


@pytest.mark.parametrize(("put", "name"), [(studio, STUDIO), (hub, HUB)])
def test_the_model_that_is_there(
    run: Run, home: Path, roomy: Path, put: Callable[[Path, Path], None], name: str
) -> None:
    put(home, roomy)
    ran = run("try")
    assert ran.code == 0, ran.err
    assert ran.out.startswith(f"{name} here: chat ")
    assert ran.out.endswith("; same text.\n")
    assert measured.measured(name).startswith("measured here on ")
    assert ran.out.removeprefix(f"{name} here: ").rstrip(".\n") in measured.measured(name)


@catches("the last one used is not looked for", "mlxspec.policy.cost_file:models_used", lambda right: list)
def test_the_last_used_comes_before_the_largest(run: Run, home: Path, roomy: Path, model: Path) -> None:
    """Of a model that is gone nothing is said; a folder that was loaded counts as here."""
    hub(home, roomy)
    studio(home, model)
    for i, name in enumerate((STUDIO, str(roomy), "owner/gone", "demo")):
        path = kept_json.kept_file("costs", name)
        kept_json.write(path, {"model": name})
        os.utime(path, (1e9 + i, 1e9 + i))
    ran = run("try", "--json")
    assert json.loads(ran.out)["model"] == roomy.name
    assert "of 3 models here, the last that was used; -m names another" in ran.err


def test_a_file_is_edited_as_before(run: Run, home: Path, roomy: Path) -> None:
    (home / "a.py").write_text("x = 1\n")
    ran = run("try", home / "a.py", "-m", roomy, "--max-tokens", 4, "--repeat", 1)
    assert ran.code == 0, ran.err
    assert "Same text in 1 of 1." in ran.out


@catches(
    "what changes nothing is accepted",
    "mlxspec.cli.try_own:_WITH_PROMPTS",
    lambda right: (),
)
@pytest.mark.parametrize(
    "typed", [("--max-tokens", "8"), ("--max-tokens=8",), ("--repeat", "3"), ("--repeat=1",)]
)
def test_what_changes_nothing_without_a_file_is_refused(
    run: Run, home: Path, roomy: Path, typed: tuple[str, ...]
) -> None:
    studio(home, roomy)
    refused(run("try", *typed), f"{typed[0].partition('=')[0]} needs FILE")


def test_json_goes_round_and_tells_no_text(run: Run, home: Path, roomy: Path) -> None:
    """The person's own last questions are asked, and only their number is told."""
    secret = "my very own question"
    for i in range(5):
        message = {"role": "user", "content": f"{secret} {i}"}
        saved.save(
            saved.new_file().with_name(f"{i}.json"),
            saved.Saved(model="x", system=None, messages=[message, {"role": "assistant", "content": "yes"}]),
        )
    ran = run("try", "-m", roomy, "--json")
    assert ran.code == 0, ran.err
    data = json.loads(ran.out)
    assert secret not in ran.out + ran.err
    assert data["kinds"][0]["num_prompts"] == 3
    assert data["kinds"][0]["temperature"] == 0.7
    assert [kind["kind"] for kind in data["kinds"]] == ["chat", "code", "edits"]
    kept = measured.measured(str(roomy))
    assert kept.endswith(measured.sentence(data))
    measured.keep(str(roomy), json.loads(json.dumps(data)))
    assert measured.measured(str(roomy)) == kept
    assert data["model"] == roomy.name
    assert f"{roomy.name} {kept}" in list(measured.all_measured())


RATIO = {"refusal": "", "is_settled": True, "least": 1.05, "most": 1.12}
OTHERS = {"chat": {}, "code": {"is_settled": False, "most": 2.0}, "edits": {"refusal": "nothing was drafted"}}
DATA: dict[str, Any] = {
    "model": "qwen3.5:4b",
    "day": "2026-12-03",
    "kinds": [
        {"kind": kind, "off": 78.2, "auto": 84.4, "same_text": True, "ratio": RATIO | more}
        for kind, more in OTHERS.items()
    ],
}


def test_the_sentence_and_where_it_is_shown(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short name and its repository mean the same model; what was measured on another machine is not shown."""
    said = (
        "measured here on 3 Dec.: chat 78 -> 84 tok/s (1.05x to 1.12x), code 78 tok/s, with drafting not settled (1.05x to 2.00x), "
        "edits 78 tok/s (nothing was drafted); same text"
    )
    measured.keep("qwen3.5:4b", DATA)
    assert measured.measured("mlx-community/Qwen3.5-4B-4bit") == said
    monkeypatch.setattr(launch, "_models", lambda port, key: [{"id": "qwen3.5-4b", "context_length": 8}])
    assert run("ps").out == f"qwen3.5-4b  in memory  {said}\n"
    measured.keep(str(model), DATA)
    assert said in " ".join(run("inspect", model).out.split())
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    assert measured.measured("qwen3.5:4b") == ""


@pytest.mark.parametrize("wrong", [{"day": "yesterday"}, {"kinds": [{}]}, {"kinds": 3}])
def test_a_damaged_file_is_as_good_as_none(wrong: dict[str, Any]) -> None:
    measured.keep("qwen3.5:4b", DATA | wrong)
    assert measured.measured("qwen3.5:4b") == ""
    assert list(measured.all_measured()) == []


def timed(
    monkeypatch: pytest.MonkeyPatch, speeds: Callable[[str, int], float], *, drafted: bool = True
) -> dict[str, int]:
    """Let `measure` run on made-up times: by kind and turn, how many times as fast drafting is. Returns how often each kind was asked."""
    asked: dict[str, int] = {}
    now = [0.0]

    def take_turn(
        engine: Any, group: Any, params: Any, both: Any, scores: list[Score], *, turn: int
    ) -> dict[int, Taken]:
        kind = group[0]
        asked[kind] = asked.get(kind, 0) + 1
        now[0] += 1.0
        work = {"mtp": DrafterStats(num_rounds=9, num_drafted=9)} if drafted else {}
        answers = [
            SimpleNamespace(tokens=(1,), stats=RequestStats(num_rounds=9, num_generated=10, drafters=work))
        ]
        found = {0: Taken(answers, 1.0), 1: Taken(answers, 1 / speeds(kind, turn))}  # type: ignore[arg-type]
        for i, score in enumerate(scores):
            score.compare(found[i].answers, found[0].answers)
            if turn:
                score.add(turn - 1, found[i], found[0])
        return found

    monkeypatch.setattr(own, "take_turn", take_turn)
    monkeypatch.setattr(own, "encode", lambda engine, text: text)
    monkeypatch.setattr(own, "SECONDS", 60.0)
    wanted = [own.Kind(name=name, texts=(name,), params=SamplingParams()) for name in ("chat", "edits")]
    engine: Any = SimpleNamespace(spec=SpecConfig(drafters=("mtp",)))
    found = own.measure(engine, wanted, clock=lambda: now[0])
    asked["settled"] = sum(score.ratio.is_settled for score in found)
    return asked


def test_what_is_settled_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind whose turns differ goes on to the end of the minute, the other ends behind three pairs."""
    asked = timed(monkeypatch, lambda kind, turn: 1.5 if kind == "chat" else 1 + turn % 2)
    assert asked["chat"] == 4
    assert 50 < asked["edits"] <= 60
    assert asked["settled"] == 1


def test_a_few_turns_even_where_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timed(monkeypatch, lambda kind, turn: 1.5) == {"chat": 4, "edits": 4, "settled": 2}
    assert timed(monkeypatch, lambda kind, turn: 1.5, drafted=False) == {"chat": 4, "edits": 4, "settled": 0}


def test_texts_that_differ_are_exit_code_1(run: Run, roomy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = own.measure

    def differing(*args: Any, **more: Any) -> list[Score]:
        return [replace(score, num_different=1) for score in found(*args, **more)]

    monkeypatch.setattr(own, "measure", differing)
    ran = run("try", "-m", roomy)
    assert ran.code == 1
    assert "chat " in ran.out
    assert "(the texts differ)" in ran.out
    assert "same text" not in ran.out


# ---- at a terminal

QUICK = "from mlxspec.bench import own; from mlxspec.cli.main import main; own.SECONDS = {}; raise SystemExit(main())"


def at_terminal(home: Path, seconds: float) -> Any:
    pytest.importorskip("pyte", reason="needs an emulated terminal")
    import recorder

    settings = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TERM": "xterm-256color",
        "MLXSPEC_CACHE": str(home / "cache"),
    }
    settings |= {
        "HF_HOME": str(home / "hf"),
        "MLX_DISABLE_COMPILE": "1",
        "MLXSPEC_CONFIG": "",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", QUICK.format(seconds), "try"]
    return recorder.Recorder(command, environment=settings, columns=200)


@pytest.mark.slow
@pytest.mark.parametrize("there", ["LM Studio", "hub", "nothing"])
def test_walked_at_a_terminal(home: Path, roomy: Path, there: str) -> None:
    if there == "LM Studio":
        studio(home, roomy)
    elif there == "hub":
        hub(home, roomy)
        (home / "hf").mkdir()
        (home / "hub").rename(home / "hf" / "hub")
    with at_terminal(home, 0) as terminal:
        code = terminal.wait()
        shown = terminal.text()
    if there == "nothing":
        assert code == 2
        assert "mlxspec: error: No model that fits is on this disk" in shown
        return
    name = STUDIO if there == "LM Studio" else HUB
    assert code == 0, shown
    assert f"{name} here: chat " in shown
    assert "same text." in shown.split("here: ")[1]
    assert len(list((home / "cache" / "tried").glob("*.json"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_killed_in_the_middle(home: Path, roomy: Path, number: int) -> None:
    """Nothing half is kept, and the next one runs."""
    studio(home, roomy)
    with at_terminal(home, 600) as terminal:
        terminal.wait_for("measuring for about a minute")
        if number == signal.SIGINT:
            terminal.interrupt()
        else:
            terminal.end(number)
        assert terminal.wait() in (128 + number, -number)
        shown = terminal.text()
    assert "Traceback" not in shown
    assert not list((home / "cache").glob("tried/*"))
    with at_terminal(home, 0) as terminal:
        assert terminal.wait() == 0
    assert len(list((home / "cache").glob("tried/*.json"))) == 1
