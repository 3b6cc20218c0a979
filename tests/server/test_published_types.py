"""Every content part, input item and tool type that the SDKs of OpenAI and Anthropic publish, by their own type definitions, in every place
of a conversation: none of them ends one. The table that comes of it stands in docs/server.md."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import anthropic.types.beta as anthropic_types
import openai.types.chat as chat_types
import openai.types.responses as responses_types
import pytest
import typing_extensions
from planting import catches

from mlxspec.server import chat_api, messages_api, responses_api
from mlxspec.server.chat_api import ChatCompletionRequest
from mlxspec.server.errors import BadField
from mlxspec.server.http.body import checked
from mlxspec.server.http.limits import ServerLimits
from mlxspec.server.job import ChatRequest
from mlxspec.server.messages_api import MessagesRequest
from mlxspec.server.responses_api import ResponsesRequest

pytestmark = pytest.mark.filterwarnings("ignore")
_PIXEL = "data:image/png;base64,iVBORw0KGgo="
_VALUES = {str: "x", int: 1, float: 1.0, bool: True, object: {}}
Dict = dict[str, Any]


def example(kind: Any) -> Any:
    """The least value of a type."""
    origin = get_origin(kind)
    if origin in (typing.Required, typing.NotRequired, typing.Annotated) or origin in (
        typing_extensions.Required,
        typing_extensions.NotRequired,
    ):
        return example(get_args(kind)[0])
    if origin is typing.Literal:
        return get_args(kind)[0]
    if origin in (typing.Union, types.UnionType):
        return example(get_args(kind)[0])
    if origin is not None and issubclass(origin, Mapping):
        return {}
    if origin is not None:
        return [example(get_args(kind)[0])]
    if typing.is_typeddict(kind) or typing_extensions.is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        wanted = {
            n: h for n, h in hints.items() if get_origin(h) in (typing.Required, typing_extensions.Required)
        }
        if not wanted:
            wanted = {n: hints[n] for n in kind.__required_keys__}
        return {name: example(hint) for name, hint in wanted.items()}
    return _VALUES.get(kind, "x")


def members(union: Any) -> Iterator[Any]:
    """The typed dictionaries of a union, those of unions within it too."""
    if typing.is_typeddict(union) or typing_extensions.is_typeddict(union):
        yield union
    elif get_origin(union) in (typing.Union, types.UnionType, typing.Annotated):
        for inner in get_args(union):
            yield from members(inner)


def examples(*unions: Any) -> dict[str, Dict]:
    """An example of each type, by its name."""
    found: dict[str, Dict] = {}
    for union in unions:
        for kind in members(union):
            made = example(kind)
            if isinstance(made.get("type"), str):
                found.setdefault(made["type"], made)
    return found


class Api(NamedTuple):
    form: Any
    read: Callable[[Any], ChatRequest]


CHAT = Api(ChatCompletionRequest, chat_api.conversation)
MESSAGES = Api(MessagesRequest, messages_api.conversation)
RESPONSES = Api(ResponsesRequest, responses_api.conversation)

CHAT_PARTS = examples(
    chat_types.ChatCompletionContentPartParam,
    chat_types.chat_completion_assistant_message_param.ContentArrayOfContentPart,
)
CHAT_TOOLS = examples(chat_types.ChatCompletionToolUnionParam)
BLOCKS = examples(anthropic_types.BetaContentBlockParam)
RESULT_BLOCKS = {kind: BLOCKS[kind] for kind in ("text", "image", "search_result", "document")}
MESSAGES_TOOLS = examples(anthropic_types.BetaToolUnionParam)
PARTS = examples(
    responses_types.response_input_message_content_list_param.ResponseInputContentParam,
    responses_types.response_output_message_param.Content,
    responses_types.response_function_call_output_item_param.ResponseFunctionCallOutputItemParam,
)
ITEMS = examples(responses_types.ResponseInputItemParam)
RESPONSES_TOOLS = examples(responses_types.ToolParam)
UNKNOWN = {"type": "hologram", "content": "x"}


def outcome(api: Api, body: Dict) -> str:
    """What becomes of a body: `used`, `left out` with a notice, or `refused` in one sentence."""
    raw = json.dumps({"max_tokens" if api is not RESPONSES else "max_output_tokens": 1, **body}).encode()
    try:
        found = checked(raw, ServerLimits(), api.form)
        request = api.read(found.form)
    except BadField as error:
        return "refused in lines" if "\n" in str(error) else "refused"
    told = [*found.notices, *request.notices]
    return "left out" if any("left out" in n or "no field" in n for n in told) else "used"


def chat_turns(part: Dict, where: str) -> Dict:
    user, text = {"role": "user", "content": "x"}, {"type": "text", "text": "y"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {
        "messages": {
            "newest": [{"role": "user", "content": [text, part]}],
            "earlier": [{"role": "user", "content": [text, part]}, {"role": "assistant", "content": "z"}, user],
            "answer": [user, {"role": "assistant", "content": [part]}, user],
            "result": [
                user, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": [part]},
            ],
        }[where]
    }  # fmt: skip


def messages_turns(block: Dict, where: str) -> Dict:
    user, text = {"role": "user", "content": "x"}, {"type": "text", "text": "y"}
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
    return {
        "messages": {
            "newest": [{"role": "user", "content": [text, block]}],
            "earlier": [
                {"role": "user", "content": [text, block]},
                {"role": "assistant", "content": "z"},
                user,
            ],
            "answer": [user, {"role": "assistant", "content": [block]}, user],
            "result": [
                user,
                use,
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": [block]}],
                },
            ],
            "beside a result": [
                user,
                use,
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}, block]},
            ],
        }[where]
    }


def responses_turns(part: Dict, where: str) -> Dict:
    user, text = {"role": "user", "content": "x"}, {"type": "input_text", "text": "y"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    return {
        "input": {
            "newest": [{"role": "user", "content": [text, part]}],
            "earlier": [
                {"role": "user", "content": [text, part]},
                {"role": "assistant", "content": "z"},
                user,
            ],
            "answer": [user, {"role": "assistant", "content": [part]}, user],
            "result": [user, call, {"type": "function_call_output", "call_id": "c", "output": [part]}],
        }[where]
    }


USERS_ONLY = {"tool_result", "mcp_tool_result"}
ANSWERS_ONLY = {"tool_use", "thinking", "redacted_thinking", "compaction"}
CASES = [
    *(
        (CHAT, chat_turns, p, w)
        for p in [*CHAT_PARTS.values(), UNKNOWN]
        for w in ("newest", "earlier", "answer", "result")
    ),
    *(
        (MESSAGES, messages_turns, b, w)
        for b in [*BLOCKS.values(), UNKNOWN]
        for w in ("newest", "earlier", "answer", "result", "beside a result")
        if not (b["type"] in USERS_ONLY and w != "earlier")
        and not (b["type"] in ANSWERS_ONLY and w != "answer")
    ),
    *(
        (RESPONSES, responses_turns, p, w)
        for p in [*PARTS.values(), UNKNOWN]
        for w in ("newest", "earlier", "answer", "result")
    ),
]


def _id(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else value["type"]
        if isinstance(value, dict)
        else getattr(value, "__name__", "")
    )


@catches(
    "a part that is not known is refused in an earlier turn",
    "mlxspec.server.usable:newest_turn",
    lambda right: lambda turns: 0,
    case="chat_turns-file-earlier",
)
@pytest.mark.parametrize(("api", "turns", "part", "where"), CASES, ids=_id)
def test_no_published_part_ends_a_conversation(api: Api, turns: Any, part: Dict, where: str) -> None:
    part = json.loads(json.dumps(part))
    if part["type"] == "image_url":
        part["image_url"]["url"] = _PIXEL
    if part["type"] == "tool_result":
        part["tool_use_id"] = "c"
        use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
        assert (
            outcome(
                api,
                {"messages": [{"role": "user", "content": "x"}, use, {"role": "user", "content": [part]}]},
            )
            == "used"
        )
        return
    found = outcome(api, turns(part, where))
    is_media = part["type"] in (
        "input_audio",
        "file",
        "input_file",
        "document",
        "container_upload",
        "image",
        "input_image",
    )
    if where == "newest" and is_media:
        assert found in ("refused", "used")
    else:
        assert found in ("used", "left out")
    if part["type"] == "hologram":
        assert found == "left out"


@pytest.mark.parametrize("item", [*ITEMS.values(), UNKNOWN], ids=_id)
def test_no_published_item_ends_a_conversation(item: Dict) -> None:
    user, call = (
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"},
    )
    items = (
        [user, call, item]
        if item["type"].startswith(("function_call_output", "custom_tool_call_output"))
        else [user, item]
    )
    found = outcome(RESPONSES, {"input": [*items, user]})
    assert found in ("used", "left out")
    assert (found == "left out") or item["type"] not in ("hologram", "web_search_call")


@pytest.mark.parametrize(
    ("api", "tool"),
    [
        *((CHAT, t) for t in [*CHAT_TOOLS.values(), {"type": "web_search"}]),
        *((MESSAGES, t) for t in [*MESSAGES_TOOLS.values(), {"type": "hologram"}]),
        *((RESPONSES, t) for t in [*RESPONSES_TOOLS.values(), {"type": "hologram"}]),
    ],
    ids=_id,
)
def test_no_published_tool_ends_a_conversation(api: Api, tool: Dict) -> None:
    body: Dict = {"input": "x"} if api is RESPONSES else {"messages": [{"role": "user", "content": "x"}]}
    found = outcome(api, {**body, "tools": [tool]})
    own = ("function", "custom", "namespace")
    assert found == ("used" if tool["type"] in own else "left out")
    assert len({len(CHAT_PARTS) >= 5, len(BLOCKS) >= 15, len(ITEMS) >= 20, len(RESPONSES_TOOLS) >= 8}) == 1


def test_unused_images_of_a_history_are_left_out_and_asked_for_ones_refused() -> None:
    bad = {"type": "image_url", "image_url": {"url": 7}}
    for where, wanted in (("earlier", "left out"), ("result", "left out"), ("newest", "refused")):
        assert outcome(CHAT, chat_turns(bad, where)) == wanted
