"""Templates in the dialect of transformers: what each snippet renders to, and where templates and special tokens are found."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import mlxspec
from mlxspec.errors import ConfigError
from mlxspec.loading.template import ChatTemplate
from mlxspec.loading.tokenizer import Tokenizer
from tests.loading import byte_tokenizer
from tests.loading.template_snippets import (
    MESSAGES,
    RECORDED,
    SNIPPETS,
    SPECIAL,
    TOOLS,
    by_transformers,
    options_of,
)

HELLO = [{"role": "user", "content": "Hello"}]
KNOWN: dict[str, str | None] = json.loads(RECORDED.read_text(encoding="utf-8"))


def ours(name: str) -> str | None:
    """None where the snippet is refused."""
    try:
        return ChatTemplate(SNIPPETS[name], SPECIAL).render(MESSAGES, **options_of(name))
    except ConfigError:
        return None


def test_the_snippets_and_what_is_recorded_are_the_same_ones() -> None:
    assert list(KNOWN) == list(SNIPPETS)
    assert len(SNIPPETS) >= 90
    assert sum(text is None for text in KNOWN.values()) < 12


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippets_render_as_transformers_renders_them(name: str) -> None:
    assert ours(name) == KNOWN[name]


def _transformers() -> tuple[int, ...]:
    """Version, () where it is missing."""
    if importlib.util.find_spec("transformers") is None:
        return ()
    return tuple(int(part) for part in importlib.metadata.version("transformers").split(".")[:2])


@pytest.mark.skipif(_transformers() < (5, 24), reason="needs transformers 5.24, whose texts are recorded")
def test_what_is_recorded_is_what_transformers_makes_of_it() -> None:
    assert {name: by_transformers(name) for name in SNIPPETS} == KNOWN


# ---- where a folder keeps them


def of(folder: Path) -> ChatTemplate | None:
    return Tokenizer.from_folder(folder).template


def rendered(folder: Path, **options: Any) -> str:
    template = of(folder)
    assert template is not None
    return template.render(HELLO, **options)


NAMED = {"default": "D{{ eos_token }}", "tool_use": "T{{ tools | length }}", "rag": "R"}


@pytest.mark.parametrize(
    "form", [NAMED, [{"name": n, "template": t} for n, t in NAMED.items()]], ids=["dict", "list"]
)
def test_named_templates(tmp_path: Path, form: Any) -> None:
    """`tool_use` is for conversations with tools."""
    byte_tokenizer.write(tmp_path, chat_template=form)
    assert rendered(tmp_path) == f"D{byte_tokenizer.END}"
    assert rendered(tmp_path, tools=TOOLS) == "T2"
    assert rendered(tmp_path, tools=None) == f"D{byte_tokenizer.END}"


def test_named_templates_in_files(tmp_path: Path) -> None:
    byte_tokenizer.write(tmp_path, chat_template="settings")
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("T", encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text("D", encoding="utf-8")
    assert rendered(tmp_path) == "D"
    assert rendered(tmp_path, tools=TOOLS) == "T"


def test_the_processors_file_is_the_last_one_that_is_asked(tmp_path: Path) -> None:
    byte_tokenizer.write(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "P"}), encoding="utf-8")
    assert rendered(tmp_path) == "P"
    byte_tokenizer.write(tmp_path, chat_template="settings")
    assert rendered(tmp_path) == "settings"


def test_special_tokens_are_those_of_the_map_beside(tmp_path: Path) -> None:
    """The map counts where the settings list no added tokens, as in transformers."""
    source = "{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ mask_token }}"
    byte_tokenizer.write(
        tmp_path, chat_template=source, bos_token="<A>", extra_special_tokens={"image_token": "<I>"}
    )
    beside = {
        "bos_token": {"content": "<B>", "lstrip": False},
        "mask_token": "<M>",
        "additional_special_tokens": ["<X>"],
    }
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(beside), encoding="utf-8")
    assert rendered(tmp_path) == f"<B>|{byte_tokenizer.END}|<I>|<M>"
    byte_tokenizer.write(tmp_path, chat_template=source, bos_token="<A>", added_tokens_decoder={})
    assert rendered(tmp_path) == f"<A>|{byte_tokenizer.END}||"


def test_an_answer_in_parts_is_gone_on_with_behind_its_last_text() -> None:
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text | trim }}</s>{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}, {"type": "image"}]
    messages = [{"role": "assistant", "content": parts}]
    assert ChatTemplate(source, {}).render(messages, continue_final_message=True) == "a</s>b "


# ---- what a user asks for


def test_a_template_of_the_users_own_that_cannot_be_used(tmp_path: Path) -> None:
    """The model's own costs the chat and not the model: tests/cli/test_cli_models.py."""
    file = tmp_path / "bad.jinja"
    file.write_text("\n{% if %}", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"bad.jinja cannot be used. .* does not compile: line 2: .* gives another"
    ):
        mlxspec.load("demo", draft="off", chat_template=file)
    file.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bad.jinja cannot be used. .* writes no text for these messages"):
        mlxspec.load("demo", draft="off", chat_template=file)


def test_a_template_of_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}{{ eos_token }}!", encoding="utf-8")
    with mlxspec.load("demo", draft="off", chat_template=str(file)) as engine:
        assert engine.tokenizer is not None
        own = engine.tokenizer.encode("import osEND!".replace("END", "<|im_end|>"), special=False)
        assert engine.chat_prompt("import os") == own
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        mlxspec.load("demo", draft="off", chat_template=tmp_path / "nothing.jinja")
    file.write_bytes(b"\xff\xff")
    with pytest.raises(ConfigError, match="no readable text"):
        mlxspec.load("demo", draft="off", chat_template=file)
