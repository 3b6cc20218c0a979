"""What policy auto keeps of a row: drafts that wait for the text, and how the last rounds went.

Every draft is compared with the text that comes, whoever's was verified. Asks nobody and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlxspec.drafters.base import Draft
from mlxspec.policy.acceptance import Offer
from mlxspec.policy.controller import Choice, Controller, PolicyRow


@dataclass(kw_only=True)
class PendingDraft:
    """A draft waiting for its text. lasts: it is compared over several rounds, as probes are; others are judged by one."""

    offer: Offer
    tokens: list[int]
    lasts: bool = False
    heard: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class Picked:
    """What a row's draft of this round is, before it is cut to what pays."""

    choice: Choice
    draft: Draft | None = None
    offer: Offer | None = None


@dataclass(kw_only=True, eq=False)
class AutoRow:
    """queued: tokens each model drafter has not run. calm: plain rounds in a row. emitted: tokens of the round just read; rested: of plain
    rounds before it that the controller has not been told of. used_lookup: the last decided round took a lookup's offer. plain: tokens so
    far, and the seconds they would have taken in plain rounds."""

    control: PolicyRow
    waiting: list[PendingDraft] = field(default_factory=list)
    queued: dict[str, int] = field(default_factory=dict)
    calm: int = 0
    emitted: int = 0
    rested: int = 0
    used_lookup: bool = False
    plain: tuple[int, float] = (0, 0.0)

    def observe(self, tokens: Sequence[int], control: Controller, catch_up: int) -> None:
        """The text goes on: drafts that waited for it are judged. catch_up: tokens a model drafter lets queue before it runs them."""
        for name, queued in self.queued.items():
            queued += len(tokens)
            self.queued[name] = queued if queued <= catch_up else 1
        waiting, self.waiting = self.waiting, []
        for draft in waiting:
            draft.heard += tokens[: len(draft.tokens) - len(draft.heard)]
            matched = _matched(draft.tokens, draft.heard)
            if draft.lasts and matched == len(draft.heard) < len(draft.tokens):
                self.waiting.append(draft)
            else:
                # the draft may be shorter than the text: all of it is known then
                control.learn(self.control, draft.offer, matched, len(draft.heard))

    def ask_anew(self) -> None:
        """What lookups offered for this text they are asked for again."""
        self.waiting = [w for w in self.waiting if w.lasts]

    def forget_behind(self, offer: Offer | None, width: int) -> None:
        """By rejection more is accepted than equals the text: only what is verified tells how much."""
        if not self.waiting or self.waiting[-1].offer is not offer:
            return
        last = self.waiting.pop()
        if width:
            sure = last.offer.confidences
            cut = last.offer._replace(length=width, confidences=None if sure is None else sure[:width])
            self.waiting.append(PendingDraft(offer=cut, tokens=last.tokens[:width]))


def _matched(draft: Sequence[int], text: Sequence[int]) -> int:
    """How many tokens at the beginning of the draft are those of the text."""
    for i, (drafted, came) in enumerate(zip(draft, text, strict=False)):
        if drafted != came:
            return i
    return min(len(draft), len(text))
