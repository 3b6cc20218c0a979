"""mlx-lm's calls on our engine: the same signatures, the same responses, the same greedy text on the demo model, with drafting."""

from __future__ import annotations

import inspect
import warnings
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from mlxspec.compat import mlx_lm as ours
from mlxspec.errors import ConfigError, MlxspecError, VocabularyError
from mlxspec.platform.resources import demo_folder

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mlx_lm
    from mlx_lm.generate import GenerationResponse, generate_step, speculative_generate_step
    from mlx_lm.sample_utils import make_logits_processors, make_sampler

QUESTION = [{"role": "user", "content": "what does os.path.join do?"}]
CODE = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return"


@cache
def loaded() -> tuple[ours.Model, Any]:
    return ours.load("demo")


@cache
def theirs() -> tuple[Any, Any]:
    return mlx_lm.load(str(demo_folder("target")))


def prompts(tokenizer: Any) -> list[Any]:
    return [tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True), CODE, mx.array([5, 6, 7])]


@pytest.mark.parametrize("name", ["load", "generate", "stream_generate"])
def test_signatures_are_theirs(name: str) -> None:
    def arguments(call: Any) -> list[tuple[str, Any, Any]]:
        given = inspect.signature(call).parameters.values()
        return [(p.name, p.kind, p.default) for p in given if p.kind is not p.VAR_KEYWORD]

    assert arguments(getattr(ours, name)) == arguments(getattr(mlx_lm, name))


def test_every_option_of_theirs_is_honoured_or_refused_by_name() -> None:
    model, tokenizer = loaded()
    passed = {"prompt", "model", "draft_model", "stream", "max_tokens"}
    options = {
        p for step in (generate_step, speculative_generate_step) for p in inspect.signature(step).parameters
    } - passed
    honoured: dict[str, Any] = {
        "sampler": lambda logprobs: mx.argmax(logprobs, axis=-1),
        "logits_processors": [],
        "num_draft_tokens": 2,
        "prefill_step_size": 64,
        "prompt_progress_callback": lambda done, total: None,
        "kv_group_size": 64,
        "quantized_kv_start": 0,
    }
    for name in sorted(options):
        if name in honoured:
            ours.stream_generate(model, tokenizer, CODE, max_tokens=2, **{name: honoured[name]}).close()
            continue
        ours.stream_generate(model, tokenizer, CODE, max_tokens=2, **{name: None}).close()
        with pytest.raises(ConfigError, match=name):
            ours.stream_generate(model, tokenizer, CODE, max_tokens=2, **{name: 8})
    with pytest.raises(TypeError, match="nonsense"):
        ours.stream_generate(model, tokenizer, CODE, nonsense=1)


def test_greedy_text_is_theirs() -> None:
    model, tokenizer = loaded()
    for prompt in prompts(tokenizer):
        wanted = list(mlx_lm.stream_generate(*theirs(), prompt, max_tokens=48))
        got = list(ours.stream_generate(model, tokenizer, prompt, max_tokens=48, num_draft_tokens=2))
        assert [r.token for r in got] == [r.token for r in wanted]
        assert [r.text for r in got] == [r.text for r in wanted]
        for a, b in zip(got, wanted, strict=True):
            assert type(a) is GenerationResponse
            assert (a.prompt_tokens, a.generation_tokens) == (b.prompt_tokens, b.generation_tokens)
            assert a.finish_reason == b.finish_reason
            assert a.logprobs.shape == b.logprobs.shape
            assert mx.allclose(a.logprobs, b.logprobs, atol=1e-2, rtol=1e-3)
        assert any(r.from_draft for r in got)
        assert ours.generate(model, tokenizer, prompt, max_tokens=48) == "".join(r.text for r in wanted)


def test_their_processors_and_samplers_work() -> None:
    model, tokenizer = loaded()
    prompt = prompts(tokenizer)[0]
    options = {
        "logits_processors": make_logits_processors(repetition_penalty=1.3, logit_bias={9: 2.0}),
        "sampler": make_sampler(temp=0.0),
        "max_tokens": 32,
    }
    assert ours.generate(model, tokenizer, prompt, **options) == mlx_lm.generate(*theirs(), prompt, **options)
    options["sampler"] = make_sampler(temp=0.8, top_p=0.9, min_p=0.02, top_k=20)
    mx.random.seed(3)
    assert len(ours.generate(model, tokenizer, prompt, **options)) > 10


def test_a_draft_model_drafts_and_another_vocabulary_is_refused(tmp_path: Any) -> None:
    model, tokenizer = loaded()
    small, _ = ours.load("demo-draft", draft="off")
    prompt = prompts(tokenizer)[0]
    plain = ours.generate(model, tokenizer, prompt, max_tokens=40)
    got = list(
        ours.stream_generate(model, tokenizer, prompt, max_tokens=40, draft_model=small, num_draft_tokens=3)
    )
    assert "".join(r.text for r in got) == plain
    assert any(r.from_draft for r in got)
    other, _ = ours.load("demo-draft", draft="off")
    other.engine.tokenizer = _Foreign(other.engine.tokenizer)
    with pytest.raises(VocabularyError):
        ours.stream_generate(model, tokenizer, prompt, draft_model=other)


class _Foreign:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def token_text(self, token: int) -> str:
        return f"other {token}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_limits_progress_and_printing(capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = loaded()
    said: list[tuple[int, int]] = []
    stream = ours.stream_generate(
        model, tokenizer, CODE, max_tokens=5, prompt_progress_callback=lambda *a: said.append(a)
    )
    assert [r.finish_reason for r in stream] == [None] * 4 + ["length"]
    assert said[0][0] == 0
    assert said[-1][0] == said[-1][1] == len(tokenizer.encode(CODE))
    text = ours.generate(model, tokenizer, CODE, max_tokens=5, verbose=True)
    out = capsys.readouterr().out
    assert text in out
    assert "tokens-per-sec" in out
    first = next(it := ours.stream_generate(model, tokenizer, CODE, max_tokens=-1))
    it.close()
    assert first.generation_tokens == 1
    assert model.engine.is_idle


def test_what_cannot_be_honoured_says_so() -> None:
    model, tokenizer = loaded()
    for options in ({"adapter_path": "x"}, {"model_config": {"a": 1}}, {"trust_remote_code": True}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            ours.load("demo", **options)
    with pytest.raises(ConfigError, match="max_tokens"):
        ours.stream_generate(model, tokenizer, CODE, max_tokens=0)
    with pytest.raises(ConfigError, match="stream"):
        ours.stream_generate(model, tokenizer, CODE, stream=None)
    with pytest.raises(ConfigError, match="compat"):
        ours.stream_generate(object(), tokenizer, CODE)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="make_cache"):
        model.make_cache()

    def failing(tokens: mx.array, logits: mx.array) -> mx.array:
        raise ValueError("no")

    with pytest.raises(MlxspecError, match="failing failed: ValueError: no"):
        ours.generate(model, tokenizer, CODE, logits_processors=[failing])
    assert len(ours.load("demo", return_config=True)) == 3
