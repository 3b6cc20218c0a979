"""Reads prompts: each into a cache of its own, piece by piece, up to the first token of its answer. Chooses whose piece is read next.

Pieces end at multiples of the chunk, at the request's marks, and where the prompt differs from an earlier one. This module deals with
requests and turns, and not with rounds.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from mlxspec.cache.quantized import PLAIN
from mlxspec.drafters.base import NO_DRAFT
from mlxspec.drafters.drafts import Drafts
from mlxspec.engine.prefix.disk import SLICE
from mlxspec.engine.prefix.rows import Prefix, covers
from mlxspec.engine.prefix.tree import TARGET, Hit
from mlxspec.engine.request import Request
from mlxspec.engine.round import sample_round
from mlxspec.engine.schedule import Turns
from mlxspec.events import Event, PrefillEvent
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import LogitsAt, Model
from mlxspec.models.image_rows import RowPiece, image_input
from mlxspec.platform import device, watchdog
from mlxspec.sampling.logprobs import logprobs

# Multiply-adds of a square matmul. Between two matmuls a BLAS's other threads fall asleep, and on a virtual machine waking them takes
# milliseconds: with two threads 64 tokens of the demo model took ten times as long, 512 the same, and more less.
_WORTH_WAKING = 512 * 192**2
_DISK_SECONDS = 0.01  # between two checks of what has been read from the disk
_TOLD_AT_ONCE = 64  # positions whose logits are held together: 64 MB of a vocabulary of 262,144


class Prefill:
    """The reading of one request's prompt. The first num_done tokens are in `cache`, which has one row. num_pieces: forwards and images
    so far.

    carry (1, H): the target's final hidden state of the last token that is in the cache, zeros before the first token. Where the
    request's drafters need residual streams of layers, they are joined to it, and H is larger.
    """

    def __init__(
        self,
        request: Request,
        model: Model,
        drafts: Drafts,
        prefix: Prefix,
        *,
        watch: watchdog.PromptWatch,
        kv_bits: int = PLAIN,
    ) -> None:
        """Begin to read a request's prompt after the longest beginning of it that the prefix cache holds. Where the disk holds more than
        memory does, a fetch is begun, and reading begins once `arrive` returns True. watch: limits the duration of pieces on a Mac.
        kv_bits: as in EngineConfig."""
        self.request = request
        self._model, self._drafts, self._prefix, self._watch = model, drafts, prefix, watch
        stops = prefix.stops(request.marks, len(request.prompt), prefix.branch(request))
        self._stops = stops if request.seen is None else request.seen.images.edges(stops)
        self.cache = model.make_cache(1, kv_bits=kv_bits)
        self.cache.scales[0] = request.scales
        self.num_done = self.num_pieces = 0
        self.is_parked = False
        self._logits: mx.array | None = None
        self._layers: tuple[int, ...] = ()
        self.carry = mx.zeros((1, model.hidden_size))
        self._fetch = prefix.fetch(request, drafts)
        if self._fetch is None:
            self._begin(None)

    def _begin(self, fetched: Hit | None) -> None:
        """Restore the longest known beginning of the prompt, and set where reading begins. fetched: the beginning that was read from the
        disk, or None."""
        request, drafts = self.request, self._drafts
        hit = self._prefix.find(request, drafts, fetched)
        request.shows_layers = any(
            d.needs.layers and d.name in request.spec.drafters for d in drafts.drafters.values()
        )
        self._layers = drafts.streams.layers if request.shows_layers else ()
        self.carry = mx.zeros((1, (1 + len(self._layers)) * self._model.hidden_size))
        if hit is not None:
            self.cache.restore(hit.parts[TARGET])
            watchdog.evaluate_in_parts(self.cache.arrays)
            final = drafts.streams.final(hit.hidden)
            self.carry, self.num_done = hit.hidden if self._layers else final, hit.length
            self._turn()
            if self.is_done:
                self._logits = self._model.head(final)

    def arrive(self, *, is_busy: bool) -> bool:
        """Return whether the prompt can be read on: no state from the disk is still awaited. Takes what the disk has delivered: one
        slice where other rows decode (is_busy), else all. A state that is damaged, or lacks a part that a drafter needs, is replaced
        by the next shorter one."""
        while self._fetch is not None:
            fetch = self._fetch
            fetch.take(SLICE if is_busy else fetch.nbytes)
            if not fetch.is_done and not fetch.has_failed:
                return False
            self._fetch = None
            hit = fetch.hit() if fetch.is_done else None
            is_here = hit is not None and covers(hit, self.request, self._drafts)
            try:
                if is_here:
                    self._begin(hit)
                    mx.eval(self.cache.arrays)  # so that what was read can go
            finally:
                self._prefix.end_fetch(fetch)
            self.request.stats.prefill_seconds += time.perf_counter() - fetch.started
            if not is_here:
                self._fetch = self._prefix.fetch(self.request, self._drafts, fetch.length - 1)
                if self._fetch is None:
                    self._begin(None)
        return True

    def attempt(self, work: Callable[[], bool], *, failed: bool = False) -> bool:
        """Run `work` and return its result. Where it raises, the request ends with the error, and `failed` is returned."""
        try:
            return work()
        except Exception as error:
            self.request.fail(error)
            return failed

    def wait(self, seconds: float) -> None:
        """Wait until more of the prompt's state has been read from the disk, for at most this number of seconds. Returns at once where
        nothing is read from the disk."""
        if self._fetch is not None:
            self._fetch.wait(seconds)

    def leave(self) -> None:
        """End the reading early. The part that has been read is kept in the prefix cache, unless the request failed."""
        if self._fetch is not None:
            self._prefix.end_fetch(self._fetch)
            self._fetch = None
        if self.request.error is None:
            self.keep()

    @property
    def is_done(self) -> bool:
        return self.num_done == len(self.request.prompt)

    def next_end(self, chunk: int) -> int:
        """Return the place, in tokens, at which the next piece of the prompt ends: at most `chunk` tokens after num_done, unless an
        image needs more."""
        at = bisect_right(self._stops, self.num_done)
        grid = (self.num_done // chunk + 1) * chunk
        end = min([grid, *self._stops[at : at + 1], len(self.request.prompt)])
        return end if self.request.seen is None else self.request.seen.images.edge(self.num_done, end)

    def read_image(self, end: int) -> bool:
        """Run the vision tower over the next image before place `end` whose rows are not computed yet; return whether there was one."""
        seen = self.request.seen
        if seen is None:
            return False
        started = time.perf_counter()
        for _, prepared in seen.images.within(self.num_done, end):
            if not seen.has(prepared):
                device.prefill_threads()
                try:
                    seen.tower(prepared)
                finally:
                    device.decode_threads()
                    self.request.stats.prefill_seconds += time.perf_counter() - started
                    self.num_pieces += 1
                return True
        return False

    def _turn(self) -> None:
        """Set the shift of rotary positions that the prompt's images cause for the tokens that follow."""
        if self.request.seen is not None:
            self.cache.shift(0, self.request.seen.images.shift(self.num_done))

    def advance(self, end: int) -> list[Event]:
        """Read the prompt up to place `end`, give its tokens to the drafters, and keep the state in the prefix cache where later prompts
        may continue from it. Return the event that reports the progress."""
        started = time.perf_counter()
        if (end - self.num_done) * self._model.hidden_size**2 >= _WORTH_WAKING:
            device.prefill_threads()
        try:
            if end > self.num_done:
                self._read(end)
            if end in self._stops or self.is_done:
                self.keep()
        finally:
            device.decode_threads()
            self.request.stats.prefill_seconds += time.perf_counter() - started
        return [
            PrefillEvent(
                request=self.request.number,
                num_done=end,
                num_total=len(self.request.prompt),
                num_cached=self.request.stats.num_cached,
            )
        ]

    def _read(self, end: int) -> None:
        request, drafts = self.request, self._drafts
        piece = request.prompt[self.num_done : end]
        last = end == len(request.prompt)
        looked_up, more = piece, {}
        if request.seen is not None:
            looked_up = request.seen.images.ids(piece)
            images = image_input([RowPiece(request.seen, self.num_done, len(piece))])
            more = {} if images is None else {"images": images}
        tokens = mx.array(np.asarray(looked_up, np.int32))
        rows = FlatRows((len(piece),), is_prompt=True)
        try:
            with self._watch.reading(len(piece)):
                # without readers of hidden states only the last one is needed: to continue a prompt that ends here
                reads = drafts.needs_hidden or self._layers or request.prompt_logprobs is not None
                logits_at: LogitsAt = "last" if last else "none" if reads else "end"
                out = self._model.forward(
                    tokens, rows, self.cache, certain=True, logits_at=logits_at, taps=self._layers, **more
                )
                hidden = drafts.streams.join(out)
                mx.async_eval(out.logits if last else hidden)  # the device has it before the watch waits
        except BaseException:
            self.cache.abort()
            raise
        self.cache.commit()
        mx.eval(out.logits if last else hidden, self.cache.arrays)
        if request.prompt_logprobs is not None:
            self._tell_prompt(hidden)
        before = None
        if drafts.needs_hidden:
            before = mx.concatenate([self.carry.astype(hidden.dtype), hidden[:-1]])
        if request.spec.drafters:
            drafts.hear(request.number, piece, before)
        self.carry, self._logits = hidden[-1:], out.logits
        self.num_done, self.num_pieces = end, self.num_pieces + 1
        self._turn()
        request.stats.num_read += len(piece)

    def _tell_prompt(self, hidden: mx.array) -> None:
        """Compute the log-probabilities of the prompt's tokens that follow those just read, and add them to the request. hidden (n, H):
        hidden states of the tokens just read. Works on a few positions at a time, because the logits of all would take too much
        memory."""
        hidden, prompt = self._drafts.streams.final(hidden), self.request.prompt
        for start in range(0, hidden.shape[0], _TOLD_AT_ONCE):
            first = self.num_done + start + 1
            behind = self.request.ids(prompt[first : first + min(_TOLD_AT_ONCE, hidden.shape[0] - start)])
            if behind:
                logits = self._model.head(hidden[start : start + len(behind)])
                chosen = mx.array(np.asarray(behind, np.int32))
                found = logprobs(logits, chosen, self.request.params.top_logprobs)
                mx.eval(found.arrays)
                self.request.read_prompt(found, behind)

    def keep(self) -> None:
        """Keep the row's state in the prefix cache, for prompts that begin with the tokens read so far."""
        if self.num_done:
            tokens = self.request.prompt[: self.num_done]
            self._prefix.keep(self.request, tokens, self.cache, 0, self._drafts, self.carry)

    def first_token(self) -> Sequence[Event]:
        """Sample the answer's first token from the prompt's last logits and return its events. Raises ValueError before the whole prompt is
        read."""
        if self._logits is None or not self.is_done:
            raise ValueError("the prompt has not been read yet")
        started = time.perf_counter()
        request, drafts = self.request, self._drafts
        place = mx.array(request.ids(request.prompt[-1:]), mx.int32)
        sampled = sample_round([request], [NO_DRAFT], place, self._logits)
        mx.eval(sampled.arrays)
        first = int(sampled.tokens.item())
        new, failure = sampled.take(0, [first])
        request.tail = (self.carry, 0)
        events = request.accept(new, logprobs=request.read_logprobs(sampled.logprobs, new, 0))
        if failure is not None:
            request.fail(failure)
        if request.spec.drafters and request.finish_reason is None:
            drafts.hear(request.number, [first], self.carry if drafts.needs_hidden else None)
            drafts.prime(request.number)
        request.stats.prefill_seconds += time.perf_counter() - started
        return events


