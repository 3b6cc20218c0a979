"""Reads requests for embeddings and ranks, runs them between the rounds of whatever decodes, and writes their answers."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxspec.engine.embedding import INSTRUCTION, Found, answers_of, judged, ranks, vectors
from mlxspec.engine.worker import Worker
from mlxspec.errors import ConfigError, ContextOverflowError, EngineStoppedError
from mlxspec.loading.pooling import Pooling
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.server.errors import BadField
from mlxspec.server.fairness import check_wanted
from mlxspec.server.forms.completions import has_several
from mlxspec.server.request_parsing import ids_of, tokenizer_of

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine

_EXAMPLES = "load one, such as Qwen/Qwen3-Embedding-0.6B, by --embedding-model"
_RERANKERS = "load a reranker, such as Qwen/Qwen3-Reranker-0.6B, by --embedding-model"
_NANO = 10**9


@dataclass(frozen=True, kw_only=True)
class Texts:
    """What is read: begin: in the engine's thread, with the texts' ids. answer: of the model's name and what was found, by number."""

    ids: Sequence[Sequence[int]]
    begin: Callable[[Sequence[Sequence[int]]], Iterator[Found]]
    answer: Callable[[str, Found], dict[str, Any]]

    async def run(self, worker: Worker) -> Found:
        """One forward between two rounds, again and again; other clients' come between them. Raises what the engine raises."""
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


def embeddings(body: Mapping[str, Any], engine: Engine) -> Texts:
    """Of /v1/embeddings. Raises BadField, ConfigError, ContextOverflowError."""
    given, size = body["input"], _size(body, engine)
    several = given if has_several(given) else [given]
    tokenizer = tokenizer_of(engine)
    ids = [_ids(text, tokenizer, engine, f"input[{i}]") for i, text in enumerate(several)]
    as_text = body.get("encoding_format") == "base64"

    def answer(name: str, found: Found) -> dict[str, Any]:
        made = [_cut(found[i], size, engine) for i in range(len(ids))]
        data = [base64.b64encode(v.astype("<f4").tobytes()).decode() if as_text else v.tolist() for v in made]
        listed = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(data)]
        return {"object": "list", "data": listed, "model": name, "usage": _usage(ids)}

    return Texts(ids=ids, begin=partial(vectors, engine), answer=answer)


def ollama_embeddings(body: Mapping[str, Any], engine: Engine) -> Texts:
    """Of /api/embed. Raises as `embeddings` does."""
    given, size, started = body["input"], _size(body, engine), time.monotonic()
    several = given if isinstance(given, list) else [given]
    tokenizer, cuts = tokenizer_of(engine), body.get("truncate") is not False
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


def reranking(body: Mapping[str, Any], engine: Engine, *, is_reranker: bool) -> Texts:
    """Of /v1/rerank. Raises BadField, ConfigError, ContextOverflowError."""
    if not is_reranker or isinstance(engine.pooling, Pooling):
        raise ConfigError(f"{engine.name} ranks nothing; {_RERANKERS}.")
    answers_of(engine)
    tokenizer, instruction = tokenizer_of(engine), body.get("instruction") or INSTRUCTION
    texts = [d if isinstance(d, str) else d["text"] for d in body["documents"]]
    ids = []
    for i, text in enumerate(texts):
        ids.append(judged(tokenizer, body["query"], text, instruction))
        _check(len(ids[-1]), engine, f"documents[{i}]")
        check_wanted()

    def answer(name: str, found: Found) -> dict[str, Any]:
        order = sorted(range(len(ids)), key=lambda i: -float(found[i][0]))[: body.get("top_n")]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": float(found[i][0])} for i in order]
        if body.get("return_documents"):
            results = [{**one, "document": {"text": texts[one["index"]]}} for one in results]
        return {"object": "list", "model": name, "results": results, "usage": _usage(ids)}

    return Texts(ids=ids, begin=partial(ranks, engine), answer=answer)


def _size(body: Mapping[str, Any], engine: Engine) -> int | None:
    """Numbers of a vector, where fewer than all are wanted. Raises BadField, and ConfigError where the model makes none."""
    if not isinstance(engine.pooling, Pooling):
        raise ConfigError(f"{engine.name} makes no embeddings: {engine.pooling}; {_EXAMPLES}.")
    wanted, most = body.get("dimensions"), engine.pooling.size or engine.model.hidden_size
    if wanted is not None and wanted > most:
        raise BadField("dimensions", f"dimensions must be at most {most}, as many as a vector has.")
    return None if wanted is None else int(wanted)


def _cut(vector: Any, size: int | None, engine: Engine) -> Any:
    """The first numbers of a vector, of length 1 where all of it was."""
    if size is None:
        return vector
    short = vector[:size]
    is_normal = isinstance(engine.pooling, Pooling) and engine.pooling.normalizes
    return short / max(float(np.linalg.norm(short)), 1e-12) if is_normal else short


def _ids(text: Any, tokenizer: Tokenizer, engine: Engine, path: str, *, cuts: bool = False) -> list[int]:
    """cuts: a text longer than the context loses its end, but not what the tokenizer puts behind it."""
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
