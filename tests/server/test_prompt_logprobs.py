"""Log-probabilities of a prompt: those of a plain forward, in the form that evaluations read, whatever the prefix store holds."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

from mlxspec import SamplingParams, SpecConfig, load
from mlxspec.config import EngineConfig
from mlxspec.engine.engine import Engine
from mlxspec.kernels.flat import FlatRows
from tests.server.serving import Served

TEXT = "def join(a, *p):\n    '''Join two or more pathname components, inserting '/' as needed.'''\n" * 3


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load("demo", spec=SpecConfig(policy="fixed"), config=EngineConfig(prefill_chunk=32))


@catches(
    "a hit of the prefix store leaves tokens out",
    "mlxspec.engine.prefix:Prefix.find",
    lambda right: (
        lambda self, request, *more: setattr(request, "prompt_logprobs", None) or right(self, request, *more)
    ),
    errors=(Exception,),
)
def test_they_are_those_of_a_plain_forward(engine: Engine) -> None:
    assert engine.tokenizer is not None
    tokens = engine.tokenizer.encode(TEXT)
    out = engine.model.forward(
        mx.array(tokens), FlatRows((len(tokens),)), engine.model.make_cache(1), certain=True
    )
    logits = np.asarray(out.logits.astype(mx.float32)).astype(np.float64)
    total = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logs = logits - logits.max(-1, keepdims=True) - total
    asked = SamplingParams(max_tokens=8, prompt_logprobs=True, top_logprobs=2)
    plain = engine.generate(tokens, SamplingParams(max_tokens=8))
    for _ in range(2):  # the second time the prefix store knows the prompt
        found = engine.generate(tokens, asked)
        told = found.prompt_logprobs
        assert told is not None
        assert [t.token for t in told] == tokens[1:]
        assert np.allclose(
            [t.logprob for t in told], [logs[i, t] for i, t in enumerate(tokens[1:])], atol=1e-3
        )
        assert [[o.token for o in t.top] for t in told] == np.argsort(-logs[:-1], axis=-1)[:, :2].tolist()
        assert (found.tokens, found.stats.num_cached) == (plain.tokens, 0)
    assert engine.generate(tokens, SamplingParams(max_tokens=8)).prompt_logprobs is None


def ask(demo: Served, **more: Any) -> dict[str, Any]:
    body = {
        "prompt": TEXT,
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
        "temperature": 0,
        "seed": 1234,
        **more,
    }
    status, answer = demo.post("/v1/completions", body)
    assert status == 200, answer
    return answer


def test_the_form_that_evaluations_read(demo: Served) -> None:
    """lm-evaluation-harness sends token ids with max_tokens 1, older ones 0, and adds up the log-probabilities behind a context."""
    tokens = demo.post("/tokenize", {"content": TEXT})[1]["tokens"]
    answer = ask(demo)
    choice = answer["choices"][0]
    told = choice["logprobs"]
    assert [len(v) for v in told.values()] == [len(tokens) + 1] * 4
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    assert all(x <= 0 for x in told["token_logprobs"][1:])
    assert "".join(told["tokens"]) == choice["text"]
    assert [
        choice["text"][i:][: len(t)] for i, t in zip(told["text_offset"], told["tokens"], strict=True)
    ] == told["tokens"]
    likeliest = [max(top, key=top.__getitem__) for top in told["top_logprobs"][1:]]
    assert any(one == token for one, token in zip(likeliest, told["tokens"][1:], strict=True))
    alone = ask(demo, prompt=tokens, max_tokens=0)
    assert alone["choices"][0]["text"] == TEXT
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == told["token_logprobs"][:-1]
    assert alone["usage"]["completion_tokens"] == 0
    several = ask(demo, prompt=[tokens, tokens[:5]], max_tokens=0)["choices"]
    assert several[0]["logprobs"] == alone["choices"][0]["logprobs"]
    assert np.allclose(several[1]["logprobs"]["token_logprobs"][1:], told["token_logprobs"][1:5], atol=1e-3)
    assert ask(demo, prompt=tokens[:1], max_tokens=0)["choices"][0]["logprobs"]["token_logprobs"] == [None]
    for wrong, path in (({"stream": True}, "echo"), ({"echo": False, "max_tokens": 0}, "max_tokens")):
        body = {"prompt": TEXT, "logprobs": 1, "echo": True, **wrong}
        status, refused = demo.post("/v1/completions", body)
        assert (status, refused["error"]["param"]) == (400, path)
