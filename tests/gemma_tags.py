"""A tiny model whose vocabulary has Gemma 4's tags of thinking and calls as special tokens, as Gemma's own has."""

from __future__ import annotations

from pathlib import Path

from tests.cli.cli_checkpoints import SPECIAL, write_checkpoint

TAGS = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|think|>")
IDS = {tag: 256 + len(SPECIAL) + i for i, tag in enumerate(TAGS)}
MARK = '<|"|>'
TEMPLATE = (
    "{% if tools %}{{ '<|tool_call>' }}{% for t in tools %}{{ t.function.name }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}{{ '<|channel>thought\n' }}{{ m.reasoning_content }}{{ '<channel|>' }}{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)


def write(folder: Path) -> Path:
    """A model folder. Without a grammar it says printable ASCII only."""
    return write_checkpoint(folder, special=(*SPECIAL, *TAGS), template=TEMPLATE)


def saying(text: str) -> str:
    """A grammar in Lark's notation of just this text, tags as special tokens."""
    parts = [text]
    for tag in TAGS:
        parts = [p for part in parts for p in _split(part, tag)]
    return "start: " + " ".join(p if p.startswith("<[") else _literal(p) for p in parts)


def _split(text: str, tag: str) -> list[str]:
    if text.startswith("<["):
        return [text]
    pieces = [[f"<[{IDS[tag]}]>", part] for part in text.split(tag)]
    return [p for pair in pieces for p in pair if p][1:] if text else []


def _literal(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
