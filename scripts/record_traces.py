#!/usr/bin/env python3
"""Records what every drafter would have said at every place of real answers: the traces that scripts/simulate replays.

    scripts/record_traces [--model demo] [--draft-model demo's] [--drafters NAMES] [--workloads FOLDER] [--items N] [--tokens N]
                          [--seed N] [--add] [--out FILE]

The engine decodes plainly; before each round every drafter is asked, and what it said is compared with the text that came. Model
drafters are asked for as many tokens as the controller may ever ask for. --add: the answers are in FILE already, with what other drafters
said to them; what these say is put beside it. Says nothing about time.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mlxspec.platform import device  # before mlx: it loads the BLAS  # isort: skip

import mlx.core as mx
import numpy as np
from simulation.requests import MODELS
from simulation.traces import Answer, Said, Workload, distinct_share, matched, read_traces, write_traces

from mlxspec.bench.workloads import read_workloads
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.demo import WORKLOADS
from mlxspec.drafters.base import Ask, Draft, Unread
from mlxspec.drafters.drafts import Drafts
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.drafters.policy import RoundPlan
from mlxspec.engine.engine import Engine
from mlxspec.engine.load import load
from mlxspec.errors import ConfigError
from mlxspec.sampling.sampler import BatchSampler

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "tests" / "policy" / "traces.npz"
DRAFTERS = (
    "mtp",
    "draft-model",
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
)
MODEL_DEPTH, LOOKUP_DEPTH = 8, 16
LEAST = 0.75  # share of distinct 4-grams of an answer; what comes when it falls below is a loop and left out


class Words(NamedTuple):
    """What a drafter says at a place."""

    tokens: list[int]
    sure: list[float] | None
    backing: int | None


class Recorder:
    """Stands in for what policies propose: asks everybody and lets nobody draft. said: by row, a list a place of what each drafter
    says."""

    def __init__(self, drafts: Drafts) -> None:
        self.said: dict[int, list[dict[str, Words]]] = {}
        self._drafts = drafts
        drafts.propose = self._propose  # type: ignore[method-assign]

    def _propose(self, rooms: Mapping[int, int], unread: Unread | None = None) -> RoundPlan | None:
        if unread is not None:
            return None  # no round runs ahead of its text
        for row in map(self._drafts.row, rooms):
            sampler = BatchSampler([row.sampler], self._drafts.vocab_size)
            place: dict[str, Words] = {}
            for drafter, _ in row.limits:
                depth = MODEL_DEPTH if isinstance(drafter, ModelDrafter) else LOOKUP_DEPTH
                depth = min(depth, drafter.max_draft or depth)
                draft = drafter.draft([Ask(row.number, row.history, depth, row.sampler)], sampler)[0]
                place[drafter.name] = _read(draft)
            self.said.setdefault(row.number, []).append(place)
        return RoundPlan()


def _before_loops(text: list[int]) -> list[int]:
    """The longest beginning that does not loop, in steps of a few tokens."""
    while distinct_share(text) < LEAST:
        text = text[:-4]
    return text


def _read(draft: Draft) -> Words:
    if not draft.length:
        return Words([], None, draft.backing)
    tokens, sure = draft.tokens, draft.confidences
    mx.eval(tokens if isinstance(tokens, mx.array) else [], sure if isinstance(sure, mx.array) else [])
    confidences = None if sure is None else np.asarray(sure).tolist()
    return Words(np.asarray(tokens).tolist(), confidences, draft.backing)


def record(
    engine: Engine, recorder: Recorder, prompt: Sequence[int], params: SamplingParams
) -> tuple[Answer, float]:
    """One answer's trace, and its share of distinct 4-grams."""
    request = engine.submit(prompt, params)
    while request.finish_reason is None:
        engine.step()
    text = _before_loops(request.history[len(request.prompt) :])
    places = recorder.said.pop(request.number, [])[
        : len(text) - 1
    ]  # the last round may have found the end token
    answer = {}
    for name in engine.spec.drafters:
        offers = [place[name] for place in places]
        depth = MODEL_DEPTH if name in MODELS else LOOKUP_DEPTH
        sure = np.zeros((len(offers), depth), np.uint8)
        for i, said in enumerate(offers):
            sure[i, : len(said.sure or ())] = np.round(255 * np.asarray(said.sure or ()))
        backing = [0 if said.backing is None else min(said.backing, 255) for said in offers]
        answer[name] = Said(
            length=np.array([len(said.tokens) for said in offers], np.uint8),
            stood=np.array([matched(said.tokens, text[i + 1 :]) for i, said in enumerate(offers)], np.uint8),
            confidences=sure if any(said.sure is not None for said in offers) else None,
            backing=np.array(backing, np.uint8) if any(said.backing is not None for said in offers) else None,
        )
    return answer, distinct_share(text)


