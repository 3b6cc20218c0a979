"""JSON schemas of the requests that this server takes. check.py checks with them, and /openapi.json publishes them.

Knows shapes and ranges. What fields mean is request_parsing.py's; what becomes of fields that are not described here is fields.py's.
"""

from __future__ import annotations

from typing import Any, get_args

from mlxspec.config import (
    DRAFTER_NAMES,
    MAX_CONTEXT,
    MAX_DRAFT,
    MAX_TOP_LOGPROBS,
    Acceptance,
    Policy,
)

Schema = dict[str, Any]
MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_TOOLS = 128
_LONG = 1 << 24  # characters


def maybe(schema: Schema) -> Schema:
    """The same, or null, which means what leaving it out means."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    out = {**schema, "type": [*kinds, "null"]}
    if "enum" in schema:
        out["enum"] = [*schema["enum"], None]
    return out


def _number(low: float, high: float, text: str = "", kind: str = "number") -> Schema:
    return maybe({"type": kind, "minimum": low, "maximum": high, **({"description": text} if text else {})})


def integer(low: int, high: int, text: str = "") -> Schema:
    return _number(low, high, text, "integer")


def _limit(low: int, text: str) -> Schema:
    """A number of tokens; -1 stands for no limit, as in llama.cpp and vLLM."""
    number = {"type": "integer", "minimum": low, "maximum": MAX_CONTEXT}
    return {"anyOf": [{"type": "integer", "enum": [-1]}, number, {"type": "null"}], "description": text}


def flag(text: str = "") -> Schema:
    return maybe({"type": "boolean", **({"description": text} if text else {})})


def of_kind(kind: str, properties: dict[str, Schema] | None = None, *required: str) -> Schema:
    """An object whose `type` is this."""
    return {
        "type": "object",
        "properties": {"type": {"type": "string", "enum": [kind]}, **(properties or {})},
        "required": list(required),
    }


def one_of_kinds(*branches: Schema, default: str | None = None) -> Schema:
    """An object of one of these kinds, which its `type` tells. default: the type of an object without one."""
    told: Schema = {"propertyName": "type", **({} if default is None else {"x-default": default})}
    return {"anyOf": list(branches), "discriminator": told}


TEXT: Schema = {"type": "string", "maxLength": _LONG}
_STOP: Schema = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": 1000},
        {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 1000}, "maxItems": 16},
    ]
}
_DRAFTER: Schema = {"type": "string", "enum": list(DRAFTER_NAMES)}

_SCHEMA: Schema = {"type": "object"}
_GRAMMAR_TEXT: Schema = {"type": "string", "minLength": 1, "maxLength": 100_000}
_CHOICES: Schema = {
    "type": "array",
    "items": {"type": "string", "minLength": 1, "maxLength": 10_000},
    "minItems": 1,
    "maxItems": 1000,
}

SAMPLING: dict[str, Schema] = {
    "temperature": _number(0, 100, "0 takes the most likely token; the default is the server's or the model's"),
    "top_p": maybe({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    "top_k": integer(-1, 1 << 30, "0 or -1: off"),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0.01, 100),
    "repeat_penalty": _number(0.01, 100, "llama.cpp's name of repetition_penalty"),
    "presence_penalty": _number(-100, 100),
    "frequency_penalty": _number(-100, 100),
    "seed": integer(-(2**63), 2**64 - 1, "the same seed gives the same text, with drafting and without; -1 draws one"),
    "stop": maybe(_STOP),
    "logit_bias": maybe(
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "propertyNames": {"type": "string", "pattern": "^[0-9]{1,9}$"},
            "maxProperties": 10_000,
        }
    ),
    "ignore_eos": flag(),
    "bad_words": maybe({"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 1000}, "maxItems": 1000}),
    "thinking_budget": _limit(0, "tokens after which thinking is closed; -1: never"),
    "thinking_token_budget": _limit(0, "another name of thinking_budget"),
    "thinking_budget_tokens": _limit(0, "another name of thinking_budget"),
    "reasoning_budget_tokens": _limit(0, "another name of thinking_budget"),
    "regex": maybe({"type": "string", "minLength": 1, "maxLength": 100_000, "description": "the answer matches it"}),
    "lark": maybe({"type": "string", "minLength": 1, "maxLength": 100_000, "description": "the answer is of this grammar"}),
    "json_schema": maybe({"anyOf": [_SCHEMA, _GRAMMAR_TEXT], "description": "the answer is JSON of this schema"}),
    "grammar": maybe({**_GRAMMAR_TEXT, "description": "the answer is of this grammar in GBNF, llama.cpp's form"}),
    "guided_json": maybe({"anyOf": [_SCHEMA, _GRAMMAR_TEXT], "description": "vLLM's name of json_schema"}),
    "guided_regex": maybe({**_GRAMMAR_TEXT, "description": "vLLM's name of regex"}),
    "guided_choice": maybe({**_CHOICES, "description": "the answer is one of these texts"}),
    "guided_grammar": maybe({**_GRAMMAR_TEXT, "description": "a grammar in GBNF or Lark"}),
    "structured_outputs": maybe(
        {
            "type": "object",
            "properties": {
                "json": maybe({"anyOf": [_SCHEMA, _GRAMMAR_TEXT]}),
                "json_object": flag(),
                "regex": maybe(_GRAMMAR_TEXT),
                "choice": maybe(_CHOICES),
                "grammar": maybe(_GRAMMAR_TEXT),
            },
            "description": "vLLM's form of all of these",
        }
    ),
    "max_tokens": _limit(1, "-1: to the context's end"),
    "n_predict": _limit(1, "llama.cpp's name of max_tokens"),
    "n": integer(1, MAX_CHOICES),
    "n_cmpl": integer(1, MAX_CHOICES, "llama.cpp's name of n"),
    "timeout": maybe({"type": "number", "exclusiveMinimum": 0, "maximum": 1e6, "description": "seconds"}),
}  # fmt: skip

DRAFTING: dict[str, Schema] = {
    "draft": maybe(
        {
            "anyOf": [
                {"type": "boolean"},
                {"type": "string", "maxLength": 200},
                {"type": "array", "items": _DRAFTER, "maxItems": 16},
            ],
            "description": "off, auto, or drafters in the order in which they are asked, of those that the server has loaded",
        }
    ),
    "policy": maybe({"type": "string", "enum": list(get_args(Policy))}),
    "acceptance": maybe({"type": "string", "enum": list(get_args(Acceptance))}),
    "n_max": integer(1, MAX_DRAFT, "most tokens a model drafts at once"),
    "n_min": integer(0, MAX_DRAFT, "shorter drafts are dropped"),
    "p_min": _number(0, 1, "a draft ends before a token less probable than this"),
}
# llama.cpp's names for the same
DRAFTING |= {f"speculative.{name}": DRAFTING[name] for name in ("n_max", "n_min", "p_min")}

COMMON: dict[str, Schema] = {
    "model": maybe({"type": "string", "maxLength": 1000}),
    "stream": flag(),
    "stream_options": maybe({"type": "object", "properties": {"include_usage": flag()}}),
    "return_progress": flag("a stream tells how much of the prompt has been read, as llama.cpp's does"),
    "timings_per_token": flag("every chunk of a stream has timings"),
    "return_drafted": flag(
        "every chunk of a stream says how many characters at the beginning of its text were drafted, and who drafted them"
    ),
    **SAMPLING,
    **DRAFTING,
}

# Images are taken out of a body before it is checked (images.py); these describe them to readers.
MAX_PIXELS: Schema = integer(
    1, 1 << 40, "pixels of an image after resizing, below the server's max_image_pixels"
)
DATA_URL: Schema = {"type": "string", "description": "a data: URL with base64; other URLs are refused"}
_DETAIL: Schema = maybe(
    {"type": "string", "enum": ["auto", "low", "high"], "description": "low: 512 x 512 pixels"}
)
IMAGES: Schema = maybe(
    {"type": "array", "items": {"type": "string", "description": "base64 of an image's file"}}
)
INPUT_IMAGE: Schema = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["input_image"]},
        "image_url": DATA_URL,
        "detail": _DETAIL,
        "max_pixels": MAX_PIXELS,
    },
    "required": ["type", "image_url"],
}
_IMAGE_URL: Schema = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["image_url"]},
        "image_url": {
            "type": "object",
            "properties": {"url": DATA_URL, "detail": _DETAIL, "max_pixels": MAX_PIXELS},
            "required": ["url"],
        },
    },
    "required": ["type", "image_url"],
}
_TEXT_PART: Schema = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": TEXT},
    "required": ["type", "text"],
}
_PARTS: Schema = {"type": "array", "items": one_of_kinds(_TEXT_PART, _IMAGE_URL)}
_CALL: Schema = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "maxLength": 200},
        "type": {"type": "string", "enum": ["function"]},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 200},
                "arguments": {
                    "anyOf": [{"type": "string", "maxLength": _LONG}, {"type": "object"}],
                    "description": "a JSON object; what is none is passed on as text",
                },
            },
            "required": ["name", "arguments"],
        },
    },
    "required": ["function"],
}
MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": maybe({"anyOf": [TEXT, _PARTS]}),
        "name": maybe({"type": "string", "maxLength": 200}),
        "tool_call_id": maybe({"type": "string", "maxLength": 200}),
        "tool_calls": maybe({"type": "array", "items": _CALL, "maxItems": MAX_TOOLS}),
        "reasoning_content": maybe(TEXT),
        "reasoning": maybe(TEXT),
    },
    "required": ["role"],
}
_MESSAGES: Schema = {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 20_000}
_FUNCTION: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"},
        "description": maybe(TEXT),
        "parameters": maybe({"type": "object"}),
        "strict": flag(),
    },
    "required": ["name"],
}
_TOOL: Schema = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["function"]}, "function": _FUNCTION},
    "required": ["type", "function"],
}
_TOOL_CHOICE: Schema = {
    "anyOf": [
        {"type": "string", "enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"type": "string", "enum": ["function"]},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string", "minLength": 1, "maxLength": 200}},
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        },
    ]
}
_RESPONSE_FORMAT: Schema = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
        "schema": maybe({"type": "object"}),
        "json_schema": {
            "type": "object",
            "properties": {
                "name": maybe({"type": "string", "maxLength": 200}),
                "description": maybe(TEXT),
                "schema": {"type": "object"},
                "strict": flag(),
            },
            "required": ["schema"],
        },
    },
    "required": ["type"],
}  # fmt: skip
_EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_TEMPLATE: dict[str, Schema] = {
    "enable_thinking": flag(),
    "preserve_thinking": flag("keep the reasoning of earlier turns in the prompt"),
}
_THINKING: dict[str, Schema] = {**_TEMPLATE, "reasoning_effort": maybe({"type": "string", "enum": _EFFORTS})}
# about thinking, in all APIs; they become variables of the chat template
TEMPLATE_FIELDS: dict[str, Schema] = {
    **_THINKING,
    "chat_template_kwargs": maybe({"type": "object", "properties": _THINKING, "additionalProperties": False}),
}

CHAT: Schema = {
    "type": "object",
    "properties": {
        "messages": _MESSAGES,
        **COMMON,
        "max_completion_tokens": COMMON["max_tokens"],
        "add_generation_prompt": flag("false: the prompt ends behind the last message"),
        "continue_final_message": flag(
            "the answer goes on with the last message, the assistant's; so it does unless this is false"
        ),
        "logprobs": flag(),
        "top_logprobs": integer(0, MAX_TOP_LOGPROBS),
        "response_format": maybe(_RESPONSE_FORMAT),
        "tools": maybe({"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS}),
        "tool_choice": maybe(_TOOL_CHOICE),
        "parallel_tool_calls": flag(),
        "modalities": maybe({"type": "array", "items": {"type": "string", "enum": ["text"]}}),
        **TEMPLATE_FIELDS,
    },
    "required": ["messages"],
}

_IDS: Schema = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 1 << 30},
    "minItems": 1,
}
COMPLETION: Schema = {
    "type": "object",
    "properties": {
        "prompt": {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": _LONG},
                _IDS,
                {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": _LONG}, "minItems": 1, "maxItems": MAX_PROMPTS},
                {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        },
        **COMMON,
        "logprobs": integer(0, MAX_TOP_LOGPROBS, "so many likeliest tokens at each place"),
        "echo": flag(),
    },
    "required": ["prompt"],
}  # fmt: skip

# llama.cpp's own form of the same
NATIVE: Schema = {
    "type": "object",
    "properties": {
        **{
            k: v
            for k, v in COMPLETION["properties"].items()
            if k not in ("echo", "logprobs", "stream_options")
        },
        "return_tokens": flag("token ids beside the text"),
    },
    "required": ["prompt"],
}

TOKENIZE: Schema = {
    "type": "object",
    "properties": {
        "model": COMMON["model"],
        "content": maybe(TEXT),
        "messages": maybe(_MESSAGES),
        "tools": CHAT["properties"]["tools"],
        "chat_template_kwargs": CHAT["properties"]["chat_template_kwargs"],
        "add_special": flag("what the tokenizer puts around a plain text"),
        "with_pieces": flag(),
    },
}

DETOKENIZE: Schema = {
    "type": "object",
    "properties": {
        "model": COMMON["model"],
        "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 1 << 30}},
    },
    "required": ["tokens"],
}
