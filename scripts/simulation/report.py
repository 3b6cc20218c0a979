"""Cells of the simulation: one machine, one length of answers and one start, all kinds of text in turn; and what a table says of them.

One controller serves all kinds in turns, as in use. Answers are split: a warm controller has served the first half, everything is measured
on the other. An answer is judged against plain decoding and against the fastest of plain decoding and all fixed settings in hindsight; and
against the setting that is fastest for its kind as a whole. Knows policies and traces; prints nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlxspec.policy.costs import bucket

from .replay import Replay
from .requests import (
    MODELS,
    Machine,
    Request,
    Rounds,
    first,
    make_requests,
    plain_group_seconds,
    plain_seconds,
)
from .traces import Answer, Workload

Setting = tuple[tuple[str, int], ...]  # (drafter, depth) in the order in which they are asked
MODEL_DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8)
LOOKUP_DEPTHS = (2, 4, 8, 16)
DRAFTERS = ("ngram-simple", "mtp")  # what loading takes by itself where there is a head
STARTS = ("cold", "warm", "restart")
_WARM = 4  # answers of each kind that a warm controller has served
_LONG = 0.97  # share of a model's accepted tokens that are accepted still, for each bucket that the context is longer


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Means over answers of ratios of decode times, above 1 is faster: over_plain: than plain decoding; over_best: than the fastest setting
    in hindsight; over_kind: than the fastest setting of the kind. context: tokens before the answers. worst: the least over_plain of an
    answer. hindsight: of the fastest setting over plain decoding. per_round: tokens."""

    machine: str
    length: int
    context: int
    start: str
    over_plain: float
    worst: float
    over_best: float
    over_kind: float
    hindsight: float
    per_round: float


def settings(drafters: Sequence[str]) -> list[Setting]:
    """All fixed settings: each drafter alone at each depth, and the lookup before each model."""
    models = [d for d in drafters if d in MODELS]
    out: list[Setting] = [((m, k),) for m in models for k in MODEL_DEPTHS]
    for lookup in (d for d in drafters if d not in MODELS):
        out += [((lookup, k),) for k in LOOKUP_DEPTHS]
        out += [((lookup, 16), (m, k)) for m in models for k in MODEL_DEPTHS]
    return out


