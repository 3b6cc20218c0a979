"""Fields and parts that the forms of all APIs share: sampling, drafting, formats and thinking; images; what becomes of other servers'
fields; and the parts of answers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from mlxspec.config import DRAFTER_NAMES, ONE_ACCEPTANCE, SamplingParams, SpecConfig
from mlxspec.server.forms import base as t

MAX_CHOICES = 16
MAX_PROMPTS = 64
ModelName = Annotated[str, Field(max_length=1000)]
Budget = Annotated[int, t.option("thinking_budget")]
Length = Annotated[int, t.option("max_tokens")]
Number = Annotated[int, t.Range(1, MAX_CHOICES)]
Words = Annotated[t.Many[t.Word], Field(max_length=16)]
Choices = Annotated[
    t.Many[Annotated[str, Field(min_length=1, max_length=10_000)]], Field(min_length=1, max_length=1000)
]
Bias = Annotated[float, t.Range(-100, 100)]
Biases = Annotated[dict[Annotated[str, Field(min_length=1, max_length=1000)], Bias], Field(max_length=10_000)]
BiasPairs = Annotated[
    t.Many[Annotated[list[int | float | bool | str], Field(min_length=2, max_length=2)]],
    Field(max_length=10_000),
]
Drafter = Literal[DRAFTER_NAMES]  # type: ignore[valid-type]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# --- what becomes of other fields

BOOKKEEPING = "bookkeeping of the client's; nothing is stored here"
CACHE = t.harmless("cache_control", "about caching; what is reused never changes an answer")
UNREAD = "not part of what a chat template reads"
NO_SAMPLER = "this server has no such sampler"
TEXT_ONLY = "this server has text only"
ONE_MACHINE = "there is one model on one machine, and requests are answered in turn"
IN_TURN = "requests are answered in turn"
_AT_START = "it is chosen when the server is started"
_NOT_RETURNED = "this server does not return it"
_TEMPLATE_TELLS = "it is read off the chat template"
_JSON_SPACE = "white space in JSON is fixed"

REFUSED: dict[str, t.Refused] = {
    # OpenAI
    **t.refuse("functions", "use tools", *t.OFF),
    **t.refuse("function_call", "use tool_choice", "none"),
    **t.refuse("audio", TEXT_ONLY),
    **t.refuse("web_search_options", "this server does not search"),
    **t.refuse("moderation", "this server does not moderate"),
    **t.refuse("suffix", "use /v1/completions or /infill", *t.OFF),
    **t.refuse("best_of", "ask for n answers and choose", 1),
    # other servers' names for OpenAI's reasoning controls, which chat completions honours
    **t.refuse("reasoning", "use reasoning_effort"),
    **t.refuse("thinking", "use enable_thinking"),
    # samplers of llama.cpp
    **t.refuse("dynatemp_range mirostat", NO_SAMPLER, *t.OFF),
    **t.refuse("adaptive_target", NO_SAMPLER, -1),
    **t.refuse("min_keep", NO_SAMPLER, 0, 1),
    **t.refuse("samplers", "the order of samplers is fixed", *t.OFF),
    # the rest of llama.cpp
    **t.refuse("chat_format chat_parser generation_prompt reasoning_budget_start_tag reasoning_budget_end_tag", _TEMPLATE_TELLS),
    **t.refuse("preserved_tokens reasoning_budget_end_tags", "they are read off the chat template", *t.OFF),
    **t.refuse("grammar_lazy grammar_triggers", "a grammar holds from the first token", *t.OFF),
    **t.refuse("grammar_type", "a grammar is what the request gives"),
    **t.refuse("reasoning_budget_message", "nothing is written before the closing tag", *t.OFF),
    **t.refuse("reasoning_control", "thinking cannot be ended while it runs", *t.OFF),
    **t.refuse("reasoning_format", "reasoning comes as reasoning_content", "auto", "deepseek", "deepseek-legacy"),
    **t.refuse("parse_tool_calls", "calls come as tool_calls", True),
    **t.refuse("n_indent", "this server does not indent", *t.OFF),
    **t.refuse("n_probs", "use logprobs and top_logprobs", *t.OFF),
    **t.refuse("post_sampling_probs", "log-probabilities are the model's own", *t.OFF),
    **t.refuse("response_fields", "an answer has all its fields", *t.OFF),
    **t.refuse("return_tokens", "use /completion, which returns them", *t.OFF),
    **t.refuse("t_max_predict_ms", "use timeout", -1, 0),
    **t.refuse("verbose", "use /apply-template to see the prompt", *t.OFF),
    **t.refuse("speculative.type", "use draft"),
    **t.refuse("speculative.ngram_size_n speculative.ngram_size_m speculative.ngram_min_hits ngram_dynamic ngram_static", _AT_START),
    **t.refuse("draft_vocab draft_bits draft_kv_bits", _AT_START),
    # this server's own, which it had
    **t.refuse("acceptance", ONE_ACCEPTANCE),
    # vLLM
    **t.refuse("add_special_tokens", "the chat template writes them", False),
    **t.refuse("cache_salt", "the prefix cache is kept apart by API key"),
    **t.refuse("chat_template", "templates come with the model"),
    **t.refuse("documents", "put them into a message", *t.OFF),
    **t.refuse("ec_transfer_params kv_transfer_params", "this server runs on one machine"),
    **t.refuse("guided_whitespace_pattern", _JSON_SPACE),
    **t.refuse("include_reasoning", "leave reasoning_content out where it is read", True),
    **t.refuse("length_penalty", "this server has no beam search", 1),
    **t.refuse("use_beam_search", "this server has no beam search", *t.OFF),
    **t.refuse("logits_processors", "code is not taken from requests", *t.OFF),
    **t.refuse("logprob_token_ids", "use top_logprobs"),
    **t.refuse("media_io_kwargs mm_processor_kwargs", TEXT_ONLY, *t.OFF),
    **t.refuse("priority", IN_TURN, 0),
    **t.refuse("prompt_logprobs", "/v1/completions has echo with logprobs"),
    **t.refuse("return_tokens_as_token_ids", _NOT_RETURNED, *t.OFF),
    **t.refuse("repetition_detection", "use repetition_penalty"),
    **t.refuse("return_prompt_text", "use /apply-template", *t.OFF),
    **t.refuse("skip_special_tokens", "special tokens are no text", True),
    **t.refuse("truncate_prompt_tokens", "a prompt is read whole or refused", -1),
    **t.refuse("vllm_xargs", "this server has no such extensions", *t.OFF),
    **t.refuse("watermarking", "this server does not watermark", *t.OFF),
}  # fmt: skip


def one_answer(what: str, logprobs: str, last: str) -> dict[str, t.Refused]:
    """Return the table `refused` of an API whose response is one answer. what: the API's name for an answer. logprobs: why it has no
    log-probabilities. last: the API's name for the last part of a conversation, which decides whether the answer continues it."""
    return {
        **REFUSED,
        **t.refuse("n n_cmpl", f"an answer of this API is one {what}", 1),
        **t.refuse("logprobs top_logprobs", f"this API {logprobs}", *t.OFF),
        **t.refuse("return_token_ids", "/v1/chat/completions and /v1/completions return them", *t.OFF),
        **t.refuse("continue_final_message", "a last message of the assistant's is continued", True),
        **t.refuse("add_generation_prompt", f"the last {last} decides", True),
        **t.refuse("modalities", TEXT_ONLY, ["text"]),
    }


