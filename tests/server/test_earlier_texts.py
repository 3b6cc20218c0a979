"""Earlier texts on a server: a question asked again is drafted, and texts of different API keys are kept apart."""

from __future__ import annotations

from typing import Any

import pytest
from planting import catches

from mlxspec.server.security import owner_of
from tests.server.serving import Served

openai = pytest.importorskip("openai", reason="the openai package is not installed")


def asked(base: str, key: str, number: int) -> Any:
    """An answer's text, and what became of drafts from earlier texts."""
    with openai.OpenAI(base_url=base, api_key=key, max_retries=0, timeout=120) as client:
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": f"what is a set of {number}?"}],
            max_tokens=32,
            extra_body={"policy": "fixed", "draft": "ngram-mod", "ignore_eos": True},
        )
    drafters = answer.mlxspec["drafters"]
    return answer.choices[0].message.content, drafters.get("suffix", {}).get("accepted", 0)


@catches(
    "all keys share their texts",
    "mlxspec.server.app:owner_of",
    lambda right: lambda headers: "",
)
def test_two_keys_never_see_each_others_texts(demo: Served) -> None:
    first, _ = asked(demo.base, "key-one", 7)
    for key in ("key-two", "key-three"):
        text, accepted = asked(demo.base, key, 7)
        assert (text, accepted) == (first, 0), key
    text, accepted = asked(demo.base, "key-one", 7)
    assert text == first
    assert accepted > 20


def test_owners_are_told_apart_by_every_header_that_holds_a_key() -> None:
    bearer = owner_of({"authorization": "Bearer abc"})
    assert owner_of({"x-api-key": "abc"}) == bearer == owner_of({"authorization": "bearer  abc "})
    assert owner_of({}) != bearer != owner_of({"authorization": "Bearer abd"})
    assert "abc" not in bearer
