"""Logits that are not numbers end the answer with an error that names the likely cause; other rows go on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from planting import catches

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx

import mlxspec
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.demo import TARGET
from mlxspec.engine.engine import Engine
from mlxspec.errors import ModelError, NotANumberError
from mlxspec.models.qwen3_5 import Qwen35

QUESTIONS = ("what does os.path.join do?", "what is a list?", "how do I open a file?")
WAYS = {
    "greedy": SamplingParams(max_tokens=24, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, top_p=0.95, seed=7),
}


def prompts(engine: Engine) -> list[list[int]]:
    assert engine.tokenizer is not None
    return [
        list(engine.tokenizer.encode(f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n"))
        for q in QUESTIONS
    ]


def poisoned(value: float, token: int) -> Callable[..., Any]:
    """A forward whose logits behind a token are `value` in one place."""
    right = Qwen35.forward

    def forward(self: Qwen35, tokens: mx.array, *args: Any, **options: Any) -> Any:
        out = right(self, tokens, *args, **options)
        if options.get("logits_at", "all") != "all" or out.logits is None:
            return out
        hit = (tokens == token)[:, None] & (mx.arange(out.logits.shape[1]) == 3)
        object.__setattr__(out, "logits", mx.where(hit, value, out.logits))
        return out

    return forward


@catches(
    "logits that are not numbers give token 0",
    "mlxspec.sampling.round:_marked",
    lambda right: lambda logits, chosen: chosen,
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("drafters", [(), ("mtp",)], ids=["plain", "drafted"])
@pytest.mark.parametrize("way", WAYS)
def test_a_row_ends_where_its_logits_are_not_numbers(
    way: str, drafters: tuple[str, ...], value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SpecConfig(drafters=drafters, policy="fixed")
    with mlxspec.load("demo", spec=spec, config=EngineConfig(prefix_budget=0)) as engine:
        given = prompts(engine)
        right = [list(engine.generate(p, WAYS[way], spec=spec).tokens) for p in given]
        others = {*right[1], *right[2], *(t for p in given for t in p)}
        place = next(i for i, t in enumerate(right[0][2:-2], 2) if t not in {*others, *right[0][:i]})
        monkeypatch.setattr(Qwen35, "forward", poisoned(value, right[0][place]))
        found = engine.generate(given, WAYS[way], spec=spec)
        assert list(found[0].tokens) == right[0][: place + 1]
        assert found[0].finish_reason == "error"
        assert "not numbers" in str(found[0].error)
        for result, expected in zip(found[1:], right[1:], strict=True):
            assert list(result.tokens) == expected
            assert result.finish_reason == "length"


@pytest.mark.parametrize("way", WAYS)
def test_an_overflow_in_float16_is_named(way: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TARGET, tmp_path / "model"))
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    large = {
        k: v * 1000
        for k, v in tensors.items()
        if k.endswith(("0.mlp.gate_proj.weight", "0.mlp.up_proj.weight"))
    }
    assert large
    mx.eval(tensors, large)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors | large)
    for dtype, fails in (("float16", True), ("float32", False)):
        with mlxspec.load(str(folder), draft="off", dtype=dtype) as engine:
            result = engine.generate(QUESTIONS[0], WAYS[way])
            assert (result.finish_reason == "error") == fails
            assert (len(result.tokens) == 0) == fails
            assert result.error is None or "float16" in result.error
    assert issubclass(NotANumberError, ModelError)
