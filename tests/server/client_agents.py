"""The openai-agents package against a server, over Responses and over chat completions: a tool is called, run, and its result goes back.
Arguments: the base URL with /v1, and JSON with `messages`."""

from __future__ import annotations

import asyncio
import json
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")
import agents  # noqa: E402
import openai  # noqa: E402

QUESTION = json.loads(sys.argv[2])["messages"][0]["content"]


async def run(kind: type[Any]) -> None:
    asked: list[str] = []

    def look_up(name: str) -> str:
        """Look up a function."""
        asked.append(name)
        return "Joins paths."

    async with openai.AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0) as client:
        agent = agents.Agent(
            name="helper",
            instructions="Answer shortly.",
            model=kind(model="demo", openai_client=client),
            model_settings=agents.ModelSettings(
                max_tokens=120, tool_choice="required", parallel_tool_calls=False
            ),
            tools=[agents.function_tool(look_up)],
        )
        result = await agents.Runner.run(agent, QUESTION, max_turns=4)
    assert len(asked) == 1
    names = [type(item).__name__ for item in result.new_items]
    assert names[:2] == ["ToolCallItem", "ToolCallOutputItem"]
    assert isinstance(result.final_output, str)
    print(kind.__name__)


agents.set_tracing_disabled(True)
for one in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
    asyncio.run(run(one))
print("all of it works")
