"""Comparing drafters: everybody answers the same prompts, sums are right, and what does not pay or is not the same text wins nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from planting import catches, rewritten

from mlxspec.bench import plots, tune
from mlxspec.bench.turns import Score, TimedTurn, compare
from mlxspec.config import SamplingParams
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine
from mlxspec.engine.stats import DrafterStats
from mlxspec.errors import ConfigError
from mlxspec.models.head_rows import HeadRows
from mlxspec.models.reads import reads
from tests import tiny_models
from tests.engine import equality

PROMPTS = equality.prompts(3, 2)
GROUPS = [[p] for p in PROMPTS]
TWELVE = SamplingParams(max_tokens=12)


def test_every_contestant_answers_every_prompt_as_often() -> None:
    engine = equality.engine()
    several = tune.contestants(engine)
    depths = [(c.name, c.depth) for c in several]
    assert depths[0] == ("ngram-simple", None)
    for name in ("mtp", "draft-model"):
        assert [d for n, d in depths if n == name] == list(tune.DEPTHS)
    assert [n for n, _ in depths[-2:]] == ["policy fixed", "policy auto"]
    told: list[tuple[int, int]] = []
    plain, scores = compare(engine, GROUPS, several[:3], TWELVE, repeat=2, told=lambda *a: told.append(a))
    total = 4 * (1 + 2) * len(PROMPTS)
    assert told == [(i + 1, total) for i in range(total)]
    for score in (plain, *scores):
        assert score.num_answers == 2 * len(PROMPTS)
        assert len(score.pairs) == 2
        assert score.num_different == 0
        assert score.num_decoded >= score.num_rounds > 0
    assert "nothing was drafted" in plain.ratio.refusal
    assert plain.num_drafted == 0
    mtp = scores[1]
    assert mtp.drafters == ("mtp",)
    assert mtp.works["mtp"].by_position == [(mtp.num_drafted, mtp.num_accepted)]  # depth 1
    assert 0 < mtp.acceptance <= 1


def test_a_part_of_the_vocabulary_is_compared_with_the_whole() -> None:
    target = tiny_models.target()
    rows = HeadRows(target.head_module, range(30, 70), target.vocab_size, capped=target.capped)
    head = Mtp(tiny_models.mtp_head(), target.max_context, rows)
    made = equality.engine([head])
    engine = Engine(made.model, made.tokenizer, drafters=[head], spec=equality.spec("mtp"))
    several = tune.contestants(engine)
    assert [(c.name, c.depth) for c in several if c.whole] == [("mtp", 1), ("mtp", 3), ("policy auto", None)]
    seen: list[bool] = []
    draft = head.draft
    head.draft = lambda *args: seen.append(head.uses_whole_head) or draft(*args)
    some = [c for c in several if c.depth == 3]
    _, scores = compare(engine, GROUPS[:1], some, TWELVE, repeat=1)
    assert set(seen) == {True, False}
    assert not head.uses_whole_head
    assert [s.num_different for s in scores] == [0, 0]
    (found,) = tune.reductions(engine, scores)
    part, whole = scores
    assert (found.name, found.depth, found.num_rows, found.vocab_size) == ("mtp", 3, 40, target.vocab_size)
    assert (found.acceptance, found.whole_acceptance) == (part.acceptance, whole.acceptance)
    assert found.whole_read_bytes - found.read_bytes == reads(target).head - head.reduced.weight_bytes


def score(name: str, *pairs: float, different: int = 0, **more) -> Score:
    """Return a score of turns with these ratios."""
    turns = [TimedTurn(num_decoded=9, seconds=1 / r, num_plain=9, plain_seconds=1.0) for r in pairs]
    counts = {"num_rounds": 3, "num_drafted_rounds": 3, "num_different": different}
    return Score(name=name, drafters=(name,), turns=turns, **(counts | more))


@catches(
    "the last text that differs is told",
    "mlxspec.bench.turns:Score.compare",
    rewritten(
        "self.different or next(iter(differing), None)", "next(iter(differing), None) or self.different"
    ),
)
def test_the_first_text_that_differs_is_told() -> None:
    """Of several in one turn as of several turns; all are counted."""
    found = score("a")
    plain = [SimpleNamespace(tokens=(i,)) for i in range(4)]
    other = [SimpleNamespace(tokens=(i, 0)) for i in range(4)]
    for mixed in ((0,), (2, 3), (1,), ()):
        found.compare([other[i] if i in mixed else plain[i] for i in range(4)][1:], plain[1:])
    assert found.num_different == 3
    assert found.different == (other[2], plain[2])


def test_the_best_beats_plain_decoding_with_the_same_texts() -> None:
    assert tune.best([]) is None
    bad = [
        score("a", 0.9, 1.0, 1.01),
        score("b", 3, 3, 3, different=1),
        score("c"),
        score("d", 1.0, 1.5, 4.0),
    ]
    assert tune.best(bad) is None
    assert tune.best([*bad, score("e", 1.1, 1.1, 1.1), score("f", 1.4, 1.5, 1.6)]).name == "f"


@pytest.mark.parametrize("suffix", plots.FORMATS)
def test_figures_are_drawn(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"figure{suffix}"
    plots.check(path)
    model = [
        score("mtp", 1 + d / 10, depth=d, works={"mtp": DrafterStats(by_position=[(9, 5)] * d)})
        for d in (1, 2)
    ]
    plots.draw(
        path, "a model", {1: 0.01, 2: 0.02}, [*model, score("ngram-simple", 1.2), score("policy auto")]
    )
    assert path.stat().st_size > 1000
    plots.draw(path, "nothing was drafted", {1: 0.01}, [])


def test_figures_that_cannot_be_drawn_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"\.png"):
        plots.check(tmp_path / "figure.jpg")
    with pytest.raises(ConfigError, match="no folder"):
        plots.check(tmp_path / "nowhere" / "figure.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        plots.draw(tmp_path / "folder.png", "", {1: 1.0}, [])
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        plots.check(tmp_path / "figure.png")
