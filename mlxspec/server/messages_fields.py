"""The request fields of Anthropic's Messages API: the schema of those that are honoured, and what becomes of the others.

Fields that all APIs share (sampling, drafting, formats) stand beside them under their usual names.
"""

from __future__ import annotations

from mlxspec.server.fields import OFF, Refused
from mlxspec.server.schemas import (
    COMMON,
    DATA_URL,
    MAX_PIXELS,
    MAX_TOOLS,
    TEMPLATE_FIELDS,
    TEXT,
    Schema,
    flag,
    maybe,
    of_kind,
    one_of_kinds,
)

_ID: Schema = {"type": "string", "maxLength": 200}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 200}
_TEXT_BLOCK = of_kind("text", {"text": TEXT}, "type", "text")
_SOURCE: Schema = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["base64", "url"]},
        "media_type": maybe({"type": "string", "description": "not read: the file tells"}),
        "data": {"type": "string", "description": "base64 of an image's file"},
        "url": DATA_URL,
    },
    "required": ["type"],
}
_IMAGE_BLOCK = of_kind("image", {"source": _SOURCE, "max_pixels": MAX_PIXELS}, "type", "source")
_TEXTS: Schema = {"anyOf": [TEXT, {"type": "array", "items": one_of_kinds(_TEXT_BLOCK)}]}
_RESULTS: Schema = {"anyOf": [TEXT, {"type": "array", "items": one_of_kinds(_TEXT_BLOCK, _IMAGE_BLOCK)}]}
_TOOL_USE = of_kind(
    "tool_use", {"id": _ID, "name": _NAME, "input": {"type": "object"}}, "type", "id", "name", "input"
)
_TOOL_RESULT = of_kind(
    "tool_result",
    {"tool_use_id": _ID, "content": maybe(_RESULTS), "is_error": flag()},
    "type",
    "tool_use_id",
)
_THINKING = of_kind(
    "thinking",
    {"thinking": TEXT, "signature": maybe({"type": "string", "description": "not read"})},
    "type",
    "thinking",
)
_REDACTED = of_kind(
    "redacted_thinking",
    {"data": {"type": "string", "description": "not read: nothing here can decrypt it"}},
    "type",
)
_BLOCKS: Schema = {
    "type": "array",
    "items": one_of_kinds(_TEXT_BLOCK, _IMAGE_BLOCK, _TOOL_USE, _TOOL_RESULT, _THINKING, _REDACTED),
}
_MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": ["user", "assistant", "system"]},
        "content": {"anyOf": [TEXT, _BLOCKS]},
    },
    "required": ["role", "content"],
}
_TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": maybe(
            {
                "type": "string",
                "maxLength": 200,
                "description": "`custom`; tools of other types, which the provider runs or describes, are left out",
            }
        ),
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"},
        "description": maybe(TEXT),
        "input_schema": {"type": "object"},
        "strict": flag(),
    },
    "required": ["name"],
}
_ALONE: dict[str, Schema] = {"disable_parallel_tool_use": flag()}
_TOOL_CHOICE = one_of_kinds(
    of_kind("auto", _ALONE, "type"),
    of_kind("any", _ALONE, "type"),
    of_kind("tool", {"name": _NAME, **_ALONE}, "type", "name"),
    of_kind("none", None, "type"),
)
_DISPLAY = maybe({"type": "string", "enum": ["summarized", "omitted"]})
_THINKING_CONFIG = one_of_kinds(
    of_kind("enabled", {"budget_tokens": COMMON["thinking_budget"], "display": _DISPLAY}, "type"),
    of_kind("adaptive", {"display": _DISPLAY}, "type"),
    of_kind("disabled", None, "type"),
)
_OUTPUT: Schema = {
    "type": "object",
    "properties": {
        "effort": TEMPLATE_FIELDS["reasoning_effort"],
        "format": maybe(of_kind("json_schema", {"schema": {"type": "object"}}, "type", "schema")),
    },
}
_ELSEWHERE = ("n", "n_cmpl", "n_predict", "stop", "stream_options")
_PROMPT: dict[str, Schema] = {
    "model": COMMON["model"],
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": 20_000},
    "system": maybe(_TEXTS),
    "tools": maybe({"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS}),
    "tool_choice": maybe(_TOOL_CHOICE),
    "thinking": maybe(_THINKING_CONFIG),
    "output_config": maybe(_OUTPUT),
    **TEMPLATE_FIELDS,
}
MESSAGES: Schema = {
    "type": "object",
    "properties": {
        **{name: schema for name, schema in COMMON.items() if name not in _ELSEWHERE},
        **_PROMPT,
        "stop_sequences": maybe(
            {
                "type": "array",
                "items": {"type": "string", "minLength": 1, "maxLength": 1000},
                "maxItems": 16,
            }
        ),
    },
    "required": ["messages", "max_tokens"],
}
COUNT_TOKENS: Schema = {"type": "object", "properties": _PROMPT, "required": ["messages"]}

_ONE_ANSWER = Refused(why="an answer of this API is one message", neutral=(1,))
_NO_LOGPROBS = Refused(
    why="this API has no place for log-probabilities; /v1/chat/completions has", neutral=OFF
)
MESSAGES_REFUSED = {
    "n": _ONE_ANSWER,
    "n_cmpl": _ONE_ANSWER,
    "logprobs": _NO_LOGPROBS,
    "top_logprobs": _NO_LOGPROBS,
    "stop": Refused(why="use stop_sequences", neutral=OFF),
    "n_predict": Refused(why="use max_tokens"),
    "max_completion_tokens": Refused(why="use max_tokens"),
    "stream_options": Refused(why="usage always comes in a stream", neutral=OFF),
    "response_format": Refused(why="use output_config.format"),
    "parallel_tool_calls": Refused(why="use tool_choice.disable_parallel_tool_use", neutral=(True,)),
    "continue_final_message": Refused(why="a last message of the assistant's is continued", neutral=(True,)),
    "add_generation_prompt": Refused(why="the last message decides", neutral=(True,)),
    "modalities": Refused(why="this server has text only", neutral=(["text"],)),
    "mcp_servers": Refused(why="this server calls no other servers", neutral=OFF),
    "container": Refused(why="this server runs no tools"),
    "output_format": Refused(why="use output_config.format"),
}
_CACHE = "about caching; what is reused never changes an answer"
MESSAGES_HARMLESS = {
    "cache_control": _CACHE,
    "system[].cache_control": _CACHE,
    "messages[].content[].content[].cache_control": _CACHE,
    "inference_geo": "there is one machine",
    "speed": "there is one machine",
    "anthropic_version": "there is one version",
    "anthropic_beta": "there is one version",
    "user_profile_id": "bookkeeping of the client's",
    "system[].citations": "answers have no citations",
    "messages[].content[].citations": "answers have no citations",
    "messages[].content[].caller": "tools are called by the model only",
    "tools[].eager_input_streaming": "arguments are always streamed while they are written",
    "tools[].allowed_callers": "tools are called by the model only",
}
