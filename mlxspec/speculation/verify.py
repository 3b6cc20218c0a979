"""Acceptance: which drafted tokens stand, given what the target chose at every verified position. Pure functions of numbers.

`match`: the target samples at each position with the request's full sampler; a draft stands while it equals that sample. Whatever proposed the
draft and however it was trimmed, the text is the one plain decoding would have given (the sample at a position is drawn from the same
logits with the same keyed noise). One token always follows the drafts that stand: the correction, or after all of them the bonus.
"""

from __future__ import annotations

from collections.abc import Sequence


def match(drafted: Sequence[int], sampled: Sequence[int]) -> int:
    """How many of the k drafted tokens stand. sampled has k + 1 entries; the one after the last that stands is the round's own token.

    Raises ValueError when the lengths do not fit.
    """
    if len(sampled) != len(drafted) + 1:
        raise ValueError(f"{len(drafted)} drafted tokens need {len(drafted) + 1} samples, not {len(sampled)}")
    for i, token in enumerate(drafted):
        if sampled[i] != token:
            return i
    return len(drafted)


def trim(confidences: Sequence[float], *, p_min: float, n_min: int) -> int:
    """How many drafted tokens are worth verifying, in llama.cpp's meaning.

    The draft ends before the first token whose confidence is below p_min; what is then shorter than n_min is dropped whole.
    """
    length = next((i for i, p in enumerate(confidences) if p < p_min), len(confidences))
    return length if length >= n_min else 0
