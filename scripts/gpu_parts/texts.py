"""Drafted text beside plain text, and speeds: the demo model and the 0.8B's shape, in float32 and bfloat16; and how busy the GPU is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import mlx.core as mx

import mlxspec
from mlxspec.bench.workloads import read_workloads
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine

from .base import Here, Skipped, table
from .recorded import PLAIN, RecordedModel, records

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
AUTO = SpecConfig(drafters=("mtp",), policy="auto")
_SAMPLED = {"temperature": 0.8, "seed": 1}
_WORKLOADS = ("edit", "explain", "continue", "ask")


def fixed(depth: int) -> SpecConfig:
    return SpecConfig(drafters=("mtp",), policy="fixed", n_max=depth)


@dataclass(kw_only=True)
class Compared:
    """Answers of one model in one dtype. equal: of each way, answers with the text of plain decoding, and all. over: of each way, speeds
    over plain decoding, an entry a prompt: medians of second and later answers, in turns. different: where a text first differs."""

    equal: dict[str, list[int]] = field(default_factory=dict)
    over: dict[str, list[float]] = field(default_factory=dict)
    different: list[str] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    def add(
        self, what: str, answer: Callable[[SpecConfig], Any], ways: Mapping[str, SpecConfig], rounds: int
    ) -> None:
        """One prompt. answer: the result with these drafters."""
        wanted, speeds = tuple(answer(PLAIN).tokens), {way: [] for way in ("off", *ways)}
        order = {"off": PLAIN, **ways}
        names = list(order)
        for turn in range(rounds + 1):
            for way in names[turn % len(names) :] + names[: turn % len(names)]:
                result = answer(order[way])
                got = tuple(result.tokens)
                counted = self.equal.setdefault(way, [0, 0])
                counted[0] += got == wanted
                counted[1] += 1
                if got != wanted:
                    self.different.append(f"{what}, {way}: token {_first_difference(got, wanted)}")
                if turn:
                    speeds[way].append(result.stats.decode_speed)
        off = median(speeds["off"])
        self.plain.append(off)
        for way in ways:
            self.over.setdefault(way, []).append(median(speeds[way]) / off)

    def tell(self, here: Here, name: str, dtype: str) -> None:
        """Into the report and its tables. Raises RuntimeError where a float32 text differs."""
        here.tables.setdefault(
            "texts", [["model", "dtype", "drafts", "equal texts", "speed over plain, median", "worst prompt"]]
        )
        for way, (same, num) in self.equal.items():
            over = self.over.get(way, [1.0])
            here.tables["texts"].append(
                [
                    name,
                    dtype,
                    way,
                    f"{same} of {num}",
                    f"{median(over):.2f}",
                    f"{min(over):.2f} of {len(over)}",
                ]
            )
        told = ", ".join(f"{way} {median(over):.2f}" for way, over in self.over.items())
        same, num = (sum(counts[i] for counts in self.equal.values()) for i in (0, 1))
        here.tell(
            f"{name}, {dtype}: {same} of {num} texts equal; over plain ({median(self.plain):.0f} tok/s): {told}"
        )
        for line in self.different:
            print(f"- differs: {line}")
        if self.different and dtype == "float32":
            raise RuntimeError("drafted text differs from plain text in float32")


def _first_difference(got: Sequence[int], wanted: Sequence[int]) -> int:
    pairs = enumerate(zip(got, wanted, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(got), len(wanted)))


def demo(here: Here, dtype: str) -> None:
    """The demo model with its own head, greedy and sampled."""
    engine = mlxspec.load("demo", draft=("ngram-simple", "mtp"), dtype=dtype)
    ways = {"mtp 3": fixed(3), "chain": SpecConfig(drafters=tuple(engine.drafts.drafters), policy="fixed")}
    ways["auto"] = SpecConfig(policy="auto")
    found = Compared()
    for work in read_workloads(engine, _WORKLOADS):
        for how, more in (("greedy", {}), ("sampled", _SAMPLED)):
            params = SamplingParams(max_tokens=here.sizes.new_tokens, **more)
            prompt = list(work.prompts[0])
            found.add(
                f"{work.name}, {how}",
                lambda s, p=prompt, k=params: engine.generate(p, k, spec=s),
                ways,
                here.sizes.rounds,
            )
            if here.seconds_left < 0:
                break
    found.tell(here, "demo", dtype)


def shape(here: Here, dtype: str) -> None:
    """Random weights of the 0.8B's shape, acceptance as recorded."""
    made = RecordedModel(here.sizes, DTYPES[dtype])
    params, found = SamplingParams(max_tokens=here.sizes.new_tokens, ignore_eos=True), Compared()
    ways = {"mtp 1": fixed(1), "mtp 3": fixed(3), "auto": AUTO}
    for name, recorded in records().items():
        made.accepts_as(recorded, params)
        found.add(name, lambda s: made.engine.generate(made.prompt, params, spec=s), ways, here.sizes.rounds)
        if here.seconds_left < 0:
            break
    found.tell(here, _shape_name(here), dtype)
    _busy(here, dtype, made.engine, made.prompt)


def _shape_name(here: Here) -> str:
    return "0.8B shape" if here.sizes.num_layers is None else "cut 0.8B shape"


def _busy(here: Here, dtype: str, engine: Engine, prompt: Sequence[int]) -> None:
    """Kernels a token, and the share of the time in which the GPU runs one, as NVIDIA's profiler sees plain decoding and rounds that draft
    three tokens. Says why where it cannot be asked."""
    num = here.sizes.new_tokens
    params = SamplingParams(max_tokens=num, ignore_eos=True)
    rows = [["dtype", "rounds", "kernels a round", "GPU busy"]]
    for name, spec in (("plain", PLAIN), ("mtp 3", fixed(3))):
        try:
            kernels, busy, rounds = profiled(
                lambda s=spec: engine.generate(prompt, params, spec=s).stats.num_rounds
            )
        except Skipped as why:
            here.tell(f"kernels a round and how busy the GPU is: not measured, {why}")
            return
        rows.append([dtype, name, f"{kernels / rounds:.0f}", f"{100 * busy:.0f} %"])
    table(rows[0], rows[1:])
    here.tables.setdefault("busy", rows[:1]).extend(rows[1:])
    here.tell(
        f"{_shape_name(here)}, {dtype}: "
        + ", ".join(f"{r[1]} {r[2]} kernels a round, GPU busy {r[3]}" for r in rows[1:])
    )


def profiled(run: Callable[[], int]) -> tuple[int, float, int]:
    """Kernels of one run, the share of its time in which one ran, and its rounds, which `run` returns. Raises Skipped where PyTorch's
    profiler, which asks NVIDIA's, is not there."""
    try:
        import torch
    except ImportError:
        raise Skipped("there is no PyTorch, whose profiler can tell") from None
    if not torch.cuda.is_available():
        raise Skipped("PyTorch finds no NVIDIA GPU")
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        rounds = run()
        mx.synchronize()
        torch.cuda.synchronize()
    spans = sorted(
        (e.time_range.start, e.time_range.end) for e in seen.events() if e.time_range.end > e.time_range.start
    )
    if not spans:
        raise Skipped("the profiler saw no kernel")
    busy, end = 0.0, spans[0][0]
    for begin, finish in spans:
        busy += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return len(spans), busy / (end - spans[0][0]), rounds
