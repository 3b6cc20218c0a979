"""Continuing texts: OpenAI's `/v1/completions`, llama.cpp's `/completion` and `/infill`, and `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, RootModel, Tag

from mlxspec.config import MAX_CONTEXT
from mlxspec.server.forms import base as t
from mlxspec.server.forms import chat, shared
from mlxspec.server.forms.base import TokenId
from mlxspec.server.forms.shared import Count

_Prompt = Annotated[str, Field(min_length=1, max_length=1 << 24)]
_Mixed = Annotated[t.Many[TokenId | _Prompt], Field(min_length=1)]
_LengthOrNone = Annotated[int, t.Range(0, MAX_CONTEXT, also=(-1,))]


def has_several(prompt: Any) -> bool:
    """Whether a body's `prompt` is several prompts. A list with a number in it is one: of ids, and texts between them."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], (int, float)):
        return False
    return not any(isinstance(part, (int, float)) for part in prompt)


def _kind_of_prompt(value: Any) -> str:
    return "several" if has_several(value) else "one"


class PromptText(t.Fields):
    """llama.cpp's form of a prompt that may hold images."""

    prompt_string: _Prompt
    refused = t.refuse("multimodal_data", "a raw prompt holds no images; use the chat format", *t.OFF)


def prompts(most: int) -> Any:
    """The type of one prompt, a text or ids with texts between them, or of several, `most` of them."""
    one = _Prompt | _Mixed | PromptText
    several = Annotated[t.Many[one], Field(min_length=1, max_length=most), Tag("several")]  # type: ignore[valid-type]
    return Annotated[Annotated[one, Tag("one")] | several, Discriminator(_kind_of_prompt)]


class WithPrompt(shared.Continued):
    prompt: prompts(64)  # type: ignore[valid-type]


class CompletionRequest(WithPrompt):
    stream_options: shared.StreamOptions | None = None
    logprobs: Annotated[int, t.option("top_logprobs")] | None = t.optional(
        "so many likeliest tokens at each place"
    )
    echo: t.Flag = t.optional(
        "the text begins with the prompt; with logprobs, and not streamed, its tokens have theirs"
    )
    max_tokens: _LengthOrNone | None = t.optional("-1: to the context's end; 0: with echo, the prompt alone")
    return_token_ids: t.Flag = t.optional("token ids beside each answer")
    suffix: t.Text | None = t.optional("each answer stands between its prompt and this")
    refused: ClassVar = {name: why for name, why in shared.REFUSED.items() if name != "suffix"}


class Native(shared.Continued):
    """What llama.cpp's own forms share."""

    max_tokens: _LengthOrNone | None = t.optional("-1: to the context's end; 0: the prompt is read and kept")
    n_predict: _LengthOrNone | None = t.optional("llama.cpp's name of max_tokens", same_as="max_tokens")
    return_tokens: t.Flag = t.optional("token ids beside the text")
    n_probs: Annotated[int, t.option("top_logprobs")] | None = t.optional(
        "so many likeliest tokens at each place, in completion_probabilities"
    )
    refused: ClassVar = {
        **{name: why for name, why in shared.REFUSED.items() if name not in ("n_probs", "return_tokens")},
        **t.refuse("return_token_ids", "use return_tokens", *t.OFF),
    }


class NativeRequest(Native, WithPrompt):
    """llama.cpp's own form of the same."""


class NearbyFile(t.Fields):
    text: t.Text
    filename: Annotated[str, Field(max_length=1000)] | None = None
    harmless = t.harmless("time", "when an editor read it")


class InfillRequest(Native):
    """What editors always send and this server cannot do is ignored, with a notice."""

    input_prefix: t.Text
    input_suffix: t.Text
    input_extra: t.Turns[NearbyFile] | None = t.optional("other texts of the project")
    prompt: t.Text | None = t.optional("goes on with input_prefix")
    refused: ClassVar = {
        name: why
        for name, why in Native.refused.items()
        if name not in ("samplers", "n_indent", "t_max_predict_ms", "response_fields")
    }
    harmless: ClassVar = {**shared.HARMLESS, **t.harmless("response_fields", "an answer has all its fields")}


class TokenizeRequest(shared.Body):
    """In llama.cpp's form with `content`, in vLLM's with `prompt`."""

    content: t.Tokenized | None = None
    prompt: t.Tokenized | None = None
    messages: Annotated[t.Turns[chat.ChatMessage], Field(min_length=1)] | None = None
    tools: t.Tools[chat.Tool] | None = None
    chat_template_kwargs: shared.TemplateVariables | None = None
    add_special: t.Flag = t.optional("what the tokenizer puts around a plain text")
    add_special_tokens: t.Flag = t.optional("the same of `prompt`, true unless it is given")
    with_pieces: t.Flag = None
    return_token_strs: t.Flag = None


class DetokenizeRequest(shared.Body):
    tokens: t.Many[TokenId]


# --- answers

_Logprobs = t.answer(
    "CompletionLogprobs", tokens=list[str], token_logprobs=list[float | None], top_logprobs=list[dict[str, float] | None],
    text_offset=list[Count]
)  # fmt: skip
_Choice = t.answer(
    "CompletionChoice", "token_ids prompt_token_ids", token_ids=list[Count], prompt_token_ids=list[Count],
    index=Count, text=str, logprobs=t.either(_Logprobs, None), finish_reason=Literal["stop", "length"]
)  # fmt: skip
CompletionAnswer = t.answer(
    "CompletionAnswer", **shared.HEAD, object=Literal["text_completion"], choices=t.many(_Choice), usage=shared.Usage, **shared.MEASURED
)  # fmt: skip
_Probable = t.answer(
    "Probable", "top_logprobs", id=Count, token=str, bytes=list[Count], logprob=float, top_logprobs=list[Any]
)
NativeAnswer = t.answer(
    "NativeAnswer", "completion_probabilities", completion_probabilities=t.many(_Probable),
    index=Count, content=str, tokens=list[Count], stop=bool, model=str, tokens_predicted=Count, tokens_evaluated=Count,
    tokens_cached=Count, generation_settings=dict[str, Any], prompt=str, has_new_line=bool, truncated=bool,
    stop_type=Literal["eos", "word", "limit"], **shared.MEASURED,
)  # fmt: skip


class NativeAnswers(RootModel[NativeAnswer | list[NativeAnswer]]):  # type: ignore[valid-type]
    """One answer, or several in a list."""


TokenizeAnswer = t.answer(
    "TokenizeAnswer", "token_strs", tokens=t.many(t.either(Count, t.answer("Piece", id=Count, piece=str | None))), count=Count,
    max_model_len=Count, token_strs=list[str | None]
)  # fmt: skip