NO_LOGPROBS = "gives no log-probabilities here; /v1/chat/completions does"
HARMLESS: dict[str, str] = {
    # OpenAI
    **t.harmless("user store metadata safety_identifier session_id", BOOKKEEPING),
    **t.harmless("service_tier id_slot", ONE_MACHINE),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"), CACHE["cache_control"]),
    **t.harmless("verbosity", "a hint that only some of OpenAI's models follow"),
    # llama.cpp
    **dict.fromkeys(("cache_prompt", "n_cache_reuse"), CACHE["cache_control"]),
    **t.harmless("n_keep n_discard", "the context is not shifted"),
    **t.harmless("t_max_prompt_ms", "llama.cpp does not honour it either"),
    **t.harmless("sse_ping_interval", "the server's own interval is 10 s"),
    **t.harmless("backend_sampling", "about where sampling runs"),
    **t.harmless(
        "dynatemp_exponent mirostat_tau mirostat_eta adaptive_decay truncation_side",
        "has an effect only beside a field that is refused",
    ),
    # vLLM
    **t.harmless("request_id", "the id of an answer is the server's; send X-Request-Id to choose the one in headers and log"),
    **t.harmless("guided_decoding_backend", "about which library compiles a grammar"),
    **t.harmless("return_mm_kwargs return_token_offsets routed_experts_prompt_start", "only other routes read it"),
    **t.harmless("spaces_between_special_tokens", "special tokens are no text"),
    **t.harmless("stream_interval", "about how text is cut into chunks"),
}  # fmt: skip


