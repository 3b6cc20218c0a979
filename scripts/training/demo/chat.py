"""ChatML rendering: the one place that knows how turns become text.

Knows roles and markers; not what is said. The shipped chat template renders the same text (a test compares them).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Question forms, requests, topics and names, by module.
WORDINGS: dict[str, Any] = json.loads(Path(__file__).with_name("wordings.json").read_text(encoding="utf-8"))
START, END, DOCUMENT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
ANSWER = f"{START}assistant\n"


def render(*turns: tuple[str, str]) -> str:
    """Turns of (role, text) as ChatML, closed."""
    return "".join(f"{START}{role}\n{text}{END}\n" for role, text in turns)


def ask(question: str, answer: str) -> str:
    """One question and its answer."""
    return render(("user", question), ("assistant", answer))


def fenced(code: str) -> str:
    """Code as a Markdown block."""
    return f"```python\n{code}\n```"


CHAT_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n\\n<tools>\\n' }}{% for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}\
{{- '</tools>\\n\\nA call is written as\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' }}{% endif -%}
{%- for message in messages %}
{%- if message.content is not string %}{% set ns = namespace(text='') %}
{%- for part in message.content or [] %}{% if part.type == 'text' %}{% set ns.text = ns.text + part.text %}\
{% else %}{{ raise_exception('This demo model reads text only.') }}{% endif %}{% endfor %}
{%- set content = ns.text %}{% else %}{% set content = message.content %}{% endif %}
{%- if message.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- elif message.role in ['system', 'user', 'assistant'] %}{{- '<|im_start|>' + message.role + '\\n' + content }}
{%- else %}{{ raise_exception('This demo model knows the roles system, user, assistant and tool only.') }}{% endif %}
{%- for call in message.tool_calls or [] %}\
{{- ('\\n' if content or not loop.first else '') \
+ '<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
