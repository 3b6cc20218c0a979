"""Token counts and times of an answer, as OpenAI's `usage`, llama.cpp's `timings` and `prompt_progress`, and our own `mlxspec`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mlxspec.engine.receipt import Receipt
from mlxspec.server.job_run import Progress

if TYPE_CHECKING:
    from mlxspec.engine.stats import RequestStats


def progress(update: Progress) -> dict[str, Any]:
    """Return llama.cpp's `prompt_progress`: the prompt's tokens, those from the prefix cache, those that are read or cached, and
    milliseconds since reading began."""
    return {
        "total": update.num_total,
        "cache": update.num_cached,
        "processed": update.num_done,
        "time_ms": round(update.seconds * 1e3),
    }


def usage(stats: Sequence[RequestStats], num_prompts: int) -> dict[str, Any]:
    """Return OpenAI's `usage` of all answers of a request together. num_prompts: a prompt that several answers share counts once."""
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
    predicted = sum(s.num_predicted for s in stats)
    if predicted:
        accepted = min(predicted, sum(s.num_foretold for s in stats))
        out["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": predicted - accepted,
        }
    return out


def timings(stats: Sequence[RequestStats]) -> dict[str, Any]:
    """Return llama.cpp's `timings` of all answers of a request together. Counts are sums; times, in milliseconds, are those of the
    slowest answer, because the answers run at the same time."""
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


def drafting(
    stats: Sequence[RequestStats], notices: Sequence[str] = (), receipts: Sequence[Receipt] = ()
) -> dict[str, Any]:
    """Return the member `mlxspec` of a response: what each drafter drafted, rounds, exactness, seeds and notices. receipts: the
    comparisons of the answers that were decoded again without drafts."""
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
        "drafted_rounds": sum(s.num_drafted_rounds for s in stats),
        "tokens_per_round": _over(decoded, rounds),
        "bit_exact": None
        if any(s.is_bit_exact is None for s in stats)
        else all(s.is_bit_exact for s in stats),
        "exact_width": min((s.exact_width or 0 for s in stats), default=0) or None,
        "seeds": [s.seed for s in stats],
        "notices": list(said),
        **({"receipts": [{"equal": r.is_equal, **asdict(r)} for r in receipts]} if receipts else {}),
    }


def _over(value: float, by: float) -> float:
    return value / by if by else 0.0