def days(
    workloads: Mapping[str, Workload],
    length: int,
    count: int,
    *,
    drafters: Sequence[str],
    seed: int,
    contexts: Sequence[int] = (0,),
) -> tuple[list[Request], list[Request]]:
    """Return requests of all kinds in turns, each after every context in turn: those that warm a controller, and `count` of each kind and
    context that are measured."""
    rng = np.random.default_rng([seed, length])
    halves: tuple[list[list[Request]], list[list[Request]]] = [], []
    for name, workload in workloads.items():
        answers = [{n: a[n] for n in drafters if n in a} for a in workload.answers]
        middle = max(1, len(answers) // 2)
        kind = "sampled" if name == "sampled" else "greedy"
        for half, some, num in zip(
            halves, (answers[:middle], answers[middle:] or answers), (_WARM, count), strict=True
        ):
            for context in contexts:
                made = make_requests(some, length, num, rng, workload=name, kind=kind)
                half.append([_after(request, context, rng) for request in made])
    warm, held = ([r for turn in zip(*half, strict=True) for r in turn] for half in halves)
    return warm, held


def _after(request: Request, context: int, rng: np.random.Generator) -> Request:
    """Return the request after `context` tokens, where a model predicts fewer tokens right."""
    share, said = _LONG ** bucket(context), dict(request.said)
    for name in [n for n in said if n in MODELS and share < 1.0]:
        most = rng.geometric(1.0 - share, len(request)) - 1  # tokens until the first one that is wrong
        said[name] = replace(said[name], stood=np.minimum(said[name].stood, most).astype(np.uint8))
    return replace(request, said=said, context=context)


def run_cells(
    workloads: Mapping[str, Workload],
    length: int,
    machines: Sequence[Machine],
    *,
    count: int = 15,
    seed: int = 0,
    starts: Sequence[str] = STARTS,
    drafters: Sequence[str] = DRAFTERS,
    contexts: Sequence[int] = (0,),
) -> list[Cell]:
    """Return the cells of one length, `count` held-out answers of each kind after each context. The same requests and noise for all of
    them. One controller serves all contexts."""
    warm, held = days(workloads, length, count, drafters=drafters, seed=seed, contexts=contexts)
    rounds = {s: first(held, s) for s in settings(drafters)}
    return [cell for m in machines for cell in _cells(m, warm, held, rounds, starts, seed)]


def _cells(
    machine: Machine,
    warm: Sequence[Request],
    held: Sequence[Request],
    rounds: Mapping[Setting, Rounds],
    starts: Sequence[str],
    seed: int,
) -> list[Cell]:
    plain = plain_seconds(held, machine)
    by_setting = [
        r.seconds(held, machine, lookups=any(n not in MODELS for n, _ in s)) for s, r in rounds.items()
    ]
    table = np.stack([plain, *by_setting])
    contexts = np.array([r.context for r in held])
    best, of_kind, kinds = table.min(0), np.zeros(len(held)), np.array([r.workload for r in held])
    for kind, context in {(r.workload, r.context) for r in held}:
        its = (kinds == kind) & (contexts == context)
        of_kind[its] = table[table[:, its].sum(1).argmin(), its]
    cells = []
    for start in starts:
        times, num_rounds = auto_seconds(machine, warm, held, start, seed)
        for context in sorted(set(contexts.tolist())):
            its = contexts == context
            cells.append(
                Cell(
                    machine=machine.name,
                    length=len(held[0]),
                    context=context,
                    start=start,
                    over_plain=float(np.mean(plain[its] / times[its])),
                    worst=float(np.min(plain[its] / times[its])),
                    over_best=float(np.mean(best[its] / times[its])),
                    over_kind=float(np.mean(of_kind[its] / times[its])),
                    hindsight=float(np.mean(plain[its] / best[its])),
                    per_round=len(held[0]) * int(its.sum()) / int(num_rounds[its].sum()),
                )
            )
    return cells


def auto_seconds(
    machine: Machine, warm: Sequence[Request], held: Sequence[Request], start: str, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the plain steps and the rounds of each held-out answer. Where the start is cold each answer meets a new controller, whose
    beliefs of the machine are off in another way; else one serves them all, which after a restart knows what an earlier one kept."""
    replay = Replay(machine, np.random.default_rng(seed))
    if start != "cold":
        for request in warm:
            replay.seconds(request)
    if start == "restart":
        replay.restart()
    times, num_rounds = [], []
    for i, request in enumerate(held):
        if start == "cold":
            replay = Replay(machine, np.random.default_rng([seed, i]))
        times.append(replay.seconds(request))
        num_rounds.append(len(replay.rounds))
    return np.array(times), np.array(num_rounds)


@dataclass(frozen=True, kw_only=True)
class GroupCell:
    """Rows that decode together: ratios of what whole groups take, until the last of a group has ended."""

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
            replay, times = Replay(machine, np.random.default_rng(seed)), []
            for group in others if start == "warm" else ():
                replay.seconds(*group)
            for i, group in enumerate(held):
                if start == "cold":
                    replay = Replay(machine, np.random.default_rng([seed, i]))
                times.append(replay.seconds(*group))
            cells.append(
                GroupCell(
                    machine=machine.name,
                    workload=name,
                    num_rows=num_rows,
                    start=start,
                    over_plain=float(plain.sum() / sum(times)),
                    slowest=float(np.quantile(plain / np.array(times), 0.05)),
                )
            )
    return cells


def _group(answers: Sequence[Answer], num_rows: int, rng: np.random.Generator) -> list[Request]:
    drawn = [answers[int(rng.integers(len(answers)))] for _ in range(num_rows)]
    return [make_requests([a], len(next(iter(a.values()))), 1, rng)[0] for a in drawn]