class Body(t.Fields):
    """A request that names a model."""

    model: ModelName | None = None
    refused = REFUSED
    harmless = HARMLESS


# --- how an answer is generated


class StructuredOutputs(t.Fields):
    """The format of the answer, in vLLM's form."""

    json_: t.Object | t.Grammar | None = t.optional(name="json")
    json_object: t.Flag = None
    regex: t.Grammar | None = None
    choice: Choices | None = None
    grammar: t.Grammar | None = None
    refused: ClassVar = {
        **t.refuse("structural_tag", "use tools, or lark"),
        **t.refuse("whitespace_pattern", _JSON_SPACE),
        **t.refuse("disable_additional_properties", "say additionalProperties in the schema", *t.OFF),
    }
    harmless = t.harmless("disable_any_whitespace", _JSON_SPACE)


class PredictedText(t.Fields):
    type: Literal["text"]
    text: t.Text


class Prediction(t.Fields):
    """The text that the answer will probably be, in the form of OpenAI's predicted outputs."""

    type: Literal["content"]
    content: t.Text | t.Many[PredictedText]


@t.with_options(SpecConfig, under="speculative.")
class Speculative(t.Fields):
    """Options of drafting under llama.cpp's names, in an object."""

    refused: ClassVar = {
        **t.refuse("type types", "use draft"),
        **t.refuse("ngram_size_n ngram_size_m ngram_min_hits", _AT_START),
    }


class Adapter(t.Fields):
    id: Annotated[int, t.Range(0, 1000)]
    scale: Annotated[float, t.Range(-100, 100)] = 1.0


@t.with_options(SpecConfig)
@t.with_options(SamplingParams, without="max_tokens stop seed")
class Generation(t.Fields):
    """Fields that have the same name in every API."""

    return_progress: t.Flag = t.optional(
        "a stream tells how much of the prompt has been read, as llama.cpp's does"
    )
    timings_per_token: t.Flag = t.optional("every chunk of a stream has timings")
    return_drafted: t.Flag = t.optional(
        "every chunk of a stream says how many characters at the beginning of its text were drafted, and who drafted them"
    )
    prove: t.Flag = t.optional(
        "the answer is decoded again without drafts before the response ends, and mlxspec.receipts says whether the text is the same"
    )
    seed: Annotated[int, t.Range(-(2**63), 2**64 - 1)] | None = t.optional(
        "the same seed gives the same text, with drafting and without; -1 draws one"
    )
    logit_bias: Biases | BiasPairs | None = t.optional(
        "by token id or by a text, all of whose tokens are meant; or pairs of one of these and a number, or false for never"
    )
    timeout: Annotated[float, t.Range(0, 1_000_000, above=True)] | None = t.optional("seconds")
    # formats
    grammar: t.Grammar | None = t.optional("the answer is of this grammar in GBNF, llama.cpp's form")
    guided_json: t.Object | t.Grammar | None = t.optional("vLLM's name of json_schema")
    guided_regex: t.Grammar | None = t.optional("vLLM's name of regex")
    guided_choice: Choices | None = t.optional("the answer is one of these texts")
    guided_grammar: t.Grammar | None = t.optional("a grammar in GBNF or Lark")
    structured_outputs: StructuredOutputs | None = None
    lora: ModelName | Annotated[t.Many[Adapter], Field(max_length=64)] | None = t.optional(
        "the adapter that the answer has, by its name; or llama.cpp's list of how much each counts, where those left out do not"
    )
    # drafting
    draft: (
        bool | Annotated[str, Field(max_length=200)] | Annotated[t.Many[Drafter], Field(max_length=16)] | None
    ) = t.optional(
        "off, auto, or drafters in the order in which they are asked, of those that the server has loaded"
    )
    prediction: Prediction | None = t.optional(
        "what the answer will probably be: it is drafted from before other drafters are asked, and never changes the answer"
    )
    # llama.cpp's names of how much is drafted
    speculative: Speculative | None = None
    refused = REFUSED
    harmless = HARMLESS  # fmt: skip


# --- prompts

_Prompt = Annotated[str, Field(min_length=1, max_length=1 << 24)]
_Mixed = Annotated[t.Many[t.TokenId | _Prompt], Field(min_length=1)]


