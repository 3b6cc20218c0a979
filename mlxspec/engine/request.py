"""One request from prompt to last token: its history, its limits, what it has emitted. Plain bookkeeping; knows no arrays and no model."""

from __future__ import annotations

from collections.abc import Sequence

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.stats import DrafterStats, RequestStats
from mlxspec.engine.text import AnswerText
from mlxspec.events import Event, FinishEvent, FinishReason, TokenLogprob, TokensEvent
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.sampling.constraints import ConstraintMaker
from mlxspec.sampling.logprobs import Logprobs
from mlxspec.sampling.sampler import RowSampler


class Request:
    """A row's owner.

    history: prompt and answer; once decoding, its last token is sampled but not yet in the target's cache. finish_reason: None
    while running; error: the sentence that goes with "error". logprobs: one a token of the answer, None where nobody asked.
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
        maker: ConstraintMaker | None = None,
    ) -> None:
        """Raises ConfigError and GrammarError for what cannot be honoured."""
        self.number = number
        self.prompt = list(prompt)
        self.history = list(prompt)
        self.params, self.spec = params, spec
        self.max_context = max_context
        self.maker = maker or ConstraintMaker(tokenizer, vocab_size)
        self.constraints = self.maker.make(params, prompt)
        self.sampler = RowSampler(
            params,
            prompt,
            vocab_size,
            drafts_by=spec.drafts_by,
            keeps_drafts=spec.acceptance == "rejection",
            constraints=self.constraints,
        )
        self.stats = RequestStats(num_prompt=len(self.prompt), seed=self.sampler.seed)
        self.answer = AnswerText(tokenizer.stream() if tokenizer else None, params.stop)
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.logprobs: list[TokenLogprob] | None = [] if params.wants_logprobs else None
        self._bytes = self.maker.token_bytes if params.wants_logprobs else ()
        self._eos = frozenset() if params.ignore_eos or tokenizer is None else tokenizer.eos_ids

    @property
    def num_generated(self) -> int:
        return len(self.history) - len(self.prompt)

    @property
    def room(self) -> int:
        """How many drafted tokens a round may verify: one token of the budget is the round's own."""
        budget = self.params.max_tokens - self.num_generated - 1
        return max(0, min(budget, self.max_context - len(self.history)))

    def read_logprobs(
        self, found: Logprobs | None, tokens: Sequence[int], start: int
    ) -> list[TokenLogprob] | None:
        """Those of tokens that were chosen at positions start, start + 1, ... of a round; None where this request wants none."""
        if found is None or self.logprobs is None:
            return None
        return found.read(tokens, self.params.top_logprobs, start, self._bytes)

    def accept(
        self,
        tokens: Sequence[int],
        *,
        num_drafted: int = 0,
        drafter: str | None = None,
        logprobs: Sequence[TokenLogprob] | None = None,
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
            if self.constraints is not None and not self.constraints.push(token):
                self.finish_reason = "error"
                self.error = (
                    "What was asked of the answer (grammar, bad words, thinking) left no token to go on with."
                )
                break
            taken.append(token)
            self.history.append(token)
            piece, stopped = self.answer.push(token)
            text += piece
            if stopped or (self.constraints is not None and self.constraints.is_finished):
                self.finish_reason = "stop"
            elif self.num_generated >= self.params.max_tokens or len(self.history) >= self.max_context:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        self.sampler.observe(taken)
        self.stats.num_generated += len(taken)
        if self.constraints is not None:
            self.stats.num_thinking = self.constraints.num_thinking
            self.stats.num_thinking_forced = self.constraints.num_forced
        given = None if logprobs is None else tuple(logprobs[: len(taken)])
        if self.logprobs is not None and given is not None:
            self.logprobs += given
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
                    logprobs=given,
                )
            )
        if self.finish_reason:
            events.append(FinishEvent(request=self.number, reason=self.finish_reason, error=self.error))
        return events

    def fail(self, why: str) -> list[Event]:
        """End with an error sentence; what has been said stays."""
        self.finish_reason, self.error = "error", why
        piece, _ = self.answer.finish()
        events: list[Event] = [TokensEvent(request=self.number, tokens=(), text=piece)] if piece else []
        return [*events, FinishEvent(request=self.number, reason="error", error=why)]

    def count(self, drafter: str | None, drafted: int, accepted: int) -> None:
        """One round's statistics."""
        self.stats.num_rounds += 1
        if drafter is not None:
            self.stats.drafters.setdefault(drafter, DrafterStats()).add(drafted, accepted)
