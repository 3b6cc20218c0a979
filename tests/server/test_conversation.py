"""Conversations over HTTP: a turn reads what is new only, whatever the client keeps of earlier answers, and says what a server says that
keeps nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mlxspec.demo
from tests.server.serving import Served

# As Qwen's: an opened tag, and thinking of the last turn only.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
DOCUMENT = " ".join(f"w{i} word" for i in range(265))  # 1,500 tokens of the demo model
QUESTION = {"role": "user", "content": f"{DOCUMENT} what does os.path.join do?"}
NEXT = {"role": "user", "content": "what does sorted do?"}
ASKED = {"max_tokens": 40, "thinking_budget": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, made to think."""
    made = tmp_path_factory.mktemp("models") / "thinker"
    shutil.copytree(Path(mlxspec.demo.__file__).parent / "target", made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def warm(folder: Path) -> Iterator[Served]:
    with Served("--model", str(folder)) as served:
        yield served


@pytest.fixture(scope="module")
def cold(folder: Path) -> Iterator[Served]:
    with Served("--model", str(folder), "--prefix-budget", "0") as served:
        yield served


def said(served: Served, *messages: dict[str, Any]) -> tuple[dict[str, Any], int, int]:
    """(message, prompt tokens, cached tokens)."""
    status, answer = served.post("/v1/chat/completions", {"messages": messages, **ASKED})
    assert status == 200, answer
    usage = answer["usage"]
    return (
        answer["choices"][0]["message"],
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


def test_the_next_turn_reads_what_is_new(warm: Served, cold: Served) -> None:
    first, num_prompt, cached = said(warm, QUESTION)
    assert num_prompt > 1450
    assert cached == 0
    assert first["reasoning_content"]
    assert first["content"]
    for kept in (
        first,  # the template drops what was thought
        {"role": "assistant", "content": first["content"]},  # the client does
        {"role": "assistant", "content": first["content"][:9]},
    ):
        message, num_prompt, cached = said(warm, QUESTION, kept, NEXT)
        assert 0.95 * num_prompt < cached < num_prompt, kept
        wanted, same_prompt, nothing = said(cold, QUESTION, kept, NEXT)
        assert (message, num_prompt, 0) == (wanted, same_prompt, nothing)


def test_an_answer_that_is_sent_back_whole_is_not_read_again(demo: Served) -> None:
    status, first = demo.post("/v1/chat/completions", {"messages": [QUESTION], "max_tokens": 60})
    assert status == 200
    _, num_prompt, cached = said(demo, QUESTION, first["choices"][0]["message"], NEXT)
    assert first["usage"]["prompt_tokens"] + 10 < cached < num_prompt


def test_a_system_prompt_is_read_once(warm: Served) -> None:
    system = {"role": "system", "content": f"Answer shortly. {DOCUMENT}"}
    said(warm, system, {"role": "user", "content": "what does json.dumps do?"})
    _, num_prompt, cached = said(warm, system, NEXT)
    assert 0.95 * num_prompt < cached < num_prompt


def test_another_beginning_finds_nothing(warm: Served) -> None:
    said(warm, QUESTION)
    other = {"role": "user", "content": f"x {QUESTION['content']}"}
    assert said(warm, other, NEXT)[2] == 0


def test_what_is_kept_is_a_gauge(warm: Served, cold: Served) -> None:
    said(cold, QUESTION)  # what is made once stays
    before = cold.settle()
    said(warm, QUESTION)
    said(cold, QUESTION)
    kept, nothing = warm.settle(), cold.settle()
    assert nothing["mlxspec_prefix_bytes"] == 0
    assert kept["mlxspec_prefix_bytes"] > 0
    assert kept["mlxspec_memory_bytes"] > before["mlxspec_memory_bytes"] + 0.8 * kept["mlxspec_prefix_bytes"]
    assert before["mlxspec_memory_bytes"] > 1 << 20
    # by less than a kept prompt would take: a round that ran ahead holds some arrays
    assert (
        nothing["mlxspec_memory_bytes"] < before["mlxspec_memory_bytes"] + 0.8 * kept["mlxspec_prefix_bytes"]
    )
