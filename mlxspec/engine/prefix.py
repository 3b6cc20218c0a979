"""What rows leave behind for texts that begin as theirs did, and what they find: between the engine's rows and the prefix store.

Knows caches, drafters and when a state is worth its bytes; the tree and its budget are prefix_store.py's. Only committed tokens enter.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxspec.cache.attention import copied
from mlxspec.cache.model_cache import ModelCache
from mlxspec.drafters.chain import Chain
from mlxspec.engine.hiddens import Hiddens, missing
from mlxspec.engine.prefix_store import TARGET, Hit, PrefixStore
from mlxspec.engine.request import Request, described

STRIDE = 2048  # tokens of a long prompt without marks between two states
SPACING = 256  # tokens between two marks at which states are kept: each costs a piece of its own
NEAR = 32  # tokens: a state that saves less reading is not kept


class Prefix:
    """The engine's prefix store. near: see NEAR."""

    def __init__(self, budget: int, *, near: int = NEAR) -> None:
        self.store = PrefixStore(budget)
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
            if not kept or kept[-1] - mark >= SPACING:
                kept.append(mark)
        if usable:
            # the end of the system prompt, which most texts share: rather that than a place close behind it
            if kept[-1] - usable[0] < self.near:
                kept.pop()
            kept.append(usable[0])
        return tuple(sorted({*kept, *range(STRIDE, num_prompt, STRIDE)}))

    def find(self, request: Request, chain: Chain) -> Hit | None:
        """The longest beginning of the request's prompt that is known; its drafters are told of it."""
        if not self.is_on:
            return None
        hit = self.store.find(request.prompt)
        known = 0 if hit is None else hit.length
        if missing(chain.drafters.values(), request.spec):
            request.hiddens = Hiddens(known)
        if hit is not None:
            request.stats.num_cached = known
            if request.spec.drafters:
                chain.resume(request.number, request.prompt[:known], hit.parts, hit.sources_from)
        return hit

    def keep(
        self,
        request: Request,
        tokens: Sequence[int],
        cache: ModelCache,
        row: int,
        chain: Chain,
        hidden: mx.array,
    ) -> None:
        """Keep the state of a row of `cache`, which stands behind just these tokens. hidden (1, H): the target's, of the last one.

        Whatever goes wrong costs the request a notice only: an answer that could not be kept is an answer all the same.
        """
        if not self.is_on:
            return
        try:
            if len(tokens) - self.store.depth(tokens) >= self.near:
                self._put(request, tokens, cache, row, chain, copied(hidden))
        except Exception as error:
            request.stats.notices.append(f"nothing of this was kept for later prompts: {described(error)}")

    def _put(
        self,
        request: Request,
        tokens: Sequence[int],
        cache: ModelCache,
        row: int,
        chain: Chain,
        hidden: mx.array,
    ) -> None:
        names = [TARGET, *(request.spec.drafters)]
        starts = self.store.starts(tokens, names)
        parts = {TARGET: cache.snapshot(row, starts[TARGET])}
        if request.spec.drafters:
            parts |= chain.snapshot(request.number, len(tokens), starts)
        lacking = [d.name for d in chain.drafters.values() if d.needs.every_hidden and d.name not in parts]
        heard = request.hiddens
        sources = heard.until(len(tokens)) if heard is not None and lacking else None
        # rather no state than one behind which a drafter could not begin
        if heard is None or self.store.covers(tokens, lacking, 0 if sources is None else len(sources)):
            self.store.put(tokens, parts, hidden, sources)
        if heard is not None:
            heard.drop(len(tokens))