def has_several(prompt: Any) -> bool:
    """Return whether the value of a body's `prompt` is several prompts. A list that contains a number is one prompt: of token ids, and
    texts between them."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], (int, float)):
        return False
    return not any(isinstance(part, (int, float)) for part in prompt)


def _kind_of_prompt(value: Any) -> str:
    return "several" if has_several(value) else "one"


class PromptText(t.Fields):
    """A prompt as an object, in llama.cpp's form for prompts with images. Images are refused here."""

    prompt_string: _Prompt
    refused = t.refuse("multimodal_data", "a raw prompt holds no images; use the chat format", *t.OFF)


def prompts(most: int) -> Any:
    """Return the type of a field that holds one prompt or up to `most` of them. A prompt is a text, or a list of token ids and texts."""
    one = _Prompt | _Mixed | PromptText
    several = Annotated[t.Many[one], Field(min_length=1, max_length=most), Tag("several")]  # type: ignore[valid-type]
    return Annotated[Annotated[one, Tag("one")] | several, Discriminator(_kind_of_prompt)]


class StreamOptions(t.Fields):
    include_usage: t.Flag = None
    continuous_usage_stats: t.Flag = t.optional(
        "beside include_usage: every chunk with text has its answer's"
    )
    harmless = t.harmless("include_obfuscation", "padding against listeners on a network")


class Continued(Body, Generation):
    """Fields that OpenAI's chat completions and completions share with llama.cpp's completion."""

    stream: t.Flag = None
    stop: t.Word | Words | None = None
    max_tokens: Length | None = t.optional("-1: to the context's end")
    n_predict: Length | None = t.optional("llama.cpp's name of max_tokens", same_as="max_tokens")
    max_completion_tokens: Length | None = t.optional(same_as="max_tokens")
    n: Number | None = None
    n_cmpl: Number | None = t.optional("llama.cpp's name of n", same_as="n")


class ThinkingAsked(t.Fields):
    """Variables of the chat template about thinking."""

    enable_thinking: t.Flag = None
    preserve_thinking: t.Flag = t.optional("keep the reasoning of earlier turns in the prompt")
    reasoning_effort: Effort | None = None


class TemplateVariables(ThinkingAsked):
    model_config = ConfigDict(extra="forbid")


class ThinkingFields(ThinkingAsked):
    """Fields about thinking at the top level of a body."""

    chat_template_kwargs: TemplateVariables | None = None


# --- images; they are taken out of a body before it is checked (images.py), and these describe them to readers

MaxPixels = Annotated[int, t.Range(1, 1 << 40)]
DataUrl = Annotated[str, Field(description="a data: URL with base64; other URLs are refused")]
Base64 = Annotated[str, Field(description="base64 of an image's file")]
_PIXELS = "pixels of an image after resizing, below the server's max_image_pixels"


class Sized(t.Fields):
    max_pixels: MaxPixels | None = t.optional(_PIXELS)


class Detailed(Sized):
    detail: Literal["auto", "low", "high"] | None = t.optional("low: 512 x 512 pixels")


class TextBlock(t.Fields):
    type: Literal["text"]
    text: t.Text
    harmless = CACHE | t.harmless("annotations citations", UNREAD)


# --- parts of answers

Count = Annotated[int, Field(ge=0)]
Usage = t.answer(
    "Usage", "completion_tokens_details", prompt_tokens=Count, completion_tokens=Count, total_tokens=Count,
    prompt_tokens_details=t.answer("PromptDetails", cached_tokens=Count),
    completion_tokens_details=t.answer("CompletionDetails", accepted_prediction_tokens=Count, rejected_prediction_tokens=Count),
)  # fmt: skip
Timings = t.answer(
    "Timings", "draft_n draft_n_accepted",
    cache_n=Count, prompt_n=Count, prompt_ms=float, prompt_per_token_ms=float, prompt_per_second=float,
    predicted_n=Count, predicted_ms=float, predicted_per_token_ms=float, predicted_per_second=float, draft_n=Count, draft_n_accepted=Count,
)  # fmt: skip
_Drafted = t.answer("Drafted", drafted=Count, accepted=Count)
Drafting = t.answer(
    "Drafting", drafters=t.table_of(_Drafted), rounds=Count, drafted_rounds=Count, tokens_per_round=float,
    bit_exact=bool | None, exact_width=Count | None, seeds=list[int], notices=list[str],
)  # fmt: skip
MEASURED: dict[str, Any] = {"timings": Timings, "mlxspec": Drafting}
HEAD: dict[str, Any] = {"id": str, "created": int, "model": str, "system_fingerprint": str}
Error = t.answer(
    "Error", error=t.answer("ErrorBody", message=str, type=str, param=str | None, code=str | None)
)
Counted = t.answer("Counted", object=str, input_tokens=Count)
