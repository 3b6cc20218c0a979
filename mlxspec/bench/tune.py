"""The ways to draft that `tune` compares with plain decoding, and what follows from their scores. Knows the engine; prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlxspec.bench.turns import Contestant, Score, proposing
from mlxspec.config import DRAFTER_NAMES
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.engine.engine import Engine

DEPTHS = (1, 2, 3, 4, 6, 8)  # tokens a model drafts at once, as tried
WHOLE_DEPTHS = (
    1,
    3,
)  # those at which it proposes over the whole vocabulary too, where it proposes over a part
MARGIN = 1.02  # this much faster than plain decoding, or it beats nothing
_LOOKUPS = tuple(n for n in DRAFTER_NAMES if n.startswith("ngram-"))


def contestants(engine: Engine) -> list[Contestant]:
    """Return each drafter of the engine alone, models at several depths, at some of them over the whole vocabulary too where they
    propose over a part; then all drafters of `engine.spec` together, fixed and by the controller."""
    found = []
    for name, drafter in engine.drafts.drafters.items():
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


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """The costs and savings of proposing over a part of the vocabulary, at one depth. acceptance, whole_acceptance: accepted shares of
    drafted tokens; read_bytes, whole_read_bytes: bytes that a drafted token reads."""

    name: str
    depth: int
    num_rows: int
    vocab_size: int
    acceptance: float
    whole_acceptance: float
    read_bytes: int
    whole_read_bytes: int


def reductions(engine: Engine, scores: Sequence[Score]) -> list[Reduced]:
    """Compare each drafter that proposed over the whole vocabulary with itself over a part of it, at the same depth."""
    found = []
    for whole in (s for s in scores if s.whole):
        part = next(s for s in scores if (s.name, s.depth, s.whole) == (whole.name, whole.depth, False))
        drafter = engine.drafts.drafters.get(whole.name)
        if not isinstance(drafter, ModelDrafter) or drafter.reduced is None or whole.depth is None:
            continue
        with proposing(engine, True):
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
    """Return the contestant with the highest median speed-up over plain decoding on the same texts. Only speed-ups that are settled
    (`Ratio.is_settled`) and at least MARGIN count. Returns None if there is none."""
    faster = [s for s in scores if s.ratio.is_settled and s.ratio.median >= MARGIN]
    return max(faster, key=lambda s: s.ratio.median, default=None)


def is_clear(faster: Score, slower: Score) -> bool:
    """Return whether `faster` has the higher speed in at least three quarters of the turns that both contestants took together; False
    where there are no turns."""
    ratios = sorted(a / b for (a, _), (b, _) in zip(faster.pairs, slower.pairs, strict=True))
    return bool(ratios) and ratios[len(ratios) // 4] > 1.0


def with_lookups(engine: Engine, wanted: bool) -> Engine:
    """Return the engine, where `wanted` with every n-gram drafter in addition to its own. The default drafters of its requests do not
    change."""
    if not wanted:
        return engine
    has = engine.drafts.drafters
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
