"""Questions, refusals and the corpus split: enough forms, nothing held out that was trained on."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from training.demo import questions, smalltalk
from training.demo.chat import CHAT_TEMPLATE, render
from training.demo.corpus import first_sentence, functions, read_library

from mlxspec.loading.template import ChatTemplate


@pytest.fixture(scope="module")
def known() -> list[questions.Known]:
    return questions.known_functions()


def test_there_are_enough_functions_and_forms(known: list[questions.Known]) -> None:
    assert len(known) >= 1200
    assert len(set(questions.CORES)) >= 60
    asked = {questions.training_question(k, random.Random(i)) for i, k in enumerate(known)}
    assert len(asked) > 0.9 * len(known)


def test_no_training_question_uses_a_held_out_form(known: list[questions.Known]) -> None:
    rnd = random.Random(3)
    for item in known:
        held = {form.format(n=item.name).lower() for form in questions.HELD_OUT_FORMS}
        assert not held & {questions.training_question(item, rnd).lower() for _ in range(5)}


def test_answers_hold_the_signature_and_the_sentence(known: list[questions.Known]) -> None:
    by_name = {k.name: k for k in known}
    assert by_name["math.sqrt"].answer == "`math.sqrt(x)`\n\nReturn the square root of x."
    assert all(k.sentence in k.answer and k.name in k.answer for k in known)


@pytest.mark.parametrize(
    ("doc", "sentence"),
    [
        (
            "Return x.\n\nMore.",
            "",
        ),  # under twenty characters there is no full stop to trust: kept whole below
        ("Return the square root of x. Raises.", "Return the square root of x."),
        ("f(x) -> y\n\nReturn the thing asked for.", "Return the thing asked for."),
        ("Split a string, e.g. by commas. Fine.", "Split a string, e.g. by commas."),
        ("", ""),
        ("word " * 60, ""),
    ],
)
def test_first_sentence(doc: str, sentence: str) -> None:
    if doc.startswith("Return x."):
        sentence = "Return x."
    assert first_sentence(doc) == sentence


def test_off_topic_questions_are_many_and_not_the_held_out_ones() -> None:
    rnd = random.Random(0)
    asked = {smalltalk.off_topic_question(rnd) for _ in range(2000)}
    assert len(asked) > 1000
    assert not any("{" in q for q in asked)
    plain = {q.lower().strip("?.! ") for q in asked}
    assert not plain & {q.lower().strip("?.! ") for q in smalltalk.HELD_OUT}
    assert len(smalltalk.HELD_OUT) == 20


def test_the_split_is_by_file_and_hashes_are_those_of_the_files() -> None:
    root = Path(json.__file__).parent
    files = read_library(root)
    assert files == read_library(root)
    for file in files:
        assert hashlib.sha256((root / file.path).read_bytes()).hexdigest() == file.sha256
    found = functions(files)
    training = {f.source for f in found if not f.held}
    assert not training & {f.source for f in found if f.held}


def _template() -> object:
    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(CHAT_TEMPLATE)


@pytest.mark.parametrize("generate", [False, True])
def test_the_template_renders_what_was_trained_on(generate: bool) -> None:
    turns = [("system", "Be brief."), ("user", "hi\n"), ("assistant", " x "), ("user", "{a}")]
    messages = [{"role": r, "content": c} for r, c in turns]
    text = _template().render(messages=messages, add_generation_prompt=generate)  # type: ignore[attr-defined]
    assert text == render(*turns) + ("<|im_start|>assistant\n" if generate else "")
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert _template().render(messages=parts) == render(("user", "ab"))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("content", "between"), [("", ""), ("I look.", "\n")])
def test_the_template_writes_tools_calls_and_their_results(content: str, between: str) -> None:
    """The model was not trained to call; where a grammar makes it call, what came back has a place in the conversation. A line break
    stands behind content and between calls, and none at the beginning of an answer."""
    call = {"function": {"name": "look", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": content, "tool_calls": [call, call]},
        {"role": "tool", "content": "3"},
    ]
    text = ChatTemplate(CHAT_TEMPLATE, {}).render(
        messages, add_generation_prompt=False, tools=[{"type": "function"}]
    )
    assert text.startswith('<|im_start|>system\n# Tools\n\n<tools>\n{"type": "function"}\n</tools>\n')
    written = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
    answered = ("assistant", f"{content}{between}{written}\n{written}")
    result = ("user", "<tool_response>\n3\n</tool_response>")
    assert text.endswith("<|im_end|>\n" + render(("user", "hi"), answered, result))


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": [{"role": "critic", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    ],
)
def test_the_template_refuses_what_the_model_cannot_do(wrong: dict[str, object]) -> None:
    with pytest.raises(TemplateError, match="demo model"):
        _template().render(**wrong)  # type: ignore[attr-defined]
