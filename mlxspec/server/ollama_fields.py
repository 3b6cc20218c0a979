"""The request fields of Ollama's API: the schemas of those that are honoured, and what becomes of the others.

Sampling, drafting and the fields that all APIs share stand in `options`.
"""

from __future__ import annotations

from mlxspec.server.fields import OFF, Refused
from mlxspec.server.schemas import COMMON, IMAGES, MAX_TOOLS, TEMPLATE_FIELDS, TEXT, Schema, flag, maybe

_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 200}
_CALL: Schema = {
    "type": "object",
    "properties": {
        "id": maybe({"type": "string", "maxLength": 200}),
        "function": {
            "type": "object",
            "properties": {"name": _NAME, "arguments": maybe({"type": "object"})},
            "required": ["name"],
        },
    },
    "required": ["function"],
}
_MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": ["system", "user", "assistant", "tool"]},
        "content": maybe(TEXT),
        "images": IMAGES,
        "thinking": maybe(TEXT),
        "tool_calls": maybe({"type": "array", "items": _CALL, "maxItems": MAX_TOOLS}),
        "tool_name": maybe({"type": "string", "maxLength": 200}),
        "tool_call_id": maybe({"type": "string", "maxLength": 200}),
    },
    "required": ["role"],
}
_TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": maybe({"type": "string", "enum": ["function"]}),
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"},
                "description": maybe(TEXT),
                "parameters": maybe({"type": "object"}),
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
}
_ELSEWHERE = ("model", "n", "n_cmpl", "n_predict", "max_tokens", "stream", "stream_options", "logit_bias")
_PREDICT: Schema = {
    "anyOf": [{"type": "integer", "enum": [-1, -2, 0]}, *COMMON["max_tokens"]["anyOf"]],
    "description": "-1 and -2: to the context's end; 0: as if it were left out",
}
OPTIONS: Schema = {
    "type": "object",
    "properties": {
        **{name: schema for name, schema in COMMON.items() if name not in _ELSEWHERE},
        "logit_bias": COMMON["logit_bias"],
        "num_predict": _PREDICT,
        "num_ctx": maybe({"type": "integer", "minimum": 0, "maximum": 1 << 30}),
    },
}
_COMMON: dict[str, Schema] = {
    "model": COMMON["model"],
    "stream": flag("a stream unless this is false"),
    "format": maybe(
        {
            "anyOf": [{"type": "string", "enum": ["", "json"]}, {"type": "object"}],
            "description": "json, or a JSON schema",
        }
    ),
    "think": maybe(
        {"anyOf": [{"type": "boolean"}, {"type": "string", "enum": ["low", "medium", "high", "max"]}]}
    ),
    "options": maybe({"type": "object"}),
    **TEMPLATE_FIELDS,
}
OLLAMA_CHAT: Schema = {
    "type": "object",
    "properties": {
        **_COMMON,
        "messages": maybe({"type": "array", "items": _MESSAGE, "maxItems": 20_000}),
        "tools": maybe({"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS}),
    },
}
OLLAMA_GENERATE: Schema = {
    "type": "object",
    "properties": {
        **_COMMON,
        "prompt": maybe(TEXT),
        "images": IMAGES,
        "system": maybe(TEXT),
        "raw": flag("the prompt is continued as it stands, without the chat template"),
    },
}
OLLAMA_SHOW: Schema = {
    "type": "object",
    "properties": {"model": COMMON["model"], "name": COMMON["model"], "verbose": flag()},
}

_ONE_ANSWER = Refused(why="an answer of this API is one message", neutral=(1,))
_NO_LOGPROBS = Refused(why="this API gives no log-probabilities here; /v1/chat/completions does", neutral=OFF)
_IN_OPTIONS = Refused(why="it is one of the options")
OLLAMA_REFUSED = {
    "context": Refused(why="use /api/chat and send the conversation", neutral=OFF),
    "template": Refused(why="templates come with the model", neutral=OFF),
    "suffix": Refused(why="this model cannot fill in", neutral=OFF),
    "logprobs": _NO_LOGPROBS,
    "top_logprobs": _NO_LOGPROBS,
    "tool_choice": Refused(why="this API has no such field; /v1/chat/completions has", neutral=("auto",)),
    "parallel_tool_calls": Refused(why="/v1/chat/completions has it", neutral=(True,)),
    "response_format": Refused(why="use format"),
    "truncate": Refused(why="a prompt is read whole or refused", neutral=(False,)),
    "shift": Refused(why="the context is not shifted", neutral=(False,)),
    "continue_final_message": Refused(why="a last message of the assistant's is continued", neutral=(True,)),
    "add_generation_prompt": Refused(why="the last message decides", neutral=(True,)),
    "modalities": Refused(why="this server has text only", neutral=(["text"],)),
    "stream_options": Refused(why="usage always comes", neutral=OFF),
    "n": _ONE_ANSWER,
    "n_cmpl": _ONE_ANSWER,
    "max_completion_tokens": Refused(why="use options.num_predict"),
    **{
        name: _IN_OPTIONS
        for name in COMMON
        if name not in ("model", "stream", "stream_options", "n", "n_cmpl", "max_tokens", "n_predict")
    },
    "max_tokens": Refused(why="use options.num_predict"),
    "n_predict": Refused(why="use options.num_predict"),
}
OPTIONS_REFUSED = {
    "n": _ONE_ANSWER,
    "n_cmpl": _ONE_ANSWER,
    "max_tokens": Refused(why="use num_predict"),
    "n_predict": Refused(why="use num_predict"),
    "tfs_z": Refused(why="this server has no such sampler", neutral=(1,)),
}
_LOADING = "about how a model is loaded, which was done when the server was started"
OPTIONS_HARMLESS = {
    **dict.fromkeys(
        ("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock",
         "embedding_only", "num_thread"),
        _LOADING,
    ),
    "num_keep": "the context is not shifted",
    "penalize_newline": "llama.cpp does not honour it any more either",
}  # fmt: skip
OLLAMA_HARMLESS = {
    "keep_alive": "--idle-unload of the server says how long a model stays",
    "dimensions": "about embeddings",
}
