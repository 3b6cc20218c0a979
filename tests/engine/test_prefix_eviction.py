"""What the prefix store drops, in which order and for whom: against a plain twin that holds texts in a list, and at a 27B model's sizes.

Arrays here are zeros that are broadcast: they declare their bytes and take no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.cache.attention import AttentionLayerCache
from mlxspec.cache.model_cache import ModelCache, Snapshot
from mlxspec.cache.recurrent import RecurrentLayerCache
from mlxspec.cache.windowed import WindowedLayerCache
from mlxspec.drafters.chain import Chain
from mlxspec.engine import prefix_store
from mlxspec.engine.prefix import STRIDE, Prefix, stride_of
from mlxspec.engine.prefix_store import TARGET, PrefixStore
from mlxspec.policy.drafting import Drafting

MB = 1 << 20
TOKEN_BYTES = 64 << 10  # keys and values of a 27B model's token
STATE_BYTES = 151 * MB
OWN_BYTES = 16  # of a token in the tree, beside its keys and values
HIDDEN_BYTES = 4 * 8


@pytest.fixture(autouse=True, scope="module")
def _no_memory() -> Iterator[None]:
    """Without this, cutting an edge would copy what was declared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_store, "copied", lambda x: x)
        yield


def declared(*shape: int) -> mx.array:
    return mx.broadcast_to(mx.zeros(()), shape)


