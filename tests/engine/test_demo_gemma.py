"""The shipped Gemma member: its text is the same with every drafter, alone and in batches, over windows that are crossed and wrapped."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlxspec
from mlxspec import demo
from mlxspec.cache.windowed import ALIGNMENT, WindowedLayerCache
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine, Result
from mlxspec.kernels.flat import FlatRows
from tests.engine.equality import PLAIN, same, spec

pytestmark = pytest.mark.skipif(
    not (demo.GEMMA / "config.json").is_file(), reason="the Gemma member is not in this checkout"
)
NGRAMS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
DRAFTERS = [
    ("ngram-simple",),
    ("ngram-simple", "draft-model"),
    *(pytest.param((name,), marks=pytest.mark.slow) for name in ("draft-model", *NGRAMS[1:])),
]
CODE = "def read(self, path):\n    with open(path) as file:\n        return file.read()\n\n\n"
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_p": 0.95},
    {"repetition_penalty": 1.1},
    {"temperature": 1.0, "top_k": 40},
)


@cache
def engine() -> Engine:
    return mlxspec.load("demo-gemma", draft=(*NGRAMS, "draft-model"), spec=SpecConfig(policy="fixed"))


@cache
def window() -> int:
    return next(s.window for s in engine().model.config.layers if s.window is not None)


@cache
def requests() -> list[tuple[list[int], SamplingParams]]:
    """Inside the window, across it, far behind it, and so long that full buffers have dropped their oldest tokens."""
    edits = json.loads(demo.workload("edit").read_text())["items"]
    texts = [CODE[:30], CODE * 3, CODE * 26]
    prompts = [
        engine().tokenizer.encode(texts[0]),
        engine().chat_prompt(edits[1]["messages"]),
        engine().tokenizer.encode(texts[1]),
        engine().tokenizer.encode(texts[2]),
    ]
    assert len(prompts[0]) < window() < len(prompts[1]) < len(prompts[3])
    assert len(prompts[3]) > 512
    return [
        (prompt, SamplingParams(max_tokens=16 + 6 * i, seed=i, ignore_eos=True, **asked))
        for i, (prompt, asked) in enumerate(zip(prompts, ASKED, strict=True))
    ]


@cache
def plain() -> list[Result]:
    return [engine().generate(p, s, spec=PLAIN) for p, s in requests()]


def check(results: list[Result], what: str) -> None:
    for (prompt, params), wanted, got in zip(requests(), plain(), results, strict=True):
        same(wanted, got, prompt, params, what, engine().model)
        assert not got.stats.notices, what


@pytest.mark.slow
def test_rows_together_are_the_rows_alone() -> None:
    prompts, params = map(list, zip(*requests(), strict=True))
    check(engine().generate(prompts, params, spec=PLAIN), "demo-gemma, plain, together")


@pytest.mark.parametrize("drafters", DRAFTERS, ids=str)
def test_ragged_rows_drafted_are_the_rows_plain(drafters: tuple[str, ...]) -> None:
    prompts, params = map(list, zip(*requests(), strict=True))
    drafting = spec(*drafters)
    check(engine().generate(prompts, params, spec=drafting), f"demo-gemma, {drafters}, together")


@pytest.mark.parametrize(
    "drafters", [DRAFTERS[0], pytest.param(("draft-model",), marks=pytest.mark.slow)], ids=str
)
def test_one_row_drafted_is_the_row_plain(drafters: tuple[str, ...]) -> None:
    drafting = spec(*drafters, n_max=6, p_min=0.3)
    check([engine().generate(p, s, spec=drafting) for p, s in requests()], f"demo-gemma, {drafters}, alone")


def test_what_a_grammar_forces_is_drafted_and_changes_nothing() -> None:
    prompt = engine().chat_prompt([{"role": "user", "content": "what does len do?"}])
    params = SamplingParams(max_tokens=120, regex=r'\{"function": "[a-z]{1,8}", "is_builtin": (true|false)\}')
    wanted = engine().generate(prompt, params, spec=PLAIN)
    got = engine().generate(prompt, params, spec=SpecConfig(drafters=("forced",)))
    assert json.loads(wanted.text)["is_builtin"] in (True, False)
    assert (got.text, got.tokens) == (wanted.text, wanted.tokens)
    assert got.stats.num_accepted == got.stats.num_drafted > 0


def test_rows_that_join_and_leave_while_others_run() -> None:
    """Each with drafters of its own; one is cancelled on the way."""
    run, rng = engine(), np.random.default_rng(5)
    specs = [spec("ngram-simple"), PLAIN, spec("draft-model"), spec("ngram-simple", "draft-model")]
    order, running = [2, 0, 3, 1], {}
    doomed = None
    while order or not run.is_idle:
        if order and rng.random() < 0.4:
            number = order.pop()
            running[number] = run.submit(*requests()[number], spec=specs[number])
            if len(running) == 2:
                doomed = run.submit(*requests()[0], spec=specs[0])
        if doomed is not None and doomed.finish_reason is None and len(running) == 3:
            run.cancel(doomed.number)
        run.step()
    assert doomed is not None
    for number, request in running.items():
        prompt, params = requests()[number]
        tokens = tuple(request.history[len(prompt) :])
        got = Result(
            text=request.answer.text, tokens=tokens, finish_reason=request.finish_reason, stats=request.stats
        )
        same(plain()[number], got, prompt, params, "demo-gemma, joined", run.model)
    assert run.nbytes == 0


def logits(model: Any, tokens: list[int], cache: Any) -> np.ndarray:
    """(len(tokens), V) float32 of one committed forward."""
    out = model.forward(mx.array(tokens, mx.int32), FlatRows((len(tokens),)), cache, certain=True)
    cache.commit()
    return np.array(out.logits.astype(mx.float32))


@pytest.mark.parametrize("length", [20, 64, 100, 500])
def test_a_restored_row_goes_on_as_the_row_itself(length: int) -> None:
    """With a draft rolled back before the snapshot, inside the window and behind it; a snapshot serves twice."""
    model, tokens = engine().model, requests()[3][0]
    kept = model.make_cache(1)
    logits(model, tokens[: length - 4], kept)
    model.forward(mx.array([7, *tokens[:9]], mx.int32), FlatRows((10,)), kept)
    kept.commit([0])
    logits(model, tokens[length - 4 : length], kept)
    snapshot, follow = kept.snapshot(0), tokens[length : length + 5]
    wanted = logits(model, tokens[: length + 5], model.make_cache(1))[length:]
    for _ in range(2):
        again = model.make_cache(1)
        again.restore(snapshot)
        starts = [c.starts[0] for c in again.layers if isinstance(c, WindowedLayerCache)]
        assert starts == 4 * [max(0, length - window() + 1) // ALIGNMENT * ALIGNMENT]
        np.testing.assert_allclose(logits(model, follow, again), wanted, atol=1e-3)
    np.testing.assert_allclose(logits(model, follow, kept), wanted, atol=1e-3)


def test_exact_is_plain_text() -> None:
    run = mlxspec.load("demo-gemma", spec=SpecConfig(policy="fixed"), config=EngineConfig(exact=True))
    (prompt, params), wanted = requests()[1], plain()[1]
    assert run.generate(prompt, params).tokens == wanted.tokens


@pytest.mark.slow
def test_a_long_answer_is_that_of_mlx_lm() -> None:
    """Greedy, over several windows, from the same folder: ours plain and drafted, theirs with rotating caches."""
    from mlx_lm.utils import load_model

    num, prompt = 200, requests()[1][0]
    theirs, _ = load_model(demo.GEMMA)
    theirs.set_dtype(mx.float32)
    cache, fed, wanted, seen = theirs.make_cache(), prompt, [], []
    for _ in range(num):
        seen.append(np.array(theirs(mx.array([fed], mx.int32), cache=cache)[0, -1]))
        wanted.append(int(seen[-1].argmax()))
        fed = wanted[-1:]
    model = engine().model
    ours = logits(model, [*prompt, *wanted], model.make_cache(1))[len(prompt) - 1 : -1]
    assert np.abs(ours - np.stack(seen)).max() < 1e-3
    params = SamplingParams(max_tokens=num, ignore_eos=True)
    for drafting in (PLAIN, spec("ngram-simple")):
        assert list(engine().generate(prompt, params, spec=drafting).tokens) == wanted


@pytest.mark.torch
def test_transformers_loads_the_folder_and_agrees() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    from transformers import AutoModelForCausalLM, Gemma3ForCausalLM

    theirs, report = AutoModelForCausalLM.from_pretrained(
        demo.GEMMA, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert isinstance(theirs, Gemma3ForCausalLM)
    assert not any(report[k] for k in ("missing_keys", "mismatched_keys", "unexpected_keys"))
    # the architecture's factor is rounded to bfloat16; transformers rounds it only when it computes in that
    theirs.model.embed_tokens.embed_scale = theirs.model.embed_tokens.embed_scale.bfloat16().float()
    tokens = requests()[3][0][:300]
    with torch.no_grad():
        wanted = theirs(torch.tensor([tokens])).logits[0].numpy()
    ours = mlxspec.load("demo-gemma", dtype="float32").model
    found = logits(ours, tokens, ours.make_cache(1))
    assert np.abs(found - wanted).max() < 1e-3
    assert (found.argmax(-1) == wanted.argmax(-1)).mean() > 0.99
