"""Log-probabilities of a prompt: those of a plain forward, in the form that evaluations read, whatever the prefix cache holds."""

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
    "a hit of the prefix cache leaves tokens out",
    "mlxspec.engine.prefix.rows:Prefix.find",
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
    for _ in range(2):  # the second time the prefix cache knows the prompt
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


# What lm-evaluation-harness 0.4.13 sent for a task of each kind, in its tokens of the demo's vocabulary.
CONTEXT = [455, 408, 270, 79, 268, 573, 65, 300, 278, 10, 675, 14, 750, 1803, 85, 31, 368, 317, 261, 1297, 9]
CONTINUATION = [601, 386, 370, 304, 1995, 53, 790, 1082, 491, 223, 386, 601, 386, 16]


def test_what_an_evaluation_adds_up(demo: Served, engine: Engine) -> None:
    """Of each choice of a batch: the sum of a continuation's log-probabilities, and whether it is what greedy decoding says."""
    assert engine.tokenizer is not None
    greedy = list(engine.generate(CONTEXT, SamplingParams(max_tokens=6)).tokens)
    prompts = [[*CONTEXT, *CONTINUATION], [*CONTEXT, *greedy], [0, *CONTEXT]]
    lengths = [len(CONTEXT), len(CONTEXT), 1]
    body = {
        "model": "demo",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    status, answer = demo.post("/v1/completions", body)
    assert status == 200, answer
    for choice, prompt, length in zip(answer["choices"], prompts, lengths, strict=True):
        told = choice["logprobs"]
        own, tops = (told[name][length:-1] for name in ("token_logprobs", "top_logprobs"))
        wanted = engine.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=True)).prompt_logprobs
        assert wanted is not None
        assert sum(own) == pytest.approx(sum(t.logprob for t in wanted[length - 1 :]), abs=1e-3)
        is_greedy = all(x == max(top.values()) for x, top in zip(own, tops, strict=True))
        assert is_greedy == (prompt is prompts[1])
    whole = [int(t) for t in (prompts[0] * 60)[:2047]]  # as long as the context leaves room for the one token
    assert len(ask(demo, prompt=whole)["choices"][0]["logprobs"]["token_logprobs"]) == 2048
    body = {
        "prompt": [CONTEXT, CONTEXT[:9]], "model": "demo", "max_tokens": 32, "temperature": 0, "stop": ["\n\n", "<|im_end|>"], "seed": 1234,
    }  # fmt: skip
    texts = [choice["text"] for choice in demo.post("/v1/completions", body)[1]["choices"]]
    params = SamplingParams(max_tokens=32, stop=("\n\n", "<|im_end|>"))
    assert texts == [engine.generate(prompt, params).text for prompt in (CONTEXT, CONTEXT[:9])]
