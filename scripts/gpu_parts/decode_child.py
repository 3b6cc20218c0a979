"""Decodes with a model folder and prints tokens a second as JSON: `decode_child.py FOLDER NEW_TOKENS`. For limits that MLX reads once."""

from __future__ import annotations

import json
import sys

import mlxspec
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig

WAYS = {
    "plain": SpecConfig(policy="fixed"),
    "drafted": SpecConfig(drafters=("mtp",), policy="fixed", n_max=3),
}


def main() -> None:
    folder, new = sys.argv[1], int(sys.argv[2])
    engine = mlxspec.load(folder, draft="mtp", config=EngineConfig(prefix_budget=0))
    params, prompt = SamplingParams(max_tokens=new, ignore_eos=True), [5 + 7 * i % 200 for i in range(128)]
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(3):
        for way, spec in WAYS.items():
            speeds[way].append(engine.generate(prompt, params, spec=spec).stats.decode_speed)
    print(json.dumps({way: max(found[1:]) for way, found in speeds.items()}))


if __name__ == "__main__":
    main()
