"""The tree by itself, on snapshots whose numbers say which text they belong to: what is found is right, what is held is counted."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.cache.model_cache import Snapshot
from mlxspec.engine.prefix_store import TARGET, PrefixStore

NAMES = (TARGET, "mtp", "draft")  # the middle one has keys and values only, as heads do
CUTTABLE = {"mtp"}
KINDS = (NAMES, NAMES[:1], NAMES[:2], NAMES[::2])


def keys(tokens: list[int], name: str) -> mx.array:
    """(1, 2, n, 3): a number for each token, its place included."""
    values = np.asarray([t + 100 * i + 1000 * len(name) for i, t in enumerate(tokens)], np.float32)
    return mx.array(np.broadcast_to(values[None, None, :, None], (1, 2, len(tokens), 3)).copy())


def hiddens(tokens: list[int]) -> mx.array:
    """(n, 5): what each token was sampled from, which the text before it decides."""
    places = [float(sum(tokens[:i]) + 10 * i) for i in range(len(tokens))]
    return mx.array(np.repeat(np.asarray(places, np.float32)[:, None], 5, axis=1))


def mark(tokens: list[int], name: str) -> float:
    return float(sum((i + 1) * t for i, t in enumerate(tokens)) + 7 * len(name))


def snapshot(tokens: list[int], name: str, start: int) -> Snapshot:
    kept = keys(tokens, name)[:, :, start:]
    point = [] if name in CUTTABLE else [(mx.full((4,), mark(tokens, name)),)]
    return Snapshot(len(tokens), [[(kept, kept + 0.5)]], point, start)


def put(store: PrefixStore, tokens: list[int], names=NAMES, num_sources: int = 0) -> bool:
    starts = store.starts(tokens, list(names))
    parts = {name: snapshot(tokens, name, starts[name]) for name in names}
    sources = hiddens(tokens)[len(tokens) - num_sources :] if num_sources else None
    return store.put(tokens, parts, mx.full((1, 2), float(len(tokens))), sources)


def check_hit(store: PrefixStore, tokens: list[int]) -> int:
    """What is found is a beginning of the text, and says so in all its numbers; returns its length."""
    hit = store.find(tokens)
    store.check()
    if hit is None:
        return 0
    text = tokens[: hit.length]
    assert hit.hidden[0, 0].item() == hit.length
    assert hit.parts[TARGET].length == hit.length
    for name, found in hit.parts.items():
        assert 0 < found.length <= hit.length
        assert found.start == 0
        wanted = np.asarray(keys(text[: found.length], name))
        for side, extra in ((0, 0.0), (1, 0.5)):
            got = np.concatenate([np.asarray(segment[0][side]) for segment in found.segments], axis=2)
            assert np.array_equal(got, wanted + extra)
        if name not in CUTTABLE:
            assert found.point[0][0][0].item() == mark(text[: found.length], name)
    for start in range(hit.length):
        sources = hit.sources_from(start)
        if sources is not None:
            assert np.array_equal(np.asarray(sources), np.asarray(hiddens(text))[start:])
    assert hit.sources_from(hit.length) is None
    return hit.length


def check_can_go_on(store: PrefixStore, tokens: list[int], name: str) -> None:
    """A part that was said to be covered is there, or can catch up from where it ends."""
    hit = store.find(tokens)
    known = sum(s[0][0].shape[2] for s in hit.parts[name].segments) if name in hit.parts else 0
    if name in CUTTABLE and known < hit.length:
        assert hit.sources_from(known) is not None


texts = st.lists(st.integers(0, 2), min_size=1, max_size=9)
operation = st.one_of(
    st.tuples(st.just("put"), texts, st.sampled_from(KINDS), st.integers(0, 9)),
    st.tuples(st.just("put"), texts, st.sampled_from(KINDS), st.integers(0, 9)),
    st.tuples(st.just("find"), texts),
    st.tuples(st.just("shrink"), st.integers(0, 6000)),
    st.tuples(st.just("clear")),
)


@settings(max_examples=120, deadline=None)
@given(st.lists(operation, max_size=25), st.sampled_from([0, 500, 900, 1400, 2000, 5000, 100000]))
def test_whatever_is_put_and_let_go(operations: list[tuple], budget: int) -> None:
    store = PrefixStore(budget)
    for what, *args in operations:
        if what == "put":
            tokens, names, num_sources = args
            num_sources = min(num_sources, len(tokens))
            covered = [n for n in NAMES[1:] if store.covers(tokens, [n], num_sources)]
            if put(store, tokens, names, num_sources):
                assert check_hit(store, tokens) == len(tokens) == store.depth(tokens)
                for name in covered:
                    check_can_go_on(store, tokens, name)
        elif what == "find":
            assert store.depth(args[0]) == check_hit(store, args[0])
        elif what == "shrink":
            store.shrink(args[0])
            assert store.nbytes <= args[0]
        else:
            store.clear()
            assert store.nbytes == store.num_states == 0
        store.check()
        assert store.nbytes <= budget
    store.shrink(0)
    assert store.nbytes == store.num_states == 0
    assert not store._root.children


def test_without_evictions_the_longest_beginning_is_found() -> None:
    store, rng, kept = PrefixStore(1 << 30), np.random.default_rng(0), []
    for _ in range(60):
        tokens = rng.integers(0, 3, int(rng.integers(1, 12))).tolist()
        kept.append(tokens)
        assert put(store, tokens)
        text = rng.integers(0, 3, 14).tolist()
        wanted = max((len(k) for k in kept if text[: len(k)] == k), default=0)
        assert check_hit(store, text) == wanted


def test_texts_that_begin_alike_share_their_tokens() -> None:
    one, two = PrefixStore(1 << 30), PrefixStore(1 << 30)
    long = list(range(400))
    put(one, [*long, 1])
    alone = one.nbytes
    put(one, [*long, 2])
    put(two, [*range(500, 901), 2])
    assert one.nbytes - alone < two.nbytes / 20
    one.check()


def test_least_recently_used_goes_first_and_a_conversation_goes_on_in_a_small_budget() -> None:
    probe = PrefixStore(1 << 30)
    put(probe, list(range(100)))
    store = PrefixStore(2 * probe.nbytes + 600)
    put(store, [7] * 100)
    put(store, list(range(100)))
    check_hit(store, [7] * 100)
    put(store, [9] * 100)
    assert [store.depth(t) for t in ([7] * 100, list(range(100)), [9] * 100)] == [100, 0, 100]
    text = list(range(30))
    for turn in range(30):  # its own older states make room, not its tokens
        assert put(store, text), turn
        assert store.depth(text) == len(text)
        text = [*text, *range(5)]
        store.check()


def test_what_can_never_fit_costs_nobody_a_place() -> None:
    store = PrefixStore(3000)
    assert put(store, [1, 2, 3])
    assert not put(store, list(range(2000)))
    assert store.depth([1, 2, 3]) == 3


def test_a_part_that_came_later_fills_the_edges_that_lack_it() -> None:
    store = PrefixStore(1 << 30)
    put(store, [1, 2, 3, 4], NAMES[:1])
    put(store, [1, 2], NAMES[:1])
    assert store.starts([1, 2, 3, 4, 5], list(NAMES)) == {TARGET: 4, "mtp": 0, "draft": 0}
    put(store, [1, 2, 3, 4, 5])
    hit = store.find([1, 2, 3, 4, 5])
    assert hit is not None
    assert set(hit.parts) == set(NAMES)
    check_hit(store, [1, 2, 3, 4, 5])
    # keys and values can be cut where an edge ends, a recurrent state cannot
    assert set(store.find([1, 2]).parts) == {TARGET, "mtp"}


def test_a_part_that_was_there_for_the_first_tokens_only_is_found_for_those() -> None:
    """And the hiddens of the others, from which it can catch up."""
    store, text = PrefixStore(1 << 30), list(range(10))
    put(store, text[:4])
    put(store, text[:7], NAMES[:1], num_sources=3)
    put(store, text, NAMES[:1], num_sources=3)
    hit = store.find(text)
    assert {name: part.length for name, part in hit.parts.items()} == {TARGET: 10, "mtp": 4, "draft": 4}
    assert check_hit(store, text) == 10
    assert len(hit.sources_from(4)) == 6
    assert hit.sources_from(3) is None
    assert hit.sources_from(5) is None  # where no edge ends


def test_a_part_that_lacks_on_the_edge_a_text_ends_in_begins_before_that() -> None:
    store = PrefixStore(1 << 30)
    put(store, [0, 0], NAMES[:1])
    assert store.starts([0], ["mtp"]) == {"mtp": 0}
    put(store, [0])
    assert store.find([0]).parts["mtp"].length == 1


def test_what_is_covered() -> None:
    store, text = PrefixStore(1 << 30), list(range(10))
    assert store.covers(text, [], 0)
    assert store.covers(text, ["mtp"], 10)
    assert not store.covers(text, ["mtp"], 9)
    put(store, text[:4])
    assert store.covers(text, ["mtp"], 6)
    assert not store.covers(text, ["mtp"], 5)
    assert store.covers(text[:4], ["mtp"], 0)
    put(store, text[:7], NAMES[:1], num_sources=3)
    assert store.covers(text, ["mtp"], 3)
    assert store.covers([*text[:6], 99], ["mtp"], 1)  # branches off inside an edge that has them
    assert not store.covers([*text[:6], 99], ["mtp"], 0)
    put(store, [*text[:7], 50], NAMES[:1])
    assert not store.covers([*text[:7], 50, 51], ["mtp"], 1)
