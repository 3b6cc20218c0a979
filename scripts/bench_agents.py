"""What an agent's conversation costs a server: ten turns with tool calls under a header that changes with each request, and the next turn
behind a restart.

Starts `mlxspec serve` with the demo model and knows it by HTTP only. The ten turns go over Messages, where the header is left out of the
prompt, and over chat completions, where it stays in. The next turn of a conversation of 1,500 tokens is asked of a server that never
stopped, of one that was restarted with a prefix store on disk, and of one that was restarted without. Texts of all servers must be the
same, or nothing is printed.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_server import Server

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
DOCUMENT = " ".join(f"w{i} word" for i in range(265))  # 1,500 tokens of the demo model
Ask = Callable[[str, dict[str, Any]], dict[str, Any]]


class Turn(NamedTuple):
    """num_prompt, num_cached: tokens. arguments: of the call that the answer is, as an object."""

    num_prompt: int
    num_cached: int
    arguments: dict[str, Any]


def agent_turns(ask: Ask, path: str, num_turns: int = 10) -> list[Turn]:
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


def _ask_messages(ask: Ask, system: str, messages: Sequence[dict[str, Any]]) -> Turn:
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
    return Turn(usage["input_tokens"] + cached, cached, block["input"])


def _ask_chat(ask: Ask, system: str, messages: Sequence[dict[str, Any]]) -> Turn:
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
    return Turn(usage["prompt_tokens"], cached, json.loads(call["function"]["arguments"]))


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


def cached_share(turns: Sequence[Turn]) -> float:
    """Of the prompts' tokens from the second turn on."""
    later = turns[1:]
    return sum(t.num_cached for t in later) / sum(t.num_prompt for t in later)


class Next(NamedTuple):
    """The turn behind a restart. seconds: to an answer of one token; num_read: tokens of the prompt; text: of a longer answer."""

    seconds: float
    num_read: int
    text: str


def _chat(server: Server, messages: Sequence[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
    body = {"messages": list(messages), "max_tokens": max_tokens, "temperature": 0, "policy": "fixed"}
    return server.ask(body)


def next_turn(server: Server, messages: Sequence[dict[str, Any]]) -> Next:
    started = time.perf_counter()
    answer = _chat(server, messages, 1)
    seconds, usage = time.perf_counter() - started, answer["usage"]
    num_read = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    return Next(seconds, num_read, _chat(server, messages, 60)["choices"][0]["message"]["content"])


def restarts(repeat: int) -> dict[str, list[Next]]:
    """The next turn as each kind of server answers it."""
    question = {"role": "user", "content": f"{DOCUMENT} what does os.path.join do?"}
    found: dict[str, list[Next]] = {
        "never stopped": [],
        "restarted, with --prefix-disk": [],
        "restarted, without": [],
    }
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            disk = ("--policy", "fixed", "--prefix-disk", "1G", "--prefix-dir", f"{folder}/prefix")
            for kind, options, stops in (
                ("never stopped", disk[:2], False),
                ("restarted, with --prefix-disk", disk, True),
                ("restarted, without", disk[:2], True),
            ):
                server = Server(*options)
                try:
                    said = _chat(server, [question], 60)["choices"][0]["message"]
                    if stops:
                        time.sleep(1.0)  # idle, as between two turns
                        server.stop()
                        server = Server(*options)
                        _chat(server, [{"role": "user", "content": "hello"}], 1)  # compiles what rounds need
                    again = {"role": "user", "content": "and what does sorted do?"}
                    found[kind].append(next_turn(server, [question, said, again]))
                finally:
                    server.stop()
    if len({one.text for several in found.values() for one in several}) != 1:
        raise SystemExit("The texts differ, so their times say nothing.")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3, help="restarts of each kind")
    args = parser.parse_args()
    server = Server()
    try:
        handled, kept = (
            agent_turns(lambda path, body: server.ask(body, path), path) for path in (MESSAGES, CHAT)
        )
    finally:
        server.stop()
    print(
        "cached tokens of the prompts of an agent's ten turns, under a header that changes with each request"
    )
    print(f"{'turn':>4} {'left out (Messages)':>22} {'kept (chat completions)':>26}")
    for number, (one, other) in enumerate(zip(handled, kept, strict=True), 1):
        pairs = (f"{t.num_cached} of {t.num_prompt}" for t in (one, other))
        print(f"{number:4} {next(pairs):>22} {next(pairs):>26}")
    print(f"2-10 {cached_share(handled):22.1%} {cached_share(kept):26.1%}\n")
    print(f"the next turn of a conversation of 1,500 tokens (median of {args.repeat})")
    for kind, several in restarts(args.repeat).items():
        seconds = statistics.median(one.seconds for one in several)
        num_read = max(one.num_read for one in several)
        print(f"{kind:32} {num_read:5} tokens read, {seconds * 1e3:6.0f} ms to the first token")


if __name__ == "__main__":
    main()