def beside(known: Workload, found: Workload) -> Workload:
    """The same answers with what both recordings say. Raises ConfigError where they are not the same."""
    pairs = list(zip(known.answers, found.answers, strict=False))
    if len(known.answers) != len(found.answers) or any(_places(a) != _places(b) for a, b in pairs):
        raise ConfigError(
            f"The recorded answers to {found.name} are not the same ones; record them anew without --add."
        )
    answers = [{**a, **b} for a, b in pairs]
    return Workload(name=found.name, answers=answers, distinct=found.distinct)


def _places(answer: Answer) -> int:
    return len(next(iter(answer.values())))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft-model")
    parser.add_argument("--workloads", type=Path, help="a folder of workloads other than the demo's")
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0, help="of the first answer that is sampled")
    parser.add_argument("--drafters", default=",".join(DRAFTERS))
    parser.add_argument("--add", action="store_true", help="put it beside what is in --out")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    known = read_traces(options.out, of=options.model) if options.add else {}
    spec = SpecConfig(n_max=MODEL_DEPTH, ngram_m=LOOKUP_DEPTH, policy="fixed")
    engine = load(options.model, draft=options.drafters, draft_model=options.draft_model, spec=spec)
    recorder = Recorder(engine.drafts)
    recorded = []
    with device.private_kernels():
        for workload in read_workloads(engine, WORKLOADS, options.workloads):
            answers, shares = [], []
            for i, prompt in enumerate(workload.prompts[: options.items]):
                params = SamplingParams(
                    max_tokens=options.tokens, temperature=workload.temperature, seed=options.seed + i
                )
                answer, share = record(engine, recorder, prompt, params)
                if _places(answer) > 1:
                    answers.append(answer)
                    shares.append(share)
            found = Workload(name=workload.name, answers=answers, distinct=shares)
            _report(found, len(workload.prompts))
            recorded += [beside(known[found.name], found) if options.add else found] if answers else []
    if not recorded:
        raise SystemExit(f"No answer was recorded, so {options.out} is left as it was.")
    write_traces(options.out, recorded, model=options.model)
    print(f"{options.out.name}: {options.out.stat().st_size / 1e3:.0f} kB")


def _report(workload: Workload, num_prompts: int) -> None:
    places = sum(map(_places, workload.answers))
    share = f"distinct 4-grams {np.mean(workload.distinct):.2f}" if workload.answers else "all of them loop"
    print(f"{workload.name}: {len(workload.answers)} of {num_prompts} answers, {places} places, {share}")
    for name in workload.answers[0] if workload.answers else ():
        length = np.concatenate([a[name].length for a in workload.answers])
        stood = np.concatenate([a[name].stood for a in workload.answers])
        first = float((stood > 0).sum() / max(1, (length > 0).sum()))
        print(
            f"  {name:14s} offers at {np.mean(length > 0):.2f} of places; the first token stands {first:.2f}, mean {stood.mean():.2f}"
        )


if __name__ == "__main__":
    main()
