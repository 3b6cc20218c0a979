"""Acceptance: which drafted tokens are verified, and which are accepted, given the tokens that the target sampled.

The target samples at each position with the request's full sampler. A draft is accepted while it equals that sample. The sample at a
position is drawn from the same logits with the same keyed noise as in plain decoding. So the text is that of plain decoding, whoever
drafted. One token always follows the accepted drafts: the correction, or the bonus if all are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def match(drafted: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many of the k drafted tokens are accepted. sampled: the k + 1 tokens that the target chose; the one after the last
    accepted draft is the round's own token.

    Raises ValueError where `sampled` has not one token more than `drafted`.
    """
    if len(sampled) != len(drafted) + 1:
        raise ValueError(f"{len(drafted)} drafted tokens need {len(drafted) + 1} samples, not {len(sampled)}")
    for i, token in enumerate(drafted):
        if sampled[i] != token:
            return i
    return len(drafted)


def num_verified(
    length: int,
    confidences: Sequence[float] | None,
    *,
    p_min: float = 0.0,
    n_min: int = 0,
    valid: Callable[[int], int] | None = None,
) -> int:
    """Return how many of `length` drafted tokens to verify, by llama.cpp's rules for p_min and n_min.

    The draft is cut before the first token whose confidence is below p_min, and before the first token that cannot be accepted: `valid(n)`
    returns how many of the first n tokens can be. If fewer than n_min tokens are left, none is verified. confidences: one for each token;
    None where the drafter has no distribution: neither p_min nor n_min applies then.
    """
    if confidences is not None:
        length = next((i for i, p in enumerate(confidences) if p < p_min), length)
    if valid is not None and length:
        length = valid(length)
    return length if confidences is None or length >= n_min else 0
