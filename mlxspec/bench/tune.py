"""Measures the speed of every drafter over plain decoding, with one model.

Each prompt is answered plainly and by every contestant in turn, in an order that turns, so what slows the machine slows all of them. A
contestant whose texts differ has no speed-up. Knows the engine; prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median

from mlxspec.config import DRAFTER_NAMES, SamplingParams, SpecConfig
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.engine.api import Result
from mlxspec.engine.engine import Engine

DEPTHS = (1, 2, 3, 4, 6, 8)  # tokens a model drafts at once, as tried
WHOLE_DEPTHS = (
    1,
    3,
)  # those at which it proposes over the whole vocabulary too, where it proposes over a part
MARGIN = 1.02  # this much faster than plain decoding, or it beats nothing
PLAIN = "plain"
_LOOKUPS = tuple(n for n in DRAFTER_NAMES if n.startswith("ngram-"))


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One way to draft. depth: tokens a model drafts at once; None where that is not what it is about. whole: models propose over the whole
    vocabulary, whatever they were loaded for."""

    name: str
    spec: SpecConfig
    depth: int | None = None
    whole: bool = False


@dataclass(kw_only=True)
class Score:
    """What one contestant came to. whole: as the contestant has it. pairs: its speed over plain decoding's, one a prompt and turn.
    by_position[i]: how often its draft token i was verified, and how often it was accepted."""

    name: str
    depth: int | None
    drafters: tuple[str, ...]
    whole: bool = False
    num_answers: int = 0
    num_different: int = 0
    num_rounds: int = 0
    num_decoded: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    pairs: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    by_position: list[tuple[int, int]] = field(default_factory=list)

    @property
    def speedup(self) -> float | None:
        """Median over prompts and turns; None where a text differed or nothing was decoded."""
        return median(self.pairs) if self.pairs and not self.num_different else None

    @property
    def decode_speed(self) -> float:
        """Tokens a second, the median."""
        return median(self.speeds) if self.speeds else 0.0

    @property
    def acceptance(self) -> float | None:
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def tokens_per_round(self) -> float:
        return self.num_decoded / self.num_rounds if self.num_rounds else 0.0

    def add(self, result: Result, plain: Result) -> None:
        """One measured answer and the plain one beside it."""
        stats = result.stats
        self.num_answers += 1
        self.num_different += result.tokens != plain.tokens
        self.num_rounds += stats.num_rounds
        self.num_decoded += stats.num_decoded
        self.num_drafted += stats.num_drafted
        self.num_accepted += stats.num_accepted
        if plain.stats.decode_speed > 0:
            self.pairs.append(stats.decode_speed / plain.stats.decode_speed)
            self.speeds.append(stats.decode_speed)
        for work in stats.drafters.values():
            for i, (verified, accepted) in enumerate(work.by_position):
                if i == len(self.by_position):
                    self.by_position.append((0, 0))
                before = self.by_position[i]
                self.by_position[i] = before[0] + verified, before[1] + accepted


def contestants(engine: Engine) -> list[Contestant]:
    """Every drafter of the engine alone, models at several depths, at some of them over the whole vocabulary too where they propose over a
    part; then all that `engine.spec` names, always and by the controller."""
    found = []
    for name, drafter in engine.chain.drafters.items():
        alone = replace(engine.spec, drafters=(name,), policy="fixed", n_min=0)
        if isinstance(drafter, ModelDrafter):
            deep = {d: replace(alone, n_max=d) for d in DEPTHS}
            found += [Contestant(name=name, spec=spec, depth=d) for d, spec in deep.items()]
            if drafter.reduced is not None:
                found += [Contestant(name=name, spec=deep[d], depth=d, whole=True) for d in WHOLE_DEPTHS]
        else:
            found.append(Contestant(name=name, spec=alone))
    if engine.spec.drafters:
        for policy in ("fixed", "auto"):
            together = replace(engine.spec, policy=policy)  # type: ignore[arg-type]
            found.append(Contestant(name=f"policy {policy}", spec=together))
        if any(c.whole for c in found):
            found.append(replace(found[-1], whole=True))
    return found


