"""Embeddings and ranks: OpenAI's `/v1/embeddings`, Ollama's `/api/embed`, and `/v1/rerank` as Jina's and Cohere's clients send it. The
module has the forms of requests and answers, and reads, runs and answers requests. Forwards run between the rounds of rows that decode."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, RootModel

from mlxspec.engine.embedding import INSTRUCTION, Found, answers_of, judged, ranks, vectors
from mlxspec.engine.worker import Worker
from mlxspec.errors import ConfigError, ContextOverflowError, EngineStoppedError
from mlxspec.loading.pooling import Pooling
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.server.errors import BadField
from mlxspec.server.forms import base as t
from mlxspec.server.forms import shared
from mlxspec.server.forms.shared import Count, has_several, prompts
from mlxspec.server.http.fairness import check_wanted
from mlxspec.server.prompt import ids_of, tokenizer_of

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine

# --- the form

MOST = 2048  # texts of a request
_Text = Annotated[str, Field(min_length=1, max_length=1 << 22)]
_Several = Field(min_length=1, max_length=MOST)
Size = Annotated[int, t.Range(1, 1 << 20)]


class VectorsBody(t.Fields):
    """Fields that all requests for embeddings and ranks share. Fields about sampling are unknown here, since nothing is sampled."""

    model: shared.ModelName | None = None
    refused: ClassVar = t.refuse("priority", shared.IN_TURN, 0)
    harmless: ClassVar = t.harmless("user", shared.BOOKKEEPING)


class EmbeddingsRequest(VectorsBody):
    input: prompts(MOST)  # type: ignore[valid-type]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Size | None = t.optional("so many first numbers of each vector, made as long as before")


class NativeEmbedRequest(VectorsBody):
    content: prompts(MOST)  # type: ignore[valid-type]


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
_NativeEmbedding = t.answer("NativeEmbedding", index=Count, embedding=list[list[float]])


class NativeEmbedAnswer(RootModel[list[_NativeEmbedding]]):  # type: ignore[valid-type]
    """The vectors of texts, each in a list of its own, as in llama.cpp's answers with pooling."""


OllamaEmbedAnswer = t.answer(
    "OllamaEmbedAnswer", model=str, embeddings=list[list[float]], total_duration=Count, load_duration=Count, prompt_eval_count=Count
)  # fmt: skip
_Ranked = t.answer(
    "Ranked", "document", index=Count, relevance_score=float, document=t.answer("RankedDocument", text=str)
)
RerankAnswer = t.answer(
    "RerankAnswer", object=Literal["list"], model=str, results=t.many(_Ranked), usage=_Usage
)


# --- reading and writing

_EXAMPLES = "load one, such as Qwen/Qwen3-Embedding-0.6B, by --embedding-model"
_RERANKERS = "load a reranker, such as Qwen/Qwen3-Reranker-0.6B, by --embedding-model"
_NANO = 10**9


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The texts of a request for vectors. ids: token ids of each text. begin: called in the engine's thread with the ids; its iterator
    does one forward a step, and yields the vectors or ranks that are complete, by the texts' numbers. answer: returns the response's
    body from the model's name and all results."""

    ids: Sequence[Sequence[int]]
    begin: Callable[[Sequence[Sequence[int]]], Iterator[Found]]
    answer: Callable[[str, Found], Any]

    async def run(self, worker: Worker) -> Found:
        """Run the texts through the model, and return the results by the texts' numbers. Between two forwards the engine runs rounds and
        forwards of other requests. Raises the engine's errors."""
        found: Found = {}
        running: list[Iterator[Found]] = []

        def step(_: Engine) -> Found | None:
            if not running:
                running.append(self.begin(self.ids))
            return next(running[0], None)

        try:
            while (ended := await asyncio.wrap_future(worker.call(step, is_piece=True))) is not None:
                found |= ended
        finally:
            with suppress(EngineStoppedError):  # arrays are let go of in their own thread
                worker.call(lambda _: running.clear())
        return found


def native_embeddings(form: NativeEmbedRequest, engine: Engine, *, is_beside: bool) -> Texts:
    """Return the texts of a request of llama.cpp's /embedding. is_beside: not used here. Raises BadField, ConfigError,
    ContextOverflowError."""
    wanted = EmbeddingsRequest(model=form.model, input=form.content)
    texts = embeddings(wanted, engine, is_beside=is_beside)

    def answer(name: str, found: Found) -> list[dict[str, Any]]:
        return [
            {"index": d["index"], "embedding": [d["embedding"]]} for d in texts.answer(name, found)["data"]
        ]

    return replace(texts, answer=answer)


