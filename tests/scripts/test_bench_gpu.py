"""The script for a GPU runs on any device in its smallest shape, and its drafts are right as often as it says."""

from __future__ import annotations

import bench_gpu
import pytest

from mlxspec.config import SamplingParams, SpecConfig


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 16])
def test_recorded_acceptance_is_what_the_engine_sees(bits: int) -> None:
    engine, drafter = bench_gpu._engine(bench_gpu.SHAPES["tiny"], bits)
    prompt, params = list(range(5, 45)), SamplingParams(max_tokens=24, ignore_eos=True)
    plain = engine.generate(prompt, params, spec=SpecConfig(policy="fixed"))
    drafter.text, drafter.num_prompt = plain.tokens, len(prompt)
    spec = SpecConfig(drafters=("mtp",), policy="fixed", n_max=3)
    for accepted, a_round in ((0, 1.0), (1, 2.0), (3, 4.0)):
        drafter.accepted = [accepted]
        result = engine.generate(prompt, params, spec=spec)
        assert result.tokens == plain.tokens
        assert result.stats.tokens_per_round == pytest.approx(a_round, rel=0.1)
