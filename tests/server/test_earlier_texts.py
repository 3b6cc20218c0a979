"""Earlier texts on a server: a question asked again is drafted, and texts of different API keys are kept apart."""

from __future__ import annotations

from typing import Any

import pytest

from mlxspec.server.http.security import owner_of
from tests.server.serving import Served

openai = pytest.importorskip("openai", reason="the openai package is not installed")


# What a fault makes of the server's process: all keys have the earlier texts, or the prefix cache, of one.
FAULTS = {
    "none": "",
    "shared texts": "from mlxspec.drafters import lookup as m; old = m.EarlierRow.__init__\n"
    "m.EarlierRow.__init__ = lambda self, index, owner, num: old(self, index, '', num)",
    "shared prefixes": "from mlxspec.engine.prefix import tree as m; old = m.KeyedText.__init__\n"
    "m.KeyedText.__init__ = lambda self, tokens, owner='', scales=(): old(self, tokens, '', scales)",
}


def asked(base: str, key: str) -> dict[str, Any]:
    """An answer, and all that is counted of it."""
    with openai.OpenAI(base_url=base, api_key=key, max_retries=0, timeout=120) as client:
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "what is a set? " + "and a list, and a tuple? " * 12}],
            max_tokens=32,
            seed=7,
            extra_body={"policy": "fixed", "draft": "ngram-mod", "ignore_eos": True},
        )
    counted = {**answer.usage.model_dump(), **answer.mlxspec}
    return {"text": answer.choices[0].message.content, **counted}


@pytest.mark.parametrize(
    "fault", ["none", *(pytest.param(f, marks=pytest.mark.slow) for f in list(FAULTS)[1:])]
)
def test_nothing_counted_tells_what_another_key_asked(fault: str) -> None:
    with Served("--max-rows", "4", plant=FAULTS[fault]) as served:
        first, other, again = (asked(served.base, key) for key in ("key-one", "key-two", "key-one"))
    assert first["text"] == other["text"] == again["text"]
    if fault == "none":
        assert other == first
    else:
        assert other != first
    # the same key is helped by what it has asked, so that there is something to see
    assert again["prompt_tokens_details"]["cached_tokens"] > 32
    assert again["drafters"]["suffix"]["accepted"] > 20


def test_owners_are_told_apart_by_every_header_that_holds_a_key() -> None:
    bearer = owner_of({"authorization": "Bearer abc"})
    assert owner_of({"x-api-key": "abc"}) == bearer == owner_of({"authorization": "bearer  abc "})
    assert owner_of({}) != bearer != owner_of({"authorization": "Bearer abd"})
    assert "abc" not in bearer
