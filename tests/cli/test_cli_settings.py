"""The config file: which value wins, what is left out, and what is refused; shell completion of the same options."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cli_runs import Run, refused

from mlxspec.cli import options, settings
from mlxspec.errors import ConfigError

FILE = """
temp = 0.5
top_p = 0.9
show-draft = true
stop = ["a", "b"]
repeat = 5

[chat]
system = "Be brief."
temp = 0.6

[presets.coder]
temp = 0.2
max-tokens = 300
resume = true
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(FILE)
    monkeypatch.setenv("MLXSPEC_CONFIG", str(path))
    return path


def test_a_table_of_a_model(file: Path) -> None:
    """It wins over all else of the file, for that model; the command line wins over it."""
    file.write_text(
        FILE + '[models.big]\ntemp = 0.1\nthinking = "off"\n[models."owner/other"]\nmin-p = 0.2\n'
    )
    args = options.parse(["serve", "--model", "big=demo", "--model", "owner/other", "--preset", "coder"])
    big, other = options.for_model(args, "big", "demo"), options.for_model(args, "other", "owner/other")
    assert (big.temp, big.thinking, big.min_p, big.max_tokens) == (0.1, "off", None, 300)
    assert (other.temp, other.thinking, other.min_p) == (0.2, None, 0.2)
    args = options.parse(["serve", "--model", "big=demo", "--temperature", "0.9"])
    assert options.for_model(args, "big", "demo").temp == 0.9
    for wrong, said in (
        ("tmep = 1", "no option 'tmep' for [models.big]"),
        ('model = "x"', "model"),
        ("temp = 'hot'", "--temp"),
    ):
        file.write_text(f"[models.big]\n{wrong}\n")
        with pytest.raises(ConfigError, match=re.escape(said)):
            options.for_model(options.parse(["serve"]), "big", "demo")
    file.write_text("models = 3\n")
    with pytest.raises(ConfigError, match="holds the options of a model"):
        options.parse(["serve"])


def test_what_wins(file: Path) -> None:
    """The command line, the preset, the command's table, the top; another command's options are left out."""
    args = options.parse(["generate", "x"])
    assert (args.temp, args.top_p, args.show_draft, args.stop) == (0.5, 0.9, True, ["a", "b"])
    args = options.parse(["chat"])
    assert (args.temp, args.system, args.resume) == (0.6, "Be brief.", False)
    args = options.parse(["chat", "--preset", "coder"])
    assert (args.temp, args.max_tokens, args.system, args.resume) == (0.2, 300, "Be brief.", True)
    args = options.parse(["chat", "--preset=coder", "--temperature", "0.1", "--system-prompt", "x"])
    assert (args.temp, args.max_tokens, args.system) == (0.1, 300, "x")
    assert options.parse(["generate", "x", "--stop", "c"]).stop == ["c"]
    assert options.parse(["tune"]).repeat == 5
    assert options.parse(["demo"]).repeat == 3  # a demonstration is not set from the top
    file.write_text("model = 'demo-gemma'")
    assert [options.parse([c]).model for c in ("chat", "tune", "doctor")] == [
        "demo-gemma",
        "demo-gemma",
        "demo",
    ]
    assert options.parse(["serve"]).model == ["demo-gemma"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("temp = ", ("TOML",)),
        ("tmep = 1", ("'tmep'", "did you mean temp?")),
        ("temp = 'hot'", ("--temp", "a number")),
        ("temp = [1]", ("temp", "[1]")),
        ("json = 'yes'", ("json", "true or false")),
        ("dtype = 'float'", ("--dtype", "float32")),
        ("temp = 900", ("--temp", "100")),
        ("[chta]\ntemp = 1", ("[chta]", "did you mean chat?")),
        ("rollback = 'tape'", ("'rollback'", "the tape is the only rollback")),
        ("[generate]\nresume = true", ("'resume'", "[generate]")),
        ("[presets]\ncoder = 1", ("[presets.NAME]",)),
        ("prompt = 'x'", ("'prompt'",)),
        ("preset = 'x'", ("'preset'",)),
        ("stop = [[]]", ("stop",)),
        ("temp = nan", ("--temp",)),
    ],
)
def test_what_is_refused(run: Run, file: Path, text: str, words: tuple[str, ...]) -> None:
    file.write_text(text)
    refused(run("generate", "x", "--model", "/nowhere"), *words)


