"""The litellm package against a server, over each API's form: text, stream, tools, JSON schema, log-probabilities. Arguments: the base URL
with /v1, and JSON with `messages`, `tools` and `schema`."""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
warnings.simplefilter("ignore")
import litellm  # noqa: E402

BASE, GIVEN = sys.argv[1], json.loads(sys.argv[2])
MESSAGES, TOOLS, SCHEMA = GIVEN["messages"], GIVEN["tools"], GIVEN["schema"]


def ask(model: str, base: str, **more: Any) -> Any:
    given = {"max_tokens": 20, "messages": MESSAGES, **more}
    return litellm.completion(model=model, api_base=base, api_key="none", **given)


def text_and_stream(model: str, base: str) -> None:
    whole = ask(model, base)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens == 20
    streamed = ask(model, base, stream=True, stream_options={"include_usage": True})
    text = "".join(c.choices[0].delta.content or "" for c in streamed if c.choices)
    assert text == whole.choices[0].message.content


def calls(model: str, base: str) -> None:
    called = ask(model, base, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=150)
    (call,) = called.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == set(TOOLS[0]["function"]["parameters"]["properties"])


def chat() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    shaped = ask("openai/demo", BASE, response_format=form, max_tokens=100)
    assert set(json.loads(shaped.choices[0].message.content)) == set(SCHEMA["properties"])
    logprobs = ask("openai/demo", BASE, max_tokens=3, logprobs=True, top_logprobs=2).choices[0].logprobs
    assert len(logprobs["content"] if isinstance(logprobs, dict) else logprobs.content) == 3
    again = [{"role": "assistant", "content": "x", "reasoning_content": "because"}, MESSAGES[0]]
    assert ask("openai/demo", BASE, messages=[*MESSAGES, *again], max_tokens=2).choices[0].message.content


ROOT = BASE.removesuffix("/v1")
for model, base in (
    ("openai/demo", BASE),
    ("anthropic/demo", ROOT),
    ("openai/responses/demo", BASE),
    ("ollama_chat/demo", ROOT),
):
    text_and_stream(model, base)
    if not model.startswith("ollama"):  # that API cannot ask for a call
        calls(model, base)
    print(model)
chat()
print("all of it works")
