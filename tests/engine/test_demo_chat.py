"""A conversation with the demo model over the prefix cache: what a second turn reads, also where the client drops earlier reasoning."""

from __future__ import annotations

import pytest

from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine
from mlxspec.engine.load import load

QUESTION = "what does os.path.join do?\n" + "\n".join(
    f"def part_{i}(path, name):\n    return os.path.join(path, name, '{i}')" for i in range(60)
)
PARAMS = SamplingParams(max_tokens=48)
MTP = SpecConfig(drafters=("mtp",), policy="fixed")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load("demo", spec=SpecConfig(policy="fixed"), config=EngineConfig(prefix_budget=1 << 28))


@pytest.fixture(scope="module")
def cold() -> Engine:
    return load("demo", spec=SpecConfig(policy="fixed"), config=EngineConfig(prefix_budget=0))


@pytest.mark.slow
def test_turn_two_of_a_long_conversation_reads_little(engine: Engine, cold: Engine) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    first = engine.chat(messages, PARAMS)
    kept = first.text.split(".")[0]  # what a client keeps that takes the rest for reasoning
    for answer in (first.text, kept[len(kept) // 2 :], "Something else altogether."):
        turns = [
            *messages,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "And then?"},
        ]
        prompt = engine.chat_prompt(turns)
        assert len(prompt) >= 1500
        warm, wanted = (e.generate(prompt, PARAMS) for e in (engine, cold))
        assert len(prompt) - warm.stats.num_cached < 0.05 * len(prompt)
        assert warm.tokens == wanted.tokens
        if wanted.stats.num_drafted > 20:
            assert warm.stats.num_accepted >= 0.8 * wanted.stats.num_accepted
    engine.prefix.tree.check()


def test_a_head_drafts_behind_plain_turns_as_in_a_cold_run(engine: Engine, cold: Engine) -> None:
    """A state that was kept without the head's part is not continued with it: the prompt is read again, and as many of its tokens are
    right. The next turn continues it."""
    text = engine.chat_prompt([{"role": "user", "content": QUESTION[:1500]}])
    for _ in range(2):
        answer = engine.generate(text, PARAMS, spec=SpecConfig())
        text = [*text, *answer.tokens, *engine.chat_prompt([{"role": "user", "content": "Explain it."}])]
    warm, wanted = (e.generate(text, PARAMS, spec=MTP) for e in (engine, cold))
    assert warm.stats.num_cached == 0
    assert warm.tokens == wanted.tokens
    assert wanted.stats.num_accepted > 10
    assert (warm.stats.num_drafted, warm.stats.num_accepted) == (
        wanted.stats.num_drafted,
        wanted.stats.num_accepted,
    )
    assert warm.stats.notices == []
    again = engine.generate([*text, *warm.tokens], PARAMS, spec=MTP)
    assert len(text) + len(warm.tokens) - again.stats.num_cached < 60
