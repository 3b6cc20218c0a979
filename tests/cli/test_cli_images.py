"""Images on the command line: `generate --image`, and in a chat `/image` and pasted paths."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runs import Run, refused
from PIL import Image

import mlxspec
from mlxspec.cli import images
from mlxspec.config import SamplingParams
from mlxspec.engine.engine import Engine
from tests.engine import sighted_demo

LIMIT = ("--max-tokens", 6)
GREEDY = SamplingParams(max_tokens=6)
WORDS = "What does this show?"


@pytest.fixture(scope="module")
def sighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sighted_demo.write(tmp_path_factory.mktemp("models") / "sighted")


@pytest.fixture(scope="module")
def engine(sighted: Path) -> Iterator[Engine]:
    with mlxspec.load(sighted) as found:
        yield found


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Two images, one with spaces in its name, and a file that is none."""
    made = {"one": tmp_path / "one.png", "two": tmp_path / "the second.PNG", "bad": tmp_path / "bad.png"}
    made["one"].write_bytes(sighted_demo.picture())
    made["two"].write_bytes(sighted_demo.picture(seed=1))
    made["bad"].write_bytes(b"hello")
    return made


def user(words: str, *shown: Path) -> dict[str, object]:
    parts = [*({"type": "image", "image": path} for path in shown), {"type": "text", "text": words}]
    return {"role": "user", "content": parts if shown else words}


def said(engine: Engine, *turns: dict[str, object]) -> list[str]:
    """Answers of one conversation."""
    messages, found = [], []
    for turn in turns:
        messages.append(turn)
        found.append(engine.chat(messages, GREEDY).text)
        messages.append({"role": "assistant", "content": found[-1]})
    return found


def test_generate_asks_about_images(
    run: Run, engine: Engine, sighted: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxspec.cli.options.load_engine", lambda *a, **k: engine)
    one, two = files["one"], files["two"]
    ran = run("generate", "--image", one, "--json", *LIMIT, WORDS)
    assert (ran.code, json.loads(ran.out)["text"]) == (0, said(engine, user(WORDS, one))[0])
    both = run("generate", "--image", one, "--image", two, "--json", *LIMIT, WORDS)
    assert json.loads(both.out)["text"] == said(engine, user(WORDS, one, two))[0]
    refused(run("generate", "--image", one, "--ignore-chat-template", WORDS), "--image goes with one prompt")
    refused(run("generate", "--image", one, "-p", "a", "-p", "b"), "--image goes with one prompt")
    refused(run("generate", "--image", one, "--no-images", WORDS), "that --no-images leaves out")
    refused(run("generate", "--image", files["bad"], WORDS), "bad.png", "no image in a supported format")
    refused(run("generate", "--image", "nowhere.png", WORDS), "nowhere.png cannot be read: No such file")
    refused(run("generate", "--image", one.parent, WORDS), "is no file")
    with Image.open(two) as still:
        still.save(moving := one.with_name("moving.gif"), save_all=True, append_images=[still.rotate(90)])
    ran = run("generate", "--image", moving, *LIMIT, WORDS)
    assert ran.code == 0
    assert "moving.gif: the image is animated, and only its first frame is read." in ran.err
    assert "animated" not in both.err
    assert engine.is_idle


@pytest.mark.slow
def test_generate_with_a_model_that_reads_none(run: Run, model: Path, files: dict[str, Path]) -> None:
    refused(run("generate", "--model", model, "--image", files["one"], WORDS), "reads no images")


@pytest.mark.slow
def test_generate_from_the_folder(run: Run, engine: Engine, sighted: Path, files: dict[str, Path]) -> None:
    ran = run("generate", "--model", sighted, "--image", files["one"], "--stats", *LIMIT, WORDS)
    assert (ran.code, ran.out) == (0, said(engine, user(WORDS, files["one"]))[0] + "\n")


def test_chat_takes_images(
    run: Run, engine: Engine, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a command, as a path alone or beside words; taken back with its question; and it stays in the conversation."""
    monkeypatch.setattr("mlxspec.cli.options.load_engine", lambda *a, **k: engine)
    monkeypatch.setattr(engine, "close", lambda: None)
    one, two = files["one"], files["two"]
    escaped = str(two).replace(" ", "\\ ")
    lines = [
        f"/image {one}",
        WORDS,
        "And now?",
        "/clear",
        f"/image {one}",
        "/image -",
        WORDS,
        "/clear",
        f"{escaped}",
        WORDS,
        "/retry",
        "/undo",
        f"'{two}' {WORDS}",
        "/clear",
        f"What is in no-such.png and {escaped}?",
        f"{one} {escaped} {WORDS}",
    ]
    ran = run("chat", *LIMIT, stdin="\n".join(lines).encode())
    assert ran.code == 0, ran.err
    second = said(engine, user(WORDS, two))[0]
    wanted = [
        *said(engine, user(WORDS, one), user("And now?")),
        *said(engine, user(WORDS)),
        second,
        second,
        second,
        *said(engine, user(f"What is in no-such.png and {escaped}?"), user(WORDS, one, two)),
    ]
    assert ran.out == "".join(f"{answer}\n" for answer in wanted)
    assert "With the next question: one.png." in ran.err
    assert "No image goes with the next question." in ran.err
    assert "With the next question: the second.PNG." in ran.err
    named = run("chat", "--image", one, *LIMIT, "-p", WORDS, "-p", "And now?")
    assert named.out == "".join(f"{a}\n" for a in said(engine, user(WORDS, one), user("And now?")))
    refused(run("chat", "--image", files["bad"], WORDS), "bad.png", "no image in a supported format")


def test_a_bad_image_leaves_a_chat_as_it_was(engine: Engine, files: dict[str, Path]) -> None:
    from mlxspec.cli.conversation import Conversation
    from mlxspec.errors import ImageError

    talk = Conversation(engine=engine, params=GREEDY, spec=engine.spec)
    with pytest.raises(ImageError) as error:
        talk.show(str(files["one"]), str(files["bad"]))
    assert str(error.value).startswith(f"{files['bad']}: ")
    assert talk.pictures == []


@pytest.mark.slow
def test_a_saved_conversation_has_its_images(
    run: Run, engine: Engine, sighted: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    kept = tmp_path / "kept.json"
    first = run(
        "chat", "--model", sighted, *LIMIT, stdin=f"/image {files['one']}\n{WORDS}\n/save {kept}\n".encode()
    )
    assert first.code == 0, first.err
    again = run("chat", "--model", sighted, *LIMIT, stdin=f"/load {kept}\nAnd now?\n".encode())
    assert again.out == said(engine, user(WORDS, files["one"]), user("And now?"))[1] + "\n"
    files["one"].unlink()
    gone = run("chat", "--model", sighted, *LIMIT, stdin=f"/load {kept}\nAnd now?\n".encode())
    assert gone.code == 2
    assert "cannot be read: No such file or directory" in gone.err


@pytest.mark.parametrize(
    ("line", "text", "names"),
    [
        ("{one}", "", ["{one}"]),
        ("'{two}'", "", ["{two}"]),
        ('read "{two}" and {one} now', "read and now", ["{two}", "{one}"]),
        ("{one}: what is it?", "{one}: what is it?", []),
        ("nowhere.png", "nowhere.png", []),
        ("  two  spaces stay  ", "  two  spaces stay  ", []),
    ],
)
def test_pasted_paths(files: dict[str, Path], line: str, text: str, names: list[str]) -> None:
    known = {name: str(path) for name, path in files.items()}
    found = images.pasted(line.format(**known))
    assert found == (text.format(**known), [name.format(**known) for name in names])