def compare(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    several: Sequence[Contestant],
    *,
    repeat: int,
    max_tokens: int,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Score, list[Score]]:
    """Plain decoding's score and the contestants', behind one unmeasured answer of each to every prompt, in which shapes compile. told:
    answers so far, and in all."""
    plain = Contestant(name=PLAIN, spec=replace(engine.spec, drafters=(), policy="fixed", n_min=0))
    everybody = [plain, *several]
    scores = [Score(name=c.name, depth=c.depth, drafters=c.spec.drafters, whole=c.whole) for c in everybody]
    params = SamplingParams(max_tokens=max_tokens)
    total, done = len(everybody) * (1 + repeat) * len(prompts), 0
    turns = [(p, i > 0) for i in range(1 + repeat) for p in prompts]
    for turn, (prompt, is_measured) in enumerate(turns):
        results: dict[int, Result] = {}
        start = turn % len(everybody)
        for i in [*range(start, len(everybody)), *range(start)]:
            with _proposing(engine, everybody[i].whole):
                results[i] = engine.generate(prompt, params, spec=everybody[i].spec)
            done += 1
            told(done, total)
        if is_measured:
            for i, score in enumerate(scores):
                score.add(results[i], results[0])
    return scores[0], scores[1:]


@contextmanager
def _proposing(engine: Engine, whole: bool) -> Iterator[None]:
    models = [d for d in engine.chain.drafters.values() if isinstance(d, ModelDrafter)]
    before = [d.uses_whole_head for d in models]
    for drafter in models:
        drafter.uses_whole_head = whole
    try:
        yield
    finally:
        for drafter, uses_whole_head in zip(models, before, strict=True):
            drafter.uses_whole_head = uses_whole_head


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """What proposing over a part of the vocabulary costs and saves, at one depth. acceptance, whole_acceptance: accepted shares of drafted
    tokens; read_bytes, whole_read_bytes: bytes that a drafted token reads."""

    name: str
    depth: int
    num_rows: int
    vocab_size: int
    acceptance: float
    whole_acceptance: float
    read_bytes: int
    whole_read_bytes: int


def reductions(engine: Engine, scores: Sequence[Score]) -> list[Reduced]:
    """Of every drafter that proposes over a part, at the depths at which it was tried over the whole too."""
    found = []
    for whole in (s for s in scores if s.whole):
        part = next(s for s in scores if (s.name, s.depth, s.whole) == (whole.name, whole.depth, False))
        drafter = engine.chain.drafters.get(whole.name)
        if not isinstance(drafter, ModelDrafter) or drafter.reduced is None or whole.depth is None:
            continue
        with _proposing(engine, True):
            whole_read = drafter.reads.bytes()
        found.append(
            Reduced(
                name=whole.name,
                depth=whole.depth,
                num_rows=len(drafter.reduced.head.ids),
                vocab_size=drafter.reduced.head.vocab_size,
                acceptance=part.acceptance or 0.0,
                whole_acceptance=whole.acceptance or 0.0,
                read_bytes=int(drafter.reads.bytes()),
                whole_read_bytes=int(whole_read),
            )
        )
    return found


def best(scores: Sequence[Score]) -> Score | None:
    """The fastest contestant that beats plain decoding with the same texts; None where nothing does."""
    faster = [s for s in scores if (s.speedup or 0.0) >= MARGIN]
    return max(faster, key=lambda s: s.speedup or 0.0, default=None)


def is_clear(faster: Score, slower: Score) -> bool:
    """Whether one contestant beats another by more than the pairs of their answers spread: in three of four."""
    ratios = sorted(a / b for a, b in zip(faster.pairs, slower.pairs, strict=True) if b > 0)
    return bool(ratios) and ratios[len(ratios) // 4] > 1.0


def with_lookups(engine: Engine, wanted: bool) -> Engine:
    """The engine with every n-gram drafter besides those it has, where `wanted`; its own default stays."""
    if not wanted:
        return engine
    has = engine.chain.drafters
    spec = engine.spec
    more = [
        ngram_lookup(n, spec.ngram_n, spec.ngram_m, spec.ngram_min_hits) for n in _LOOKUPS if n not in has
    ]
    return Engine(
        engine.model,
        engine.tokenizer,
        drafters=[*has.values(), *more],
        spec=engine.spec,
        config=engine.config,
        name=engine.name,
    )
