"""What the controller's drafting remembers of a row: drafts that wait for the text, and how the last rounds went.

Every draft is compared with the text that comes, whoever's was verified. Knows tokens and offers; asks nobody and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlxspec.drafters.base import Draft
from mlxspec.policy.controller import PLAIN, Choice, Controller, Offer
from mlxspec.policy.row import RowControl


@dataclass(kw_only=True)
class Said:
    """A draft waiting for its text. lasts: whether it is compared over several rounds, as probes are; others are judged by one."""

    offer: Offer
    tokens: list[int]
    lasts: bool = False
    heard: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class Picked:
    """What a row's draft of this round is, before it is cut to what pays."""

    choice: Choice = PLAIN
    draft: Draft | None = None
    offer: Offer | None = None


@dataclass(kw_only=True, eq=False)
class AutoRow:
    """queued: tokens each model drafter has not run. calm: plain rounds in a row. emitted: tokens of the round just read; rested: of plain
    rounds before it that the controller has not been told of. plain: tokens so far, and the seconds they would have taken in plain
    rounds."""

    control: RowControl
    said: list[Said] = field(default_factory=list)
    queued: dict[str, int] = field(default_factory=dict)
    calm: int = 0
    emitted: int = 0
    rested: int = 0
    looked_up: bool = False
    plain: tuple[int, float] = (0, 0.0)

    def observe(self, tokens: Sequence[int], control: Controller, catch_up: int) -> None:
        """The text goes on: drafts that waited for it are judged. catch_up: tokens a model drafter lets queue before it runs them."""
        for name, waiting in self.queued.items():
            waiting += len(tokens)
            self.queued[name] = waiting if waiting <= catch_up else 1
        if self.said:
            self._judge(tokens, control)

    def ask_anew(self) -> None:
        """What lookups said of this text they are asked for again."""
        if self.said:
            self.said = [s for s in self.said if s.lasts]

    def forget_behind(self, picked: Picked, width: int) -> None:
        """By rejection more stands than equals the text: only what is verified tells how much."""
        last = self.said[-1] if self.said else None
        if last is not None and last.offer is picked.offer:
            self.said.pop()
            if width:
                sure = last.offer.confidences
                offer = last.offer._replace(length=width, confidences=None if sure is None else sure[:width])
                self.said.append(Said(offer=offer, tokens=last.tokens[:width]))

    def _judge(self, tokens: Sequence[int], control: Controller) -> None:
        staying = []
        for said in self.said:
            said.heard += tokens[: len(said.tokens) - len(said.heard)]
            same = _same(said.tokens, said.heard)
            if said.lasts and same == len(said.heard) < len(said.tokens):
                staying.append(said)
            else:
                # the draft may be shorter than the text: all of it is known then
                control.learn(self.control, said.offer, same, len(said.heard))
        self.said = staying


def _same(draft: Sequence[int], text: Sequence[int]) -> int:
    for i, (drafted, came) in enumerate(zip(draft, text, strict=False)):
        if drafted != came:
            return i
    return min(len(draft), len(text))