def embeddings(form: EmbeddingsRequest, engine: Engine, *, is_beside: bool) -> Texts:
    """Return the texts of a request of /v1/embeddings. is_beside: not used here. Raises BadField, ConfigError, ContextOverflowError."""
    given, size = form.input, _size(form.dimensions, engine)
    several = given if has_several(given) else [given]
    tokenizer = tokenizer_of(engine)
    ids = [_ids(text, tokenizer, engine, f"input[{i}]") for i, text in enumerate(several)]
    as_text = form.encoding_format == "base64"

    def answer(name: str, found: Found) -> dict[str, Any]:
        made = [_cut(found[i], size, engine) for i in range(len(ids))]
        data = [base64.b64encode(v.astype("<f4").tobytes()).decode() if as_text else v.tolist() for v in made]
        listed = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(data)]
        return {"object": "list", "data": listed, "model": name, "usage": _usage(ids)}

    return Texts(ids=ids, begin=partial(vectors, engine), answer=answer)


def ollama_embeddings(form: OllamaEmbedRequest, engine: Engine, *, is_beside: bool) -> Texts:
    """Return the texts of a request of Ollama's /api/embed. is_beside: not used here. Raises BadField, ConfigError,
    ContextOverflowError."""
    given, size, started = form.input, _size(form.dimensions, engine), time.monotonic()
    several = given if isinstance(given, list) else [given]
    tokenizer, cuts = tokenizer_of(engine), form.truncate is not False
    ids = [_ids(text, tokenizer, engine, f"input[{i}]", cuts=cuts) for i, text in enumerate(several)]

    def answer(name: str, found: Found) -> dict[str, Any]:
        return {
            "model": name,
            "embeddings": [_cut(found[i], size, engine).tolist() for i in range(len(ids))],
            "total_duration": int((time.monotonic() - started) * _NANO),
            "load_duration": 0,
            "prompt_eval_count": sum(map(len, ids)),
        }

    return Texts(ids=ids, begin=partial(vectors, engine), answer=answer)


def reranking(form: RerankRequest, engine: Engine, *, is_beside: bool) -> Texts:
    """Return the texts of a request of /v1/rerank. is_beside: the engine is held for vectors alone, as a reranker must be. Raises
    BadField, ConfigError, ContextOverflowError."""
    if not is_beside or isinstance(engine.pooling, Pooling):
        raise ConfigError(f"{engine.name} ranks nothing; {_RERANKERS}.")
    answers_of(engine)
    tokenizer, instruction = tokenizer_of(engine), form.instruction or INSTRUCTION
    texts = [d if isinstance(d, str) else d.text for d in form.documents]
    ids = []
    for i, text in enumerate(texts):
        ids.append(judged(tokenizer, form.query, text, instruction))
        _check(len(ids[-1]), engine, f"documents[{i}]")
        check_wanted()

    def answer(name: str, found: Found) -> dict[str, Any]:
        order = sorted(range(len(ids)), key=lambda i: -float(found[i][0]))[: form.top_n]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": float(found[i][0])} for i in order]
        if form.return_documents:
            results = [{**one, "document": {"text": texts[one["index"]]}} for one in results]
        return {"object": "list", "model": name, "results": results, "usage": _usage(ids)}

    return Texts(ids=ids, begin=partial(ranks, engine), answer=answer)


def _size(wanted: int | None, engine: Engine) -> int | None:
    """Return the requested size of vectors; None for the model's own. Raises BadField for a size above the model's, ConfigError for a
    model that makes no embeddings."""
    if not isinstance(engine.pooling, Pooling):
        raise ConfigError(f"{engine.name} makes no embeddings: {engine.pooling}; {_EXAMPLES}.")
    most = engine.pooling.size or engine.model.hidden_size
    if wanted is not None and wanted > most:
        raise BadField("dimensions", f"dimensions must be at most {most}, as many as a vector has.")
    return wanted


def _cut(vector: Any, size: int | None, engine: Engine) -> Any:
    """Return the first `size` numbers of a vector, or all of them where size is None. Where the model makes vectors of length 1, the
    shorter vector is scaled to length 1 too."""
    if size is None:
        return vector
    short = vector[:size]
    is_normal = isinstance(engine.pooling, Pooling) and engine.pooling.normalizes
    return short / max(float(np.linalg.norm(short)), 1e-12) if is_normal else short


def _ids(text: Any, tokenizer: Tokenizer, engine: Engine, path: str, *, cuts: bool = False) -> list[int]:
    """Return the token ids of a text. path: the text's place in the body, for errors. cuts: a text longer than the context is cut before
    the tokens that the tokenizer adds at its end; without cuts it raises ContextOverflowError. Raises BadField for a text without
    tokens, and for an id that the vocabulary does not have."""
    found, size = ids_of(text, tokenizer.encode), engine.model.vocab_size
    end = tokenizer.around[1]
    if cuts and len(found) > engine.max_context:
        found = [*found[: engine.max_context - len(end)], *end]
    if not found:
        raise BadField(path, f"{path} has no tokens.")
    if max(found) >= size:
        raise BadField(path, f"{path} holds an id that is not there; ids end at {size - 1}.")
    _check(len(found), engine, path)
    return found


def _check(num: int, engine: Engine, path: str) -> None:
    if num > engine.max_context:
        raise ContextOverflowError(num, engine.max_context)


def _usage(ids: Sequence[Sequence[int]]) -> dict[str, int]:
    num = sum(map(len, ids))
    return {"prompt_tokens": num, "total_tokens": num}
