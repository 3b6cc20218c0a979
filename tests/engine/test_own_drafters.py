"""`load(drafters=...)`: objects of the user's stand among the drafters by name; what is wrong with them is told before loading; they cannot
write to the text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tiny_models

import mlxspec
from mlxspec import Ask, Draft, Drafter, SamplingParams, SpecConfig
from mlxspec.drafters.checked import History
from mlxspec.engine.engine import Engine
from mlxspec.errors import ConfigError


class Repeat(Drafter):
    name = "repeat"

    def draft(self, asks: list[Ask], sampler) -> list[Draft]:
        return [Draft.of([ask.history[-1]]) for ask in asks]


class Named(Repeat):
    def __init__(self, name: object) -> None:
        self.name = name  # type: ignore[assignment]


class Writes(Drafter):
    """Changes the row's history in one way, and drafts."""

    name = "writes"

    def __init__(self, write: Callable[[list[int]], object]) -> None:
        self._write = write

    def draft(self, asks: list[Ask], sampler) -> list[Draft]:
        for ask in asks:
            self._write(ask.history)  # type: ignore[arg-type]
        return [Draft.of([1]) for _ in asks]


@pytest.mark.parametrize(
    "write",
    [
        lambda h: h.append(5),
        lambda h: h.extend([5]),
        lambda h: h.insert(0, 5),
        lambda h: h.__setitem__(-1, 5),
        lambda h: h.__setitem__(slice(0, 1), []),
        lambda h: h.__delitem__(-1),
        lambda h: h.__iadd__([5]),
        lambda h: h.clear(),
        lambda h: h.sort(),
    ],
)
def test_a_drafter_that_writes_to_a_history_ends_and_the_text_stays(write: Callable) -> None:
    spec = SpecConfig(drafters=("writes",), policy="fixed")
    engine = Engine(tiny_models.target(), drafters=[Writes(write)], spec=spec)
    prompt, params = [3, 4, 5, 4], SamplingParams(max_tokens=8, ignore_eos=True)
    drafted = engine.generate(prompt, params)
    assert drafted.tokens == engine.generate(prompt, params, spec=SpecConfig()).tokens
    (notice,) = drafted.stats.notices
    assert notice.startswith("writes drafting ended: ")
    engine.close()


def test_a_history_is_read_like_a_list() -> None:
    tokens = [3, 4, 5, 4]
    history = History(tokens)
    assert [len(history), history[-1], history.index(4), history.count(4)] == [4, 4, 1, 2]
    assert (list(history), [*reversed(history)], 5 in history) == (tokens, tokens[::-1], True)
    assert (history[1:3], history[-2:], history[::-1]) == ([4, 5], [5, 4], tokens[::-1])
    assert np.asarray(history).tolist() == tokens


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