def test_presets_that_are_not_there(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(run("generate", "x", "--preset", "codr"), "'codr'", "did you mean coder?")
    file.write_bytes(b"\xff")
    refused(run("generate", "x"), str(file))
    file.unlink()
    refused(run("generate", "x", "--preset", "coder"), "no preset 'coder'")
    refused(run("generate", "x"), f"MLXSPEC_CONFIG names {file}, and there is no such file")
    file.mkdir()
    refused(run("generate", "x"), "cannot be read")
    monkeypatch.setenv("MLXSPEC_CONFIG", "")
    refused(run("generate", "x", "--preset", "coder"), "no preset 'coder'")


def test_where_it_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLXSPEC_CONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")  # to be ignored, says the rule
    assert settings.config_file() == tmp_path / ".config" / "mlxspec" / "config.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert settings.config_file() == tmp_path / "xdg" / "mlxspec" / "config.toml"
    (tmp_path / "xdg" / "mlxspec").mkdir(parents=True)
    (tmp_path / "xdg" / "mlxspec" / "config.toml").write_text("temp = 0.25")
    assert options.parse(["generate", "x"]).temp == 0.25


# ---- completion


def completed(line: str, script: str) -> list[str]:
    """What bash offers behind the words of a line."""
    words = line.split(" ")
    given = " ".join(f"'{w}'" for w in words)
    code = (
        f"{script}\nCOMP_WORDS=({given}); COMP_CWORD={len(words) - 1}; "
        "_shtab_mlxspec mlxspec; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.split()


def test_bash_completes(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.json").touch()
    script = run("completion", "bash").out
    assert completed("mlxspec ch", script) == ["chat"]
    assert completed("mlxspec generate --ma", script) == ["--max-context", "--max-tokens"]
    assert completed("mlxspec generate --dtype b", script) == ["bfloat16"]
    assert completed("mlxspec chat --model d", script) == ["demo", "demo-gemma", "demo-vision", "demo-agent"]
    assert completed("mlxspec generate sch", script) == ["schema.json"]
    assert completed("mlxspec completion ", script)[-4:] == ["bash", "zsh", "fish", "tcsh"]
    assert set(completed("mlxspec ", script)) >= set(options.COMMANDS)


def test_the_other_shells_know_every_option(run: Run) -> None:
    zsh, tcsh = run("completion", "zsh").out, run("completion", "tcsh").out
    assert zsh.startswith("#compdef mlxspec")
    for command in options.COMMANDS:
        assert f"{command}:" in zsh
        assert command in tcsh
    for flag in ("max-tokens", "json-schema", "idle-unload", "graft-mtp", "resume"):
        assert f"--{flag}" in zsh
    with pytest.raises(ConfigError, match="SHELL must be one of bash, zsh, fish, tcsh"):
        options.parse(["completion", "powershell"])


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "mlxspec.fish"
    script.write_text(run("completion", "fish").out)
    for line, wanted in (
        ("mlxspec ch", {"chat"}),
        ("mlxspec generate --max-t", {"--max-tokens"}),
        ("mlxspec generate --dtype b", {"bfloat16"}),
    ):
        code = f"source {script}; complete -C '{line}'"
        done = subprocess.run(["fish", "-c", code], capture_output=True, text=True, timeout=300, check=True)
        assert {found.split("\t")[0] for found in done.stdout.splitlines()} == wanted, line
