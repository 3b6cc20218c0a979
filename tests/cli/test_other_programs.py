"""Flags of llama-server, Ollama, vLLM and mlx-lm: each is honoured under our name, accepted as needless with a sentence, or refused with
what to use; `mlxspec flags` shows the table of the package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runs import Run, refused
from planting import catches

from mlxspec.cli import options, other_programs
from mlxspec.config import MAX_CONTEXT
from mlxspec.errors import ConfigError

FLAGS = Path(__file__).with_name("llama_server_flags.txt").read_text(encoding="utf-8").splitlines()
DIFFERENT = ("--draft",)  # names of ours that other programs use for something else


def each() -> Iterator[tuple[str, str | None]]:
    """(flag, a value of its) of every line."""
    for line in FLAGS:
        if not line.startswith("#"):
            names = re.findall(r"(?:^|, )(-[^\s,]+)", line)
            value = line.split(" ")[-1] if not line.split(" ")[-1].startswith("-") else None
            yield from ((name, value) for name in names)


@pytest.mark.parametrize(("flag", "value"), [*each()], ids=lambda v: str(v)[:30])
def test_every_flag_is_honoured_needless_or_refused_with_a_reason(flag: str, value: str | None) -> None:
    if flag in ("-h", "--help") or flag in DIFFERENT:
        return
    known = options.flags(options.parser_of("serve"))
    assert flag in known or flag in other_programs.table()
    for words in ([flag, value], [f"{flag}={value}"]) if value is not None else ([flag],):
        try:
            args = options.parse(["serve", *words])
        except ConfigError as error:
            said = str(error)
            meant = other_programs.table()[flag][-1]
            reasons = (
                f"There is no option {flag}; {meant.target}.",
                f"{flag} is {meant.target}, which `mlxspec serve`",
            )
            assert said.startswith(reasons) or "x.json cannot be read" in said
        else:
            assert all(note.startswith((flag, "owner/name")) and note.endswith(".") for note in args.notes)


def test_the_table_is_whole() -> None:
    """Own flags of it exist somewhere, and a sentence reads well behind `is not needed:` and behind `;`."""
    there = {s for name in options.COMMANDS for s in options.flags(options.parser_of(name))}
    for flag, meanings in other_programs.table().items():
        assert re.fullmatch(r"--?[a-zA-Z0-9][\w.-]*", flag)
        for meant in meanings:
            if meant.fate == "same":
                assert meant.target in there, meant
            else:
                assert not meant.target.endswith("."), meant
        assert len({m.program for m in meanings}) == len(meanings), flag


def parsed(line: str) -> dict[str, object]:
    return vars(options.parse(line.split()))


def test_what_values_become() -> None:
    args = parsed(
        "serve -hf Qwen/Qwen3-4B -hfd unsloth/Qwen3-0.6B-GGUF:UD-Q6_K_XL -n -1 -c 0 -s -1 -np 3 -ctk q8_0 -ctv q8_0 -ctkd q4_0 -cram 64"
        " --spec-type draft-mtp,draft-simple,ngram-mod --lookup-cache-static a -lcd b --sleep-idle-seconds 60 --no-mmproj --alias x,y"
        " --cors-origins http://a,http://b --spec-ngram-mod-n-match 5 --spec-ngram-map-k-min-hits 2 -r one -r two"
    )
    assert args["model"] == ["Qwen/Qwen3-4B"]
    assert args["draft_model"] == "mlx-community/Qwen3-0.6B-6bit"
    assert (args["max_tokens"], args["max_context"], args["seed"]) == (MAX_CONTEXT, None, None)
    assert (args["max_rows"], args["kv_bits"], args["draft_kv_bits"]) == (3, 8, 4)
    assert (args["prefix_budget"], args["draft"]) == (64 << 20, "mtp,draft-model,ngram-mod")
    assert args["idle_unload"] == 60.0
    assert (args["no_images"], args["alias"]) == (True, "x,y")
    assert args["allowed_origins"] == ["http://a", "http://b"]
    assert (args["ngram_min_hits"], args["stop"]) == (2, ["one", "two"])
    assert len(args["notes"]) == 4  # type: ignore[arg-type]  # the draft model, and three that are not needed
    assert parsed("serve --keepalive 1h30m")["idle_unload"] == 5400.0
    assert parsed("serve --keepalive=-1")["idle_unload"] is None
    assert parsed("serve --no-cache-prompt")["prefix_budget"] == 0
    found = parsed('serve --speculative-config {"model":"a/b","num_speculative_tokens":4}')
    assert (found["draft_model"], found["draft_max"]) == ("a/b", 4)
    assert [parsed(f"chat {line}")["thinking"] for line in ("--think", "--think=false", "-rea auto")] == [
        "on",
        "off",
        None,
    ]
    assert parsed("chat --think=high")["chat_template_args"] == ['{"reasoning_effort": "high"}']
    assert parsed("generate x -fa -n 5")["words"] == parsed("generate -fa x")["words"] == ["x"]
    assert parsed("generate --top-k -1 --stop -1 x")["stop"] == ["-1"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("serve -ctk q8_0 -ctv q4_0", "-ctk and -ctv are one setting here, --kv-bits"),
        ("serve -ctk q5_1", "-ctk must be one of f32, f16"),
        ("serve -hf owner/name:Q8_0", "leave :Q8_0 out"),
        ("serve -hf owner/name-GGUF:IQ1_S", "no model for MLX is known"),
        ("serve -ngl", "-ngl needs a value."),
        ("serve --speculative-config [1]", "must be a JSON object"),
        ("serve --speculative-config {\"method\":\"suffix\"}", "'method': 'suffix', which is not known here"),
        ("serve --keepalive soon", "must be a time like 5m"),
        ("serve --cache-ram much", "--prefix-budget must be bytes"),
        ("serve --acceptance match", "There is no option --acceptance; a draft is accepted where it equals the token"),
        ("serve --spec-draft-sampling probabilistic", "There is no option --spec-draft-sampling; a draft is accepted"),
        ("serve -hfx", "There is no option -hfx."),
        ("serve --mirostat 1", "There is no option --mirostat; this server has no such sampler."),
        ("generate x -np 4", "-np is --max-rows, which `mlxspec generate` does not have."),
        ("models -ngl 3", "There is no option -ngl;"),
    ],
)  # fmt: skip
def test_what_is_refused(run: Run, line: str, said: str) -> None:
    assert said in refused(run(*line.split()))


@catches("GGUF is asked of the hub", "mlxspec.cli.other_programs:_GGUF", lambda right: re.compile("nothing"))
def test_a_repository_in_gguf_is_replaced_aloud() -> None:
    args = parsed("serve -hf ggml-org/gemma-4-E2B-it-GGUF")
    assert args["model"] == ["mlx-community/gemma-4-E2B-it-4bit"]
    assert args["notes"] == [
        "ggml-org/gemma-4-E2B-it-GGUF is in GGUF, which MLX does not read: mlx-community/gemma-4-E2B-it-4bit is loaded in its place."
    ]


def test_the_command_shows_every_other_name_and_field(run: Run) -> None:
    said = json.loads(run("flags", "--json").out)
    assert ["--temperature", "llama-server", "--temp"] in said["flags"]
    assert ["--no-cache-prompt", "llama-server", "--prefix-budget 0"] in said["flags"]
    shown = {flag for flags, _, _ in said["flags"] for flag in flags.split()}
    same = {
        flag for flag, means in other_programs.table().items() if any(meant.fate == "same" for meant in means)
    }
    assert shown == same
    what = {name: here for names, here in said["fields"] for name in names.split()}
    assert what["draft"] == "honoured"
    assert what["user"].startswith("no effect: ")
    out = run("flags").out
    assert "--temperature" in out
    assert "guided_json" in out


def test_config_files_know_the_same_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.toml"
    monkeypatch.setenv("MLXSPEC_CONFIG", str(file))
    file.write_text("[serve]\nparallel = 3\nctx-size = 512\n")
    args = options.parse(["serve"])
    assert (args.max_rows, args.max_context) == (3, 512)
