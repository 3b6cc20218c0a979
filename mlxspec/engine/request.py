"""One request from prompt to last token: its history, its limits, what it has emitted. Plain bookkeeping; knows no arrays and no model."""

from __future__ import annotations

from collections.abc import Sequence

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.stats import DrafterStats, RequestStats
from mlxspec.engine.text import AnswerText
from mlxspec.events import Event, FinishEvent, FinishReason, TokensEvent
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.sampling.sampler import RowSampler


class Request:
    """A row's owner.

    history: prompt and answer; once decoding, its last token is sampled but not yet in the target's cache. finish_reason: None
    while running.
    """

    def __init__(
        self,
        number: int,
        prompt: Sequence[int],
        params: SamplingParams,
        spec: SpecConfig,
        *,
        max_context: int,
        vocab_size: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.number = number
        self.prompt = list(prompt)
        self.history = list(prompt)
        self.params, self.spec = params, spec
        self.max_context = max_context
        self.sampler = RowSampler(params, prompt, vocab_size)
        self.stats = RequestStats(num_prompt=len(self.prompt), seed=self.sampler.seed)
        self.answer = AnswerText(tokenizer.stream() if tokenizer else None, params.stop)
        self.finish_reason: FinishReason | None = None
        self._eos = frozenset() if params.ignore_eos or tokenizer is None else tokenizer.eos_ids

    @property
    def num_generated(self) -> int:
        return len(self.history) - len(self.prompt)

    @property
    def room(self) -> int:
        """How many drafted tokens a round may verify: one token of the budget is the round's own."""
        budget = self.params.max_tokens - self.num_generated - 1
        return max(0, min(budget, self.max_context - len(self.history)))

    def accept(
        self, tokens: Sequence[int], *, num_drafted: int = 0, drafter: str | None = None
    ) -> list[Event]:
        """Take a round's tokens (drafts that stand, then the round's own) up to whatever ends the answer; returns events.

        What stands behind the end is dropped, so the text ends where plain decoding would have ended it.
        """
        taken: list[int] = []
        text = ""
        for token in tokens:
            if token in self._eos:
                self.stats.num_end = 1
                self.finish_reason = "stop"
                break
            taken.append(token)
            self.history.append(token)
            piece, stopped = self.answer.push(token)
            text += piece
            if stopped:
                self.finish_reason = "stop"
            elif self.num_generated >= self.params.max_tokens or len(self.history) >= self.max_context:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        self.sampler.observe(taken)
        self.stats.num_generated += len(taken)
        if self.finish_reason:
            piece, stopped = self.answer.finish()
            text += piece
            if stopped:
                self.finish_reason = "stop"
        events: list[Event] = []
        if taken or text:
            stood = min(num_drafted, len(taken))
            events.append(
                TokensEvent(
                    request=self.number,
                    tokens=tuple(taken),
                    text=text,
                    num_drafted=stood,
                    drafter=drafter if stood else None,
                )
            )
        if self.finish_reason:
            events.append(FinishEvent(request=self.number, reason=self.finish_reason))
        return events

    def count(self, drafter: str | None, drafted: int, accepted: int) -> None:
        """One round's statistics."""
        self.stats.num_rounds += 1
        if drafter is not None:
            self.stats.drafters.setdefault(drafter, DrafterStats()).add(drafted, accepted)