def snapshot(start: int, length: int, token_bytes: int, state_bytes: int) -> Snapshot:
    kept = declared(1, 1, length - start, token_bytes // 8)
    return Snapshot(length, [[(kept, kept)]], [(declared(state_bytes // 4),)], start)


def put(
    store: PrefixStore,
    tokens: list[int],
    token_bytes: int = TOKEN_BYTES,
    state_bytes: int = STATE_BYTES,
    **more,
) -> bool:
    start = store.starts(tokens, [TARGET])[TARGET]
    part = snapshot(start, len(tokens), token_bytes, state_bytes)
    done = store.put(tokens, {TARGET: part}, declared(1, HIDDEN_BYTES // 4), **more)
    store.check()
    return done


# ---- against a plain twin


@dataclass(kw_only=True)
class Twin:
    """The rules of the module's docstring, with a list of texts in place of a tree: `kept` from the least to the most recently used."""

    budget: int
    token_bytes: int
    state_bytes: int
    kept: list[tuple[int, ...]] = field(default_factory=list)
    waypoints: set[tuple[int, ...]] = field(default_factory=set)

    def nbytes(self, texts: list[tuple[int, ...]]) -> int:
        edges = {text[: i + 1] for text in texts for i in range(len(text))}
        return len(texts) * (self.state_bytes + HIDDEN_BYTES) + len(edges) * (self.token_bytes + OWN_BYTES)

    def touch(self, text: tuple[int, ...]) -> None:
        for length in range(1, len(text) + 1):
            beginning = text[:length]
            goes_on = {t[length] for t in self.kept if len(t) > length and t[:length] == beginning}
            if beginning in self.kept and (beginning == text or len(goes_on) > 1):
                self.kept.remove(beginning)
                self.kept.append(beginning)

    def order(self, text: tuple[int, ...]) -> list[tuple[int, ...]]:
        own = [t for t in self.kept if t in self.waypoints and text[: len(t)] == t]
        others = [t for t in self.kept if t in self.waypoints and t not in own]
        return [*own, *others, *(t for t in self.kept if t not in self.waypoints)]

    def put(self, text: tuple[int, ...], rest: int, is_waypoint: bool) -> bool:
        longer = (*text, *([-1] * rest))
        small = self.nbytes([longer]) <= self.budget
        kept = [t for t in self.kept if t != text]
        for victim in [None, *(t for t in self.order(text) if t != text)]:
            if victim is not None:
                if victim not in self.waypoints and (is_waypoint or not small):
                    return False
                kept.remove(victim)
            if self.nbytes([*kept, text]) <= self.budget:
                break
        else:
            return False
        if not is_waypoint:
            self.waypoints.discard(text)
        elif text not in self.kept:
            self.waypoints.add(text)
        self.kept = [*kept, text]
        self.waypoints &= set(self.kept)
        self.touch(text)
        return True

    def find(self, text: tuple[int, ...]) -> int:
        found = max((t for t in self.kept if text[: len(t)] == t), key=len, default=())
        if found:
            self.waypoints.discard(found)
            self.touch(found)
        return len(found)

    def shrink(self, nbytes: int) -> None:
        for victim in self.order((-1,)):
            if self.nbytes(self.kept) <= nbytes:
                break
            self.kept.remove(victim)
        self.waypoints &= set(self.kept)


def states(store: PrefixStore) -> list[tuple[tuple[int, ...], bool]]:
    """Texts and kinds, the least recently used first."""
    found = []
    for node in store._nodes():
        if node.state is not None:
            text, step = (), node
            while step.parent is not None:
                text, step = step.tokens + text, step.parent
            found.append((node.used, text, node.is_waypoint))
    return [(text, kind) for _, text, kind in sorted(found)]


texts = st.lists(st.integers(0, 2), min_size=1, max_size=9)
operation = st.one_of(
    st.tuples(st.just("put"), texts, st.integers(0, 6), st.booleans()),
    st.tuples(st.just("put"), texts, st.just(0), st.booleans()),
    st.tuples(st.just("find"), texts),
    st.tuples(st.just("shrink"), st.integers(0, 6000)),
)


budgets = st.one_of(st.integers(0, 2000), st.integers(0, 8000))


def run(operations: list[tuple], budget: int, state_bytes: int) -> None:
    store = PrefixStore(budget)
    twin = Twin(budget=budget, token_bytes=80, state_bytes=state_bytes)
    for what, *args in operations:
        before = states(store)
        if what == "put":
            tokens, rest, is_waypoint = args
            done = put(store, tokens, 80, state_bytes, rest=rest, is_waypoint=is_waypoint)
            assert done == twin.put(tuple(tokens), rest, is_waypoint)
            if done:
                assert store.depth(tokens) == len(tokens)
            else:
                assert states(store) == before
            if not is_waypoint and twin.nbytes([(*tokens, *([-1] * rest))]) <= budget:
                assert done, "an anchor of a text that fits is always kept"
        elif what == "find":
            hit = store.find(args[0])
            assert (0 if hit is None else hit.length) == twin.find(tuple(args[0]))
        else:
            store.shrink(args[0])
            twin.shrink(args[0])
        assert states(store) == [(t, t in twin.waypoints) for t in twin.kept]
        assert store.nbytes == twin.nbytes(twin.kept) <= budget


@settings(max_examples=150, deadline=None)
@given(st.lists(operation, max_size=30), budgets, st.sampled_from([40, 400, 1200]))
def test_what_is_kept_is_what_the_rules_say(operations: list[tuple], budget: int, state_bytes: int) -> None:
    run(operations, budget, state_bytes)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(st.lists(operation, max_size=60), budgets, st.sampled_from([0, 40, 400, 1200, 3000]))
def test_what_is_kept_is_what_the_rules_say_at_length(
    operations: list[tuple], budget: int, state_bytes: int
) -> None:
    run(operations, budget, state_bytes)


# ---- the order, by example


def test_own_waypoints_go_first_then_others_then_the_least_recently_used_anchor() -> None:
    one = STATE_BYTES + HIDDEN_BYTES + 100 * (TOKEN_BYTES + OWN_BYTES)
    store = PrefixStore(6 * one)
    old, other, own = [[base + i for i in range(300)] for base in (1000, 2000, 3000)]
    assert put(store, old[:100])
    for text in (other, own):
        assert put(store, text[:100], is_waypoint=True)
        assert put(store, text[:200], is_waypoint=True)
    seen = []
    for length in (250, 251, 252, 253, 254, 255):
        assert put(store, own[:length])
        seen.append([text[0] + len(text) for text, _ in states(store) if text[0] != 3000 or len(text) <= 200])
    # each line: what is left beside what was put
    assert seen[0] == [1100, 2100, 2200, 3100, 3200]
    assert seen[1] == [1100, 2100, 2200, 3200]
    assert seen[2] == [1100, 2100, 2200]
    assert seen[3] == [1100, 2200]
    assert seen[4] == [1100]
    assert seen[5] == []


def test_a_state_that_texts_share_is_used_when_one_of_them_is() -> None:
    store = PrefixStore(10 << 30)
    system, alone = list(range(100)), list(range(500, 600))
    put(store, system)
    put(store, alone)
    put(store, [*system, 1])
    # only one text goes on from it, and that one has a state of its own
    assert states(store)[0][0] == tuple(system)
    put(store, [*system, 2])
    store.find([*system, 1, 7])
    assert [text for text, _ in states(store)] == [tuple(alone), (*system, 2), tuple(system), (*system, 1)]


def test_a_waypoint_that_a_text_goes_on_from_is_an_anchor() -> None:
    store = PrefixStore(2 * (STATE_BYTES + 200 * TOKEN_BYTES))
    put(store, [1] * 100, is_waypoint=True)
    put(store, [2] * 100, is_waypoint=True)
    assert store.find([1] * 120).length == 100
    assert put(store, [3] * 200, is_waypoint=True)
    assert [len(text) for text, _ in states(store)] == [100, 200]
    assert store.depth([1] * 120) == 100
    put(store, [1] * 100, is_waypoint=True)
    assert (((1,) * 100), False) in states(store)


def test_what_cannot_be_evaluated_leaves_a_valid_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """An edge was cut, and states were dropped to make room."""
    store = PrefixStore(3 * (STATE_BYTES + 100 * TOKEN_BYTES))
    text = list(range(120))
    put(store, text[:50])
    put(store, text)
    put(store, [*text[:70], 900])
    real = prefix_store._cut

    def fails(*args):
        real(*args)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(prefix_store, "_cut", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        put(store, [*text[:60], *range(700, 840)])
    store.check()
    assert store.depth([*text[:60], *range(700, 840)]) <= 50
    monkeypatch.setattr(prefix_store, "_cut", real)
    assert put(store, [*text[:60], *range(700, 840)])


def test_an_edge_whose_state_was_dropped_for_a_put_that_failed_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = PrefixStore(2 * STATE_BYTES + 400 * TOKEN_BYTES)
    text = list(range(300))
    put(store, text[:50])
    put(store, [900] * 50)
    monkeypatch.setattr(prefix_store.mx, "eval", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        put(store, text)
    store.check()
    assert [kept for kept, _ in states(store)] == [(900,) * 50]


KINDS = ((TARGET,), (TARGET, "mtp"), (TARGET, "draft", "mtp"))
put_of_parts = st.tuples(texts, st.sampled_from(KINDS), st.integers(0, 9), st.booleans())


@settings(max_examples=100, deadline=None)
@given(st.lists(put_of_parts, min_size=1, max_size=6))
def test_what_fits_to_the_byte_drops_nothing(puts: list[tuple]) -> None:
    """Also where a part lacks at the end of a text, an edge is cut, or snapshots have more than the tree lacks."""

    def made(budget: int) -> PrefixStore:
        store = PrefixStore(1 << 30)
        for number, (tokens, names, num_sources, is_whole) in enumerate(puts):
            store.budget = budget if number == len(puts) - 1 else store.budget
            starts = dict.fromkeys(names, 0) if is_whole else store.starts(tokens, names)
            parts = {name: snapshot(starts[name], len(tokens), 80, 40) for name in names}
            sources = declared(num, 5) if (num := min(num_sources, len(tokens))) else None
            assert store.put(tokens, parts, declared(1, 3), sources)
            store.check()
        return store

    wanted = made(1 << 30)
    assert states(made(wanted.nbytes)) == states(wanted)


# ---- at a 27B model's sizes


class Row:
    """A model cache of one row, of which only snapshots are taken."""

    def __init__(self, length: int) -> None:
        self.length = length

    def snapshot(self, row: int, start: int) -> Snapshot:
        return snapshot(start, self.length, TOKEN_BYTES, STATE_BYTES)


def read(prefix: Prefix, prompt: list[int], marks: tuple[int, ...] = (), answer: int = 40) -> int:
    """What a request does to the store; returns how many tokens were known."""
    stats = SimpleNamespace(notices=[], num_cached=0)
    spec = SimpleNamespace(drafters=(), policy="fixed", owner="")
    request = SimpleNamespace(
        number=0,
        prompt=prompt,
        marks=marks,
        spec=spec,
        stats=stats,
        hiddens=None,
        prompt_logprobs=None,
        scales=(),
    )
    hit = prefix.find(request, Drafting(Chain(())))
    known = 0 if hit is None else hit.length
    text = [*prompt, *range(10**6, 10**6 + answer)]
    ends = [*(s for s in prefix.stops(marks, len(prompt)) if s > known), len(prompt), len(text)]
    for end in ends:
        prefix.keep(request, text[:end], Row(end), 0, Drafting(Chain(())), declared(1, HIDDEN_BYTES // 4))
        prefix.store.check()
    assert stats.notices == []
    return known


def numbers(base: int, num: int) -> list[int]:
    return list(range(base, base + num))


@pytest.mark.parametrize("budget", [700, 900])
@pytest.mark.parametrize(
    "marks", [(), (1500,), (1500, 5000), (1500, 4000, 9000, 13_000), tuple(range(1500, 13_500, 300))], ids=len
)
def test_a_prompt_larger_than_the_store_leaves_everybody_where_they_were(
    marks: tuple[int, ...], budget: int
) -> None:
    prefix = Prefix(budget * MB, stride=3 * STRIDE)
    system = numbers(0, 1500)
    others = [[*system, *numbers(base, 300)] for base in (20_000, 30_000)]
    read(prefix, others[0], (1500,), answer=0)
    read(prefix, others[1], (1500,), answer=0)
    before = [prefix.store.depth([*text, 7]) for text in (system, *others)]
    assert before == [1500, 1800, 1800]
    for _ in range(2):
        assert read(prefix, [*system, *numbers(50_000, 12_000)], marks) >= 1500
        assert [prefix.store.depth([*text, 7]) for text in (system, *others)] == before
    assert read(prefix, [*others[0], *numbers(70_000, 50)]) == 1800


@pytest.mark.parametrize("marks", [(), tuple(range(1500, 21_000, 1000))], ids=len)
def test_a_prompt_that_fits_drops_its_own_waypoints_before_others(marks: tuple[int, ...]) -> None:
    prefix = Prefix(2400 * MB, stride=3 * STRIDE)
    system = numbers(0, 1500)
    others = [[*system, *numbers(base, 300)] for base in (20_000, 30_000)]
    for text in others:
        read(prefix, text, (1500,), answer=0)
    long = [*system, *numbers(50_000, 20_000)]
    read(prefix, long, marks)
    kept = [prefix.store.depth([*text, 7]) for text in (system, *others, long)]
    assert kept == [1500, 1800, 1800, len(long)]
    assert prefix.store.depth(long[: 3 * STRIDE]) == 1500  # its own waypoints made room


def test_the_first_conversations_of_a_full_store_keep_their_system_prompt() -> None:
    """An anchor inside a prompt that fits drops the least recently used, so that later texts may branch off behind it."""
    prefix = Prefix(1200 * MB)
    for base in range(5):
        read(prefix, numbers(100_000 * base, 2000), (1000,))
    system = numbers(900_000, 1000)
    read(prefix, [*system, *numbers(950_000, 800)], (1000,))
    assert read(prefix, [*system, *numbers(960_000, 800)], (1000,)) == 1000


def published(heads: int, num_layers: int, kv_heads: int) -> ModelCache:
    """Caches of a Qwen3.5 hybrid: three of four layers are recurrent."""
    conv = 2 * 16 * 128 + heads * 128
    recurrent = [
        RecurrentLayerCache(heads, 128, 128, conv, 4, mx.bfloat16) for _ in range(num_layers * 3 // 4)
    ]
    return ModelCache(
        [*recurrent, *(AttentionLayerCache(kv_heads, 256, mx.bfloat16) for _ in range(num_layers // 4))], 0
    )


def test_the_stride_follows_from_bytes() -> None:
    """At most a third of a long prompt's bytes in the store are states inside it."""
    for cache, stride in ((published(48, 64, 4), 6144), (published(16, 24, 2), 4096)):
        per_token, state = cache.snapshot_bytes()
        assert stride_of(cache) == stride
        assert 2 * state <= stride * per_token
        assert 2 * state > (stride - STRIDE) * per_token
    assert published(48, 64, 4).snapshot_bytes()[0] == TOKEN_BYTES
    assert stride_of(ModelCache([AttentionLayerCache(4, 256, mx.bfloat16)], 0)) == STRIDE
    assert stride_of(ModelCache([RecurrentLayerCache(4, 8, 8, 96, 4, mx.bfloat16)], 0)) == STRIDE
    windows = [WindowedLayerCache(1, 256, 512, mx.bfloat16) for _ in range(5)]
    assert stride_of(ModelCache([*windows, AttentionLayerCache(1, 256, mx.bfloat16)], 0)) == 3 * STRIDE
