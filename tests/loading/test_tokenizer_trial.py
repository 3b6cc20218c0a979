"""A tokenizer.json that makes its library panic, run for ever or abort is one error, and the process goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planting import catches

from mlxspec.errors import TokenizerError
from mlxspec.loading import tokenizer
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.platform import helper
from tests.loading import byte_tokenizer

WORDS = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
PREFIXED = {
    "type": "BPE", "vocab": {"a": 0, "é": 1, "aé": 2}, "merges": [["a", "é"]],
    "continuing_subword_prefix": "x", "end_of_word_suffix": "y",
}  # fmt: skip
DOUBLES = {"type": "Replace", "pattern": {"Regex": "."}, "content": "aa"}
CRAFTED: dict[str, dict[str, Any]] = {
    "panics when it is read": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}},
    "panics when it encodes": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "X", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
    "panics when it decodes": {"decoder": {"type": "Strip", "content": "a", "start": 10**18, "stop": 10**18}},
    "divides by nothing": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "aborts": {"model": PREFIXED},
    "does not end": {"normalizer": {"type": "Sequence", "normalizers": [DOUBLES] * 40}},
}


def written(folder: Path, changes: dict[str, Any]) -> Path:
    made = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": WORDS, **changes,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(made), encoding="utf-8")
    return folder


@catches(
    "a tokenizer is not tried",
    "mlxspec.loading.tokenizer:_try",
    lambda right: lambda ask, folder: None,
    case="panics when it decodes",
)
@pytest.mark.parametrize("what", CRAFTED)
def test_a_crafted_file_is_one_error(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_TRIAL", replace(tokenizer._TRIAL, seconds=3.0, memory=1 << 30))
    with pytest.raises(TokenizerError, match=r"^tokenizer\.json in .* cannot be (read|used)") as caught:
        Tokenizer.from_folder(written(tmp_path, CRAFTED[what]))
    assert "\n" not in str(caught.value)


def test_a_text_that_cannot_be_encoded_is_no_fault_of_the_file(tmp_path: Path) -> None:
    """It has no token for unknown words: that is an error of the text's."""
    made = Tokenizer.from_folder(written(tmp_path, {"model": {**WORDS, "unk_token": "none"}}))
    assert made.encode("a", special=False) == [0]


def test_a_file_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = helper.run
    monkeypatch.setattr(helper, "run", lambda *given: calls.append(1) or run(*given))
    folder = byte_tokenizer.write(tmp_path)
    for _ in range(3):
        Tokenizer.from_folder(folder)
    assert len(calls) == 1
    byte_tokenizer.write(tmp_path, beginning=True)
    Tokenizer.from_folder(folder)
    assert len(calls) == 2
