"""Names of the request fields that other servers publish for chat completions, read off their sources: facts, to compare our lists with.

llama.cpp: tools/server/server-schema.cpp and oaicompat_chat_params_parse (22 August 2026). vLLM: ChatCompletionRequest and its nested
models (November 2026), and the `guided_*` fields of its earlier versions. OpenAI's come from the installed openai package.
"""

from __future__ import annotations

from typing import get_args

from mlxspec.server.forms.base import Fields

LLAMA_CPP = """
    adaptive_decay adaptive_target add_generation_prompt backend_sampling cache_prompt chat_format chat_parser
    chat_template_kwargs continue_final_message dry_allowed_length dry_base dry_multiplier dry_penalty_last_n
    dry_sequence_breakers dynatemp_exponent dynatemp_range echo frequency_penalty generation_prompt grammar grammar_lazy
    grammar_triggers grammar_type id_slot ignore_eos json_schema logit_bias logprobs lora max_completion_tokens max_tokens
    messages min_keep min_p mirostat mirostat_eta mirostat_tau model n n_cache_reuse n_cmpl n_discard n_indent n_keep n_predict
    n_probs parallel_tool_calls parse_tool_calls post_sampling_probs presence_penalty preserved_tokens reasoning_budget_end_tag
    reasoning_budget_end_tags reasoning_budget_message reasoning_budget_start_tag reasoning_budget_tokens reasoning_control
    reasoning_effort reasoning_format repeat_last_n repeat_penalty response_fields response_format return_progress return_tokens
    samplers seed speculative.n_max speculative.n_min speculative.ngram_min_hits speculative.ngram_size_m speculative.ngram_size_n
    speculative.p_min speculative.type sse_ping_interval stop stream stream_options stream_options.include_usage t_max_predict_ms
    t_max_prompt_ms temperature thinking_budget_tokens timings_per_token tool_choice tools top_k top_logprobs top_n_sigma top_p
    typical_p verbose xtc_probability xtc_threshold
""".split()

VLLM = """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template chat_template_kwargs
    continue_final_message documents ec_transfer_params echo frequency_penalty guided_choice guided_decoding_backend
    guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos include_reasoning include_stop_str_in_output
    kv_transfer_params length_penalty logit_bias logits_processors logprob_token_ids logprobs max_completion_tokens max_tokens
    media_io_kwargs messages min_p min_tokens mm_processor_kwargs model n parallel_tool_calls presence_penalty priority
    prompt_logprobs reasoning_effort repetition_detection repetition_penalty request_id response_format return_mm_kwargs
    return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start seed
    session_id skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
    stream_options.continuous_usage_stats stream_options.include_usage structured_outputs structured_outputs.choice
    structured_outputs.disable_additional_properties structured_outputs.disable_any_whitespace structured_outputs.grammar
    structured_outputs.json structured_outputs.json_object structured_outputs.regex structured_outputs.structural_tag
    structured_outputs.whitespace_pattern temperature thinking_token_budget tool_choice tools top_k top_logprobs top_p
    truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
""".split()


def honoured(form: type[Fields]) -> dict[str, type[Fields] | None]:
    """The names of a form's fields in a body, each with the form of its value, or of its items, where it has one of its own."""
    out: dict[str, type[Fields] | None] = {}
    for name, field in form.model_fields.items():
        kinds = [field.annotation]
        while kinds and not (isinstance(kinds[0], type) and issubclass(kinds[0], Fields)):
            kinds = [*get_args(kinds[0]), *kinds[1:]]
        out[field.alias or name] = kinds[0] if kinds else None
    return out
