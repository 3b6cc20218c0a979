"""Cells of the simulation: one workload at one length on some machines, all policies, and what the table says of them.

Answers are split: fixed settings are chosen, and the warm controller is warmed, on the first half; everything is measured on the
other. Knows policies and traces; prints nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .replay import Replay
from .requests import (
    MODELS,
    Machine,
    Request,
    Rounds,
    first,
    fixed,
    longest_expected,
    make_requests,
    oracle,
    plain_group_seconds,
    plain_seconds,
)
from .traces import Answer, Workload

MODEL_DEPTHS = (1, 2, 3, 4, 6, 8)
LOOKUP_DEPTHS = (1, 2, 4, 8, 16)
DRAFTERS = (
    "ngram-simple",
    "mtp",
)  # what loading takes by itself; the draft model stands in where there is no head
FIRST_DEPTHS = {
    "mtp": 3,
    "eagle3": 3,
    "dflash": 8,
    "draft-model": 3,
}  # llama.cpp's default for models; lookups take all they have
_ORACLE_REQUESTS = 8


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Ratios of total decode time to plain's, above 1 is faster; over_best: to the fixed setting that was best on other requests.
    slowest: the ratio to plain that 95 % of single requests exceed. drafter_cost: plain steps a token of the dearest drafter."""

    machine: str
    workload: str
    length: int
    start: str
    over_plain: float
    slowest: float
    over_best: float
    best: tuple[str, int]
    best_over_plain: float
    first: float
    longest: float
    oracle: float
    drafter_cost: float
    fixed: dict[str, float] = field(default_factory=dict)


