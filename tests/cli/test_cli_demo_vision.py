"""`mlxspec demo --vision`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import Run, refused

from mlxspec import demo
from mlxspec.bench import demo_prompts, demo_runs
from mlxspec.loading import hub
from tests.engine import sighted_demo

SHORT = ("--max-tokens", 4, "--repeat", 1)


@pytest.fixture(scope="module")
def sighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sighted_demo.write(tmp_path_factory.mktemp("models") / "sighted")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, sighted: Path) -> None:
    """Two pictures, and another model in the place of the demo that reads them."""
    resolve, every = hub.resolve, demo_prompts.picture_prompts()
    monkeypatch.setattr(demo_runs, "_MOST_TURNS", 1)
    monkeypatch.setattr(demo_prompts, "picture_prompts", lambda: every[:2])
    monkeypatch.setattr(
        hub, "resolve", lambda name, **more: sighted if name == hub.DEMO_VISION else resolve(name, **more)
    )


def test_pictures_are_asked_about(run: Run, quick: None) -> None:
    ran = run("demo", "--vision", *SHORT)
    assert ran.code == 0, ran.err
    assert ran.out.startswith(
        "2 prompts for demo-vision, in turns with drafting off and auto, the default.\n"
    )
    assert ran.out.count("    same text · ") == 2
    assert "number-1: Read the number. It says 526599" in ran.out
    assert "0 of 2 pictures were read without a fault." in ran.out
    assert '--image FILE "Read the number."' in ran.out
    assert "\x1b" not in ran.out


@pytest.mark.slow
def test_everything_as_json(run: Run, quick: None) -> None:
    data = json.loads(run("demo", "--vision", "--all", "--json", *SHORT).out)
    assert data["identical"] is True
    assert [p["says"] for p in data["prompts"]] == ["526599", "02.08.1916"]
    assert all(p["comparisons"][0]["stats"]["drafters"]["mtp"]["num_drafted"] for p in data["prompts"])


def test_models_that_read_no_images(run: Run, model: Path) -> None:
    refused(run("demo", "--vision", "--model", model, "--draft", "mtp"), "reads no images")
    refused(run("demo", "--vision", "--model", model), "reads no images")
    refused(run("demo", "--vision", "--no-images"), "--no-images")


def test_pictures_are_files_and_say_something() -> None:
    prompts = demo_prompts.picture_prompts()
    assert {p.image for p in prompts} == set(demo.PICTURES.glob("*.png"))
    assert all(p.says and p.image is not None and p.image.stat().st_size < 20_000 for p in prompts)
