"""A record of an answer is one JSON line that holds what it takes to decode the answer again.

`mlxspec generate --json` and `mlxspec serve --record` write records, `mlxspec prove` reads them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from mlxspec.config import KV_BITS, SamplingParams
from mlxspec.engine.api import Result
from mlxspec.engine.request import Request
from mlxspec.engine.stats import DrafterStats, RequestStats
from mlxspec.errors import ConfigError
from mlxspec.events import FinishReason
from mlxspec.option import shown

_MOST_ID = 2**31 - 1  # of a token: ids are int32


def record(request: Request, model: str, kv_bits: int, weights: str | None) -> dict[str, Any]:
    """Return what it takes to decode an ended answer again, as plain JSON objects. model: the engine's name. kv_bits: as in
    EngineConfig. weights: the engine's `weights_digest`, None where it is not known. The prompt_tokens are None where the answer
    depends on more than token ids: images, callables of Python. The max_tokens and min_tokens are at most what the context left room
    for, so that an engine with a larger context ends the answer at the same place."""
    is_open = request.finish_reason == "length" and request.limit < request.params.max_tokens
    room = min(
        request.limit if is_open else request.params.max_tokens, request.max_context - len(request.prompt)
    )
    least = min(request.params.min_tokens, room)
    params = replace(request.params, seed=request.stats.seed, max_tokens=room, min_tokens=least)
    usual = SamplingParams()
    is_whole = request.seen is None and not params.has_hooks
    return {
        "model": model,
        "weights": weights,
        "kv_bits": kv_bits,
        "prompt_tokens": request.prompt if is_whole else None,
        "params": {
            f.name: getattr(params, f.name)
            for f in fields(params)
            if is_whole and getattr(params, f.name) != getattr(usual, f.name)
        },
        "tokens": request.history[len(request.prompt) :],
        "finish_reason": request.finish_reason,
        "error": request.error,
        "stats": request.stats.data(),
    }


@dataclass(frozen=True, kw_only=True)
class Record:
    """An answer with what it takes to decode it again, as `record` returned it. result: the answer; its text is "" where the record has
    none. prompt: token ids, None where the answer cannot be decoded again. weights: digest of the model's weights, None where the
    record does not name it."""

    model: str
    weights: str | None
    kv_bits: int
    prompt: tuple[int, ...] | None
    params: SamplingParams
    result: Result

    @classmethod
    def read(cls, line: str) -> Record:
        """Return the record in one line of JSON. Raises ConfigError for a line that holds none."""
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{shown(line)} is no JSON object.") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{shown(line)} is no JSON object.")
        missing = [
            n for n in ("model", "prompt_tokens", "params", "tokens", "finish_reason") if n not in data
        ]
        if missing:
            raise ConfigError(f"it has no {missing[0]}.")
        if not isinstance(data["model"], str):
            raise ConfigError(f"model must be a name, not {shown(data['model'])}.")
        weights = data.get("weights")
        if weights is not None and not isinstance(weights, str):
            raise ConfigError(f"weights must be a digest, not {shown(weights)}.")
        if data["finish_reason"] not in get_args(FinishReason):
            raise ConfigError(f"no answer ends with {shown(data['finish_reason'])}.")
        given = data["params"]
        try:
            given = {**given, "logit_bias": {int(t): b for t, b in given.get("logit_bias", {}).items()}}
            stats = data.get("stats", {})
            counted = RequestStats(
                seed=int(given.get("seed") or 0),
                decode_seconds=float(stats.get("decode_seconds", 0.0)),
                drafters={"": DrafterStats(num_accepted=int(stats.get("num_accepted", 0)))},
            )
            kv_bits = int(data.get("kv_bits", 16))
            params = SamplingParams(**given)
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise ConfigError("its params or stats are of another kind.") from error
        if kv_bits not in KV_BITS:
            raise ConfigError(f"kv_bits must be one of {', '.join(map(str, KV_BITS))}, not {kv_bits}.")
        prompt, text = data["prompt_tokens"], data.get("text", "")
        if not isinstance(text, str):
            raise ConfigError(f"text must be a text, not {shown(text)}.")
        return cls(
            model=data["model"],
            weights=weights,
            kv_bits=kv_bits,
            prompt=None if prompt is None else _ids("prompt_tokens", prompt),
            params=params,
            result=Result(
                text=text,
                tokens=_ids("tokens", data["tokens"]),
                finish_reason=data["finish_reason"],
                stats=counted,
                error=data.get("error"),
            ),
        )


def _ids(name: str, given: Any) -> tuple[int, ...]:
    if not isinstance(given, list) or not all(type(i) is int and 0 <= i <= _MOST_ID for i in given):
        raise ConfigError(f"{name} must be a list of token ids, not {shown(given)}.")
    return tuple(given)
