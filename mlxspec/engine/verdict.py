"""The result of the exactness probe: for which widths of a round the logits equal those of plain steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WidthVerdict:
    """One width of a round.

    is_bitwise: logits of the verify, and those of a plain step behind it (behind all of it, and behind part of it), have the bits of plain
    steps. same_argmax: each place has the same likeliest token. largest: largest difference of a logit.
    """

    width: int
    is_bitwise: bool
    same_argmax: bool
    largest: float


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """All widths tried, and in how many tokens of context."""

    widths: tuple[WidthVerdict, ...]
    context: int

    @property
    def is_exact(self) -> bool:
        """Every width tried has the bits of plain steps."""
        return all(v.is_bitwise for v in self.widths)

    @property
    def exact_width(self) -> int:
        """The widest round up to which every width has the bits of plain steps; 1 where not even two tokens have."""
        found = 1
        for verdict in sorted(self.widths, key=lambda v: v.width):
            if not verdict.is_bitwise or verdict.width != found + 1:
                break
            found = verdict.width
        return found

    def sentence(self) -> str:
        """What was found, in one or two sentences."""
        if not self.widths:
            return "No verify width was tried."
        tried = f"up to {max(v.width for v in self.widths)} tokens"
        if self.is_exact:
            return f"Verifying {tried} gives the same bits as plain steps."
        largest = max(v.largest for v in self.widths)
        flips = [v.width for v in self.widths if not v.same_argmax]
        moved = f"Verifying {tried} moves logits by at most {largest:.1e}"
        if flips:
            return f"{moved} and changed the top token at width {flips[0]}. Greedy text can differ from plain decoding."
        return f"{moved} and never changed the top token. Greedy text matches plain decoding except at near ties."
