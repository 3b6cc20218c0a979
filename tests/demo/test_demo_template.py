"""The demo family's chat template: what it writes, and what it refuses."""

from __future__ import annotations

import pytest
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlxspec import demo
from mlxspec.loading.template import ChatTemplate

CHAT_TEMPLATE = (demo.TARGET / "chat_template.jinja").read_text().removesuffix("\n")


def render(*turns: tuple[str, str]) -> str:
    """Write turns of (role, text) as ChatML, closed: the text that the model was trained on."""
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)


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
