"""A server whose tokenizer has a token without a row: a request that contains it is refused, and the next one is answered."""

from __future__ import annotations

from pathlib import Path

from tests.loading.test_vocabularies_as_published import IMAGE, with_added
from tests.server.serving import Served


def test_a_request_with_such_a_token_is_refused_and_the_next_one_answered(tmp_path: Path) -> None:
    with Served("--model", str(with_added(tmp_path / "model", IMAGE)), "--draft", "off") as served:
        body = {"prompt": f"a {IMAGE}", "max_tokens": 2}
        status, said = served.post("/v1/completions", body)
        assert status == 400
        assert f"the token '{IMAGE}', whose id 2048 is beyond the rows" in said["error"]["message"]
        status, said = served.post("/v1/completions", {**body, "prompt": "b", "logit_bias": {"2048": 1.0}})
        assert status == 400
        status, _ = served.post("/v1/completions", {**body, "prompt": "a b"})
        assert status == 200
        chat = {"messages": [{"role": "user", "content": IMAGE}], "max_tokens": 2}
        assert (
            served.post("/v1/chat/completions", chat)[0] == 200
        )  # a message spells the token and means text
