"""Connects requests to the prefix cache: keeps states of rows for later prompts, and finds states for new ones.

Decides where a prompt's states are kept, and which of them are anchors. Only committed tokens enter. Anchors are offered to the prefix
cache on disk, if there is one. A prompt of which the disk has a longer beginning than memory waits until that is read. The bytes that are
being read are subtracted from the tree's budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxspec.cache.attention import copied
from mlxspec.cache.model_cache import ModelCache
from mlxspec.drafters.drafts import Drafts
from mlxspec.engine.prefix.disk import Fetch, PrefixDisk
from mlxspec.engine.prefix.tree import TARGET, Hit, PrefixTree
from mlxspec.engine.request import Request, described

STRIDE = (
    2048  # tokens of a long prompt without marks between two states, or a multiple of it: see `stride_of`
)
STATE_SHARE = 2  # the least ratio of a stride's keys and values to a state, in bytes
_MARKS = 8  # the stride over the least distance of two marks at which states are kept
_PROMPTS = 8  # the newest, with which a prompt is compared
CLOSE_SECONDS = 5.0  # in which what waits for the disk is written when an engine ends
NEAR = 32  # tokens: a state that saves less reading is not kept


def stride_of(cache: ModelCache) -> int:
    """Return the number of tokens between two states that are kept of a long prompt: the least multiple of STRIDE whose keys and values
    take at least STATE_SHARE times the bytes of a state. So states inside a prompt take at most a third of its bytes in the prefix
    cache. cache: of the model; it needs no rows. Returns STRIDE where a model keeps nothing for each token."""
    per_token, state = cache.snapshot_bytes()
    return STRIDE if not per_token else STRIDE * max(1, -(-STATE_SHARE * state // (per_token * STRIDE)))


class Prefix:
    """The prefix cache of an engine. tree: the part in memory. disk: the part in files, None where there is none. stride: tokens between
    two states of a long prompt without marks. spacing: least tokens between two marks at which states are kept. near: a state that
    saves fewer tokens than this is not kept. coming: bytes that are being read from the disk."""

    def __init__(self, budget: int, *, stride: int = STRIDE, disk: PrefixDisk | None = None) -> None:
        self.tree = PrefixTree(budget)
        self.disk = disk
        self._allowed = budget
        self.coming = 0
        self.near = NEAR
        self._prompts: deque[tuple[bytes, np.ndarray]] = deque(maxlen=_PROMPTS)  # by the key of their owner
        self.space(stride)
        self.is_on = budget > 0

    def space(self, stride: int) -> None:
        """Set the number of tokens between two states that are kept of a long prompt, from now on."""
        self.stride, self.spacing = stride, stride // _MARKS

    def limit(self, budget: int) -> None:
        """Set the budget of the prefix cache in memory, in bytes, and drop states that exceed it."""
        self._allowed = budget
        self.tree.budget = max(0, budget - self.coming)
        self.tree.shrink(self.tree.budget)

    @property
    def has_work(self) -> bool:
        """Return whether a state waits to be written to the disk."""
        return self.disk is not None and self.disk.has_work

    @property
    def can_work(self) -> bool:
        """Return whether a call of `work` would do something now."""
        return self.disk is not None and self.disk.can_work

    def work(self) -> None:
        """Hand the next state that waits for the disk to the file thread. Takes a small part of a step."""
        if self.disk is not None:
            self.disk.work(self.tree)

    def flush(self, seconds: float) -> None:
        """Write the states that wait for the disk, for at most this number of seconds."""
        if self.disk is not None:
            self.disk.flush(self.tree, seconds)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write the states that wait for the disk, for at most this number of seconds, and drop all states in memory."""
        disk, self.disk = self.disk, None
        if disk is not None:
            disk.close(self.tree, seconds)
        self.limit(0)

    def stops(self, marks: Sequence[int], num_prompt: int, branch: int = 0) -> tuple[int, ...]:
        """Return the places, in tokens, at which a prompt's pieces must end so that states can be kept there. Except for `branch`, they
        depend on the prompt alone, so a longer prompt with the same beginning has the same ones.

        marks: places up to which later prompts may share the beginning. num_prompt: tokens of the prompt. branch: the place at which an
        earlier prompt differs from this one, 0 for none.
        """
        if not self.is_on:
            return ()
        kept: list[int] = []
        usable = [m for m in marks if self.near <= m < num_prompt]
        for mark in usable:  # the first is the end of the system prompt, which most texts share
            if not kept or mark - max(kept[-1], mark // self.stride * self.stride) >= self.spacing:
                kept.append(mark)
        if usable and usable[-1] - kept[-1] >= self.near:
            kept.append(usable[-1])
        found = {*kept, *range(self.stride, num_prompt, self.stride)}
        if branch - max((stop for stop in found if stop <= branch), default=0) >= self.spacing:
            found.add(branch)
        return tuple(sorted(found))

    def branch(self, request: Request) -> int:
        """Return the place at which the request's prompt first differs from the earlier prompt of its owner with which it shares most
        tokens; 0 where it continues all earlier prompts or shares nothing. So a line that an agent changes in each system prompt is
        found."""
        key, tokens, most = request.keyed.key(0), np.asarray(request.prompt, np.int64), 0
        for other_key, other in self._prompts:
            num = min(len(other), len(tokens))
            shared = next(iter(np.flatnonzero(other[:num] != tokens[:num])), num)
            if key == other_key and shared < num:
                most = max(most, int(shared))
        self._prompts.append((key, tokens))
        return most

    def _is_anchor(self, request: Request, length: int) -> bool:
        """Return whether other texts are expected to branch off after the first `length` tokens of a request: at the first mark of its
        prompt (the end of the system prompt), at the last mark, at the prompt's end, and after the answer."""
        if length >= len(request.prompt):
            return True
        usable = [m for m in request.marks if self.near <= m < len(request.prompt)]
        return bool(usable) and length in (usable[0], usable[-1])

    def _is_shared(self, request: Request, length: int) -> bool:
        """Return whether a request's system prompt ends after `length` tokens, so that many texts begin with them."""
        return length == next((m for m in request.marks if self.near <= m < len(request.prompt)), 0)

    def num_unknown(self, request: Request, drafts: Drafts) -> int:
        """Return how many tokens of the request's prompt must still be read: those after the longest beginning whose state is in memory
        with the parts that its drafters need."""
        num = len(request.prompt)
        return num - self.tree.depth(request.keyed, num, _needed(request, drafts))

    def fetch(self, request: Request, drafts: Drafts, most: int | None = None) -> Fetch | None:
        """Begin to read from the disk a longer beginning of the request's prompt than memory holds, and return the fetch; None where
        there is none that saves enough tokens. most: tokens of that beginning at most; None: the whole prompt. The caller must call
        `end_fetch` later."""
        if self.disk is None or not self.is_on or request.prompt_logprobs is not None or request.scales:
            return None  # the disk knows texts of the weights alone
        text, num = request.keyed, len(request.prompt)
        known = self.tree.depth(text, num, _needed(request, drafts)) + self.near - 1
        fetch = self.disk.fetch(text, known, self._allowed - self.coming, num if most is None else most)
        if fetch is not None:
            self.coming += fetch.nbytes
            self.limit(self._allowed)
        return fetch

    def end_fetch(self, fetch: Fetch) -> None:
        """Cancel a fetch and release its bytes of the budget."""
        fetch.cancel()
        self.coming -= fetch.nbytes
        self.limit(self._allowed)

    def find(self, request: Request, drafts: Drafts, fetched: Hit | None = None) -> Hit | None:
        """Return the state of the longest known beginning of the request's prompt, with the parts that its drafters need, and restore
        the drafters' parts; None where there is none. fetched: a state that was read from the disk; it is also put into memory."""
        if not self.is_on:
            return None
        if fetched is not None:
            self._take(request, fetched)
        needed = _needed(request, drafts)
        hit = None if request.prompt_logprobs is not None else self.tree.find(request.keyed, needed)
        if fetched is not None and (hit is None or hit.length < fetched.length):
            hit = fetched
        known = 0 if hit is None else hit.length
        if hit is not None:
            if self.disk is not None and not request.scales and hit is not fetched:
                self.disk.offer(request.keyed, known, is_shared=self._is_shared(request, known))
            request.stats.num_cached = known
            if request.spec.drafters:
                drafts.resume(request.number, request.prompt[:known], hit.parts)
        return hit

    def _take(self, request: Request, hit: Hit) -> None:
        """Put a state that was read from the disk into memory, so that later prompts find it."""
        parts = {name: s for name, s in hit.parts.items() if s.length == hit.length}
        self.tree.put(request.keyed, hit.length, parts, hit.hidden)

    def keep(
        self,
        request: Request,
        tokens: Sequence[int],
        cache: ModelCache,
        row: int,
        drafts: Drafts,
        hidden: mx.array,
    ) -> None:
        """Keep the state of a row of `cache` for later prompts. tokens: all tokens that are in the row. hidden (1, H): the target's
        final hidden state of the last one. Does nothing where a state that is fewer than `near` tokens shorter is kept already.

        An error adds only a notice to the request, because its answer is right without the kept state.
        """
        if not self.is_on:
            return
        try:
            request.keyed.tokens = tokens
            needed = _needed(request, drafts)
            if len(tokens) - self.tree.depth(request.keyed, len(tokens), needed) >= self.near:
                self._put(request, tokens, cache, row, drafts, copied(hidden))
        except Exception as error:
            request.stats.notices.append(f"nothing of this was kept for later prompts: {described(error)}")

    def _put(
        self,
        request: Request,
        tokens: Sequence[int],
        cache: ModelCache,
        row: int,
        drafts: Drafts,
        hidden: mx.array,
    ) -> None:
        text, length = request.keyed, len(tokens)
        starts = self.tree.starts(text, length, [TARGET, *request.spec.drafters])
        parts = {TARGET: cache.snapshot(row, starts[TARGET])}
        if request.spec.drafters:
            parts |= drafts.snapshot(request.number, length, starts)
        is_anchor = self._is_anchor(request, length)
        is_kept = self.tree.put(text, length, parts, hidden, is_anchor=is_anchor)
        if is_kept and is_anchor and self.disk is not None and not request.scales:
            is_shared, in_prompt = self._is_shared(request, length), length <= len(request.prompt)
            self.disk.offer(text, length, is_shared=is_shared, supersedes=in_prompt)


def _needed(request: Request, drafts: Drafts) -> list[str]:
    """Return the names of the request's drafters that can continue from a state only with a part of their own."""
    drafters = drafts.drafters
    return [n for n in request.spec.drafters if n in drafters and drafters[n].needs.every_hidden]


def covers(hit: Hit, request: Request, drafts: Drafts) -> bool:
    """Return whether a state has the parts, at its full length, that the request's drafters need."""
    needed = _needed(request, drafts)
    return all(name in hit.parts and hit.parts[name].length == hit.length for name in needed)
