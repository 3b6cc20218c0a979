"""Embeds texts, and ranks documents by a query, with forwards of a loaded model.

Both are generators. Each `next` runs one forward of a limited number of tokens, so that decoding rows wait for no more than that between
two rounds. Short texts share a forward. A longer one takes several forwards, except in models that attend in both directions, which read it
in one. All of this runs in the engine's thread.

Ranks are computed as for Qwen3-Reranker (Zhang et al. 2025): the probability of "yes" against "no" after a question about query and
document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxspec.errors import ConfigError
from mlxspec.kernels.flat import FlatRows
from mlxspec.loading.pooling import Pooling
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.platform import device
from mlxspec.platform.host import numbers

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine

MOST_ROWS = 32  # texts that share a forward
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_VERDICT = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
Found = dict[int, NDArray[np.float32]]  # number of a text -> its vector (H,), or (1,) its rank


def vectors(engine: Engine, texts: Sequence[Sequence[int]]) -> Iterator[Found]:
    """Embed texts of token ids, none longer than the context. Runs one forward for each `next` and yields the vectors (H,) float32 of
    the texts that ended with this forward, by their index. Raises ConfigError where the model makes no embeddings."""
    pooling = engine.pooling
    if not isinstance(pooling, Pooling):
        raise ConfigError(f"{engine.name} makes no embeddings: {pooling}.")

    def made(pooled: mx.array) -> mx.array:
        for weight, bias in pooling.dense:
            pooled = pooled @ weight.T if bias is None else pooled @ weight.T + bias
        length = mx.sqrt(mx.sum(pooled * pooled, axis=-1, keepdims=True))
        return pooled / mx.maximum(length, 1e-12) if pooling.normalizes else pooled

    return _read(engine, texts, pooling.mode, made)


def ranks(engine: Engine, texts: Sequence[Sequence[int]]) -> Iterator[Found]:
    """Rank documents by a query. texts: for each document the token ids that `judged` returns. Runs one forward for each `next` and
    yields, by index, the probability of "yes", (1,) float32, of the texts that ended with this forward. Raises ConfigError where the
    model is no reranker."""
    yes, no = answers_of(engine)

    def made(pooled: mx.array) -> mx.array:
        logits = engine.model.head(pooled.astype(engine.model.dtype)).astype(mx.float32)
        return mx.sigmoid(logits[:, yes : yes + 1] - logits[:, no : no + 1])

    return _read(engine, texts, "last", made)


def answers_of(engine: Engine) -> tuple[int, int]:
    """Return the token ids of "yes" and "no". Raises ConfigError where the tokenizer lacks one of them or a control token of the
    reranker's question."""
    tokenizer = engine.tokenizer
    found = (
        []
        if tokenizer is None
        else [tokenizer.id_of(name) for name in ("yes", "no", "<|im_start|>", "<|im_end|>")]
    )
    if len(found) < 4 or None in found:
        raise ConfigError(f"{engine.name} cannot rank: it is no reranker of Qwen3's kind.")
    return int(found[0] or 0), int(found[1] or 0)


def judged(tokenizer: Tokenizer, query: str, document: str, instruction: str = INSTRUCTION) -> list[int]:
    """Return the token ids of the reranker's question whether a document answers a query. Control tokens that query, document or
    instruction spell are encoded as plain text."""
    told = tokenizer.encode_plain(f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}")
    return [*tokenizer.encode(_JUDGE, special=False), *told, *tokenizer.encode(_VERDICT, special=False)]


def _read(
    engine: Engine, texts: Sequence[Sequence[int]], mode: str, made: Callable[[mx.array], mx.array]
) -> Iterator[Found]:
    """Run the texts through the model, and yield after each forward the results of the texts that ended with it, by index. mode: how
    hidden states are pooled ("mean", "last", else the first token's). made: maps pooled hidden states (B, H) float32 to results (B,
    ...)."""
    model, most = engine.model, engine.prefill_chunk
    is_whole = getattr(model, "reads_both_ways", False)
    for group in _groups([len(text) for text in texts], most):
        cache = model.make_cache(len(group))
        longest, pooled = max(len(texts[i]) for i in group), mx.zeros((len(group), model.hidden_size))
        most = longest if is_whole else engine.prefill_chunk
        for start in range(0, longest, most):  # more than once for one text alone
            parts = [texts[i][start : start + most] for i in group]
            rows = FlatRows(tuple(map(len, parts)))
            device.prefill_threads()
            try:
                tokens = mx.array(np.concatenate([np.asarray(part, np.int32) for part in parts]))
                out = model.forward(tokens, rows, cache, certain=True, logits_at="none")
                cache.commit()
                hidden = out.hidden.astype(mx.float32)
                if mode == "mean":
                    pooled = pooled + _shares(rows, longest if len(group) == 1 else None) @ hidden
                elif mode == "last":
                    pooled = rows.last(hidden)
                elif start == 0:
                    pooled = hidden[mx.array(np.asarray(rows.starts[:-1], np.int32))]
                mx.eval(pooled, cache.arrays)
            finally:
                device.decode_threads()
            if start + most < longest:
                yield {}
        yield dict(zip(group, numbers(made(pooled)).copy(), strict=True))  # in memory of their own


def _shares(rows: FlatRows, length: int | None) -> mx.array:
    """Return the matrix (B, N) float32 that multiplies hidden states (N, H) into the means of B texts. length: tokens of the whole text,
    where `rows` holds a part of one text; None: each row is a whole text."""
    found = np.zeros((rows.num_rows, rows.num_tokens), np.float32)
    for row, (start, width) in enumerate(zip(rows.starts, rows.widths, strict=False)):
        found[row, start : start + width] = 1 / (length or width)
    return mx.array(found)


def _groups(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield lists of the indices of texts that share a forward: at most `most` tokens together, or one text alone."""
    group: list[int] = []
    for i, length in enumerate(lengths):
        if group and (len(group) == MOST_ROWS or sum(lengths[j] for j in group) + length > most):
            yield group
            group = []
        group.append(i)
    if group:
        yield group
