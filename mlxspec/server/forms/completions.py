"""Continuing texts: OpenAI's `/v1/completions`, llama.cpp's `/completion`, and `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, RootModel, Tag

from mlxspec.config import MAX_TOP_LOGPROBS
from mlxspec.server.forms import base as t
from mlxspec.server.forms import chat, shared
from mlxspec.server.forms.shared import Count

TokenId = Annotated[int, t.Range(0, 1 << 30)]
_Prompt = Annotated[str, Field(min_length=1, max_length=1 << 24)]
_Ids = Annotated[t.Many[TokenId], Field(min_length=1)]
_Several = Field(min_length=1, max_length=64)


def _kind_of_prompt(value: Any) -> str:
    first = value[0] if isinstance(value, list) and value else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "one"


class WithPrompt(shared.Continued):
    prompt: Annotated[
        Annotated[_Prompt | _Ids, Tag("one")]
        | Annotated[t.Many[_Prompt], _Several, Tag("texts")]
        | Annotated[t.Many[_Ids], _Several, Tag("lists")],
        Discriminator(_kind_of_prompt),
    ]


class CompletionRequest(WithPrompt):
    stream_options: shared.StreamOptions | None = None
    logprobs: Annotated[int, t.Range(0, MAX_TOP_LOGPROBS)] | None = t.optional(
        "so many likeliest tokens at each place"
    )
    echo: t.Flag = None  # fmt: skip


class NativeRequest(WithPrompt):
    """llama.cpp's own form of the same."""

    return_tokens: t.Flag = t.optional("token ids beside the text")


class TokenizeRequest(shared.Body):
    content: t.Text | None = None
    messages: Annotated[t.Turns[chat.ChatMessage], Field(min_length=1)] | None = None
    tools: t.Tools[chat.Tool] | None = None
    chat_template_kwargs: shared.TemplateVariables | None = None
    add_special: t.Flag = t.optional("what the tokenizer puts around a plain text")
    with_pieces: t.Flag = None


class DetokenizeRequest(shared.Body):
    tokens: t.Many[TokenId]


# --- answers

_Logprobs = t.answer(
    "CompletionLogprobs", tokens=list[str], token_logprobs=list[float], top_logprobs=list[dict[str, float]], text_offset=list[Count]
)  # fmt: skip
_Choice = t.answer(
    "CompletionChoice", index=Count, text=str, logprobs=t.either(_Logprobs, None), finish_reason=Literal["stop", "length"]
)  # fmt: skip
CompletionAnswer = t.answer(
    "CompletionAnswer", **shared.HEAD, object=Literal["text_completion"], choices=t.many(_Choice), usage=shared.Usage, **shared.MEASURED
)  # fmt: skip
NativeAnswer = t.answer(
    "NativeAnswer", index=Count, content=str, tokens=list[Count], stop=bool, model=str, tokens_predicted=Count, tokens_evaluated=Count,
    tokens_cached=Count, generation_settings=dict[str, Any], prompt=str, has_new_line=bool, truncated=bool,
    stop_type=Literal["eos", "word", "limit"], **shared.MEASURED,
)  # fmt: skip


class NativeAnswers(RootModel[NativeAnswer | list[NativeAnswer]]):  # type: ignore[valid-type]
    """One answer, or several in a list."""


TokenizeAnswer = t.answer(
    "TokenizeAnswer", tokens=t.many(t.either(Count, t.answer("Piece", id=Count, piece=str | None))), count=Count
)  # fmt: skip