def run_cells(
    workload: Workload,
    length: int,
    machines: Sequence[Machine],
    *,
    count: int = 200,
    seed: int = 0,
    drafters: Sequence[str] = DRAFTERS,
) -> list[Cell]:
    """Cold and warm cells of one workload and length, `count` held-out requests each. The same requests and noise for all of them."""
    rng = np.random.default_rng([seed, length])
    answers = [{n: a[n] for n in drafters if n in a} for a in workload.answers]
    half = max(1, len(answers) // 2)
    others = make_requests(answers[:half], length, max(8, count // 4), rng)
    held = make_requests(answers[half:] or answers, length, count, rng)
    settings = {
        (n, k): (fixed(others, n, k), fixed(held, n, k))
        for n in answers[0]
        for k in (MODEL_DEPTHS if n in MODELS else LOOKUP_DEPTHS)
    }
    order = [(n, FIRST_DEPTHS.get(n, 16)) for n in answers[0]]
    rules = first(held, order), longest_expected(held, dict(order))
    return [cell for m in machines for cell in _cells(workload.name, m, others, held, settings, rules, seed)]


def _cells(
    name: str,
    machine: Machine,
    others: Sequence[Request],
    held: Sequence[Request],
    settings: dict[tuple[str, int], tuple[Rounds, Rounds]],
    rules: tuple[Rounds, Rounds],
    seed: int,
) -> list[Cell]:
    plain = plain_seconds(held, machine)
    known = {("plain", 0): (float(plain_seconds(others, machine).sum()), plain)}
    for (drafter, depth), (elsewhere, here) in settings.items():
        lookups = drafter not in MODELS
        known[drafter, depth] = (
            float(elsewhere.seconds(others, machine, lookups=lookups).sum()),
            here.seconds(held, machine, lookups=lookups),
        )
    best = min(known, key=lambda k: known[k][0])
    total, best_total = float(plain.sum()), float(known[best][1].sum())
    by_rule = [total / float(r.seconds(held, machine, lookups=True).sum()) for r in rules]
    few = held[:_ORACLE_REQUESTS]
    least = float(plain[: len(few)].sum() / oracle(few, machine).sum())
    cells = []
    for start in ("cold", "warm"):
        alone = [[r] for r in others] if start == "warm" else []
        times = auto_seconds(machine, alone, [[r] for r in held], seed)
        cells.append(
            Cell(
                machine=machine.name,
                workload=name,
                length=len(held[0]),
                start=start,
                over_plain=total / float(times.sum()),
                slowest=float(np.quantile(plain / times, 0.05)),
                over_best=best_total / float(times.sum()),
                best=best,
                best_over_plain=total / best_total,
                first=by_rule[0],
                longest=by_rule[1],
                oracle=least,
                drafter_cost=max(d.step for d in machine.drafts.values()),
                fixed={f"{n} {k}": total / float(t.sum()) for (n, k), (_, t) in known.items()},
            )
        )
    return cells


def auto_seconds(
    machine: Machine,
    others: Sequence[Sequence[Request]],
    held: Sequence[Sequence[Request]],
    seed: int,
) -> np.ndarray:
    """Plain steps of each held-out group of rows, which may be one. With `others` one controller serves them all, one group behind the
    other; without, each group meets a new one, whose beliefs of the machine are off in another way."""
    if not others:
        rngs = (np.random.default_rng([seed, i]) for i in range(len(held)))
        return np.array([Replay(machine, r).seconds(*g) for r, g in zip(rngs, held, strict=True)])
    auto = Replay(machine, np.random.default_rng(seed))
    for group in others:
        auto.seconds(*group)
    return np.array([auto.seconds(*g) for g in held])


def auto_over_plain(
    workload: Workload,
    length: int,
    machines: Sequence[Machine],
    *,
    count: int = 40,
    seed: int = 0,
    drafters: Sequence[str] = DRAFTERS,
) -> dict[str, float]:
    """Speed over plain decoding of each cell, cold and warm: what `run_cells` finds, without its other policies."""
    rng = np.random.default_rng([seed, length])
    answers = [{n: a[n] for n in drafters if n in a} for a in workload.answers]
    half = max(1, len(answers) // 2)
    others = [[r] for r in make_requests(answers[:half], length, max(8, count // 4), rng)]
    held = make_requests(answers[half:] or answers, length, count, rng)
    found = {}
    for machine in machines:
        plain = float(plain_seconds(held, machine).sum())
        for start, before in (("cold", []), ("warm", others)):
            times = auto_seconds(machine, before, [[r] for r in held], seed)
            found[f"{machine.name}, {workload.name}, {start}"] = plain / float(times.sum())
    return found


@dataclass(frozen=True, kw_only=True)
class GroupCell:
    """The same of rows that decode together: ratios of what whole groups take, until the last of a group has ended."""

    machine: str
    workload: str
    num_rows: int
    start: str
    over_plain: float
    slowest: float


def run_group_cells(
    workloads: Sequence[Workload],
    num_rows: int,
    machines: Sequence[Machine],
    *,
    count: int = 60,
    seed: int = 0,
    drafters: Sequence[str] = DRAFTERS,
) -> list[GroupCell]:
    """Cold and warm cells of `count` groups of rows each. Rows are whole answers as they were recorded, drawn from all of these
    workloads alike, for what short answers cost is the question; their first halves warm, their second halves are measured."""
    rng = np.random.default_rng([seed, num_rows])
    parts: list[list[list[Request]]] = []
    for half, num in ((0, max(2, count // 4)), (1, count)):
        answers = []
        for workload in workloads:
            own, middle = workload.answers, len(workload.answers) // 2
            answers += [
                {n: a[n] for n in drafters if n in a} for a in (own[middle:] if half else own[:middle])
            ]
        parts.append([_group(answers, num_rows, rng) for _ in range(num)])
    others, held = parts
    name = "+".join(w.name for w in workloads)
    cells = []
    for machine in machines:
        plain = np.array([plain_group_seconds(g, machine) for g in held])
        for start in ("cold", "warm"):
            times = auto_seconds(machine, others if start == "warm" else (), held, seed)
            cells.append(
                GroupCell(
                    machine=machine.name,
                    workload=name,
                    num_rows=num_rows,
                    start=start,
                    over_plain=float(plain.sum() / times.sum()),
                    slowest=float(np.quantile(plain / times, 0.05)),
                )
            )
    return cells


def _group(answers: Sequence[Answer], num_rows: int, rng: np.random.Generator) -> list[Request]:
    drawn = [answers[int(rng.integers(len(answers)))] for _ in range(num_rows)]
    return [make_requests([a], len(next(iter(a.values()))), 1, rng)[0] for a in drawn]


def worst(cells: Sequence[Cell], start: str) -> str:
    """The worst cells of a kind in one line."""
    some = [c for c in cells if c.start == start]
    if not some:
        return "no cells"
    parts = []
    for what, key in (("plain", "over_plain"), ("slowest 5 %", "slowest"), ("best fixed", "over_best")):
        cell = min(some, key=lambda c: float(getattr(c, key)))
        parts.append(f"{what} {getattr(cell, key):.3f} ({cell.machine}, {cell.workload}, {cell.length})")
    return "; ".join(parts)
