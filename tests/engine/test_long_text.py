"""What a step costs the host does not grow with the text: calls, Python's bytes, nodes of the graph; and MLX's bytes as attention's scores.

By counts, not by time.
"""

from __future__ import annotations

import sys

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine
from mlxspec.engine.text import AnswerText
from mlxspec.kernels.attention import causal_mask
from mlxspec.loading.tokenizer import TextStream
from tests import long_text, tiny_models

SHORT, MIDDLE, LONG = 1024, 6144, 131_072
SAMPLED = SamplingParams(
    max_tokens=1024,
    temperature=0.8,
    top_p=0.9,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    seed=1,
    stop=("no such text", "nor this"),
    logprobs=True,
)
PROCESSED = SamplingParams(max_tokens=1024, logits_processors=(lambda tokens, logits: logits,))
PLAIN = SpecConfig(policy="fixed")
MTP = SpecConfig(drafters=("mtp",), policy="fixed", n_max=3)
LOOKUP = SpecConfig(drafters=("ngram-simple",), policy="fixed")
AUTO = SpecConfig(drafters=("ngram-simple", "mtp"), policy="auto")
PYTHON_BYTES = 16 << 10  # of a step; a list of the shorter text would take as many
VARIED = 1.1  # calls follow how many tokens of a draft are accepted


def work(length: int, params: SamplingParams, spec: SpecConfig) -> long_text.StepWork:
    engine, request = long_text.engine_behind(length, params, spec)
    try:
        return long_text.step_work(engine, request, steps=12, warm=3)
    finally:
        engine.close()


def check(short: long_text.StepWork, long: long_text.StepWork, growth: int, num_scores: int) -> None:
    """growth: tokens that the longer text has more. num_scores: of queries and heads that attend in a step, at most."""
    for longer, shorter in ((long.calls, short.calls), (long.nodes, short.nodes)):
        both = longer.keys() & shorter.keys()
        assert both, "no step of the longer text has the drafts of one of the shorter text"
        assert all(longer[drafts] <= VARIED * shorter[drafts] for drafts in both)
    assert long.python_bytes <= PYTHON_BYTES
    assert long.kept_bytes <= 2 * PYTHON_BYTES
    # scores, and what becomes of them: as `score_bytes` has it
    assert long.mlx_bytes - short.mlx_bytes <= 16 * 4 * num_scores * growth


@pytest.mark.parametrize(
    ("params", "spec", "num_scores"),
    [(SAMPLED, PLAIN, 4), (PROCESSED, PLAIN, 4), (SAMPLED, MTP, 16)],
    ids=["plain", "processed", "mtp"],
)
def test_a_step_costs_the_host_as_much_behind_a_longer_text(
    params: SamplingParams, spec: SpecConfig, num_scores: int
) -> None:
    check(work(SHORT, params, spec), work(MIDDLE, params, spec), MIDDLE - SHORT, num_scores)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [PLAIN, LOOKUP, MTP, AUTO], ids=["plain", "lookup", "mtp", "auto"])
@pytest.mark.parametrize("params", [SamplingParams(max_tokens=1024), SAMPLED], ids=["greedy", "sampled"])
def test_a_step_costs_the_host_as_much_behind_128k_tokens(params: SamplingParams, spec: SpecConfig) -> None:
    # a draft of a lookup has 12 tokens
    num_scores = {PLAIN: 4, MTP: 16}.get(spec, 52)
    check(work(SHORT, params, spec), work(LONG, params, spec), LONG - SHORT, num_scores)


def test_lookups_make_as_many_calls_in_a_longer_text() -> None:
    """A lookup walks over no more of a text than it drafts, and over no more places than have a vote."""
    for make in range(len(long_text.lookups())):
        found = [
            long_text.lookup_calls(long_text.lookups()[make], long_text.text(n)) for n in (SHORT, MIDDLE)
        ]
        name = long_text.lookups()[make].name
        assert found[1] <= 400, name
        assert found[1] <= found[0] + 150, name  # more places that vote


def test_an_answer_is_put_together_only_when_it_is_asked_for() -> None:
    """Adding a token copies no text: what Python holds at a token is a few pieces, however long the answer is."""
    stream = tiny_models.tokenizer().stream()
    answer = AnswerText(stream, ("no such text",))
    said = "".join(answer.push(40 + i % 40)[0] for i in range(3000))
    assert isinstance(stream, TextStream)
    for held in (answer._said, stream._given):
        assert max(map(len, held)) <= 16
    assert said + answer.finish()[0] == answer.text
    assert len(answer.text) == 3000
    assert answer.text is answer.text


def test_a_logits_processor_is_given_the_whole_text_from_a_buffer() -> None:
    engine, request = long_text.engine_behind(250, PROCESSED, PLAIN)
    for _ in range(40):
        engine.step()
        if request.finish_reason:
            break
        assert request.shown.tolist() == request.history
    before = sys.getsizeof(request._shown)
    assert before <= 4 * (len(request.history) + 600)
    assert np.shares_memory(request.shown, request._shown)
    engine.close()


def test_masks_are_made_on_the_device() -> None:
    for width, length in ((1, 5), (3, 9), (4, 4)):
        wanted = np.tri(width, length, length - width, dtype=np.bool_)
        assert np.array_equal(np.array(causal_mask(width, length)), wanted)


@pytest.mark.slow
def test_4000_tokens_cost_the_same_and_take_the_memory_computed() -> None:
    """The last steps of a long answer make the calls of the first ones; what MLX holds is the row's buffers and nothing that grows beside
    them; the row's buffers are what the budget reserved."""
    num = 4000
    target, _ = long_text.models("hybrid")
    config = EngineConfig(prefix_budget=0)
    made = Engine(target, tiny_models.tokenizer(), drafters=long_text.lookups()[:1], config=config)
    params = SamplingParams(max_tokens=num, ignore_eos=True, temperature=1.0, seed=1)
    request = made.submit(long_text.text(40), params, spec=LOOKUP)
    beside, calls = [], []
    while not made.is_idle:
        made.step()
        if request.num_generated >= 500 * (len(beside) + 1) and not made.is_idle:
            calls.append(sorted(long_text._calls(made.step) for _ in range(9))[4])
            mx.synchronize()
            beside.append(mx.get_active_memory() - made.nbytes)
            assert made.nbytes <= made.memory.reserved
    assert request.num_generated == num
    assert len(beside) >= 7
    assert max(beside) - min(beside) <= 256 << 10, (
        beside
    )  # a step's own arrays; 3,500 tokens of logits would be five times as much
    assert max(calls) <= 1.6 * min(calls), calls  # a round with a draft makes more calls than one without
