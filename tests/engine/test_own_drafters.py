"""`load(drafters=...)`: objects of the user's stand among the drafters by name; what is wrong with them is told before loading."""

from __future__ import annotations

import pytest

import mlxspec
from mlxspec import Ask, Draft, Drafter, SpecConfig
from mlxspec.errors import ConfigError


class Repeat(Drafter):
    name = "repeat"

    def propose(self, asks: list[Ask], sampler) -> list[Draft]:
        return [Draft.of([ask.history[-1]]) for ask in asks]


class Named(Repeat):
    def __init__(self, name: object) -> None:
        self.name = name  # type: ignore[assignment]


@pytest.mark.slow
def test_own_drafters_come_first_or_where_they_are_named() -> None:
    assert mlxspec.load("demo", drafters=[Repeat()]).spec.drafters == (
        "repeat",
        "suffix",
        "ngram-simple",
        "mtp",
    )
    engine = mlxspec.load("demo", drafters=[Repeat()], draft="mtp,repeat")
    assert engine.spec.drafters == ("mtp", "repeat")
    plain = mlxspec.load("demo", draft="off").generate("import os\n")
    for drafters in (("repeat",), ("mtp", "repeat")):
        result = engine.generate("import os\n", spec=SpecConfig(drafters=drafters, policy="fixed", p_min=0.9))
        assert result.tokens == plain.tokens
        assert result.stats.drafters["repeat"].num_drafted > 0


@pytest.mark.parametrize(
    ("drafters", "draft", "says"),
    [
        ([Repeat], "auto", "inherit"),
        (["mtp"], "auto", "inherit"),
        ([Named(None)], "auto", "name"),
        ([Named("two words")], "auto", "name"),
        ([Named("off")], "auto", "name"),
        ([Named("mtp")], "auto", "already"),
        ([Repeat(), Repeat()], "auto", "already"),
        ([Repeat()], "off", "repeat was given"),
        ([Repeat()], "mtp", "repeat was given"),
        ([], "repeat", "no drafter 'repeat'"),
    ],
    ids=[str(i) for i in range(10)],
)
def test_what_is_wrong_is_told_before_anything_is_loaded(drafters: list, draft: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        mlxspec.load("/there-is-no-model-here", drafters=drafters, draft=draft)
