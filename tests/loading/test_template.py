"""Chat templates: what they are given, what they may not do, and that what goes wrong in them is one sentence."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from mlxspec.errors import ConfigError, HelperError, TokenizerError
from mlxspec.loading.template import LONGEST, ChatTemplate
from mlxspec.loading.tokenizer import Tokenizer
from tests.loading import byte_tokenizer

pytestmark = pytest.mark.smoke

HELLO = [{"role": "user", "content": "Hello"}]
CHATML = """{%- for message in messages %}
    {%- if message.role == 'skip' %}{%- continue %}{%- endif %}
    {{- '<|' + message.role + '|>' + message.content + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}
"""


def render(source: str, messages: list | None = None, **options) -> str:
    return ChatTemplate(source, {"eos_token": "<e>"}).render(
        HELLO if messages is None else messages, **options
    )


def test_a_chat_is_written_as_the_template_says() -> None:
    chat = [*HELLO, {"role": "skip", "content": "x"}, {"role": "assistant", "content": "Hi"}]
    assert render(CHATML, chat) == "<|user|>Hello<e>\n<|assistant|>Hi<e>\n<|assistant|>"
    assert render(CHATML, chat, add_generation_prompt=False) == "<|user|>Hello<e>\n<|assistant|>Hi<e>\n"
    assert render(CHATML, enable_thinking=False).endswith("<|assistant|><think></think>")


def test_a_last_message_can_be_gone_on_with() -> None:
    """White space at its end is the message's, whatever the template does behind it."""
    thought = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    template = (
        f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{thought}{{{{ m.content | trim }}}}<e>{{% endfor %}}"
    )
    for said in ("Hi", "Hi \n", "a<e>b"):
        chat = [*HELLO, {"role": "assistant", "content": said}]
        assert render(template, chat, continue_final_message=True) == f"<|user|>Hello<e><|assistant|>{said}"
    chat = [*HELLO, {"role": "assistant", "content": "", "reasoning_content": "So"}]
    assert render(template, chat, continue_final_message=True) == "<|user|>Hello<e><|assistant|><think>So"
    chat[-1]["content"] = "Hi"
    assert render(template, chat, continue_final_message=True).endswith("<think>So</think>Hi")
    assert chat[-1]["content"] == "Hi"
    with pytest.raises(ConfigError, match="last message"):
        render("{{ messages[0].content }}", chat, continue_final_message=True)


def test_what_templates_expect_to_find() -> None:
    tools = [{"name": "f", "args": {"ü": 1}}]
    assert render("{{ tools | tojson }}", tools=tools) == '[{"name": "f", "args": {"ü": 1}}]'
    assert render("{{ tools | tojson(indent=2) }}", tools=tools) == json.dumps(
        tools, ensure_ascii=False, indent=2
    )
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert (
        render(
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
        )
        == "1"
    )
    assert render("{{ messages[0].content.split('l')[0].strip() }}") == "He"
    assert render("{{ nothing }}|{{ nothing is defined }}") == "|False"


def test_rendering_changes_nothing() -> None:
    template = ChatTemplate(CHATML, {"eos_token": ""})
    messages = [{"role": "user", "content": "a"}]
    assert template.render(messages) == template.render(messages)
    assert messages == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set _ = messages.append(1) %}",
        "{% set _ = messages[0].update(role='x') %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
        "{{ nothing.at.all }}",
        "{{ undefined_function() }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10 ** 15 }}",
        "{{ strftime_now(5) }}",
        "{{ '%d' % 'x' }}",
        "{{ {}['a']['b'] }}",
    ],
)
def test_a_template_that_refuses_or_misbehaves_is_a_sentence(source: str) -> None:
    with pytest.raises((ConfigError, HelperError)) as caught:
        render(source)
    assert str(caught.value).startswith("The chat template ")
    assert "\n" not in str(caught.value)


def test_endless_output_is_cut_off() -> None:
    source = "{% for i in range(99999) %}{{ long }}{% endfor %}"
    with pytest.raises(ConfigError, match="more text"):
        render(source, long="x" * 10_000)


def test_a_refusal_keeps_the_templates_own_words() -> None:
    with pytest.raises(ConfigError, match=r"no system role\.$"):
        render("{{ raise_exception('no system role.') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ x",
        "{% for x in y %}",
        "{% nonsense %}",
        "{{ a | nofilter }}",
        "{% endif %}",
        "{{ " + "(" * 5000 + " }}",
    ],
)
def test_a_template_that_does_not_compile(source: str) -> None:
    """It can be read, and is refused when it is used."""
    template = ChatTemplate(source, {})
    with pytest.raises(ConfigError, match="does not compile") as caught:
        template.render(HELLO)
    assert "\n" not in str(caught.value)
    assert template.check() == str(caught.value)


# ---- where a folder keeps it


def of(folder: Path) -> ChatTemplate | None:
    return Tokenizer.from_folder(folder).template


def test_a_folder_without_a_template_has_none(tmp_path: Path) -> None:
    assert of(byte_tokenizer.write(tmp_path)) is None


def test_the_file_of_its_own_comes_first(tmp_path: Path) -> None:
    byte_tokenizer.write(tmp_path, chat_template="settings {{ eos_token }}")
    assert of(tmp_path).render(HELLO) == f"settings {byte_tokenizer.END}"
    (tmp_path / "chat_template.jinja").write_text("file ü")
    assert of(tmp_path).render(HELLO) == "file ü"


def test_of_several_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}, 5, {"name": [1]}]
    assert of(byte_tokenizer.write(tmp_path, chat_template=named)).render(HELLO) == "D"
    assert of(byte_tokenizer.write(tmp_path, chat_template=named[:1])) is None
    assert of(byte_tokenizer.write(tmp_path, chat_template=7)) is None


def test_special_tokens_may_be_objects(tmp_path: Path) -> None:
    settings = {
        "bos_token": {"content": "<B>"},
        "pad_token": None,
        "unk_token": 5,
        "chat_template": "{{ bos_token }}",
    }
    assert of(byte_tokenizer.write(tmp_path, **settings)).render(HELLO) == "<B>"


def test_a_template_file_that_is_no_text(tmp_path: Path) -> None:
    byte_tokenizer.write(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(TokenizerError, match="no readable text"):
        of(tmp_path)


def test_a_template_that_is_too_long_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=f"more than {LONGEST} characters"):
        render("x" * (LONGEST + 1))
