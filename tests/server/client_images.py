"""An image from openai-agents and from litellm, over each API's form. Arguments: the base URL with /v1, and JSON with `url` (a data: URL),
`question` and `regex`, which ends the answers to openai-agents: it raises for a response that a limit has cut. Prints the answers as
JSON, one a line."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import warnings
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
warnings.simplefilter("ignore")
import agents  # noqa: E402
import litellm  # noqa: E402
import openai  # noqa: E402

BASE, GIVEN = sys.argv[1], json.loads(sys.argv[2])
ROOT = BASE.removesuffix("/v1")


async def agent(kind: type[Any]) -> str:
    async with openai.AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0) as client:
        made = agents.Agent(
            name="reader",
            model=kind(model="demo", openai_client=client),
            model_settings=agents.ModelSettings(
                max_tokens=120, temperature=0, extra_body={"regex": GIVEN["regex"]}
            ),
        )
        parts = [
            {"type": "input_image", "detail": "auto", "image_url": GIVEN["url"]},
            {"type": "input_text", "text": GIVEN["question"]},
        ]
        result = await agents.Runner.run(made, [{"role": "user", "content": parts}], max_turns=1)
    return str(result.final_output)


def completion(model: str, base: str) -> str:
    parts = [
        {"type": "image_url", "image_url": {"url": GIVEN["url"]}},
        {"type": "text", "text": GIVEN["question"]},
    ]
    given = {"max_tokens": 20, "temperature": 0, "messages": [{"role": "user", "content": parts}]}
    found = litellm.completion(model=model, api_base=base, api_key="none", **given)
    return str(found.choices[0].message.content)


agents.set_tracing_disabled(True)
for one in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
    print(json.dumps([one.__name__, asyncio.run(agent(one))]))
for name, address in (
    ("openai/demo", BASE),
    ("anthropic/demo", ROOT),
    ("openai/responses/demo", BASE),
    ("ollama_chat/demo", ROOT),
):
    print(json.dumps([name, completion(name, address)]))
