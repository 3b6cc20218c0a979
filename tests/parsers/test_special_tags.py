"""Tags that are special tokens reach the parser: the same pieces as from the text itself, in the chat and from the server."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.cli.conversation import Conversation
from mlxspec.cli.interrupt import Interrupt
from mlxspec.config import SamplingParams
from mlxspec.engine.load import load
from mlxspec.loading.template import ChatTemplate
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.parsers.formats import CHANNEL, ChatFormat, detect
from mlxspec.parsers.pieces import CallArguments, CallStart, Content, Reasoning, merged
from tests import gemma_tags
from tests.gemma_tags import IDS, MARK, TAGS, saying
from tests.server.serving import Served

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "maxLength": 5},
                    "count": {"type": "integer", "minimum": 0, "maximum": 9},
                },
                "required": ["text", "count"],
            },
        },
    }
]
THOUGHT = "<|channel>thought\nSo: {a}\n<channel|>"
CALL = f"<|tool_call>call:look{{text:{MARK}a < b{MARK},count:3}}<tool_call|>"


@cache
def folder() -> Path:
    return gemma_tags.write(Path(mkdtemp()) / "tags")


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(folder())


def test_the_template_says_which_special_tokens_are_text() -> None:
    made = tokenizer()
    assert detect(made.template.source) == ChatFormat(thinking=CHANNEL, tools="gemma4")
    text = f"<|im_start|>a{THOUGHT}<|think|>b{CALL}<|im_end|>"
    ids = made.encode(text)
    assert set(IDS.values()) <= set(ids)
    shown = f"a{THOUGHT}b{CALL}"
    stream = made.stream()
    assert "".join(stream.push(t) for t in ids) + stream.rest() == shown == made.decode(ids)
    other = Tokenizer.from_folder(folder())
    other.template = ChatTemplate("{{ messages }}", {})
    for tag in TAGS:
        shown = shown.replace(tag, "")
    assert other.decode(ids) == shown
    other.template = None
    assert other.decode(ids) == shown


FRAGMENTS = [
    *TAGS,
    "<|im_start|>",
    "thought\n",
    "call:look{",
    "text:",
    "count:",
    "3",
    "}",
    "{",
    ",",
    "é",
    "<",
    "word",
    "\n",
    " ",
]


@settings(deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join))
def test_tokens_parse_as_the_text_does(text: str) -> None:
    made = tokenizer()
    form, stream = detect(made.template.source), made.stream()
    whole, by_token = form.parser("", TOOLS), form.parser("", TOOLS)
    visible = text.replace("<|im_start|>", "").replace("<|think|>", "")
    wanted = merged([*whole.push(visible), *whole.finish()])
    pieces = [p for t in made.encode(text) for p in by_token.push(stream.push(t))]
    assert merged([*pieces, *by_token.push(stream.rest()), *by_token.finish()]) == wanted


def test_thinking_and_a_call() -> None:
    made = tokenizer()
    parser, stream = detect(made.template.source).parser("", TOOLS), made.stream()
    pieces = [p for t in made.encode(THOUGHT + "Let me see.\n" + CALL) for p in parser.push(stream.push(t))]
    assert merged([*pieces, *parser.finish()]) == [
        Reasoning("So: {a}"),
        Content("Let me see."),
        CallStart(0, "look"),
        CallArguments(0, '{"text": "a < b", "count": 3}'),
    ]


def said(talk: Conversation) -> tuple[str, str]:
    """Thought and answer of a turn."""
    with Interrupt() as interrupt:
        pieces = list(talk.ask("hi", interrupt))
    thought, answer = ("".join(p.text for p in pieces if p.is_thinking == yes) for yes in (True, False))
    reasoning = {"reasoning_content": thought} if thought else {}
    assert talk.turns[-1] == {"role": "assistant", "content": answer, **reasoning}
    return thought, answer


def test_thinking_in_a_chat() -> None:
    engine = load(str(folder()))
    params = SamplingParams(max_tokens=60, lark=saying(THOUGHT + "Hello."))
    assert said(Conversation(engine=engine, params=params, spec=engine.spec)) == ("So: {a}", "Hello.")


def test_a_budget_closes_thinking_that_the_prompt_has_opened() -> None:
    engine = load(str(folder()))
    engine.tokenizer.template = ChatTemplate(gemma_tags.TEMPLATE + "<|channel>thought\n", {})
    params = SamplingParams(max_tokens=20, thinking_budget=6, ignore_eos=True)
    thought, answer = said(Conversation(engine=engine, params=params, spec=engine.spec))
    assert 0 < len(thought) <= 6  # a byte a token, white space around it left out
    assert 0 < len(answer) <= 13  # the tag that was forced is a token too
    assert "channel" not in thought + answer


def test_calls_and_thinking_from_a_server() -> None:
    with Served("--model", f"tags={folder()}", "--max-tokens", "100") as served:
        for more, thinks in (({"thinking_budget": 4}, True), ({"enable_thinking": False}, False)):
            called = served.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **more)
            (choice,) = called["choices"]
            assert choice["finish_reason"] == "tool_calls", choice
            assert not choice["message"].get("content")
            assert bool(choice["message"].get("reasoning_content")) is thinks, choice
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "look"
            assert set(json.loads(call["function"]["arguments"])) == {"text", "count"}

        body = {
            "messages": [{"role": "user", "content": "x"}],
            "tools": TOOLS,
            "lark": saying(THOUGHT + "Look.\n" + CALL),
        }
        status, answer = served.post("/v1/chat/completions", body)
        assert status == 200, answer
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("So: {a}", "Look.")
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"text": "a < b", "count": 3}
        objects, _, done = served.stream("/v1/chat/completions", body)
        assert done
        deltas = [c["delta"] for o in objects for c in o.get("choices", ())]
        assert "".join(d.get("reasoning_content") or "" for d in deltas) == "So: {a}"
        assert "".join(d.get("content") or "" for d in deltas) == "Look."
        parts = [t["function"].get("arguments") or "" for d in deltas for t in d.get("tool_calls") or ()]
        assert json.loads("".join(parts)) == {"text": "a < b", "count": 3}
