"""Embeddings and ranks: OpenAI's `/v1/embeddings`, Ollama's `/api/embed`, and `/v1/rerank` as Jina's and Cohere's clients send it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mlxspec.server.forms import base as t
from mlxspec.server.forms import shared
from mlxspec.server.forms.completions import prompts
from mlxspec.server.forms.shared import Count

MOST = 2048  # texts of a request
_Text = Annotated[str, Field(min_length=1, max_length=1 << 22)]
_Several = Field(min_length=1, max_length=MOST)
Size = Annotated[int, t.Range(1, 1 << 20)]


class VectorsBody(t.Fields):
    """What all three share. Nothing is sampled, so fields about that are unknown ones."""

    model: shared.ModelName | None = None
    harmless: ClassVar = {
        **t.harmless("user", shared.BOOKKEEPING),
        **t.harmless("priority", shared.ONE_MACHINE),
    }


class EmbeddingsRequest(VectorsBody):
    input: prompts(MOST)  # type: ignore[valid-type]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Size | None = t.optional("so many first numbers of each vector, made as long as before")


class OllamaEmbedRequest(VectorsBody):
    input: _Text | Annotated[t.Many[_Text], _Several]
    truncate: t.Flag = t.optional("unless false a text longer than the context is cut at its end")
    dimensions: Size | None = None
    options: t.Object | None = t.optional("about sampling; not read")
    harmless: ClassVar = {
        **VectorsBody.harmless,
        **t.harmless("keep_alive", "--idle-unload of the server says how long a model stays"),
    }


class RankedText(t.Fields):
    text: _Text


class RerankRequest(VectorsBody):
    query: _Text
    documents: Annotated[t.Many[_Text | RankedText], _Several]
    top_n: Size | None = None
    return_documents: t.Flag = None
    instruction: Annotated[str, Field(min_length=1, max_length=10_000)] | None = t.optional(
        "what a good document does"
    )


# --- answers

_Usage = t.answer("VectorUsage", prompt_tokens=Count, total_tokens=Count)
_Embedding = t.answer(
    "Embedding", object=Literal["embedding"], index=Count, embedding=t.either(list[float], str)
)
EmbeddingsAnswer = t.answer(
    "EmbeddingsAnswer", object=Literal["list"], data=t.many(_Embedding), model=str, usage=_Usage
)
OllamaEmbedAnswer = t.answer(
    "OllamaEmbedAnswer", model=str, embeddings=list[list[float]], total_duration=Count, load_duration=Count, prompt_eval_count=Count
)  # fmt: skip
_Ranked = t.answer(
    "Ranked", "document", index=Count, relevance_score=float, document=t.answer("RankedDocument", text=str)
)
RerankAnswer = t.answer(
    "RerankAnswer", object=Literal["list"], model=str, results=t.many(_Ranked), usage=_Usage
)
