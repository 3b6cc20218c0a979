"""Decides how many positions are sampled together, so that what sampling takes beside the logits stays bounded.

Sampling takes several float32 arrays as large as the logits. A position's result does not depend on the positions beside it, because each
row of logits is sampled by itself. MLX makes room for the results of many operations before it runs them, so a block of positions is waited
for before the next one is built. That costs a round its lead over the host. So positions are cut into blocks only where one block would
take more bytes than the device has for it, and never up to AT_ONCE positions, which most rounds have.
"""

from __future__ import annotations

from mlxspec.platform import device
from mlxspec.sampling.truncate import numbers_held

AT_ONCE = 5  # positions: a round's own token and four drafted ones
# arrays (n, V) of float32 that sampling n positions holds at once: whatever is asked, and without top-p alone, filters, penalties and masks
MOST_COPIES, FEW_COPIES = 15, 4


def block_size(num: int, vocab_size: int, copies: int) -> int:
    """Return how many of `num` positions to sample at a time. copies: the most arrays (n, V) of float32 that sampling n positions holds
    at once."""
    if num <= AT_ONCE or not copies:
        return num
    return max(1, device.sampling_bytes() // (4 * copies * numbers_held(vocab_size)))


def most_bytes(num: int, vocab_size: int) -> int:
    """Return an upper bound of the bytes that sampling `num` positions takes in addition to their logits."""
    block = min(num, block_size(num, vocab_size, MOST_COPIES))
    return 4 * MOST_COPIES * numbers_held(vocab_size) * max(block, min(num, AT_ONCE))
