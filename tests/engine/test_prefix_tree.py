"""The tree by itself, on snapshots whose numbers say which text they belong to: what is found is right, what is held is counted, and states
are dropped in the order that the module names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import catches

from mlxspec.engine.prefix import tree as tree_module
from mlxspec.engine.prefix.tree import TARGET, KeyedText, PrefixTree
from tests.engine.marked_texts import CUTTABLE, KINDS, NAMES, PLENTY, depth, keys, mark, put


def check_hit(tree: PrefixTree, tokens: list[int], needed: Sequence[str] = ()) -> int:
    """What is found is a beginning of the text with all that is needed, and says so in all its numbers; returns its length."""
    hit = tree.find(KeyedText(tokens), needed)
    tree.check()
    if hit is None:
        return 0
    text = tokens[: hit.length]
    assert hit.hidden[0, 0].item() == hit.length
    assert {hit.parts[n].length if n in hit.parts else 0 for n in (TARGET, *needed)} == {hit.length}
    for name, found in hit.parts.items():
        assert 0 < found.length <= hit.length
        assert found.start == 0
        wanted = np.asarray(keys(text[: found.length], name))
        for side, extra in ((0, 0.0), (1, 0.5)):
            got = np.concatenate([np.asarray(segment[0][side]) for segment in found.segments], axis=2)
            assert np.array_equal(got, wanted + extra)
        if name not in CUTTABLE:
            assert found.point[0][0][0].item() == mark(text[: found.length], name)
    return hit.length


texts = st.lists(st.integers(0, 2), min_size=1, max_size=9)
operation = st.one_of(
    st.tuples(st.just("put"), texts, st.sampled_from(KINDS), st.booleans()),
    st.tuples(st.just("put"), texts, st.sampled_from(KINDS), st.booleans()),
    st.tuples(st.just("find"), texts, st.sampled_from(KINDS)),
    st.tuples(st.just("shrink"), st.integers(0, 6000)),
    st.tuples(st.just("clear")),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(operation, max_size=25), st.sampled_from([0, 500, 900, 1400, 2000, 5000, 100000]))
def test_whatever_is_put_and_let_go(operations: list[tuple], budget: int) -> None:
    tree = PrefixTree(budget)
    for what, *args in operations:
        if what == "put":
            tokens, names, is_anchor = args
            anchors = {node.key for node in tree.states if node.is_anchor}
            if put(tree, tokens, names, is_anchor=is_anchor):
                assert check_hit(tree, tokens, names) == len(tokens) == depth(tree, tokens, names)
            if not is_anchor:
                assert anchors <= {node.key for node in tree.states if node.is_anchor}
        elif what == "find":
            assert depth(tree, *args) == check_hit(tree, *args) <= depth(tree, args[0])
        elif what == "shrink":
            tree.shrink(args[0])
            assert tree.nbytes <= args[0]
        else:
            tree.clear()
            assert tree.nbytes == len(tree.states) == 0
        tree.check()
        assert tree.nbytes <= budget
    tree.shrink(0)
    assert tree.nbytes == len(tree.states) == 0
    tree.check()


@catches(
    "a state without a drafter's part is found for it",
    "mlxspec.engine.prefix.tree:Node.has",
    lambda right: lambda self, needed: right(self, ()),
)
def test_without_evictions_the_longest_beginning_that_has_all_parts_is_found() -> None:
    tree, rng, kept = PrefixTree(PLENTY), np.random.default_rng(0), dict[tuple[int, ...], set[str]]()
    for _ in range(120):
        tokens = rng.integers(0, 3, int(rng.integers(1, 12))).tolist()
        names = KINDS[rng.integers(len(KINDS))]
        kept.setdefault(tuple(tokens), set()).update(names)
        assert put(tree, tokens, names)
        text, needed = rng.integers(0, 3, 14).tolist(), set(KINDS[rng.integers(len(KINDS))])
        fits = [len(k) for k, has in kept.items() if text[: len(k)] == list(k) and needed <= has]
        assert check_hit(tree, text, sorted(needed)) == max(fits, default=0)


@catches(
    "the key of a text has no owner",
    "mlxspec.engine.prefix.tree:KeyedText.__init__",
    lambda right: lambda self, tokens, owner="", scales=(): right(self, tokens, "", scales),
)
def test_owners_never_find_each_others_texts() -> None:
    tree, text = PrefixTree(PLENTY), [1, 2, 3, 4]
    put(tree, text, owner="alice")
    assert tree.find(KeyedText(text, "alice")).length == 4
    for other in (KeyedText(text), KeyedText(text, "bob"), KeyedText(text, "alice", (0.5,))):
        assert tree.find(other) is None
        assert tree.depth(other, 4) == 0


def test_keys_are_those_of_the_tokens_in_whatever_order_they_are_asked_for() -> None:
    tokens = list(range(50))
    text = KeyedText(tokens)
    tokens.append(7)  # a text grows
    for length in (20, 51, 3, 0, 40, 20):
        assert text.key(length) == KeyedText(tokens[:length]).key(length)
    assert len({text.key(length) for length in range(52)}) == 52


def test_texts_share_what_leads_to_a_common_state() -> None:
    one, two = PrefixTree(PLENTY), PrefixTree(PLENTY)
    long = list(range(400))
    put(one, long)
    put(one, [*long, 1])
    alone = one.nbytes
    put(one, [*long, 2])
    put(two, [*long, 2])
    assert one.nbytes - alone < two.nbytes / 20


def test_the_least_recently_used_goes_first_and_a_conversation_continues_in_a_small_budget() -> None:
    probe = PrefixTree(PLENTY)
    put(probe, list(range(100)))
    tree = PrefixTree(2 * probe.nbytes + 600)
    put(tree, [7] * 100)
    put(tree, list(range(100)))
    check_hit(tree, [7] * 100)
    put(tree, [9] * 100)
    assert [depth(tree, t) for t in ([7] * 100, list(range(100)), [9] * 100)] == [100, 0, 100]
    text = list(range(30))
    for turn in range(30):  # its own older states make room, not its tokens
        assert put(tree, text), turn
        assert depth(tree, text) == len(text)
        text = [*text, *range(5)]
        tree.check()


def test_what_can_never_fit_costs_nobody_a_place() -> None:
    tree = PrefixTree(3000)
    assert put(tree, [1, 2, 3])
    assert not put(tree, list(range(2000)))
    assert depth(tree, [1, 2, 3]) == 3


@catches(
    "anchors do not go behind other states",
    "mlxspec.engine.prefix.tree:PrefixTree._make_room",
    lambda right: lambda self, growth, may, kept=(), but=None: right(self, growth, True, kept, but),
)
def test_a_state_inside_a_prompt_drops_no_anchor() -> None:
    probe = PrefixTree(PLENTY)
    put(probe, [1] * 100)
    tree = PrefixTree(3 * probe.nbytes)
    assert put(tree, [1] * 100)
    assert put(tree, [2] * 100, is_anchor=False)
    assert put(tree, [3] * 100)
    assert put(
        tree, [4] * 100, is_anchor=False
    )  # in the place of the other one, although that was used later than an anchor
    assert [depth(tree, [i] * 100) for i in (1, 2, 3, 4)] == [100, 0, 100, 100]
    assert put(tree, [5] * 100)
    assert not put(tree, [6] * 100, is_anchor=False)
    assert [depth(tree, [i] * 100) for i in (1, 3, 4, 5)] == [100, 100, 0, 100]


def test_a_state_that_a_text_continued_from_is_an_anchor() -> None:
    tree = PrefixTree(PLENTY)
    put(tree, [1] * 9, is_anchor=False)
    tree.find(KeyedText([1] * 12))
    put(tree, [1] * 9, is_anchor=False)
    (node,) = tree.states
    assert node.is_anchor


def test_a_state_that_texts_share_is_used_when_one_of_them_is() -> None:
    tree, system, alone = PrefixTree(PLENTY), list(range(100)), list(range(500, 600))
    for text in (system, alone, [*system, 1], [*system, 2]):
        put(tree, text)
    tree.find(KeyedText([*system, 1, 7]))
    assert [n.length for n in sorted(tree.states, key=lambda n: n.used)] == [100, 101, 100, 101]
    tree.shrink(tree.nbytes - 1)
    assert depth(tree, alone) == 0


def test_what_cannot_be_evaluated_leaves_a_valid_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = PrefixTree(PLENTY)
    put(probe, list(range(120)))
    tree, text = PrefixTree(probe.nbytes + 200), list(range(120))
    put(tree, text[:50])
    put(tree, [900] * 50)
    with monkeypatch.context() as patch:
        patch.setattr(tree_module.mx, "eval", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            put(tree, text)
    tree.check()
    assert depth(tree, text) == 0  # its beginning made room
    assert put(tree, text)
    tree.check()


def test_a_part_that_came_later_brings_what_leads_to_it() -> None:
    tree = PrefixTree(PLENTY)
    put(tree, [1, 2, 3, 4], NAMES[:1])
    put(tree, [1, 2], NAMES[:1])
    starts = tree.starts(KeyedText([1, 2, 3, 4, 5]), 5, NAMES)
    assert starts == {TARGET: 4, "mtp": 0, "draft": 0}
    put(tree, [1, 2, 3, 4, 5])
    assert set(tree.find(KeyedText([1, 2, 3, 4, 5])).parts) == set(NAMES)
    put(tree, [1, 2])  # also where the state was there without it
    assert set(tree.find(KeyedText([1, 2])).parts) == set(NAMES)
    assert check_hit(tree, [1, 2, 3, 4, 5]) == 5
    assert check_hit(tree, [1, 2]) == 2


def test_a_part_that_was_there_for_the_first_tokens_only_is_found_for_those() -> None:
    tree, text = PrefixTree(PLENTY), list(range(10))
    put(tree, text[:4])
    put(tree, text[:7], NAMES[:1])
    put(tree, text, NAMES[:1])
    hit = tree.find(KeyedText(text))
    assert {name: part.length for name, part in hit.parts.items()} == {TARGET: 10, "mtp": 4, "draft": 4}
    assert check_hit(tree, text) == 10
    assert check_hit(tree, text, NAMES) == 4


def test_a_node_without_a_state_is_no_depth() -> None:
    tree, text = PrefixTree(1 << 20), list(range(9))
    for length in (4, 8):
        put(tree, text[:length])
    longest = max(tree.states, key=lambda node: node.length)
    assert tree.depth(KeyedText(text), 9) == 8
    longest.hidden = None
    assert tree.depth(KeyedText(text), 9) == 4
