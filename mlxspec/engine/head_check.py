"""Tests an MTP head on a short text when it is loaded: which convention its norms follow, and whether it predicts better than chance.

The verdict is kept in the user's cache folder, in a file for each pair of a target and a head, so that later loads need not run the test. A
damaged file is treated as missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.models.head_norms import ENOUGH, HeadScore, Shifts, TargetRun, best_shifts
from mlxspec.models.qwen3_5_mtp import NORMS, Qwen35Mtp
from mlxspec.platform import kept_json
from mlxspec.platform.host import numbers
from mlxspec.version import __version__

TEXT = (
    "def mean(values):\n    total = 0\n    for value in values:\n        total = total + value\n    return total / len(values)\n\n"
    "The function adds the values of a list and divides the sum by their number. It raises an error for an empty list, because the "
    "sum is then divided by zero. To find the largest value of a list, go through the list and keep the largest value so far.\n"
)
TRIAL_TOKENS = 64  # at most, of the text


def check_head(
    head: Qwen35Mtp,
    tokenizer: Tokenizer,
    files: Sequence[Path],
    share: Callable[[Any], Any] = lambda value: value,
) -> str | None:
    """Choose by trial which norms of an MTP head are stored shifted (1 + w), and set them accordingly. The trial scores the head on a short
    text in each candidate state. Its verdict is cached on disk.

    Returns a notice where the head predicts no better than chance, else None. The head stays as loaded, and the result is None, where the
    text has too few tokens or the target itself does not predict the text, for example with random weights.

    head: its weights and its target's weights are evaluated. files: the weight files of target and head; their names, sizes and times are
    part of the cache key. share: maps a plain JSON value to rank 0's value, where several ranks run the target together.
    """
    tokens = tokenizer.encode(TEXT)[:TRIAL_TOKENS]
    if len(tokens) < ENOUGH:
        return None
    path = _path(head, tokens, files)
    verdict = _verdict(share(kept_json.read(path)))
    if verdict is None:
        run = TargetRun.over(head.target, tokens)
        if not run.reads:
            return None
        shifts, score = best_shifts(head, run)
        found = share({"shifts": shifts, "score": list(score)})
        kept_json.write(path, found)
        verdict = _verdict(found)
    if verdict is None:
        return None
    shifts, score = verdict
    head.set_norms(head.norms(), shifts)
    mx.eval(head.parameters())
    if score.is_useful:
        return None
    return (
        f"There is no drafting with the MTP head: on a short text {score.accepted:.0%} of its drafts would be accepted, and "
        f"{score.chance:.0%} by chance, whichever of its norms are taken to be stored shifted by 1. It is damaged, or it was made for "
        "another model."
    )


def _verdict(data: Any) -> tuple[Shifts, HeadScore] | None:
    """Return the norm shifts and the score that a cache file holds; None where the data is missing or damaged."""
    try:
        score = HeadScore(*(float(x) for x in data["score"]))
        shifts = {str(group): float(by) for group, by in data["shifts"].items()}
        are_known = set(shifts) <= set(NORMS) and {*shifts.values()} <= {-1.0, 1.0}
        return (shifts, score) if are_known and all(0 <= x <= 1 for x in score) else None
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _path(head: Qwen35Mtp, tokens: Sequence[int], files: Sequence[Path]) -> Path:
    described = [
        __version__,
        list(tokens),
        [(name, list(value.shape), str(value.dtype)) for name, value in tree_flatten(head.parameters())],
        sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files),
    ]
    norms = [numbers(weight).tobytes() for weights in head.norms().values() for weight in weights]
    return kept_json.kept_file("heads", described, *norms)  # norms as loaded, which shifts are relative to
