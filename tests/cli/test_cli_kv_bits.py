"""--kv-bits and --draft-kv-bits on the command line: what they do to an answer, what is said of them, and what is refused."""

from __future__ import annotations

import json

import pytest
from cli_runs import Run

from mlxspec.config import EngineConfig, SpecConfig
from mlxspec.engine.load import load

ASK = ("-p", "what is a list?", "-n", "20")


@pytest.mark.parametrize("bits", [8, 4])
def test_generate_says_what_plain_decoding_with_as_many_bits_says(run: Run, bits: int) -> None:
    kept = ("--kv-bits", str(bits), "--draft-kv-bits", "4")
    drafted = run("generate", *ASK, *kept)
    plain = run("generate", *ASK, "--kv-bits", str(bits), "--draft", "off")
    assert drafted.code == plain.code == 0
    assert drafted.out == plain.out != ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--kv-bits", "5"), "--kv-bits must be one of 4, 8, 16, not 5."),
        (("--draft-kv-bits", "2"), "--draft-kv-bits must be one of 4, 8, 16, not 2."),
        (("--kv-bits", "eight"), "--kv-bits"),
    ],
)
def test_other_numbers_are_refused(run: Run, options: tuple[str, ...], said: str) -> None:
    done = run("generate", *ASK, *options)
    assert done.code != 0
    assert said in done.err
    assert "Traceback" not in done.err


def test_what_quantizes_nothing_is_said(run: Run) -> None:
    done = run("generate", *ASK, "--draft", "ngram-simple", "--draft-kv-bits", "8")
    assert "--draft-kv-bits 8 (draft_kv_bits) is not used: no drafter here keeps keys and values" in done.err


def test_inspect_reckons_with_them(run: Run) -> None:
    found = {
        bits: json.loads(
            run("inspect", "demo", "--kv-bits", str(bits), "--draft-kv-bits", str(bits), "--json").out
        )
        for bits in (16, 8, 4)
    }
    memory = {bits: data["memory"] for bits, data in found.items()}
    sizes = [memory[bits]["a_token"] for bits in (16, 8, 4)]
    heads, layers = 1, 2
    assert sizes == [2 * layers * heads * n for n in (4 * 64, 64 + 8, 32 + 8)]  # float32
    for name in ("state", "drafter_state", "total"):
        assert memory[16][name] > memory[8][name] > memory[4][name]
    assert "keys and values: 288 bytes a token" in run("inspect", "demo", "--kv-bits", "8").out


@pytest.mark.slow
def test_the_first_lines_tell() -> None:
    from mlxspec.cli.stats_line import kept_bits

    def said(**bits: int) -> str:
        spec = SpecConfig(draft_kv_bits=bits.get("draft", 16))
        return kept_bits(
            load("demo", draft="mtp", spec=spec, config=EngineConfig(kv_bits=bits.get("own", 16)))
        )

    assert said() == ""
    assert said(own=8) == " · keys and values in 8 bits"
    assert said(own=8, draft=4) == " · keys and values in 8 bits, drafters' in 4"
    assert said(draft=4) == " · drafters' keys and values in 4 bits"
