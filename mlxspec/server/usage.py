"""Token counts and times of an answer, as OpenAI's `usage`, llama.cpp's `timings` and `prompt_progress`, and our own `mlxspec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxspec.server.job_run import Delta, Progress

if TYPE_CHECKING:
    from mlxspec.engine.stats import RequestStats


@dataclass(frozen=True, kw_only=True)
class Extras:
    """usage: a last chunk with it (stream_options.include_usage). usages: beside that, in every chunk with text, its answer's
    (stream_options.continuous_usage_stats). progress: chunks while a prompt is read (return_progress). timings: in
    every chunk with text (timings_per_token). drafted: in every chunk with text, how much of it was drafted (return_drafted)."""

    usage: bool = False
    usages: bool = False
    progress: bool = False
    timings: bool = False
    drafted: bool = False

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Extras:
        asked = body.get("stream_options") or {}
        return cls(
            usage=bool(asked.get("include_usage")),
            usages=bool(asked.get("include_usage") and asked.get("continuous_usage_stats")),
            progress=bool(body.get("return_progress")),
            timings=bool(body.get("timings_per_token")),
            drafted=bool(body.get("return_drafted")),
        )

    def beside(self, update: Delta, place: int = 0) -> dict[str, Any]:
        """Members of the chunk that holds piece `place` of an update."""
        out: dict[str, Any] = {"timings": timings([update.stats])} if self.timings else {}
        if self.usages:
            out["usage"] = usage([update.stats], 1)
        if self.drafted:
            count = update.drafted[place] if place < len(update.drafted) else 0
            out["mlxspec"] = {"drafted_chars": count, "drafter": update.drafter if count else None}
        return out


def progress(update: Progress) -> dict[str, Any]:
    """llama.cpp's fields: tokens of the prompt, of those from the prefix cache, and those that are in; milliseconds since the request."""
    return {
        "total": update.num_total,
        "cache": update.num_cached,
        "processed": update.num_done,
        "time_ms": round(update.seconds * 1e3),
    }


def usage(stats: Sequence[RequestStats], num_prompts: int) -> dict[str, Any]:
    """Of all answers together; a prompt that several answers share counts once, as OpenAI counts."""
    each = max(1, len(stats) // max(1, num_prompts))
    prompts = stats[::each]
    num_prompt = sum(s.num_prompt for s in prompts)
    num_completion = sum(s.num_generated for s in stats)
    out: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(s.num_cached for s in prompts)},
    }
    predicted = [s.drafters["predicted"] for s in stats if "predicted" in s.drafters]
    if predicted:
        accepted = sum(p.num_accepted for p in predicted)
        out["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(p.num_drafted for p in predicted) - accepted,
        }
    return out


def timings(stats: Sequence[RequestStats]) -> dict[str, Any]:
    """llama.cpp's fields. Answers of one request run beside one another: counts add up, times are the longest."""
    prompt_n = sum(s.num_read for s in stats)
    predicted_n = sum(s.num_generated for s in stats)
    prompt_ms = max((s.prefill_seconds for s in stats), default=0.0) * 1e3
    predicted_ms = max((s.decode_seconds for s in stats), default=0.0) * 1e3
    out: dict[str, Any] = {
        "cache_n": sum(s.num_cached for s in stats),
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _over(prompt_ms, prompt_n),
        "prompt_per_second": _over(prompt_n * 1e3, prompt_ms),
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _over(predicted_ms, predicted_n),
        "predicted_per_second": _over(predicted_n * 1e3, predicted_ms),
    }
    if any(s.drafters for s in stats):
        out["draft_n"] = sum(s.num_drafted for s in stats)
        out["draft_n_accepted"] = sum(s.num_accepted for s in stats)
    return out


def drafting(stats: Sequence[RequestStats], notices: Sequence[str] = ()) -> dict[str, Any]:
    """Who drafted, and what there is to say: nothing is switched off silently."""
    drafters: dict[str, dict[str, int]] = {}
    for one in stats:
        for name, found in one.drafters.items():
            own = drafters.setdefault(name, {"drafted": 0, "accepted": 0, "judged": 0, "right": 0})
            own["drafted"] += found.num_drafted
            own["accepted"] += found.num_accepted
            own["judged"] += found.num_judged
            own["right"] += found.num_right
    rounds, decoded = sum(s.num_rounds for s in stats), sum(s.num_decoded for s in stats)
    said = dict.fromkeys([*notices, *(n for s in stats for n in s.notices)])
    return {
        "drafters": drafters,
        "rounds": rounds,
        "tokens_per_round": _over(decoded, rounds),
        "seeds": [s.seed for s in stats],
        "notices": list(said),
    }


def _over(value: float, by: float) -> float:
    return value / by if by else 0.0
