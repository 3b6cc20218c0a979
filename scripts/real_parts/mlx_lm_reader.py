"""mlx-lm's greedy text, decoded token by token or read in one forward behind a text that is expected.

Reading is decoding's twin: greedy decoding gives a text if and only if, at each place, the likeliest token behind the prompt and the text
so far is the next one of the text. A forward over many tokens rounds otherwise than many forwards over one, so where the two likeliest
tokens are closer than MARGIN the reading decides nothing. Knows mlx-lm's models and caches; knows nothing of ours.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

MARGIN = 1e-3  # in log-probability; forwards of one and of many tokens differ by some 1e-5 in float32
CHUNK = 512
KEPT, NUM_KEPT = (
    500,
    16,
)  # texts of so many tokens and more are kept for longer prompts that begin with them, so many texts


class Reader:
    """model: one of mlx-lm's. ends: ids that end an answer. limit: the longest answer."""

    def __init__(self, model: Any, *, ends: Sequence[int], limit: int) -> None:
        self._model, self._ends, self._limit = model, frozenset(ends), limit
        self._kept: list[tuple[list[int], list[Any]]] = []  # texts that were read, and the caches behind them

    def decode(self, prompt: Sequence[int]) -> list[int]:
        """Token by token, without the token that ends it."""
        tokens: list[int] = []
        for token, _ in generate_step(mx.array(list(prompt)), self._model, max_tokens=self._limit):
            if int(token) in self._ends:
                break
            tokens.append(int(token))
        return tokens

    def read(self, prompt: Sequence[int], answer: Sequence[int]) -> dict[str, Any]:
        """Whether greedy decoding would give this answer: {"sure": every choice is the answer's, by MARGIN at least; "margin": the smallest
        lead, below 0 where another token leads; "place": where that is}."""
        tokens = [*prompt, *answer]
        begin = len(prompt) - 1
        start, cache = self._beginning(tokens[:begin])
        for at in range(start, begin, CHUNK):
            self._model(mx.array(tokens[at : min(at + CHUNK, begin)])[None], cache=cache)
            mx.eval([c.state for c in cache])
        if begin >= KEPT:
            self._kept = [*self._kept[1 - NUM_KEPT :], (tokens[:begin], self._copied(cache))]
        logits = self._model(mx.array(tokens[begin:])[None], cache=cache)[0].astype(mx.float32)
        wanted = [[token] for token in answer]
        if len(answer) < self._limit:
            wanted.append(sorted(self._ends))  # behind the last token stands an end
        leads = [self._lead(logits[i], mx.array(ids)) for i, ids in enumerate(wanted)]
        place = min(range(len(leads)), key=leads.__getitem__)
        return {"sure": leads[place] >= MARGIN, "margin": leads[place], "place": place}

    def _beginning(self, tokens: list[int]) -> tuple[int, list[Any]]:
        """How many of the tokens were read for an earlier prompt, and a copy of the caches behind them."""
        known = [(text, cache) for text, cache in self._kept if tokens[: len(text)] == text]
        if not known:
            return 0, make_prompt_cache(self._model)
        text, cache = max(known, key=lambda pair: len(pair[0]))
        return len(text), self._copied(cache)

    @staticmethod
    def _copied(cache: list[Any]) -> list[Any]:
        made = [copy.copy(layer) for layer in cache]
        for layer in made:
            for name, value in vars(layer).items():
                if isinstance(value, mx.array):  # which the layer will write into
                    setattr(layer, name, mx.array(value))
        return made

    @staticmethod
    def _lead(logits: mx.array, wanted: mx.array) -> float:
        """By how much the likeliest of `wanted` leads all others, below 0 where it does not. logits: [vocabulary]."""
        best = mx.max(logits[wanted])
        others = mx.put_along_axis(logits, wanted.astype(mx.uint32), mx.array(-mx.inf), axis=0)
        return float(best - mx.max(others))
