"""The request fields that published APIs name, and whether this server honours, refuses or accepts each without effect.

Each field of OpenAI's, llama.cpp's and vLLM's chat completions is one of:

    honoured   it is in a schema of schemas.py, under this name or as an alias of one (ALIASES)
    refused    the request is an error that names the field, unless its value asks for nothing (REFUSED)
    harmless   it is accepted and changes nothing about the answer (HARMLESS, with the reason)

A field that is in no list is ignored, and the answer's `mlxspec.notices` name it. Nested fields are listed by path; `[]` stands for any
place in a list. tests/server/test_fields.py compares the lists with the published ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxspec.server.check import check, unknown
from mlxspec.server.errors import BadField

ALIASES = {
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "n_cmpl": "n",
    "repeat_penalty": "repetition_penalty",
    "thinking_token_budget": "thinking_budget",
    "thinking_budget_tokens": "thinking_budget",
    "reasoning_budget_tokens": "thinking_budget",
    **{f"speculative.{name}": name for name in ("n_max", "n_min", "p_min")},
}


@dataclass(frozen=True, kw_only=True)
class Refused:
    """why: ends the sentence "FIELD cannot be honoured: ...". neutral: values that ask for nothing and are accepted; null always is.
    only_with: refused only beside one of these fields."""

    why: str
    neutral: tuple[Any, ...] = ()
    only_with: tuple[str, ...] = ()


_NO_SAMPLER = "this server has no such sampler"
_AT_START = "it is chosen when the server is started"
_TEXT_ONLY = "this server has text only"
_NOT_RETURNED = "this server does not return it"
OFF: tuple[Any, ...] = (False, 0, "", [], {})

REFUSED: dict[str, Refused] = {
    # OpenAI
    "functions": Refused(why="use tools", neutral=OFF),
    "function_call": Refused(why="use tool_choice", neutral=("none",)),
    "audio": Refused(why=_TEXT_ONLY),
    "web_search_options": Refused(why="this server does not search"),
    "moderation": Refused(why="this server does not moderate"),
    "suffix": Refused(why="this model cannot fill in", neutral=OFF),
    "best_of": Refused(why="ask for n answers and choose", neutral=(1,)),
    "messages[].function_call": Refused(why="use tool_calls"),
    "messages[].audio": Refused(why=_TEXT_ONLY),
    # other servers' names for OpenAI's reasoning controls
    "reasoning": Refused(why="use reasoning_effort"),
    "thinking": Refused(why="use enable_thinking"),
    # samplers of llama.cpp
    "dry_multiplier": Refused(why=_NO_SAMPLER, neutral=OFF),
    "dynatemp_range": Refused(why=_NO_SAMPLER, neutral=OFF),
    "mirostat": Refused(why=_NO_SAMPLER, neutral=OFF),
    "top_n_sigma": Refused(why=_NO_SAMPLER, neutral=(-1, 0)),
    "typical_p": Refused(why=_NO_SAMPLER, neutral=(1,)),
    "xtc_probability": Refused(why=_NO_SAMPLER, neutral=OFF),
    "adaptive_target": Refused(why=_NO_SAMPLER, neutral=(-1,)),
    "min_keep": Refused(why=_NO_SAMPLER, neutral=(0, 1)),
    "samplers": Refused(why="the order of samplers is fixed", neutral=OFF),
    "repeat_last_n": Refused(
        why="penalties count the whole text",
        neutral=(-1,),
        only_with=("repeat_penalty", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    ),
    # the rest of llama.cpp
    "chat_format": Refused(why="it is read off the chat template"),
    "chat_parser": Refused(why="it is read off the chat template"),
    "generation_prompt": Refused(why="it is read off the chat template"),
    "grammar_lazy": Refused(why="a grammar holds from the first token", neutral=OFF),
    "grammar_triggers": Refused(why="a grammar holds from the first token", neutral=OFF),
    "grammar_type": Refused(why="a grammar is what the request gives"),
    "preserved_tokens": Refused(why="they are read off the chat template", neutral=OFF),
    "reasoning_budget_start_tag": Refused(why="it is read off the chat template"),
    "reasoning_budget_end_tag": Refused(why="it is read off the chat template"),
    "reasoning_budget_end_tags": Refused(why="they are read off the chat template", neutral=OFF),
    "reasoning_budget_message": Refused(why="nothing is written before the closing tag", neutral=OFF),
    "reasoning_control": Refused(why="thinking cannot be ended while it runs", neutral=OFF),
    "reasoning_format": Refused(
        why="reasoning comes as reasoning_content", neutral=("auto", "deepseek", "deepseek-legacy")
    ),
    "parse_tool_calls": Refused(why="calls come as tool_calls", neutral=(True,)),
    "lora": Refused(why=_AT_START, neutral=OFF),
    "n_indent": Refused(why="this server does not indent", neutral=OFF),
    "n_probs": Refused(why="use logprobs and top_logprobs", neutral=OFF),
    "post_sampling_probs": Refused(why="log-probabilities are the model's own", neutral=OFF),
    "response_fields": Refused(why="an answer has all its fields", neutral=OFF),
    "return_tokens": Refused(why="use /completion, which returns them", neutral=OFF),
    "t_max_predict_ms": Refused(why="use timeout", neutral=(-1, 0)),
    "verbose": Refused(why="use /apply-template to see the prompt", neutral=OFF),
    "speculative.type": Refused(why="use draft"),
    "speculative.ngram_size_n": Refused(why=_AT_START),
    "speculative.ngram_size_m": Refused(why=_AT_START),
    "speculative.ngram_min_hits": Refused(why=_AT_START),
    "ngram_dynamic": Refused(why=_AT_START),
    "ngram_static": Refused(why=_AT_START),
    "draft_vocab": Refused(why=_AT_START),
    "draft_bits": Refused(why=_AT_START),
    "draft_kv_bits": Refused(why=_AT_START),
    # vLLM
    "add_special_tokens": Refused(why="the chat template writes them", neutral=(False,)),
    "allowed_token_ids": Refused(why="use a grammar", neutral=OFF),
    "cache_salt": Refused(why="the prefix cache is shared by all clients; --prefix-budget 0 keeps none"),
    "chat_template": Refused(why="templates come with the model"),
    "documents": Refused(why="put them into a message", neutral=OFF),
    "ec_transfer_params": Refused(why="this server runs on one machine"),
    "guided_whitespace_pattern": Refused(why="white space in JSON is fixed"),
    "include_reasoning": Refused(why="leave reasoning_content out where it is read", neutral=(True,)),
    "include_stop_str_in_output": Refused(why="a stop string is not part of the answer", neutral=OFF),
    "kv_transfer_params": Refused(why="this server runs on one machine"),
    "length_penalty": Refused(why="this server has no beam search", neutral=(1,)),
    "logits_processors": Refused(why="code is not taken from requests", neutral=OFF),
    "logprob_token_ids": Refused(why="use top_logprobs"),
    "media_io_kwargs": Refused(why=_TEXT_ONLY, neutral=OFF),
    "min_tokens": Refused(why="use ignore_eos with max_tokens, or a grammar", neutral=OFF),
    "mm_processor_kwargs": Refused(why=_TEXT_ONLY, neutral=OFF),
    "prompt_logprobs": Refused(why=_NOT_RETURNED),
    "repetition_detection": Refused(why="use repetition_penalty"),
    "return_prompt_text": Refused(why="use /apply-template", neutral=OFF),
    "return_token_ids": Refused(why="use /tokenize", neutral=OFF),
    "return_tokens_as_token_ids": Refused(why=_NOT_RETURNED, neutral=OFF),
    "skip_special_tokens": Refused(why="special tokens are no text", neutral=(True,)),
    "stop_token_ids": Refused(why="use stop", neutral=OFF),
    "stream_options.continuous_usage_stats": Refused(why="use timings_per_token", neutral=OFF),
    "structured_outputs.structural_tag": Refused(why="use tools, or lark"),
    "structured_outputs.whitespace_pattern": Refused(why="white space in JSON is fixed"),
    "structured_outputs.disable_additional_properties": Refused(
        why="say additionalProperties in the schema", neutral=OFF
    ),
    "truncate_prompt_tokens": Refused(why="a prompt is read whole or refused", neutral=(-1,)),
    "use_beam_search": Refused(why="this server has no beam search", neutral=OFF),
    "vllm_xargs": Refused(why="this server has no such extensions", neutral=OFF),
    "watermarking": Refused(why="this server does not watermark", neutral=OFF),
}
# /v1/completions has one of its own that chat completions have not; a chat's is vLLM's, and means another thing.
CHAT_REFUSED = {"echo": Refused(why="the message that is continued is not repeated", neutral=OFF)}

_BOOKKEEPING = "bookkeeping of the client's; nothing is stored here"
_CACHE = "about caching; what is reused never changes an answer"
_ONE_MACHINE = "there is one model on one machine, and requests are answered in turn"
_WITHOUT_SWITCH = "has an effect only beside a field that is refused"
HARMLESS: dict[str, str] = {
    # OpenAI
    "user": _BOOKKEEPING,
    "store": _BOOKKEEPING,
    "metadata": _BOOKKEEPING,
    "safety_identifier": _BOOKKEEPING,
    "service_tier": _ONE_MACHINE,
    "prompt_cache_key": _CACHE,
    "prompt_cache_retention": _CACHE,
    "prompt_cache_options": _CACHE,
    "prediction": "a hint for speed; n-gram drafters look at the prompt already",
    "verbosity": "a hint that only some of OpenAI's models follow",
    "stream_options.include_obfuscation": "padding against listeners on a network",
    "messages[].prefix": "an answer goes on with a last message of the assistant's anyway",
    "messages[].refusal": "not part of what a chat template reads",
    "messages[].annotations": "not part of what a chat template reads",
    "messages[].cache_control": _CACHE,
    "messages[].content[].cache_control": _CACHE,
    "messages[].content[].annotations": "not part of what a chat template reads",
    "messages[].tool_calls[].index": "the place of a streamed call, sent back",
    "tools[].cache_control": _CACHE,
    "tools[].defer_loading": _CACHE,
    "tools[].function.defer_loading": _CACHE,
    # llama.cpp
    "cache_prompt": _CACHE,
    "n_cache_reuse": _CACHE,
    "n_keep": "the context is not shifted",
    "n_discard": "the context is not shifted",
    "id_slot": _ONE_MACHINE,
    "t_max_prompt_ms": "llama.cpp does not honour it either",
    "sse_ping_interval": "the server's own interval is 10 s",
    "backend_sampling": "about where sampling runs",
    "dry_base": _WITHOUT_SWITCH,
    "dry_allowed_length": _WITHOUT_SWITCH,
    "dry_penalty_last_n": _WITHOUT_SWITCH,
    "dry_sequence_breakers": _WITHOUT_SWITCH,
    "dynatemp_exponent": _WITHOUT_SWITCH,
    "mirostat_tau": _WITHOUT_SWITCH,
    "mirostat_eta": _WITHOUT_SWITCH,
    "xtc_threshold": _WITHOUT_SWITCH,
    "adaptive_decay": _WITHOUT_SWITCH,
    # vLLM
    "priority": _ONE_MACHINE,
    "request_id": "the id of an answer is the server's; send X-Request-Id to choose the one in headers and log",
    "session_id": _BOOKKEEPING,
    "guided_decoding_backend": "about which library compiles a grammar",
    "return_mm_kwargs": "only other routes read it",
    "return_token_offsets": "only other routes read it",
    "routed_experts_prompt_start": "only other routes read it",
    "spaces_between_special_tokens": "special tokens are no text",
    "stream_interval": "about how text is cut into chunks",
    "structured_outputs.disable_any_whitespace": "white space in JSON is fixed",
    "truncation_side": _WITHOUT_SWITCH,
}

_PLACE = re.compile(r"\[\d+\]")


def review(
    body: Mapping[str, Any],
    schema: Mapping[str, Any],
    refused: Mapping[str, Refused],
    harmless: Mapping[str, str] | None = None,
    under: str = "",
) -> list[str]:
    """Check a body against its schema and these lists. refused, harmless: fields of this API alone, which come first. under: where the body
    stands in the request, like `options`.

    Returns the paths that are in no list, which are ignored. Raises BadField for the first thing that cannot be honoured.
    """
    check(body, schema, under)
    ignored = []
    for path, value in unknown(body, schema, under):
        name = _PLACE.sub("[]", path.removeprefix(f"{under}."))
        if name in (harmless or {}):
            continue
        found = refused.get(name) or REFUSED.get(name)
        if found is not None:
            _refuse(path, value, found, body)
        elif name not in HARMLESS:
            ignored.append(path)
    return ignored


def canonical(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same body with aliases under their own names. Raises BadField where two names of one thing contradict each other."""
    out = {name: value for name, value in body.items() if name not in ALIASES}
    said = {name: name for name in out}
    for alias, name in ALIASES.items():
        value = body.get(alias)
        if value is None:
            continue
        if out.get(name) is not None and out[name] != value:
            raise BadField(alias, f"{alias} and {said[name]} mean the same and contradict each other.")
        out[name], said[name] = value, alias
    return out


def _refuse(path: str, value: Any, refused: Refused, body: Mapping[str, Any]) -> None:
    """Raises BadField unless the value asks for nothing."""
    if value is None or value in refused.neutral:
        return
    if refused.only_with and not any(body.get(name) is not None for name in refused.only_with):
        return
    raise BadField(path, f"{path} cannot be honoured: {refused.why}.")
