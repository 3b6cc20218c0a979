"""Traces say what drafting would have done: rounds replayed from them are as many as the engine's own, for drafters that look at the text
alone."""

from __future__ import annotations

import subprocess
import sys

import bench_gate
import numpy as np
import pytest
from simulation.requests import Request, fixed
from simulation.traces import Answer, Said, read_traces

from mlxspec import load
from mlxspec.bench.workloads import read_workloads
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.demo import WORKLOADS

TOKENS, ITEMS = 32, 2


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answer]]:
    out = tmp_path_factory.mktemp("traces") / "traces.npz"
    command = [sys.executable, str(bench_gate.ROOT / "scripts" / "record_traces.py"), "--out", str(out)]
    command += ["--items", str(ITEMS), "--tokens", str(TOKENS)]
    subprocess.run(command, check=True, capture_output=True)
    return {name: list(w.answers) for name, w in read_traces(out, of="demo").items()}


def _longer(said: Said, num: int) -> Said:
    """Nothing is offered at so many more places."""
    nothing = np.zeros(num, np.uint8)
    return Said(length=np.concatenate([said.length, nothing]), stood=np.concatenate([said.stood, nothing]))


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "depth"), [("mtp", 3), ("draft-model", 3), ("ngram-simple", 16)])
def test_replayed_rounds_are_the_engines(recorded: dict[str, list[Answer]], drafter: str, depth: int) -> None:
    spec = SpecConfig(drafters=(drafter,), policy="fixed", n_max=depth, ngram_m=16)
    engine = load("demo", draft=(drafter,), spec=spec)
    num_drafted = compared = 0
    for work in read_workloads(engine, WORKLOADS):
        if work.temperature:
            continue  # traces are of greedy text
        for answer, prompt in zip(recorded[work.name], work.prompts, strict=False):
            stats = engine.generate(prompt, SamplingParams(max_tokens=TOKENS)).stats
            # the end token and the last place, where nothing more may be drafted, are not recorded
            missing = stats.num_decoded - len(answer[drafter])
            if missing > 2:
                continue  # the recording ends where the answer began to loop
            said, ones = _longer(answer[drafter], missing), np.ones(stats.num_decoded)
            rounds = fixed([Request(said={drafter: said}, noise=ones, tilt=ones)], drafter, depth)
            assert stats.num_rounds <= len(rounds.place) <= stats.num_rounds + stats.num_end
            num_drafted, compared = num_drafted + stats.num_drafted, compared + 1
    assert compared > 3
    assert num_drafted
