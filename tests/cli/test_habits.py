"""Words that people bring from other programs: names of models, of commands and of options; and what help shows of each command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import Run, refused
from planting import catches, rewritten

from mlxspec.cli import launch, options
from mlxspec.errors import ModelError
from mlxspec.loading import hub
from mlxspec.loading.repositories import check_repo
from mlxspec.loading.short_names import repository, short_names

LISTED = "generate chat demo run serve launch bench tune prove doctor pull models convert inspect".split()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("https://huggingface.co/mlx-community/Qwen3.5-4B-4bit", "mlx-community/Qwen3.5-4B-4bit"),
        ("https://huggingface.co/owner/name/tree/main", "owner/name"),
        ("huggingface.co/owner/name/", "owner/name"),
        ("hf.co/owner/name", "owner/name"),
        ("qwen3.5:4b", "mlx-community/Qwen3.5-4B-4bit"),
        ("Qwen3.5-9B", "mlx-community/Qwen3.5-9B-4bit"),
        ("qwen3.5", "mlx-community/Qwen3.5-4B-4bit"),
        ("gemma3:270m", "mlx-community/gemma-3-270m-it-4bit"),
        ("llama3.2:latest", "mlx-community/Llama-3.2-3B-Instruct-4bit"),
        ("gemma4", "mlx-community/gemma-4-e4b-it-4bit"),
        ("gemma4:26b-a4b", "mlx-community/gemma-4-26b-a4b-it-4bit"),
        ("gpt-oss:20b", "mlx-community/gpt-oss-20b-MXFP4-Q8"),
        ("gpt-oss-20b", "mlx-community/gpt-oss-20b-MXFP4-Q8"),
        ("qwen3-coder:30b", "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit"),
        ("qwen3.6:35b-a3b", "mlx-community/Qwen3.6-35B-A3B-4bit"),
        ("llama3", "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit"),
        ("phi4", "mlx-community/phi-4-4bit"),
        ("mistral", "mlx-community/Mistral-7B-Instruct-v0.3-4bit"),
        ("qwen3", "mlx-community/Qwen3-4B-4bit"),
        ("owner/name", "owner/name"),
        ("demo", "demo"),
        ("https://example.org/owner/name", "https://example.org/owner/name"),
    ],
)
def test_names_that_people_type(typed: str, meant: str) -> None:
    assert repository(typed) == meant


def test_short_names_are_of_repositories_and_known_once() -> None:
    names = [name for known in short_names() for name in (known.name, *known.also)]
    assert len(set(names)) == len(names) > 20
    for known in short_names():
        check_repo(known.repo)
        assert 0 < known.gb < 100


def test_a_short_name_is_looked_for_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--mlx-community--Qwen3.5-4B-4bit"
    folder = home / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    assert (
        hub.resolve("qwen3.5:4b", download=False)
        == hub.resolve("hf.co/mlx-community/Qwen3.5-4B-4bit")
        == folder
    )


def test_an_unknown_name_says_how_to_search() -> None:
    with pytest.raises(ModelError, match="`mlxspec models llama9 8b` searches for others"):
        hub.resolve("llama9:8b")


def test_run_without_a_name_lists_what_fits(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxspec.platform import memory

    monkeypatch.setattr(memory, "machine_memory", lambda: 8_000_000_000)
    ran = run("run")
    assert ran.code == 0
    first, *rows = ran.out.splitlines()
    assert first.split() == ["model", "download", "who", "drafts", "from"]
    assert rows[0].startswith("qwen3.5:9b ")
    assert "its MTP head" in rows[0]
    assert not any(row.startswith(("qwen3.8:27b", "qwen3:14b")) for row in rows)
    assert any("RedHatAI/Qwen3-8B-speculator.dflash2" in row for row in rows)
    assert "`mlxspec run NAME`" in ran.err
    assert "measured here" not in ran.err
    data = {"model": "x", "day": "2026-12-03", "kinds": []}
    monkeypatch.setattr("mlxspec.engine.measured.kept_json.read", lambda path: data)
    assert "qwen3.5:9b measured here on 3 Dec.: " in run("run").err


@catches(
    "what is of unknown size fits",
    "mlxspec.cli.models:_search",
    rewritten("0 < m.size <= machine]", "m.size <= machine]"),
)
@catches(
    "what takes all of the memory does not fit",
    "mlxspec.cli.models:_search",
    rewritten("0 < m.size <= machine]", "0 < m.size < machine]"),
)
def test_models_that_fit_are_known_to_fit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size around both bounds: none is listed by --fits that the table does not call fitting."""
    from mlxspec.checkpoints import search
    from mlxspec.platform import memory

    sizes = (0, 1, 1_000_000, 1_000_001)
    of_no_kind = {"model_type": "", "quantization": "", "downloads": 0, "base_models": (), "gated": False}
    every = [search.Found(name=f"owner/of-{size}", size=size, **of_no_kind) for size in sizes]
    monkeypatch.setattr(memory, "machine_memory", lambda: 1_000_000)
    monkeypatch.setattr(search, "search", lambda words, **more: every)
    table = run("models", "of")
    told = [row.split()[-2] for row in table.out.splitlines()[1:]]
    fitting = json.loads(run("models", "of", "--fits", "--json").out)["models"]
    assert told == ["?", "yes", "yes", "no"], table.out
    assert [m["size"] for m in fitting] == [1, 1_000_000]


def test_other_words_for_commands(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("show", "demo").out == run("inspect", "demo").out
    assert run("-v").out == run("version").out == run("--version").out
    assert run("help").out == run("--help").out
    assert run("help", "chat").out == run("chat", "--help").out
    assert "edit this file" in run("try", "--help").out
    assert "--request" in run("try", "--help").out
    refused(run("stop"), "Ctrl-C ends")
    monkeypatch.setattr(launch, "_models", lambda port, key: None)
    assert run("ps").code == 1
    monkeypatch.setattr(launch, "_models", lambda port, key: [{"id": "a", "context_length": 8}, {"id": "b"}])
    assert run("ps").out == "a  in memory\nb  loaded when it is asked for\n"


def test_other_words_for_options(run: Run, model: Path, tmp_path: Path) -> None:
    short = ("generate", "hello", "--model", model)
    wanted = run(*short, "--max-tokens", 4, "--top-p", 0.9).out
    for words in (("--max_tokens", 4), ("--max-new-tokens", 4), ("--max_new_tokens=4",)):
        assert run(*short, *words, "--top_p", 0.9).out == wanted
    refused(run(*short, "--draft", 16), "--draft-max 16")
    assert run("convert", model, tmp_path / "made", "--bits", 4, "--group-size", 32).code == 0
    refused(run("convert", model), "`mlxspec convert MODEL DIR`")
    refused(run("convert", model, tmp_path / "x", "-o", tmp_path / "y"), "named twice")


@pytest.mark.parametrize("command", options.COMMANDS)
def test_help_shows_few_options_and_all_where_it_is_asked(run: Run, command: str) -> None:
    short, whole = run(command, "--help").out, run(command, "--help-all").out
    every = [a for a in options.parser_of(command)._actions if a.option_strings]
    count = lambda text: sum(line.startswith("  -") for line in text.split("also understood")[0].splitlines())  # noqa: E731
    assert count(whole) == len(every)
    assert count(short) <= 16
    assert (count(short) < len(every)) == ("--help-all" in short)


def test_the_list_of_commands_is_short(run: Run) -> None:
    told = run("--help").out
    assert all(f"\n    {name} " in told for name in LISTED)
    assert "    completion" not in told
    assert "Also: rm, flags, completion, ps." in told
