"""/openapi.json says what is: every answer of the server fits its schema, and no request that fits a schema, or does not, gives a 5xx."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxspec.server.openapi import document
from tests.server.serving import Served


def test_the_description_is_complete(demo: Served) -> None:
    status, _, data = demo.ask("GET", "/openapi.json")
    assert status == 200
    found = json.loads(data)
    assert found == json.loads(json.dumps(document()))
    assert set(found["paths"]) >= {
        "/v1/chat/completions",
        "/chat/completions",
        "/v1/models",
        "/tokenize",
        "/health",
        "/metrics",
        "/v1/messages",
        "/v1/responses/{name}",
        "/api/chat",
    }
    names = [
        part["operationId"]
        for item in found["paths"].values()
        for m, part in item.items()
        if m != "parameters"
    ]
    assert len(names) == len(set(names))


def _fuzz(demo: Served, num_examples: int) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    chosen = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    schema = schemathesis.openapi.from_dict(document())
    schema.config.update(base_url=f"http://127.0.0.1:{demo.port}")
    for result in schema.get_all_operations():
        operation = result.ok()
        if not operation.path.startswith(("/v1", "/api")) and operation.path != "/":
            continue  # the same routes again

        @settings(
            max_examples=num_examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(
            case=st.one_of(
                operation.as_strategy(),
                operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE),
            )
            if operation.method == "post"
            else operation.as_strategy()
        )
        def one(case: Any) -> None:
            _shorten(case)
            response = case.call(timeout=120)
            case.validate_response(response, checks=chosen)

        one()


def _shorten(case: Any) -> None:
    """Answers of a token or two: what is tested is the shape."""
    path, body = case.operation.path, case.body
    if not isinstance(body, dict) or not path.endswith(ANSWERING):
        return
    name = "max_output_tokens" if path.endswith("/responses") else "max_tokens"
    if path.startswith("/api/"):
        name = "num_predict"
        body = body.setdefault("options", {})
        if not isinstance(body, dict):
            return
    for one in (name, "max_completion_tokens", "n_predict"):
        if isinstance(body.get(one), (int, float)) and (body[one] > 2 or body[one] in (0, -1, -2)):
            body[one] = 2
    if body.get(name) is None:
        body[name] = 2


ANSWERING = (
    "/chat/completions",
    "/completions",
    "/completion",
    "/infill",
    "/messages",
    "/responses",
    "/chat",
    "/generate",
)


def test_schemathesis(demo: Served) -> None:
    _fuzz(demo, 1)


@pytest.mark.slow
def test_schemathesis_at_length() -> None:
    with Served("--max-rows", "4") as served:
        _fuzz(served, 30)
