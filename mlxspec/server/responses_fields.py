"""The request fields of OpenAI's Responses API: the schema of those that are honoured, and what becomes of the others.

Fields that all APIs share (sampling, drafting, formats) stand beside them under their usual names.
"""

from __future__ import annotations

from mlxspec.server.fields import OFF, Refused
from mlxspec.server.schemas import (
    COMMON,
    INPUT_IMAGE,
    MAX_TOOLS,
    TEMPLATE_FIELDS,
    TEXT,
    Schema,
    flag,
    maybe,
    of_kind,
    one_of_kinds,
)

_ID: Schema = maybe({"type": "string", "maxLength": 200})
_CALL_ID: Schema = {"type": "string", "minLength": 1, "maxLength": 200}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 200}


_PARTS: Schema = {
    "type": "array",
    "items": one_of_kinds(
        *(of_kind(kind, {"text": TEXT}, "type", "text") for kind in ("input_text", "output_text", "text")),
        of_kind("refusal", {"refusal": TEXT}, "type", "refusal"),
        INPUT_IMAGE,
    ),
}
_CONTENT: Schema = {"anyOf": [TEXT, _PARTS]}
_STATED: dict[str, Schema] = {"id": _ID, "status": maybe({"type": "string", "maxLength": 40})}
_THOUGHTS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"type": "string"}, "text": TEXT},
        "required": ["text"],
    },
}
_ITEM: Schema = one_of_kinds(
    of_kind(
        "message",
        {
            **_STATED,
            "role": {"type": "string", "enum": ["user", "assistant", "system", "developer"]},
            "content": _CONTENT,
        },
        "role",
        "content",
    ),
    of_kind(
        "function_call",
        {**_STATED, "call_id": _CALL_ID, "name": _NAME, "arguments": TEXT},
        "type",
        "call_id",
        "name",
        "arguments",
    ),
    of_kind(
        "function_call_output",
        {**_STATED, "call_id": _CALL_ID, "output": _CONTENT},
        "type",
        "call_id",
        "output",
    ),
    of_kind(
        "reasoning",
        {
            **_STATED,
            "summary": maybe(_THOUGHTS),
            "content": maybe(_THOUGHTS),
            "encrypted_content": maybe(TEXT),
        },
        "type",
    ),
    of_kind(
        "custom_tool_call",
        {**_STATED, "call_id": _CALL_ID, "name": _NAME, "input": TEXT},
        "type",
        "call_id",
        "name",
        "input",
    ),
    of_kind(
        "custom_tool_call_output",
        {**_STATED, "call_id": _CALL_ID, "output": _CONTENT},
        "type",
        "call_id",
        "output",
    ),
    default="message",
)
_TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {
            "type": "string",
            "maxLength": 200,
            "description": "function or custom; tools of other types, which the provider runs, are left out",
        },
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"},
        "description": maybe(TEXT),
        "parameters": maybe({"type": "object"}),
        "strict": flag(),
        "format": maybe(
            {
                "type": "object",
                "properties": {
                    "type": {"type": "string", "enum": ["text", "grammar"]},
                    "syntax": maybe({"type": "string", "maxLength": 40}),
                    "definition": maybe(TEXT),
                },
                "description": "of a custom tool: told to the model, and not enforced",
            }
        ),
    },
    "required": ["type"],
}
_TOOL_CHOICE: Schema = {
    "anyOf": [
        {"type": "string", "enum": ["none", "auto", "required"]},
        *(of_kind(kind, {"name": _NAME}, "type", "name") for kind in ("function", "custom")),
    ],
    "discriminator": {"propertyName": "type"},
}
_REASONING: Schema = {
    "type": "object",
    "properties": {"effort": TEMPLATE_FIELDS["reasoning_effort"]},
}
_TEXT: Schema = {
    "type": "object",
    "properties": {
        "format": maybe(
            one_of_kinds(
                of_kind("text", None, "type"),
                of_kind("json_object", None, "type"),
                of_kind(
                    "json_schema",
                    {
                        "name": _ID,
                        "description": maybe(TEXT),
                        "schema": {"type": "object"},
                        "strict": flag(),
                    },
                    "type",
                    "schema",
                ),
            )
        )
    },
}
_ELSEWHERE = ("n", "n_cmpl", "n_predict", "max_tokens", "stream_options")
RESPONSES: Schema = {
    "type": "object",
    "properties": {
        **{name: schema for name, schema in COMMON.items() if name not in _ELSEWHERE},
        **TEMPLATE_FIELDS,
        "input": {"anyOf": [TEXT, {"type": "array", "items": _ITEM, "maxItems": 20_000}]},
        "instructions": maybe(TEXT),
        "tools": maybe({"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS}),
        "tool_choice": maybe(_TOOL_CHOICE),
        "parallel_tool_calls": flag(),
        "reasoning": maybe(_REASONING),
        "text": maybe(_TEXT),
        "max_output_tokens": COMMON["max_tokens"],
        "metadata": maybe(
            {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": 64}
        ),
        "previous_response_id": maybe({"type": "string", "maxLength": 200}),
        "store": flag("keep the response for previous_response_id, within max_stored and stored_seconds"),
        "include": maybe({"type": "array", "items": {"type": "string", "maxLength": 200}, "maxItems": 64}),
        "stream_options": maybe({"type": "object", "properties": {}}),
    },
    "required": ["input"],
}

_ONE_ANSWER = Refused(why="an answer of this API is one response", neutral=(1,))
_LENGTH = Refused(why="use max_output_tokens")
_NO_LOGPROBS = Refused(why="this API gives no log-probabilities here; /v1/chat/completions does", neutral=OFF)
RESPONSES_REFUSED = {
    "background": Refused(why="this server answers while the client waits", neutral=(False,)),
    "conversation": Refused(why="use previous_response_id"),
    "prompt": Refused(why="prompts are not stored here"),
    "truncation": Refused(why="a prompt is read whole or refused", neutral=("disabled",)),
    "context_management": Refused(why="a prompt is read whole or refused", neutral=OFF),
    "messages": Refused(why="use input"),
    "n": _ONE_ANSWER,
    "n_cmpl": _ONE_ANSWER,
    "max_tokens": _LENGTH,
    "max_completion_tokens": _LENGTH,
    "n_predict": _LENGTH,
    "logprobs": _NO_LOGPROBS,
    "top_logprobs": _NO_LOGPROBS,
    "response_format": Refused(why="use text.format"),
    "continue_final_message": Refused(why="a last message of the assistant's is continued", neutral=(True,)),
    "add_generation_prompt": Refused(why="the last item decides", neutral=(True,)),
    "modalities": Refused(why="this server has text only", neutral=(["text"],)),
}
_WHOLE = "reasoning is given whole"
_ELSES = "bookkeeping of the client's"
RESPONSES_HARMLESS = {
    "client_metadata": _ELSES,
    "max_tool_calls": "it counts tools that the provider runs, and there are none",
    "reasoning.summary": _WHOLE,
    "reasoning.generate_summary": _WHOLE,
    "text.verbosity": "a hint that only some of OpenAI's models follow",
    "input[].phase": _ELSES,
    "input[].namespace": _ELSES,
    "input[].caller": _ELSES,
    "input[].name": _ELSES,
    "input[].content[].annotations": "not part of what a chat template reads",
    "input[].content[].logprobs": "not part of what a chat template reads",
    "tools[].tools": "of a namespace, which is left out",
    "tools[].defer_loading": "all tools are told to the model",
}
