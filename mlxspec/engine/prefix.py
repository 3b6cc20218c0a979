"""Connects rows to the prefix store: saves states of rows for later prompts, and finds states for new ones.

Knows caches, drafters, owners, where a prompt's states are kept, and which of them are anchors and which waypoints; the tree, its budget
and its eviction are prefix_store.py's. Only committed tokens enter. Behind the store in memory there may be one on disk (prefix_disk):
anchors are offered to it, and a prompt of which it knows more than memory does waits for what is read. The bytes that it holds in memory
meanwhile are taken from the budget of the store in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import mlx.core as mx

from mlxspec.cache.attention import copied
from mlxspec.cache.model_cache import ModelCache, Snapshot
from mlxspec.engine.hiddens import Hiddens, missing
from mlxspec.engine.prefix_disk.disk import Fetch, PrefixDisk
from mlxspec.engine.prefix_store import TARGET, Hit, PrefixStore
from mlxspec.engine.request import Request, described
from mlxspec.policy.drafting import Drafting

STRIDE = (
    2048  # tokens of a long prompt without marks between two states, or a multiple of it: see `stride_of`
)
STATE_SHARE = 2  # the keys and values of a stride take at least so many times the bytes of a state
_MARKS = 8  # of a stride, one part of so many lies between two marks at which states are kept: each costs a piece of its own
CLOSE_SECONDS = 5.0  # in which what waits for the disk is written when an engine ends
NEAR = 32  # tokens: a state that saves less reading is not kept


def stride_of(cache: ModelCache) -> int:
    """Tokens between two states of a long prompt: the least multiple of STRIDE whose keys and values take STATE_SHARE times the bytes of a
    state. So the states inside a prompt take at most a third of its bytes in the store. `cache` needs no rows. STRIDE where a model
    keeps nothing token by token."""
    per_token, state = cache.snapshot_bytes()
    return STRIDE if not per_token else STRIDE * max(1, -(-STATE_SHARE * state // (per_token * STRIDE)))


def key_of(request: Request, tokens: Sequence[int]) -> Sequence[int]:
    """A beginning of the request's text as the store knows it. Another owner's, or one under adapters, is another text from its first token
    on: that one is a negative number, equal only for the same owner, adapters and token but for a chance of 2**-63."""
    owner = request.spec.owner
    if not tokens or not (owner or request.scales):
        return tokens
    said = hashlib.sha256(repr((owner, request.scales, tokens[0])).encode()).digest()
    return [~(int.from_bytes(said[:8]) >> 1), *tokens[1:]]


class Prefix:
    """The engine's prefix store. stride, spacing: tokens between two states of a long prompt without marks, and between two marks at which
    states are kept. near: see NEAR. disk: the store on disk, None where there is none."""

    def __init__(self, budget: int, *, stride: int = STRIDE, disk: PrefixDisk | None = None) -> None:
        self.store = PrefixStore(budget)
        self.disk = disk
        self._allowed = budget
        self._coming = 0  # bytes that are being read from the disk
        self.near = NEAR
        self.space(stride)
        self.is_on = budget > 0
        self._balance()

    def space(self, stride: int) -> None:
        """So many tokens lie between two states of a long prompt from here on."""
        self.stride, self.spacing = stride, stride // _MARKS

    def limit(self, budget: int) -> None:
        """So many bytes it may have now; what is too much goes."""
        self._allowed = budget
        self._balance()

    def _balance(self) -> None:
        """What reading and writing the disk needs is taken from the store in memory."""
        held = self._coming + (0 if self.disk is None else self.disk.reserve)
        self.store.budget = max(0, self._allowed - held)
        self.store.shrink(self.store.budget)

    @property
    def has_work(self) -> bool:
        """Whether anything waits to be written to the disk."""
        return self.disk is not None and self.disk.has_work

    @property
    def can_work(self) -> bool:
        """Whether `work` could write some of it now."""
        return self.disk is not None and self.disk.can_work

    def work(self, *, is_busy: bool) -> None:
        """Copy a slice of what waits for the disk, if it is time for one. is_busy: rows decode."""
        if self.disk is not None:
            self.disk.work(self.store, is_busy=is_busy)

    def flush(self, seconds: float) -> None:
        """Write what waits for the disk, for so long at most."""
        if self.disk is not None:
            self.disk.flush(self.store, seconds)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what can be written in this time, and let go of everything."""
        disk, self.disk = self.disk, None
        if disk is not None:
            disk.close(self.store, seconds)
        self.limit(0)

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

    def fetch(self, request: Request) -> Fetch | None:
        """Begin to read what the disk knows of the request's prompt and memory does not; None where that is not worth it. `end_fetch` must
        follow."""
        if self.disk is None or not self.is_on or request.prompt_logprobs is not None or request.scales:
            return None  # the disk knows texts of the weights alone
        key, room = key_of(request, request.prompt), self._allowed - self._coming - self.disk.reserve
        fetch = self.disk.fetch(key, self.store.depth(key), room)
        if fetch is not None:
            self._coming += fetch.nbytes
            self._balance()
        return fetch

    def end_fetch(self, fetch: Fetch) -> None:
        """Nothing of it is held any more."""
        fetch.cancel()
        self._coming -= fetch.nbytes
        self._balance()

    def find(self, request: Request, drafting: Drafting, fetched: Hit | None = None) -> Hit | None:
        """The longest beginning of the request's prompt that is known; its drafters are told of it. fetched: what came from the disk."""
        if not self.is_on:
            return None
        is_kept = fetched is not None and self._take(request, drafting, fetched)
        key = key_of(request, request.prompt)
        hit = None if request.prompt_logprobs is not None else self.store.find(key)
        if fetched is not None and (hit is None or hit.length <= fetched.length):
            hit = fetched
        known = 0 if hit is None else hit.length
        if missing(drafting.chain.drafters.values(), request.spec):
            request.hiddens = Hiddens(known)
            if hit is not None and hit is fetched and not is_kept:
                request.hiddens = _heard(hit)
        if (
            hit is not None
            and self.disk is not None
            and not request.scales
            and (hit is not fetched or is_kept)
        ):
            self.disk.offer(key[:known])
        if hit is not None:
            request.stats.num_cached = known
            if request.spec.drafters:
                drafting.resume(request.number, request.prompt[:known], hit.parts, hit.sources_from)
        return hit

    def _take(self, request: Request, drafting: Drafting, hit: Hit) -> bool:
        """Put into memory what came from the disk, for this prompt and others. Not where a drafter could not begin behind it: the store
        keeps hiddens of whole edges only."""
        parts = {name: _joined(s) for name, s in hit.parts.items() if s.length == hit.length}
        heard = sum(len(x) for x in hit.sources if x is not None)
        lacking = [
            d for d in drafting.chain.drafters.values() if d.needs.every_hidden and d.name not in parts
        ]
        if lacking and heard < hit.length:
            return False
        tokens = key_of(request, request.prompt[: hit.length])
        sources = hit.sources_from(hit.length - heard) if lacking else None
        return self.store.put(tokens, parts, hit.hidden, sources, rest=len(request.prompt) - hit.length)

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
            if len(tokens) - self.store.depth(key_of(request, tokens)) >= self.near:
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
        names, key = [TARGET, *(request.spec.drafters)], key_of(request, tokens)
        starts = self.store.starts(key, names)
        parts = {TARGET: cache.snapshot(row, starts[TARGET])}
        if request.spec.drafters:
            parts |= drafting.snapshot(request.number, len(tokens), starts)
        lacking = [
            d.name for d in drafting.chain.drafters.values() if d.needs.every_hidden and d.name not in parts
        ]
        heard = request.hiddens
        sources = heard.until(len(tokens)) if heard is not None and lacking else None
        # rather no state than one behind which a drafter could not begin
        if heard is None or self.store.covers(key, lacking, 0 if sources is None else len(sources)):
            rest = max(0, len(request.prompt) - len(tokens))
            is_waypoint = not self._is_anchor(request, len(tokens))
            is_kept = self.store.put(key, parts, hidden, sources, rest=rest, is_waypoint=is_waypoint)
            if is_kept and not is_waypoint and self.disk is not None and not request.scales:
                self.disk.offer(key)
        # what the store did not take is needed for the next state of this text
        if heard is not None and self.store.depth(key) == len(tokens):
            heard.drop(len(tokens))


def _joined(snapshot: Snapshot) -> Snapshot:
    """The same in one segment."""
    if len(snapshot.segments) == 1:
        return snapshot
    layers = [
        tuple(mx.concatenate(arrays, axis=2) for arrays in zip(*pieces, strict=True))
        for pieces in zip(*snapshot.segments, strict=True)
    ]
    return Snapshot(snapshot.length, [layers], snapshot.point)


def _heard(hit: Hit) -> Hiddens:
    """The hiddens that came with a state."""
    num = sum(len(x) for x in hit.sources if x is not None)
    sources = hit.sources_from(hit.length - num)
    found = Hiddens(hit.length - num)
    if sources is not None:
        found.add(sources)
    return found
