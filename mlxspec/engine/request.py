"""One request from prompt to last token: its history, its limits, and the text that it has given out. It computes no arrays."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxspec.config import MAX_CONTEXT, SamplingParams, SpecConfig
from mlxspec.drafters.alignment import TOKEN_ALIGNED, num_met
from mlxspec.drafters.row import AskedDrafter
from mlxspec.engine.prefix.tree import KeyedText
from mlxspec.engine.stats import DrafterStats, RequestStats
from mlxspec.engine.text import AnswerText
from mlxspec.errors import GrammarError, MlxspecError
from mlxspec.events import FinishReason, TokenLogprob, TokensEvent
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.models.image_rows import SeenImages
from mlxspec.platform import device, watchdog
from mlxspec.sampling.constraints import Compiled, ConstraintMaker, ends_of
from mlxspec.sampling.logprobs import Logprobs
from mlxspec.sampling.loops import DELAY, EVERY
from mlxspec.sampling.round import NO_TOKEN_LEFT
from mlxspec.sampling.row import RowSampler

TOKEN_BYTES = 48  # of a token on the host: places in two lists, and the integer
NOT_BEGUN = (
    "the answer reached its limit in thinking, before its grammar (of a required call or a format) began:"
    " thinking_budget limits thinking"
)
SHORT_OF_MEMORY = "the answer ends here as the memory for more of it is taken by other answers"
STEP = 4096  # tokens by which memory is reserved for an answer whose only limit is the context
UNREAD = 512  # tokens of an answer that may wait for its client before its row rests
_UNREAD_BYTES = 512  # of one of them: an event and its text
_LOGPROB_BYTES = 256  # of one token's log-probability, its text included


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The reason for which a request is ended from outside. number: the request's. error: the sentence that ends it; None: it is
    cancelled. is_late: whether its deadline has passed."""

    number: int
    error: str | None = None
    is_late: bool = False


