"""One scenario in every API's form: the body of a request, what its answer says, and what its stream says.

A scenario is a chat that all APIs can ask for. The prompts that it becomes are the same, so the answers must be.
"""

from __future__ import annotations

import http.client
import json
import random
from dataclasses import dataclass
from typing import Any

from tests.server.serving import LONG, Served
from tests.server.stream_grammar import ChatGrammar, MessagesGrammar, OllamaGrammar, ResponsesGrammar

TOOL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "full": {"type": "boolean"},
        "kind": {"type": "string", "enum": ["function", "class"]},
    },
    "required": ["name", "full", "kind"],
}
TOOL_NAMES = ("look_up", "forget")
QUESTIONS = (
    "what does os.path.join do?",
    "what does sorted do?",
    "what does json.dumps do?",
    "what does shutil.copy do?",
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """tool: None for no tools, else auto, required or the name of one. called: an earlier turn called a tool. thinks: None leaves
    thinking to the template."""

    question: str
    system: str | None = None
    called: bool = False
    tool: str | None = None
    thinks: bool | None = None
    budget: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int = 24
    seed: int | None = None
    draft: str = "auto"

    @property
    def shared(self) -> dict[str, Any]:
        """The fields that have the same name everywhere."""
        sampled = {} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        return {"draft": self.draft, "policy": "fixed", "max_tokens": self.max_tokens, **sampled}


def scenario(rng: random.Random) -> Scenario:
    """A random one."""
    tool = rng.choice([None, None, "auto", "required", TOOL_NAMES[0]])
    thinks = rng.choice([None, False, False, True])
    return Scenario(
        question=rng.choice(QUESTIONS),
        system=rng.choice([None, "Answer shortly."]),
        called=tool is not None and rng.random() < 0.5,
        tool=tool,
        thinks=thinks,
        budget=rng.choice([None, 3, 8]) if thinks else None,
        stop=rng.choice([(), (), (".",), ("path", "zzz"), ("e ",)]),
        max_tokens=rng.choice([1, 6, 24, 24, 80]),
        seed=rng.choice([None, 1, 2, 3]),
        draft=rng.choice(["auto", "off", "mtp"]),
    )


@dataclass(frozen=True)
class Result:
    """What an answer said, whole or streamed. calls: (name, arguments), the arguments as an object where they are one. reason: OpenAI's."""

    text: str
    thinking: str
    calls: tuple[tuple[str, Any], ...]
    reason: str
    num_prompt: int
    num_generated: int


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {"arguments": arguments}


class ChatForm:
    """OpenAI's chat completions."""

    grammar = ChatGrammar
    name, path = "chat", "/v1/chat/completions"

    def body(self, s: Scenario) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": s.system}] if s.system else []
        messages.append({"role": "user", "content": s.question})
        if s.called:
            function = {"name": TOOL_NAMES[0], "arguments": '{"name": "x"}'}
            call = {"id": "call_1", "type": "function", "function": function}
            messages += [
                {"role": "assistant", "content": "I look.", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "Joins paths."},
            ]
        out: dict[str, Any] = {**s.shared, "messages": messages}
        if s.tool is not None:
            out["tools"] = [
                {"type": "function", "function": {"name": n, "parameters": TOOL_SCHEMA}} for n in TOOL_NAMES
            ]
            named = {"type": "function", "function": {"name": s.tool}}
            out["tool_choice"] = s.tool if s.tool in ("auto", "required") else named
            out["parallel_tool_calls"] = False
        if s.thinks is not None:
            out["enable_thinking"] = s.thinks
        if s.budget is not None:
            out["thinking_budget"] = s.budget
        if s.stop:
            out["stop"] = list(s.stop)
        return out

    def whole(self, answer: dict[str, Any]) -> Result:
        (choice,) = answer["choices"]
        message = choice["message"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        return Result(
            text=message["content"] or "",
            thinking=message.get("reasoning_content", ""),
            calls=tuple((n, _parsed(a)) for n, a in calls),
            reason=choice["finish_reason"],
            num_prompt=answer["usage"]["prompt_tokens"],
            num_generated=answer["usage"]["completion_tokens"],
        )

    def stream_body(self, s: Scenario) -> dict[str, Any]:
        return {**self.body(s), "stream": True, "stream_options": {"include_usage": True}}

    def streamed(self, said: ChatGrammar) -> Result:
        return Result(
            text=said.text,
            thinking=said.thinking,
            calls=tuple((n, _parsed(a)) for n, a in said.calls),
            reason=said.reason or "",
            num_prompt=said.usage["prompt_tokens"],
            num_generated=said.usage["completion_tokens"],
        )


class MessagesForm:
    """Anthropic's Messages."""

    grammar = MessagesGrammar
    name, path = "messages", "/v1/messages"
    _REASONS = {  # noqa: RUF012
        "end_turn": "stop",
        "stop_sequence": "stop",
        "max_tokens": "length",
        "model_context_window_exceeded": "length",
        "tool_use": "tool_calls",
    }

    def body(self, s: Scenario) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": s.question}]}]
        if s.called:
            use = {"type": "tool_use", "id": "toolu_1", "name": TOOL_NAMES[0], "input": {"name": "x"}}
            result = {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [{"type": "text", "text": "Joins paths."}],
            }
            messages += [
                {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
                {"role": "user", "content": [result]},
            ]
        out: dict[str, Any] = {**s.shared, "model": "demo", "messages": messages}
        if s.system:
            out["system"] = [{"type": "text", "text": s.system, "cache_control": {"type": "ephemeral"}}]
        if s.tool is not None:
            out["tools"] = [{"name": n, "input_schema": TOOL_SCHEMA} for n in TOOL_NAMES]
            kinds: dict[str, Any] = {"auto": {"type": "auto"}, "required": {"type": "any"}}
            choice = kinds.get(s.tool, {"type": "tool", "name": s.tool})
            out["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
        if s.thinks is not None:
            out["thinking"] = {"type": "enabled" if s.thinks else "disabled"}
            if s.budget is not None:
                out["thinking"]["budget_tokens"] = s.budget
        if s.stop:
            out["stop_sequences"] = list(s.stop)
        return out

    def whole(self, answer: dict[str, Any]) -> Result:
        blocks, usage = answer["content"], answer["usage"]
        return Result(
            text="".join(b["text"] for b in blocks if b["type"] == "text"),
            thinking="".join(b["thinking"] for b in blocks if b["type"] == "thinking"),
            calls=tuple((b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"),
            reason=self._REASONS[answer["stop_reason"]],
            num_prompt=usage["input_tokens"] + usage["cache_read_input_tokens"],
            num_generated=usage["output_tokens"],
        )

    def stream_body(self, s: Scenario) -> dict[str, Any]:
        return {**self.body(s), "stream": True}

    def streamed(self, said: MessagesGrammar) -> Result:
        usage = said.usage
        return Result(
            text=said.text,
            thinking=said.thinking,
            calls=tuple((n, _parsed(a)) for n, a in said.calls),
            reason=self._REASONS[said.stop_reason or ""],
            num_prompt=usage["input_tokens"] + usage["cache_read_input_tokens"],
            num_generated=usage["output_tokens"],
        )


class ResponsesForm:
    """OpenAI's Responses."""

    grammar = ResponsesGrammar
    name, path = "responses", "/v1/responses"

    def body(self, s: Scenario) -> dict[str, Any]:
        items: list[dict[str, Any]] = [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": s.question}]}
        ]
        if s.called:
            said = {"type": "output_text", "text": "I look.", "annotations": []}
            items += [
                {"type": "message", "role": "assistant", "content": [said], "id": "msg_1"},
                {
                    "type": "function_call",
                    "call_id": "call_1",
                    "name": TOOL_NAMES[0],
                    "arguments": '{"name": "x"}',
                },
                {"type": "function_call_output", "call_id": "call_1", "output": "Joins paths."},
            ]
        out: dict[str, Any] = {**s.shared, "model": "demo", "input": items, "store": False}
        out["max_output_tokens"] = out.pop("max_tokens")
        if s.system:
            out["instructions"] = s.system
        if s.tool is not None:
            out["tools"] = [
                {"type": "function", "name": n, "parameters": TOOL_SCHEMA, "strict": False}
                for n in TOOL_NAMES
            ]
            named = {"type": "function", "name": s.tool}
            out["tool_choice"] = s.tool if s.tool in ("auto", "required") else named
            out["parallel_tool_calls"] = False
        if s.thinks is not None:
            out["enable_thinking"] = s.thinks
        if s.budget is not None:
            out["thinking_budget"] = s.budget
        if s.stop:
            out["stop"] = list(s.stop)
        return out

    def whole(self, answer: dict[str, Any]) -> Result:
        output = answer["output"]

        def text(kind: str) -> str:
            return "".join(i["content"][0]["text"] for i in output if i["type"] == kind)

        calls = tuple((i["name"], _parsed(i["arguments"])) for i in output if i["type"] == "function_call")
        is_whole = answer["status"] == "completed"
        stopped = calls and _is_object(next(i["arguments"] for i in reversed(output) if "arguments" in i))
        return Result(
            text=text("message"),
            thinking=text("reasoning"),
            calls=calls,
            reason="length" if not is_whole else "tool_calls" if stopped else "stop",
            num_prompt=answer["usage"]["input_tokens"],
            num_generated=answer["usage"]["output_tokens"],
        )

    def stream_body(self, s: Scenario) -> dict[str, Any]:
        return {**self.body(s), "stream": True}

    def streamed(self, said: ResponsesGrammar) -> Result:
        result = self.whole(said.response)
        assert (said.text, said.thinking) == (result.text, result.thinking)
        return result


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments or "{}"), dict)
    except ValueError:
        return False


class OllamaForm:
    """Ollama's chat, which has no field for the choice of a tool."""

    grammar = OllamaGrammar
    name, path = "ollama", "/api/chat"

    def body(self, s: Scenario) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": s.system}] if s.system else []
        messages.append({"role": "user", "content": s.question})
        if s.called:
            call = {"function": {"name": TOOL_NAMES[0], "arguments": {"name": "x"}}}
            messages += [
                {"role": "assistant", "content": "I look.", "tool_calls": [call]},
                {"role": "tool", "tool_name": TOOL_NAMES[0], "content": "Joins paths."},
            ]
        options = s.shared
        options["num_predict"] = options.pop("max_tokens")
        if s.budget is not None:
            options["thinking_budget"] = s.budget
        if s.stop:
            options["stop"] = list(s.stop)
        out: dict[str, Any] = {"model": "demo:latest", "messages": messages, "options": options}
        if s.tool is not None:
            out["tools"] = [
                {"type": "function", "function": {"name": n, "parameters": TOOL_SCHEMA}} for n in TOOL_NAMES
            ]
        if s.thinks is not None:
            out["think"] = s.thinks
        return out

    def whole(self, answer: dict[str, Any]) -> Result:
        message = answer["message"]
        calls = tuple(
            (c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())
        )
        reason = answer["done_reason"]
        is_called = calls and not (len(calls[-1][1]) == 1 and "arguments" in calls[-1][1])
        return Result(
            text=message["content"],
            thinking=message.get("thinking", ""),
            calls=calls,
            reason="tool_calls" if reason == "stop" and is_called else reason,
            num_prompt=answer["prompt_eval_count"],
            num_generated=answer["eval_count"],
        )

    def stream_body(self, s: Scenario) -> dict[str, Any]:
        return self.body(s)

    def streamed(self, said: OllamaGrammar) -> Result:
        message = {"content": said.text, "thinking": said.thinking, "tool_calls": said.tool_calls}
        return self.whole({**said.last, "message": message})


FORMS: tuple[Any, ...] = (ChatForm(), MessagesForm(), ResponsesForm(), OllamaForm())


def forms_of(s: Scenario) -> list[Any]:
    """The APIs that a scenario can be asked through."""
    return [f for f in FORMS if f.name != "ollama" or s.tool in (None, "auto")]


def ask(served: Served, form: Any, s: Scenario) -> Result:
    status, answer = served.post(form.path, {**form.body(s), "stream": False})
    assert status == 200, (form.name, s, answer)
    return form.whole(answer)


def ask_streamed(served: Served, form: Any, s: Scenario) -> Result:
    status, _, data = served.ask("POST", form.path, form.stream_body(s))
    assert status == 200, (form.name, s, data)
    return streamed(form, data)


def streamed(form: Any, data: bytes) -> Result:
    """What a whole stream said, which follows the API's grammar."""
    said = form.grammar()
    said.read(data)
    said.finish()
    result: Result = form.streamed(said)
    return result


def leave(served: Served, form: Any, s: Scenario, num_bytes: int) -> None:
    """Job for a stream, read so many bytes, and go away. What came is the beginning of a stream that follows the grammar."""
    data = json.dumps(form.stream_body(s)).encode()
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=LONG)
    try:
        connection.request("POST", form.path, data, {"Content-Type": "application/json"})
        if num_bytes:
            with connection.getresponse() as response:
                assert response.status == 200, (form.name, s)
                form.grammar().read(response.read(num_bytes), is_cut=True)
    finally:
        connection.close()


def expire(served: Served, form: Any, s: Scenario, seconds: float) -> None:
    """Job for a stream that gets so little time. It follows the grammar to its end, or to the error in place of it."""
    body = form.stream_body(s)
    body.get("options", body)["timeout"] = seconds
    status, _, data = served.ask("POST", form.path, body)
    assert status in (200, 408), (form.name, s, data)
    if status == 200:
        said = form.grammar()
        said.read(data)
        assert said.state == "end"
