"""Connects rows to the prefix store: saves states of rows for later prompts, and finds states for new ones.

Knows caches, drafters, where a prompt's states are kept, and which of them are anchors and which waypoints; the tree, its budget and its
eviction are prefix_store.py's. Only committed tokens enter.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxspec.cache.attention import copied
from mlxspec.cache.model_cache import ModelCache
from mlxspec.engine.hiddens import Hiddens, missing
from mlxspec.engine.prefix_store import TARGET, Hit, PrefixStore
from mlxspec.engine.request import Request, described
from mlxspec.policy.drafting import Drafting

STRIDE = (
    2048  # tokens of a long prompt without marks between two states, or a multiple of it: see `stride_of`
)
STATE_SHARE = 2  # the keys and values of a stride take at least so many times the bytes of a state
_MARKS = 8  # of a stride, one part of so many lies between two marks at which states are kept: each costs a piece of its own
NEAR = 32  # tokens: a state that saves less reading is not kept


def stride_of(cache: ModelCache) -> int:
    """Tokens between two states of a long prompt: the least multiple of STRIDE whose keys and values take STATE_SHARE times the bytes of a
    state. So the states inside a prompt take at most a third of its bytes in the store. `cache` needs no rows. STRIDE where a model
    keeps nothing token by token."""
    per_token, state = cache.snapshot_bytes()
    return STRIDE if not per_token else STRIDE * max(1, -(-STATE_SHARE * state // (per_token * STRIDE)))


class Prefix:
    """The engine's prefix store. stride, spacing: tokens between two states of a long prompt without marks, and between two marks at which
    states are kept. near: see NEAR."""

    def __init__(self, budget: int, *, stride: int = STRIDE, near: int = NEAR) -> None:
        self.store = PrefixStore(budget)
        self.stride, self.spacing = stride, stride // _MARKS
        self.near = near

        self.is_on = budget > 0

    def limit(self, budget: int) -> None:
        """So many bytes it may have now; what is too much goes."""
        self.store.budget = budget
        self.store.shrink(budget)

    def stops(self, marks: Sequence[int], num_prompt: int) -> tuple[int, ...]:
        """Where a prompt's pieces must end so that states can be kept there: depends on the prompt alone, not on what is in the store."""
        if not self.is_on:
            return ()
        kept: list[int] = []
        usable = [m for m in marks if self.near <= m < num_prompt]
        for mark in reversed(usable):
            if not kept or kept[-1] - mark >= self.spacing:
                kept.append(mark)
        if usable:
            # the end of the system prompt, which most texts share: rather that than a place close behind it
            if kept[-1] - usable[0] < self.near:
                kept.pop()
            kept.append(usable[0])
        return tuple(sorted({*kept, *range(self.stride, num_prompt, self.stride)}))

    def _is_anchor(self, request: Request, length: int) -> bool:
        """Whether a text is expected to branch off behind the first `length` tokens of a request: at the first mark of its prompt (the end
        of the system prompt), at the last one, at its end, and behind the answer. Another mark and a multiple of the stride are not,
        nor is the place where a cancelled prompt was interrupted."""
        if length >= len(request.prompt):
            return True
        usable = [m for m in request.marks if self.near <= m < len(request.prompt)]
        return bool(usable) and length in (usable[0], usable[-1])

    def find(self, request: Request, drafting: Drafting) -> Hit | None:
        """The longest beginning of the request's prompt that is known; its drafters are told of it."""
        if not self.is_on:
            return None
        hit = self.store.find(request.prompt)
        known = 0 if hit is None else hit.length
        if missing(drafting.chain.drafters.values(), request.spec):
            request.hiddens = Hiddens(known)
        if hit is not None:
            request.stats.num_cached = known
            if request.spec.drafters:
                drafting.resume(request.number, request.prompt[:known], hit.parts, hit.sources_from)
        return hit

    def keep(
        self,
        request: Request,
        tokens: Sequence[int],
        cache: ModelCache,
        row: int,
        drafting: Drafting,
        hidden: mx.array,
    ) -> None:
        """Keep the state of a row of `cache`, which stands behind just these tokens. hidden (1, H): the target's, of the last one.

        Whatever goes wrong costs the request a notice only: an answer that could not be kept is an answer all the same.
        """
        if not self.is_on:
            return
        try:
            if len(tokens) - self.store.depth(tokens) >= self.near:
                self._put(request, tokens, cache, row, drafting, copied(hidden))
        except Exception as error:
            request.stats.notices.append(f"nothing of this was kept for later prompts: {described(error)}")

    def _put(
        self,
        request: Request,
        tokens: Sequence[int],
        cache: ModelCache,
        row: int,
        drafting: Drafting,
        hidden: mx.array,
    ) -> None:
        names = [TARGET, *(request.spec.drafters)]
        starts = self.store.starts(tokens, names)
        parts = {TARGET: cache.snapshot(row, starts[TARGET])}
        if request.spec.drafters:
            parts |= drafting.snapshot(request.number, len(tokens), starts)
        lacking = [
            d.name for d in drafting.chain.drafters.values() if d.needs.every_hidden and d.name not in parts
        ]
        heard = request.hiddens
        sources = heard.until(len(tokens)) if heard is not None and lacking else None
        # rather no state than one behind which a drafter could not begin
        if heard is None or self.store.covers(tokens, lacking, 0 if sources is None else len(sources)):
            rest = max(0, len(request.prompt) - len(tokens))
            is_waypoint = not self._is_anchor(request, len(tokens))
            self.store.put(tokens, parts, hidden, sources, rest=rest, is_waypoint=is_waypoint)
        # what the store did not take is needed for the next state of this text
        if heard is not None and self.store.depth(tokens) == len(tokens):
            heard.drop(len(tokens))
