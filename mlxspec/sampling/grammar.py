"""Answers of a given language: JSON schema, regular expression or Lark grammar, by llguidance (MIT, https://github.com/guidance-ai/llguidance).

A `Grammar` is one request's matcher. It advances by committed tokens only: looking into a draft is undone before it is told of. Knows bytes
of tokens; knows no logits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mlxspec.config import SamplingParams
from mlxspec.errors import GrammarError
from mlxspec.loading.token_bytes import TokenBytes
from mlxspec.sampling.bits import Bits, num_words

# As `json.dumps` writes: models know it best, and with white space fixed most of what stands between values is forced. A schema's own
# "x-guidance" settings go before these.
_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarCompiler:
    """Makes matchers for one vocabulary."""

    def __init__(self, vocabulary: TokenBytes) -> None:
        self._vocabulary = vocabulary

    def compile(self, params: SamplingParams) -> Grammar:
        """Raises GrammarError with the compiler's own words."""
        from llguidance import LLMatcher

        what, text = _source(params)
        wrong = _first_line(LLMatcher.validate_grammar(text, self._tokenizer))
        if wrong and not wrong.startswith("WARNING"):
            raise GrammarError(f"The {what} cannot be used: {wrong}.")
        matcher = LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"The {what} cannot be used: {_first_line(matcher.get_error())}.")
        return Grammar(matcher, self._vocabulary)

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        eos = sorted(self._vocabulary.eos_ids)
        if not eos:
            raise GrammarError("This model has no token that ends a text, so no grammar can end.")
        return LLTokenizer(
            TokenizerWrapper(_Vocabulary(self._vocabulary, eos[0])),
            n_vocab=len(self._vocabulary.tokens),
            eos_token=eos,
        )


class _Vocabulary:
    """What llguidance wants to know of a vocabulary."""

    bos_token_id = None

    def __init__(self, vocabulary: TokenBytes, eos: int) -> None:
        self._encode = vocabulary.encode
        self.eos_token_id = eos
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = sorted(vocabulary.special | vocabulary.eos_ids)

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text, not bytes")  # how the wrapper finds out what it may pass
        return self._encode(text)


class Grammar:
    """One request's matcher."""

    def __init__(self, matcher: Any, vocabulary: TokenBytes) -> None:
        self._matcher = matcher
        self._eos = vocabulary.eos_ids
        self._num_words = num_words(len(vocabulary.tokens))

    @property
    def is_finished(self) -> bool:
        """Nothing but the end may follow."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> Bits:
        """What may follow now."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        return bits[: self._num_words]

    def validate(self, tokens: Sequence[int]) -> int:
        """How many of these tokens could stand."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def forced(self) -> list[int]:
        """Tokens of the text that must follow; empty where there is a choice."""
        return list(self._matcher.compute_ff_tokens())

    def consume(self, token: int) -> bool:
        """Go on by one token; False, and nothing happened, if it may not come."""
        return self.validate([token]) == 1 and bool(self._matcher.consume_token(token))

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise GrammarError(
                f"The grammar's matcher could not go back: {_first_line(self._matcher.get_error())}."
            )


def _source(params: SamplingParams) -> tuple[str, str]:
    """What it is called, and llguidance's own form of it."""
    from llguidance import LLMatcher

    if params.regex is not None:
        return "regular expression", LLMatcher.grammar_from_regex(params.regex)
    if params.lark is not None:
        return "Lark grammar", LLMatcher.grammar_from_lark(params.lark)
    schema = params.json_schema
    try:
        text = json.dumps(dict(schema), allow_nan=False) if isinstance(schema, Mapping) else str(schema)
        if not isinstance(json.loads(text), (dict, bool)):
            raise GrammarError("The JSON schema cannot be used: it is no JSON object.")
        return "JSON schema", LLMatcher.grammar_from_json_schema(text, defaults=_JSON_STYLE)
    except (ValueError, TypeError, RecursionError) as error:
        raise GrammarError(f"The JSON schema cannot be used: {_first_line(str(error))}.") from error


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0].strip().rstrip(".:")[:300] if lines else ""
