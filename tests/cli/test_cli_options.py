"""Options: every bad value is one sentence that names the flag, found before anything is loaded."""

from __future__ import annotations

from dataclasses import fields

import pytest
from cli_runs import Run, refused

from mlxspec.cli import options
from mlxspec.config import DRAFTER_NAMES, EngineConfig, SamplingParams, SpecConfig
from mlxspec.errors import ConfigError

pytestmark = pytest.mark.smoke

NOWHERE = "/there-is-no-model-here"  # a bad option must be found before this is
INTEGERS = {
    "--max-tokens": ("0", "-1", "99999999999"),
    "--top-k": ("-2", "99999999999"),
    "--seed": ("-2", str(2**63)),
    "--draft-max": ("-1", "257"),
    "--draft-min": ("-1", "257"),
    "--ngram-n": ("0", "65"),
    "--ngram-m": ("0", "257"),
    "--max-context": ("1", "-5", "99999999999"),
}
NUMBERS = {
    "--temp": ("-0.1", "101"),
    "--top-p": ("0", "-1", "1.01"),
    "--min-p": ("-0.1", "1.5"),
    "--repetition-penalty": ("0", "-1", "101"),
    "--presence-penalty": ("-101", "101"),
    "--frequency-penalty": ("-101", "101"),
    "--draft-p-min": ("-0.5", "1.5"),
}
NO_NUMBER = ("", "abc", "1,5", "0x10", "--", "∞")
BAD = [
    *(
        (f, v)
        for f, values in INTEGERS.items()
        for v in (*values, *NO_NUMBER, "1.5", "1e3", "nan", "9" * 400, "9" * 5000)
    ),
    *((f, v) for f, values in NUMBERS.items() for v in (*values, *NO_NUMBER, "nan", "inf", "-inf", "1e999")),
    ("--dtype", "int4"),
    ("--dtype", ""),
    ("--stop", ""),
    ("--model", ""),
    ("--draft-model", ""),
]


@pytest.mark.parametrize(("flag", "value"), BAD, ids=lambda v: v[:20])
def test_bad_values_name_the_flag(run: Run, flag: str, value: str) -> None:
    said = refused(run("generate", "-p", "x", "--model", NOWHERE, f"{flag}={value}"), flag)
    assert len(said) < 300


@pytest.mark.parametrize("command", ["chat", "demo"])
def test_other_commands_check_the_same(run: Run, command: str) -> None:
    refused(run(command, "--model", NOWHERE, "--max-tokens=0"), "--max-tokens")
    refused(run(command, "--model", NOWHERE, "--max-context=0"), "--max-context")


@pytest.mark.parametrize("value", ["0", "-1", "101", "x"])
def test_demo_repetitions(run: Run, value: str) -> None:
    refused(run("demo", "--repeat", value), "--repeat")


def test_n_min_above_n_max(run: Run) -> None:
    refused(
        run("generate", "-p", "x", "--draft-min", "20", "--draft-max", "2", "--model", NOWHERE),
        "--draft-min",
        "--draft-max",
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "-p", "x", "--max", "5"], ("--max", "did you mean --max-context or --max-tokens?")),
        (["generate", "-p", "x", "--tempp=1"], ("--tempp", "did you mean --temp?")),
        (["generate", "-p", "x", "--frobnicate"], ("--frobnicate", "--help")),
        (["generate", "-p", "x", "y"], ("'y'",)),
        (["generate", "-p"], ("-p", "needs a value")),
        (["generate", "-p", "x", "--model"], ("--model needs a value",)),
        (["generate", "-p", "--temp"], ("needs a value",)),
        (["generate", "-p", "x", "--json=1"], ("--json",)),
        (["frobnicate"], ("'frobnicate'", ", ".join(options.COMMANDS))),
        (["gen"], ("'gen'",)),
        (["--json"], ("No command",)),
        (["--frobnicate", "generate", "-p", "x"], ("--frobnicate",)),
        ([""], ("''",)),
    ],
    ids=" ".join,
)
def test_unknown_words(run: Run, arguments: list[str], words: tuple[str, ...]) -> None:
    refused(run(*arguments), *words)


def test_every_field_has_a_flag() -> None:
    """A new option of the config classes must be reachable from here, or be left out on purpose."""
    left_out = {
        "logit_bias",
        "ignore_eos",
        "drafters",
        "max_waiting",
        "past_texts",
        "owner",
        "predicted",
        "allowed_token_ids",
        "stop_token_ids",
        "keeps_stop",
        "adapters",
        "lark_at",
        "lark_once",
        "stop_outside",
        "thinks_first",
    }
    left_out |= {
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "thinking_tags",
        "logits_processors",
        "sampler",
    }  # of the Python API: a stream of text has no place for them
    known = {f.name for c in (SamplingParams, SpecConfig, EngineConfig) for f in fields(c)} - left_out
    assert known <= set(options._FLAGS)
    assert set(options.SAMPLING) == {f.name for f in fields(SamplingParams)} - left_out


def test_values_arrive() -> None:
    args = options.parse(
        "generate -p x --max-tokens 7 --temp 0.5 --top-p 0.9 --top-k 40 --min-p 0.05 --repetition-penalty 1.1 --presence-penalty -1"
        " --frequency-penalty 0.2 --seed 3 --stop a --stop=b --draft-max 5 --draft-min 1 --draft-p-min 0.4 --ngram-n 3 --ngram-m 9".split()
    )
    assert options.sampling_params(args) == SamplingParams(
        max_tokens=7, temperature=0.5, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1, presence_penalty=-1,
        frequency_penalty=0.2, seed=3, stop=("a", "b"),
    )  # fmt: skip
    assert options.spec_config(args) == SpecConfig(n_max=5, n_min=1, p_min=0.4, ngram_n=3, ngram_m=9)


def test_defaults_are_the_config_classes() -> None:
    args = options.parse(["generate", "-p", "x"])
    assert options.sampling_params(args) == SamplingParams()
    assert options.spec_config(args) == SpecConfig()
    assert (args.model, args.draft) == ("demo", "auto")


def test_a_prompt_may_begin_with_a_dash() -> None:
    assert options.parse(["generate", "--prompt=-1 + 1"]).prompt == ["-1 + 1"]
    assert options.parse(["generate", "-p", "-"]).prompt == ["-"]


def test_help_names_every_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse(["generate", "--help"])
    shown = " ".join(capsys.readouterr().out.split()).replace("- ", "-")
    assert all(name in shown for name in DRAFTER_NAMES)


def test_errors_of_options_are_ours() -> None:
    with pytest.raises(ConfigError):
        options.parse(["generate", "--temp", "hot"])


def test_measurements_draft_from_no_earlier_answers() -> None:
    """They ask each prompt several times."""
    for command in ("bench", "tune", "demo"):
        assert options.engine_config(options.parse([command])).past_texts == 0
    assert options.engine_config(options.parse(["chat"])).past_texts == EngineConfig.past_texts
