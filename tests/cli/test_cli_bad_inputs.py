"""Eighty things that people type wrongly, over all commands: one sentence, the right exit code, no traceback, and the word that was meant
where one is near. Nothing is loaded, fetched or written for any of them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from cli_runs import Run, refused

# what is typed, and what the sentence must hold
BAD = [
    # commands
    ("chta", "did you mean chat?"),
    ("genrate x", "did you mean generate?"),
    ("Serve", "did you mean serve?"),
    ("benhc", "did you mean bench?"),
    ("docter", "did you mean doctor?"),
    ("list", "`mlxspec models` lists"),
    ("frobnicate", "there are: generate, chat"),
    ("'what is a list?'", 'mlxspec generate "TEXT"'),
    ("--model demo", "The command comes before --model"),
    # generate: the prompt
    ("generate ''", "The prompt is empty"),
    ("generate -p ''", "The prompt is empty"),
    ("generate", "The prompt is empty"),
    ("generate what is x", "in quotes"),
    ("generate x -p y", "beside -p"),
    ("generate -p - -p -", "only once"),
    ("generate -p", "-p/--prompt needs a value"),
    ("generate x --ignore-chat-template --system y", "--system needs the chat template"),
    # options
    ("generate x --no-stream", "answers always stream"),
    ("generate x --temprature 1", "did you mean --temp?"),
    ("generate x --maxtokens 5", "did you mean --max-tokens?"),
    ("generate x --jsn", "did you mean --json?"),
    ("generate x --draftmodel demo", "did you mean --draft-model?"),
    ("generate x --split-mode row", "a model is divided by mlx.launch"),
    ("generate x --frobnicate", "--help"),
    ("generate x --json=1", "--json"),
    ("generate x --max-tokens", "needs a value"),
    # values
    ("generate x --max-tokens 0", "--max-tokens must be between"),
    ("generate x --max-tokens ten", "--max-tokens must be an integer, not 'ten'"),
    ("generate x --max-tokens 1.5", "must be an integer"),
    ("generate x --temp hot", "--temp must be a number"),
    ("generate x --temp=-1", "--temp must be between"),
    ("generate x --temp nan", "--temp must be between"),
    ("generate x --top-p 0", "--top-p must be above 0"),
    ("generate x --top-p 2", "--top-p must be above 0 and at most 1"),
    ("generate x --min-p 2", "--min-p must be between"),
    ("generate x --top-k=-5", "--top-k must be between"),
    ("generate x --repetition-penalty 0", "--repetition-penalty"),
    ("generate x --seed=-2", "--seed"),
    ("generate x --stop ''", "--stop must not be empty"),
    ("generate x --bad-word ''", "--bad-word"),
    ("generate x --regex a --lark b", "one grammar only"),
    ("generate x --json-schema @absent.json", "absent.json cannot be read: No such file"),
    ("generate x --lark @.", "cannot be read: Is a directory"),
    ("generate x --thinking-budget many", "--thinking-budget must be an integer"),
    ("generate x --max-context 1", "--max-context must be between"),
    ("generate x --dtype int4", "--dtype must be one of"),
    ("generate x --dtype bfloat", "did you mean bfloat16?"),
    ("generate x --rollback snapshots", "There is no option --rollback; the tape is the only rollback"),
    # models
    ("generate x --model ''", "--model must not be empty"),
    ("generate x --model demmo", "did you mean demo?"),
    ("generate x --model /no/such/model", "/no/such/model"),
    ("generate x --revision main", "only models from Hugging Face have revisions"),
    # drafting
    ("generate x --draft mtq", "did you mean mtp?"),
    ("generate x --draft off,mtp", "stand alone"),
    ("generate x --draft mtp,mtp", "twice"),
    ("generate x --draft draft-model --draft-model ''", "--draft-model must not be empty"),
    ("generate x --draft-min 9 --draft-max 2", "every draft would be dropped"),
    ("generate x --policy atuo", "did you mean auto?"),
    (
        "generate x --acceptance rejection",
        "There is no option --acceptance; a draft is accepted where it equals",
    ),
    ("generate x --preset coder", "no preset 'coder'"),
    # chat
    ("chat --temp hot", "--temp must be a number"),
    ("chat -p x y", "beside -p"),
    ("chat --thinkin", "did you mean --thinking"),
    ("chat --resumee", "did you mean --resume?"),
    # serve
    ("serve --port http", "--port must be an integer"),
    ("serve --port 99999", "--port must be between"),
    ("serve --memory-budget lots", "like 800M or 6G"),
    ("serve --prefix-disk 5", "--prefix-disk 5 would be 5 bytes; write a unit, like 5M or 5G."),
    ("serve --prefix-budget 800", "write a unit, like 800M"),
    ("serve --limit max_bdy=1", "did you mean max_body?"),
    ("serve --model a=demo --model a=demo-gemma", "Two models are called a"),
    ("serve --api-key @absent", "cannot be read"),
    ("serve --host 0.0.0.0", "key"),
    # measuring
    ("demo --draft off", "--draft off leaves nothing to compare"),
    ("demo --repeat 0", "--repeat must be between"),
    ("bench edits", "'edits' belongs to no option"),
    ("bench --workloads edti", "did you mean edit?"),
    ("bench --workloads ''", "There is no workload ''; there are: edit"),
    ("bench --plot x.doc", "--plot"),
    ("tune --prompts absent.txt", "absent.txt cannot be read"),
    ("tune --draft off", "--draft off leaves nothing to compare"),
    ("doctor --model ''", "--model must not be empty"),
    ("doctor --josn", "did you mean --json?"),
    # checkpoints
    ("pull", "MODEL"),
    ("pull nothing-like-an-id", "nothing-like-an-id"),
    ("pull a/b --context 0", "--context must be between"),
    ("rm a/b --ye", "did you mean --yes?"),
    ("inspect /no/such/model", "/no/such/model"),
    ("convert demo", "`mlxspec convert MODEL DIR`"),
    ("convert demo -o ''", "Name the folder"),
    ("completion fihs", "SHELL must be one of bash, zsh, fish, tcsh"),
    ("completion", "SHELL"),
]


@pytest.mark.parametrize(("typed", "words"), BAD, ids=[t for t, _ in BAD])
def test_bad_inputs(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(run(*shlex.split(typed)), words)
    assert not list(tmp_path.iterdir())


def test_there_are_eighty() -> None:
    assert len({typed for typed, _ in BAD}) >= 80
    assert {typed.split()[0] for typed, _ in BAD} >= {
        "generate",
        "chat",
        "serve",
        "demo",
        "bench",
        "tune",
        "doctor",
    }