class Prefills:
    """The prompts that an engine reads, the oldest request's first. Iterating and `len` are over those that are not parked."""

    def __init__(self) -> None:
        self.every: list[Prefill] = []
        self._turns = Turns()

    def __len__(self) -> int:
        return sum(not p.is_parked for p in self.every)

    def __iter__(self) -> Iterator[Prefill]:
        return iter([p for p in self.every if not p.is_parked])

    @property
    def parked(self) -> list[Request]:
        """Return the requests whose prompts are partly read and parked."""
        return [p.request for p in self.every if p.is_parked]

    def park(self, request: Request, *, is_parked: bool = True) -> None:
        """Pause the reading of a request's prompt; with is_parked False, continue it."""
        (prefill,) = (p for p in self.every if p.request is request)
        prefill.is_parked = is_parked

    def add(self, prefill: Prefill) -> None:
        """Add a request's prompt to those that are being read."""
        self.every.append(prefill)
        self.every.sort(key=lambda p: p.request.number)

    def remove(self, prefill: Prefill) -> None:
        """Remove a prompt that has been read whole, or whose request has ended."""
        self.every.remove(prefill)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the target's states of all prompts, parked ones included."""
        return sum(p.cache.nbytes for p in self.every)

    def pieces(self, chunk: int, *, is_busy: bool) -> Iterator[tuple[Prefill, int | None]]:
        """Yield the pieces to read next, at most `chunk` tokens together: the prompt and the place at which its piece ends. The caller
        reads each piece before it continues. A pair with None instead of a place means that an image of the prompt has gone through
        the vision tower, which counts as a whole chunk. is_busy: whether rows decode. A request whose image or stored state fails
        ends with the error."""
        left, ready = chunk, [p for p in self if p.attempt(partial(p.arrive, is_busy=is_busy))]
        waiting = [p for p in self if p.request.finish_reason is None]
        if not ready and waiting and not is_busy:
            waiting[0].wait(_DISK_SECONDS)
        while ready:
            served = [p.num_pieces for p in ready]
            prefill = ready[self._turns.next(served, [p.request.client for p in ready])]
            end = prefill.next_end(chunk)
            if left < chunk and end - prefill.num_done > left:
                return
            self._turns.took()
            if prefill.attempt(partial(prefill.read_image, end), failed=True):
                yield prefill, None
                return
            left -= end - prefill.num_done
            yield prefill, end
            ready = [p for p in ready if p in self.every]
