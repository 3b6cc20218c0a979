"""Models, tokenizers and prompts that cannot be used: exit code 2, one sentence, nothing on stdout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_checkpoints import CONTEXT
from cli_runs import Run, refused


def change(path: Path, **values: object) -> None:
    """Set keys of a JSON file; None takes them out."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def generate(run: Run, folder: Path | str, *more: str | Path, prompt: str = "hello"):  # type: ignore[no-untyped-def]
    return run("generate", "-p", prompt, "--max-tokens", "4", "--model", folder, *more)


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "nothing-here", "a/b/c", "../..//", "has space", "-dash", "x\x1b[31my"]
)
def test_no_such_model(run: Run, name: str) -> None:
    said = refused(run("generate", "-p", "x", f"--model={name}"))
    assert "\x1b" not in said


def test_a_file_is_no_model(run: Run, model: Path) -> None:
    refused(generate(run, model / "config.json"), "is a file")


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("config.json", "config.json"),
        ("model.safetensors", "safetensors"),
        ("tokenizer.json", "tokenizer.json"),
    ],
)
def test_a_file_is_missing(run: Run, copied: Path, missing: str, words: str) -> None:
    (copied / missing).unlink()
    refused(generate(run, copied), words)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe\x00", b'"text"'])
def test_a_file_is_damaged(run: Run, copied: Path, name: str, content: bytes) -> None:
    (copied / name).write_bytes(content)
    refused(generate(run, copied), name)


@pytest.mark.parametrize("keep", [4, 100, 0.5, 0.999])
def test_truncated_weights(run: Run, copied: Path, keep: float) -> None:
    path = copied / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: keep if isinstance(keep, int) else int(keep * len(whole))])
    refused(generate(run, copied), "model.safetensors")


def test_a_missing_shard(run: Run, copied: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(generate(run, copied), "model-2.safetensors")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": None}, "model_type"),
        ({"model_type": "no_such_kind"}, "no_such_kind"),
        (
            {"model_type": "gpt_oss"},
            "cannot load this model",
        ),  # runs by mlx-lm's code, and these are not its weights
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"hidden_size": 64}, "shape"),
        ({"num_hidden_layers": 4}, "missing"),
        ({"vocab_size": 100}, ""),
        ({"layer_types": ["sideways", "full_attention"]}, "layer_types"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit(run: Run, copied: Path, values: dict[str, object], words: str) -> None:
    change(copied / "config.json", **values)
    refused(generate(run, copied), words)


def test_a_template_that_refuses_messages(run: Run, copied: Path) -> None:
    change(copied / "tokenizer_config.json", chat_template="{{ raise_exception('not so') }}")
    refused(generate(run, copied), "chat template refuses these messages: not so")
    assert generate(run, copied, "--ignore-chat-template").code == 0


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if %}", "chat template does not compile"),
        ("{{ 1 / 0 }}", "chat template refuses these messages"),
        ("{{ messages.__class__.mro() }}", "chat template refuses these messages"),
    ],
)
def test_a_bad_template_costs_chat_and_not_the_model(
    run: Run, copied: Path, template: str, words: str
) -> None:
    change(copied / "tokenizer_config.json", chat_template=template)
    ran = generate(run, copied)
    notice, error = ran.err.splitlines()
    assert notice.startswith("There is no chat with this model.")
    refused(ran._replace(err=f"{error}\n"), words)
    plain = generate(run, copied, "--ignore-chat-template")
    assert plain.code == 0
    assert plain.out


def test_drafters_that_are_not_there(run: Run, model: Path, draft_model: Path) -> None:
    refused(generate(run, model, "--draft", "frobnicate"), "'frobnicate'", "ngram-simple")
    refused(generate(run, model, "--draft", ""), "must not be empty")
    refused(generate(run, model, "--draft", "mtp,mtp"), "twice")
    refused(generate(run, model, "--draft", "mtp,off"), "stand alone")
    refused(generate(run, model, "--draft", "draft-model"), "--draft-model")
    refused(generate(run, draft_model, "--draft", "mtp"), "no MTP head")
    refused(generate(run, model, "--draft", "draft-model", "--draft-model", "/no/such"), "/no/such")


def test_a_draft_model_with_another_vocabulary(run: Run, model: Path, foreign_model: Path) -> None:
    refused(
        generate(run, model, "--draft", "draft-model", "--draft-model", foreign_model),
        "2 token ids",
        "'a'",
        "'b'",
    )


def test_a_prompt_beyond_the_context(run: Run, model: Path) -> None:
    refused(generate(run, model, prompt="x" * CONTEXT), str(CONTEXT))
    refused(generate(run, model, "--max-context", "8"), "8")
    refused(run("generate", "-p", "short", "-p", "x" * CONTEXT, "--model", model), str(CONTEXT))


@pytest.mark.parametrize("arguments", [["-p", ""], ["-p", "-"], ["-p", "x", "-p", ""]], ids=str)
def test_an_empty_prompt(run: Run, model: Path, arguments: list[str]) -> None:
    refused(run("generate", *arguments, "--model", model), "empty")


def test_no_prompt(run: Run, model: Path) -> None:
    refused(run("generate", "--model", model), "empty")


def test_stdin_twice(run: Run, model: Path) -> None:
    refused(run("generate", "-p", "-", "-p", "-", "--model", model, stdin=b"x"), "twice")


@pytest.mark.parametrize("bad", [b"\xff\xfe", b"caf\xe9"])
def test_what_is_no_utf8(run: Run, model: Path, bad: bytes) -> None:
    refused(run("generate", "-p", "-", "--model", model, stdin=bad), "UTF-8")
    refused(run("generate", "-p", bad.decode("utf-8", "surrogateescape"), "--model", model), "UTF-8")
    refused(
        run(
            "generate", "-p", "x", "--system-prompt", bad.decode("utf-8", "surrogateescape"), "--model", model
        ),
        "UTF-8",
    )
    refused(run("chat", "--model", model, stdin=bad), "UTF-8")


def test_a_system_prompt_needs_a_template(run: Run, copied: Path) -> None:
    refused(
        generate(run, copied, "--system-prompt", "Be brief.", "--ignore-chat-template"),
        "--ignore-chat-template",
    )
    change(copied / "tokenizer_config.json", chat_template=None)
    refused(generate(run, copied, "--system-prompt", "Be brief."), "no chat template")
    refused(run("chat", "-p", "x", "--model", copied), "no chat template")
