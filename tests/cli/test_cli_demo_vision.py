"""`mlxspec demo --vision`, and how an image is shown in a terminal."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import pytest
from cli_runs import Run, refused
from PIL import Image

from mlxspec import demo
from mlxspec.bench import demo_prompts, demo_runs
from mlxspec.cli import pictures
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
        "2 prompts for demo-vision, each with drafting off and with mtp. Drafting is forced"
    )
    assert ran.out.count(" identical ") == 2
    assert "number-1: Read the number. It says 526599" in ran.out
    assert "0 of 2 pictures were read without a fault." in ran.out
    assert '--image FILE "Read the number."' in ran.out
    assert "\x1b" not in ran.out


@pytest.mark.slow
def test_everything_as_json(run: Run, quick: None) -> None:
    data = json.loads(run("demo", "--vision", "--json", *SHORT).out)
    assert data["identical"] is True
    assert [p["says"] for p in data["prompts"]] == ["526599", "02.08.1916"]
    assert all(p["comparisons"][0]["stats"]["drafters"]["mtp"]["num_drafted"] for p in data["prompts"])


def test_models_that_read_no_images(run: Run, model: Path) -> None:
    refused(run("demo", "--vision", "--model", model, "--draft", "mtp"), "reads no images")
    refused(run("demo", "--vision", "--no-images"), "--no-images")


def test_the_gap_behind_an_image_is_that_of_the_choice(sighted: Path) -> None:
    import mlxspec
    from mlxspec.config import SamplingParams

    with mlxspec.load(sighted, draft="off") as engine:
        prompt, params = (
            demo_runs.asked(engine, demo_prompts.picture_prompts()[0]),
            SamplingParams(max_tokens=4),
        )
        tokens = engine.generate(prompt, params).tokens
        for place in range(3):
            other = (*tokens[:place], tokens[place] ^ 1)
            flip = demo_runs.find_flip(engine, prompt, params, tokens, other)
            assert (flip.position, flip.plain_token) == (place, tokens[place])
            assert flip.gap >= 0


def test_pictures_are_files_and_say_something() -> None:
    prompts = demo_prompts.picture_prompts()
    assert {p.image for p in prompts} == set(demo.PICTURES.glob("*.png"))
    assert all(p.says and p.image is not None and p.image.stat().st_size < 20_000 for p in prompts)


@pytest.fixture
def image() -> Image.Image:
    return Image.open(demo_prompts.picture_prompts()[0].image).convert("RGB")  # type: ignore[arg-type]


def test_kitty_and_iterm_get_the_file(image: Image.Image) -> None:
    parts = re.findall("\x1b_G([^;]*);([^\x1b]*)\x1b\\\\", pictures.for_kitty(image))
    assert [p[0] for p in parts] == ["a=T,f=100,m=1", *["m=1"] * (len(parts) - 2), "m=0"]
    assert all(len(p[1]) <= 4096 for p in parts)
    iterm = re.fullmatch("\x1b]1337;File=inline=1;size=([0-9]+):([^\x07]*)\x07\n", pictures.for_iterm(image))
    assert iterm is not None
    for data in (base64.b64decode("".join(p[1] for p in parts)), base64.b64decode(iterm[2])):
        assert Image.open(io.BytesIO(data)).tobytes() == image.tobytes()
    assert int(iterm[1]) == len(base64.b64decode(iterm[2]))


@pytest.mark.parametrize(("colours", "code"), [("truecolor", "38;2;"), ("", "38;5;")])
def test_half_blocks_are_pixels(monkeypatch: pytest.MonkeyPatch, colours: str, code: str) -> None:
    monkeypatch.setenv("COLORTERM", colours)
    monkeypatch.setenv("COLUMNS", "40")
    small = Image.new("RGB", (20, 8), (255, 0, 0))
    small.paste((0, 0, 255), (0, 1, 20, 2))
    drawn = pictures.in_half_blocks(small)
    lines = drawn.splitlines()
    assert [line.count("\u2580") for line in lines] == [20] * 4
    assert drawn.count(code) == 80
    red, blue = ("2;255;0;0", "2;0;0;255") if colours else ("5;196", "5;21")
    assert lines[0].startswith(f"\x1b[38;{red};48;{blue}m\u2580")
    assert lines[1].startswith(f"\x1b[38;{red};48;{red}m\u2580")
    assert all(line.endswith("\x1b[0m") for line in lines)
    wide = pictures.in_half_blocks(Image.new("RGB", (400, 100)))
    assert [line.count("\u2580") for line in wide.splitlines()] == [39] * 5


@pytest.mark.parametrize(
    ("env", "way"),
    [
        ({"TERM": "xterm-256color"}, pictures.in_half_blocks),
        ({"TERM": "xterm-kitty"}, pictures.for_kitty),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, pictures.for_iterm),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "ghostty"}, pictures.for_kitty),
        ({"TERM": "tmux-256color", "TERM_PROGRAM": "WezTerm"}, pictures.in_half_blocks),
        ({"TERM": "xterm-kitty", "NO_COLOR": "1"}, None),
        ({"TERM": "dumb"}, None),
    ],
)
def test_each_terminal_its_way(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], way: object) -> None:
    for name in ("TERM", "TERM_PROGRAM", "TMUX", "KITTY_WINDOW_ID", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert pictures._way() is None  # a pipe
    monkeypatch.setattr(pictures.terminal, "is_terminal", lambda stream: True)
    assert pictures._way() is way
