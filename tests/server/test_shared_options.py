"""An option of sampling is one line of its config class: every API takes it, and hands it to the engine."""

from __future__ import annotations

from typing import Any

import pytest
from planting import catches

import mlxspec
from mlxspec import Engine, SamplingParams
from mlxspec.option import Option, options
from mlxspec.server import chat_api, completions_api, messages_api, ollama_api, responses_api
from mlxspec.server.forms.base import review
from mlxspec.server.prompt import Context

USER = [{"role": "user", "content": "x"}]
APIS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "chat": (chat_api.ChatCompletionRequest, chat_api.read, {"messages": USER}),
    "completions": (completions_api.CompletionRequest, completions_api.read, {"prompt": "x"}),
    "messages": (messages_api.MessagesRequest, messages_api.read, {"messages": USER, "max_tokens": 9}),
    "responses": (responses_api.ResponsesRequest, responses_api.read, {"input": "x"}),
    "ollama": (ollama_api.OllamaChatRequest, ollama_api.read_chat, {"messages": USER}),
}
# Each API has these under names or with a meaning of its own.
OWN = {"max_tokens", "top_logprobs", "seed"}
NUMBERS = [
    own
    for own in options(SamplingParams).values()
    if own.kind in (int, float) and own.body and own.name not in OWN
]


def value(own: Option) -> float:
    """One that is not the default."""
    near = own.low + min(1.0, own.high - own.low) / 2
    return own.low + 1 if own.is_whole else near if near != own.default else near / 2


@pytest.fixture(scope="module")
def engine() -> Engine:
    return mlxspec.load("demo", draft="off")


@catches("options are not read", "mlxspec.server.params:_given", lambda right: lambda form, config: {})
@pytest.mark.parametrize("api", APIS)
def test_every_number_reaches_the_engine(api: str, engine: Engine) -> None:
    form, read, body = APIS[api]
    given = {own.body: value(own) for own in NUMBERS}
    whole = {**body, "options": given} if api == "ollama" else {**body, **given}
    checked, ignored = review(form, whole)
    job, _ = read(checked, Context(engine=engine, defaults=SamplingParams()))
    assert ignored == []
    assert len(NUMBERS) > 10
    found = job.asks[0].params
    assert {own.name: getattr(found, own.name) for own in NUMBERS} == {
        own.name: value(own) for own in NUMBERS
    }