class Request:
    """A request, from its prompt to the last token of its answer.

    history: tokens of prompt and answer; while decoding, the last one is sampled but not yet in the target's cache. finish_reason: None
    while running. error: the sentence for finish_reason "error". failure: the exception that caused it, if there was one. logprobs: one
    for each token of the answer, None where not requested. marks: places in the prompt, ascending, up to which another prompt may share
    its beginning. end_token: the sampled token that ended the answer and is not part of it. newest: tokens that the last round added to
    the answer. client: name by which places are shared out. tail: hidden states (n, H), and the index of the one after the newest token
    in the target's cache. keyed: its text with keys for the prefix cache. shows_layers: whether its forwards also return the residual
    streams that drafters need; H is then the width of `Streams`. seen: the images of the prompt, None where there are none; prompt and
    history have keys in the place of image tokens (models/image_rows.py). scales: of the engine's adapters, as in ModelCache. limit:
    tokens of the answer for which memory is reserved; where max_tokens is MAX_CONTEXT it grows with the answer.
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
        marks: Sequence[int] = (),
        deadline: float | None = None,
        compiled: Compiled | None = None,
        client: str = "",
        seen: SeenImages | None = None,
        scales: tuple[float, ...] = (),
    ) -> None:
        """Make a request that has not begun. prompt: token ids, with keys in the place of image tokens. maker: makes the constraints on
        its tokens; None: a new one. deadline: seconds from now; None: none. compiled: the compiled parts of params; None: they are
        compiled here. Raises ConfigError and GrammarError for parameters that cannot be used."""
        self.number = number
        self.prompt = list(prompt)
        self.history = list(prompt)
        self.params, self.spec = params, spec
        self.limit = max(STEP, params.min_tokens) if params.max_tokens == MAX_CONTEXT else params.max_tokens
        self.max_context = max_context
        self.marks = tuple(marks)
        self._deadline = (
            None
            if deadline is None
            else (time.monotonic() + deadline, f"{deadline:g} seconds were not enough.")
        )
        self.seen, self.scales = seen, scales
        self.maker = maker or ConstraintMaker(tokenizer, vocab_size)
        self.client = client
        compiled = compiled or self.maker.compile(params, owner=spec.owner)
        self._compiled_bytes = compiled.nbytes
        self.constraints = self.maker.constraints_for(params, self.ids(self.prompt), compiled)
        self.sampler = RowSampler(
            params,
            self.prompt if seen is None else [t for t in self.prompt if t >= 0],  # no penalty counts images
            vocab_size,
            constraints=self.constraints,
            breaks=compiled.breaks,
        )
        self._loops = self.maker.loops_for(params, self.ids(self.prompt[-64:]))
        self._closes: int | None = None  # the period of the loop for which thinking will be closed
        self.stats = RequestStats(num_prompt=len(self.prompt), seed=self.sampler.seed)
        self.answer = AnswerText(
            tokenizer.stream() if tokenizer else None,
            params.stop,
            keeps_stop=params.keeps_stop,
            outside=params.stop_outside,
        )
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.failure: BaseException | None = None
        self.has_expired = False  # what ended it is its deadline
        self.since = 0  # the engine's step in which it last got a place
        self.end_token: int | None = None
        self.newest: list[int] = []
        self.tail: tuple[mx.array, int] | None = None
        self.keyed = KeyedText(self.history, spec.owner, scales)
        self.shows_layers = False
        self._is_said = False  # nothing of the text is held back any more
        self.logprobs: list[TokenLogprob] | None = [] if params.wants_logprobs else None
        self.prompt_logprobs: list[TokenLogprob] | None = [] if params.prompt_logprobs else None
        self._bytes = self.maker.token_bytes if params.wants_logprobs else ()
        self._shown = np.zeros(0, np.int32)  # a buffer that begins with _num_shown tokens
        self._num_shown = 0
        self._eos = ends_of(params, frozenset() if tokenizer is None else tokenizer.eos_ids)

    def ids(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return tokens of the request with ids of the vocabulary; a key of an image token becomes the id of that token."""
        return tokens if self.seen is None else self.seen.images.shown(tokens)

    @property
    def shown(self) -> NDArray[np.int32]:
        """Return the history as token ids of the vocabulary, (n,) int32: each key of an image token is replaced by the id of the image
        token. Logits processors receive the array and must not change it. A call converts only the tokens that were added since the
        last call."""
        new = self.ids(self.history[self._num_shown :])
        end = self._num_shown + len(new)
        if end > len(self._shown):
            grown = np.zeros(end + max(256, end // 8), np.int32)
            grown[: self._num_shown] = self._shown[: self._num_shown]
            self._shown = grown
        self._shown[self._num_shown : end] = new
        self._num_shown = end
        return self._shown[:end]

    @property
    def num_generated(self) -> int:
        return len(self.history) - len(self.prompt)

    @property
    def most_tokens(self) -> int:
        """Return the number of tokens of prompt and answer for which memory is reserved."""
        return min(len(self.prompt) + self.limit, self.max_context)

    @property
    def wants_more(self) -> bool:
        """Return whether memory for more tokens of the answer should be reserved now, early enough that drafts are not shortened by the
        limit."""
        is_open = self.params.max_tokens == MAX_CONTEXT
        return is_open and self.limit - self.num_generated < STEP // 2 and self.most_tokens < self.max_context

    @property
    def host_bytes(self) -> int:
        """Return an upper bound of the bytes that the request takes apart from arrays: its compiled parts, its tokens, the events that
        its client has not read, log-probabilities, and its images' pixels."""
        most = self.most_tokens
        found = self._compiled_bytes + text_bytes(most) + len(self.spec.predicted) * TOKEN_ALIGNED
        if self.logprobs is not None:
            num = most - (0 if self.params.prompt_logprobs else len(self.prompt))
            found += max(0, num) * (1 + self.params.top_logprobs) * _LOGPROB_BYTES
        return found if self.seen is None else found + self.seen.images.nbytes

    @property
    def room(self) -> int:
        """Return how many drafted tokens a round may verify for this row: one token of what is left of the answer is the round's own.
        Where loops are searched for, at most DELAY, so that no launched round reaches a place at which a token may be forced."""
        budget = self.limit - self.num_generated - 1
        most = min(budget, self.max_context - len(self.history))
        return max(0, most if self._loops is None else min(most, DELAY))

    @property
    def out_of_time(self) -> Ending | None:
        """Return the ending of a request whose deadline has passed or whose grammar takes too long; else None."""
        if self.finish_reason is not None:
            return None
        if self._deadline is not None and time.monotonic() >= self._deadline[0]:
            return Ending(number=self.number, error=self._deadline[1], is_late=True)
        why = None if self.constraints is None else self.constraints.overdue
        return None if why is None else Ending(number=self.number, error=why)

    def end(self, ending: Ending) -> None:
        """End the request for the reason in `ending`, unless it has ended."""
        if self.finish_reason is not None:
            return
        if ending.error is not None:
            self.fail(ending.error)
            self.has_expired = ending.is_late
        else:
            self.finish_reason = "cancelled"

    def fail(self, error: BaseException | str) -> None:
        """End the request with finish_reason "error" because of `error`, unless it has ended. The text so far stays."""
        if self.finish_reason is None:
            self.finish_reason, self.error = "error", error if isinstance(error, str) else described(error)
            self.failure = None if isinstance(error, str) else error
        if not isinstance(error, str):
            device.note_failure(error)

    def rest(self) -> list[TokensEvent]:
        """Return the text that was held back until the answer's end, as at most one event; an empty list where it was returned before."""
        if self._is_said:
            return []
        self._is_said = True
        piece, _ = self.answer.finish(cut=self.finish_reason == "length")
        return [TokensEvent(request=self.number, tokens=(), text=piece)] if piece else []

    def tokens_in_cache(self, length: int) -> list[int] | None:
        """Return the first `length` tokens that the target has run for this request; None where some of them have not been read by the
        host yet."""
        known = self.history if self.end_token is None else [*self.history, self.end_token]
        return known[:length] if length <= len(known) else None

    def read_logprobs(
        self, found: Logprobs | None, tokens: Sequence[int], start: int
    ) -> list[TokenLogprob] | None:
        """Return the log-probabilities of tokens that were chosen at positions start, start + 1, ... of a round; None where this request
        has not requested them. found: of all positions of the round."""
        if found is None or self.logprobs is None:
            return None
        return found.read(tokens, self.params.top_logprobs, start, self._bytes)

    def read_prompt(self, found: Logprobs, tokens: Sequence[int]) -> None:
        """Add the log-probabilities of these next tokens of the prompt, if they were requested."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += found.read(tokens, self.params.top_logprobs, 0, self._bytes)

    def accept(
        self,
        tokens: Sequence[int],
        *,
        num_accepted: int = 0,
        drafter: str | None = None,
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> list[TokensEvent]:
        """Add a round's tokens, num_accepted drafted ones and then the round's own, to the answer up to its end. Return at most one
        event.

        Tokens after the end are dropped, so the text ends where plain decoding would have ended it. drafter: name of the drafter of the
        accepted tokens. logprobs: one for each token, None where not requested.
        """
        taken = self.newest = []
        text, drafted = "", 0
        for token in tokens:
            if token in self._eos:
                self.stats.num_end = 1
                self.end_token, self.finish_reason = token, "stop"
                break
            if self.constraints is not None and not self.constraints.push(token):
                self.end_token, self.finish_reason = token, "error"
                self.failure = GrammarError(NO_TOKEN_LEFT)
                self.error = str(self.failure)
                break
            taken.append(token)
            self.history.append(token)
            piece, stopped = self.answer.push(token, may_stop=self.num_generated >= self.params.min_tokens)
            text += piece
            drafted = len(text) if len(taken) <= num_accepted else drafted
            if stopped or (self.constraints is not None and self.constraints.is_finished):
                self.finish_reason = "stop"
            elif self._is_loop() or len(self.history) >= self.most_tokens:
                self.finish_reason = "length"
                if self.wants_more and self.num_generated >= self.limit:
                    self.stats.notices.append(SHORT_OF_MEMORY)
            if self.finish_reason:
                break
        self.sampler.observe(taken)
        self.stats.num_generated += len(taken)
        if self.constraints is not None:
            self.stats.num_thinking = self.constraints.num_thinking
            self.stats.num_thinking_forced = self.constraints.num_forced
            if self._closes is not None and self.constraints.num_forced:
                self._count_loop(self._closes, "thinking looped and was closed")
                self._closes = None
        given = None if logprobs is None else tuple(logprobs[: len(taken)])
        if self.logprobs is not None and given is not None:
            self.logprobs += given
        if self.finish_reason:
            self._is_said = True
            piece, stopped = self.answer.finish(cut=self.finish_reason == "length")
            text += piece
            if stopped:
                self.finish_reason = "stop"
        if (
            self.finish_reason == "length"
            and self.constraints is not None
            and self.constraints.awaits_grammar
        ):
            self.stats.notices.append(NOT_BEGUN)
        if not taken and not text:
            return []
        num_accepted = min(num_accepted, len(taken))
        return [
            TokensEvent(
                request=self.number,
                tokens=tuple(taken),
                text=text,
                num_drafted=num_accepted,
                num_drafted_chars=drafted,
                drafter=drafter if num_accepted else None,
                logprobs=given,
            )
        ]

    def _is_loop(self) -> bool:
        """Return whether the answer ends now because it loops. For a loop within thinking, the closing of the thinking is scheduled
        instead (sampling/loops.py)."""
        if self._loops is None or self.num_generated % EVERY:
            return False
        loop = self._loops.look(self.history, len(self.prompt))
        if loop is not None and not loop.is_thought:
            self._count_loop(loop.period, "the answer looped and was ended")
            return True
        if loop is not None and self._loops.thinking is not None:
            self.constraints = self.sampler.constraints = self.constraints or self.maker.unconstrained()
            if self.constraints.close_thinking(DELAY, self._loops.thinking, self._loops.state):
                self._closes = loop.period
        if not self._loops.is_on:
            self._loops = None
        return False

    def _count_loop(self, period: int, what: str) -> None:
        self.stats.num_loops += 1
        self.stats.notices.append(f"{what}: it repeats every {period} tokens (loop_breaker)")

    def count_asked(self, asked: Mapping[str, AskedDrafter]) -> None:
        """Add to the statistics, at the end of the request, the calls, seconds and right first tokens of each drafter. asked: records by
        drafter's name. Where no policy compared drafts with the text, the first tokens that rounds verified are counted."""
        for name, found in asked.items():
            work = self.stats.drafters.setdefault(name, DrafterStats())
            work.num_calls, work.seconds = found.calls, found.seconds
            verified = work.by_position[0] if work.by_position else (0, 0)
            work.num_judged, work.num_right = (found.judged, found.right) if found.judged else verified

    def count_foretold(self) -> None:
        """Count in the statistics how many tokens of the answer the prediction in the request contained. May be called after the end, in
        any thread."""
        predicted = self.spec.predicted
        if not isinstance(predicted, str):
            self.stats.num_predicted = len(predicted)
            self.stats.num_foretold = num_met(predicted, self.history[len(self.prompt) :])

    def count(self, drafter: str | None, num_drafted: int, num_accepted: int) -> None:
        """Count a round in the statistics, and clear `newest` for its tokens. drafter: name of the drafter, None for a plain round."""
        self.newest = []
        self.stats.num_rounds += 1
        if drafter is not None:
            self.stats.drafters.setdefault(drafter, DrafterStats()).add(num_drafted, num_accepted)


def text_bytes(num_tokens: int) -> int:
    """Return the bytes that this number of tokens of a request take on the host, including the events that its client has not read."""
    return num_tokens * TOKEN_BYTES + min(num_tokens, UNREAD) * _UNREAD_BYTES


def described(error: BaseException) -> str:
    """Return a sentence about the error that ended an answer."""
    if isinstance(error, MlxspecError):
        return str(error)
    said = str(error).strip().rstrip(".")
    return watchdog.explained(f"{type(error).__name__}{': ' + said if said else ''}.")
