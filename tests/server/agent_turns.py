"""An agent's conversation: ten turns with tool calls under a header that changes with each request, over Messages or chat completions."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"
HEADER = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"
BUDGET = "<total_tokens>{} tokens left</total_tokens>"
CODER = "You are a coder who looks things up, answers shortly and never guesses. " * 33
TOOL = {
    "name": "look_up",
    "description": "Looks up a function.",
    "parameters": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}},
        "required": ["name"],
    },
}
Job = Callable[[str, dict[str, Any]], dict[str, Any]]


class ClientTurn(NamedTuple):
    """num_prompt, num_cached: tokens. arguments: of the call that the answer is, as an object."""

    num_prompt: int
    num_cached: int
    arguments: dict[str, Any]


def agent_turns(ask: Job, path: str, num_turns: int = 10) -> list[ClientTurn]:
    """A conversation in which each answer is a call, and each later request brings its result. path: MESSAGES or CHAT. The header and the
    budget in the system prompt are others in each request."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what does os.path.join do?"}]
    turns = []
    for number in range(num_turns):
        header, budget = HEADER.format(secrets.token_hex(4)[:5]), BUDGET.format(190_000 - 1731 * number)
        system = f"{header}\n{CODER}\n{budget}"
        found = (_ask_messages if path == MESSAGES else _ask_chat)(ask, system, messages)
        turns.append(found)
        messages += _answered(path, number, found.arguments)
    return turns


def _ask_messages(ask: Job, system: str, messages: Sequence[dict[str, Any]]) -> ClientTurn:
    answer = ask(
        MESSAGES,
        {
            "max_tokens": 80,
            "system": system,
            "messages": list(messages),
            "thinking": {"type": "disabled"},
            "tools": [
                {
                    "name": TOOL["name"],
                    "description": TOOL["description"],
                    "input_schema": TOOL["parameters"],
                }
            ],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
    )
    usage, block = answer["usage"], answer["content"][-1]
    cached = usage["cache_read_input_tokens"]
    return ClientTurn(usage["input_tokens"] + cached, cached, block["input"])


def _ask_chat(ask: Job, system: str, messages: Sequence[dict[str, Any]]) -> ClientTurn:
    answer = ask(
        CHAT,
        {
            "max_tokens": 80,
            "messages": [{"role": "system", "content": system}, *messages],
            "enable_thinking": False,
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    )
    usage, (call,) = answer["usage"], answer["choices"][0]["message"]["tool_calls"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return ClientTurn(usage["prompt_tokens"], cached, json.loads(call["function"]["arguments"]))


def _answered(path: str, number: int, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """What an agent adds to the conversation: the call, and its result."""
    name, said = f"call_{number}", f"{number} uses, in shutil, glob and pathlib."
    if path == MESSAGES:
        use = {"type": "tool_use", "id": name, "name": TOOL["name"], "input": arguments}
        result = {"type": "tool_result", "tool_use_id": name, "content": said}
        return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    function = {"name": TOOL["name"], "arguments": json.dumps(arguments)}
    call = {"id": name, "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": name, "content": said},
    ]


def cached_share(turns: Sequence[ClientTurn]) -> float:
    """Of the prompts' tokens from the second turn on."""
    later = turns[1:]
    return sum(t.num_cached for t in later) / sum(t.num_prompt for t in later)
