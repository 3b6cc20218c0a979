"""What may come next: grammars, forbidden words and thinking budgets, along drafts and behind them."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planting import catches, rewritten

from mlxspec.config import SamplingParams
from mlxspec.errors import ConfigError, GrammarError
from mlxspec.loading.token_bytes import TokenBytes
from mlxspec.sampling import bits
from mlxspec.sampling.bad_words import START, BadWords
from mlxspec.sampling.constraints import ConstraintMaker, Constraints
from mlxspec.sampling.thinking import Thinking
from tests import tiny_models
from tests.tiny_models import EOS, VOCAB

pytestmark = pytest.mark.smoke

MAKER = ConstraintMaker(tiny_models.tokenizer(), VOCAB)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "abc"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def ids(text: str) -> list[int]:
    return [ord(c) - 32 for c in text]


ALL_BUT_END = "".join(chr(32 + i) for i in range(VOCAB) if i != EOS)


def make(prompt: str = "x", **params) -> Constraints:
    found = MAKER.constraints_for(SamplingParams(**params), ids(prompt))
    assert found is not None
    return found


def letters(mask) -> str:
    """What a mask allows, the end token as a dollar sign."""
    flags = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
    return "".join("$" if i == EOS else chr(32 + i) for i in np.flatnonzero(flags))


@given(st.sets(st.integers(0, 99)), st.integers(100, 140))
def test_bits_hold_what_was_put_in(tokens: set[int], vocab: int) -> None:
    packed = bits.only(tokens, vocab)
    assert {i for i in range(vocab) if bits.holds(packed, i)} == tokens
    assert packed.shape == (bits.num_words(vocab),)
    assert set(np.flatnonzero(np.asarray(bits.unpack(mx.array(packed[None]), vocab))[0]).tolist()) == tokens


def test_nothing_asked_is_no_constraint() -> None:
    assert MAKER.constraints_for(SamplingParams(), [1]) is None


@catches(
    "the end is forbidden for one token longer",
    "mlxspec.sampling.constraints:Constraints._own_mask",
    rewritten("state.num >= self._least", "state.num > self._least"),
)
@catches(
    "the end is allowed one token early",
    "mlxspec.sampling.constraints:Constraints._own_mask",
    rewritten("state.num >= self._least", "state.num >= self._least - 1"),
)
@catches(
    "nothing is known to be forbidden before the end is allowed",
    "mlxspec.sampling.constraints:Constraints.reaches",
    rewritten("state.num < self._least", "state.num < self._least - 1"),
)
@pytest.mark.parametrize("more", [{}, {"thinking_budget": 50}])
def test_an_answer_may_end_behind_exactly_min_tokens(more: dict) -> None:
    """Along a draft as behind committed tokens; and whether the host must know the tokens says the same."""
    least, text = 5, ids("abcdefgh")
    for committed in range(len(text) + 1):
        found = make(min_tokens=least, **more)
        assert all(map(found.push, text[:committed]))
        assert found.reaches(1) is (committed < least)
        masks = found.masks(text[committed:])
        may_end = [mask is None or bits.holds(mask, EOS) for mask in masks]
        assert may_end == [num >= least for num in range(committed, len(text) + 1)]


# ---- grammars


def test_masks_along_a_draft_are_those_of_committing_it() -> None:
    text = '{"name": "ab", "n": 7}'
    ahead, behind = make(json_schema=SCHEMA), make(json_schema=SCHEMA)
    for start in range(len(text)):
        draft = ids(text[start : start + 5])
        masks = ahead.masks(draft)
        assert len(masks) == len(draft) + 1
        assert letters(masks[0]) == letters(behind.masks([])[0])
        assert ahead.push(draft[0])
        assert behind.push(draft[0])
    assert ahead.is_finished
    assert behind.is_finished


def test_looking_along_a_draft_changes_nothing() -> None:
    c = make(regex="(ab|cd)*e")
    before = letters(c.masks([])[0])
    for draft in ("abab", "abx", "cdcdcdcd", "", "e", "zz"):
        c.masks(ids(draft))
        assert letters(c.masks([])[0]) == before
    assert before == "ace"


@pytest.mark.parametrize(
    ("draft", "length"), [("abab", 4), ("abx", 2), ("x", 0), ("", 0), ("abe", 3), ("abea", 3), ("acd", 1)]
)
def test_a_draft_is_valid_up_to_its_first_forbidden_token(draft: str, length: int) -> None:
    assert make(regex="(ab|cd)*e").validate(ids(draft)) == length


def test_behind_a_forbidden_or_an_end_token_anything_may_come() -> None:
    c = make(regex="(ab)*")
    masks = c.masks([*ids("ab"), EOS, 5])
    assert letters(masks[2]) == "a$"
    assert masks[3:] == [None, None]
    masks = c.masks(ids("axb"))
    assert masks[2:] == [None, None]


@pytest.mark.parametrize("ignore_eos", [False, True])
@given(
    draft=st.lists(st.sampled_from([*"abc<", "$"]), max_size=12),
    words=st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_words_are_forbidden_behind_a_drafted_end_token_that_is_ignored(
    draft: list[str], words: list[str], ignore_eos: bool
) -> None:
    """The end token adds nothing to the text: behind it a word may not be completed that began before it."""
    tokens = [EOS if letter == "$" else ids(letter)[0] for letter in draft]
    masks = make(bad_words=tuple(words), ignore_eos=ignore_eos).masks(tokens)
    said, has_ended = "", False
    for place in range(len(draft) + 1):
        if has_ended:
            assert masks[place] is None
        else:
            wanted = {c for c in "abc<" if not any((said + c).endswith(w) for w in words)}
            assert set(letters(masks[place])) & set("abc<") == wanted
            assert bits.holds(masks[place], EOS)
        if place < len(draft):
            letter = draft[place]
            refused = letter != "$" and any((said + letter).endswith(w) for w in words)
            has_ended = has_ended or refused or (letter == "$" and not ignore_eos)
            said += letter.replace("$", "")


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_thinking_budget_counts_on_behind_a_drafted_end_token_that_is_ignored(at: int) -> None:
    draft = ids("abcde")
    draft[at] = EOS
    masks = make("<think>", thinking_budget=3, ignore_eos=True).masks(draft[:3] + ids("</think>x"))
    assert [None if m is None else letters(m) for m in masks] == [None] * 3 + list("</think>") + [None] * 2
    ended = make("<think>", thinking_budget=3).masks(draft)
    assert [None if m is None else letters(m) for m in ended] == [None] * 3 + ["<"] * (at == 3) + [None] * (
        3 - (at == 3)
    )


def test_what_is_forced_is_known() -> None:
    c = make(json_schema=SCHEMA)
    assert "".join(chr(32 + t) for t in c.forced()) == '{"name": "ab'
    for token in c.forced():
        assert c.push(token)
    assert c.forced() == []
    assert letters(c.masks([])[0]) == '"c'


def test_a_token_that_may_not_come_is_refused_and_changes_nothing() -> None:
    c = make(regex="ab")
    assert not c.push(ids("b")[0])
    assert c.push(ids("a")[0])
    assert c.push(ids("b")[0])
    assert c.is_finished


@pytest.mark.parametrize(
    "params",
    [
        {"json_schema": {"type": "nonsense"}},
        {"json_schema": {"$ref": "#/nowhere"}},
        {"json_schema": "{"},
        {"json_schema": "[1]"},
        {"json_schema": {"enum": {1, 2}}},
        {"json_schema": {"type": "string", "maxLength": float("nan")}},
        {"regex": "a["},
        {"lark": "start: nope"},
        {"lark": "%%%"},
    ],
    ids=str,
)
def test_a_bad_grammar_is_one_sentence(params: dict) -> None:
    with pytest.raises(
        GrammarError, match=r"^The (JSON schema|regular expression|Lark grammar) cannot be used: .+\.$"
    ) as found:
        make(**params)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    "params",
    [
        {"regex": "a", "lark": 'start: "a"'},
        {"regex": "a", "ignore_eos": True},
        {"regex": ""},
        {"json_schema": 3},
        {"thinking_budget": -1},
        {"thinking_tags": ("a", "a")},
        {"thinking_tags": ("a",)},
        {"bad_words": ("",)},
        {"bad_words": (3,)},
        {"top_logprobs": 21},
        {"logprobs": 1},
    ],
    ids=str,
)
def test_bad_parameters_are_refused(params: dict) -> None:
    with pytest.raises(ConfigError):
        SamplingParams(**params)


def test_without_a_tokenizer_there_is_nothing_to_constrain() -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        ConstraintMaker(None, VOCAB).constraints_for(SamplingParams(regex="a"), [1])


# ---- forbidden words


@given(
    text=st.text("abc", max_size=14),
    words=st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_a_token_is_forbidden_exactly_where_it_would_complete_a_word(text: str, words: list[str]) -> None:
    c, said = make(bad_words=tuple(words)), ""
    for letter in text:
        expected = any((said + letter).endswith(w) for w in words)
        mask = c.masks([])[0]
        assert bits.holds(mask, ids(letter)[0]) != expected
        assert bits.holds(mask, EOS)
        if not expected:
            assert c.push(ids(letter)[0])
            said += letter
        else:
            assert not c.push(ids(letter)[0])
    assert not any(w in said for w in words)


def test_words_are_forbidden_however_they_are_cut() -> None:
    """A vocabulary of pieces: every way of spelling the word is closed at its last piece."""
    pieces = [b"se", b"cret", b"s", b"ecr", b"et", b"xsecretx", b"e", b"c", b"r", b"t", b" ", b""]

    class Vocabulary(TokenBytes):
        def __init__(self) -> None:
            self.tokens, self.special = tuple(pieces), frozenset()

    words = BadWords(("secret",), Vocabulary())
    for spelling in ([0, 1], [2, 3, 4], [2, 6, 7, 8, 4], [0, 7, 8, 6, 9], [10, 0, 1], [5]):
        state = START
        for i, token in enumerate(spelling):
            assert bits.holds(words.mask(state), token) == (i < len(spelling) - 1), (spelling, i)
            state = words.step(state, token)


def test_words_and_grammar_together_may_leave_nothing() -> None:
    c = make(regex="ab", bad_words=("ab",))
    assert c.push(ids("a")[0])
    assert letters(c.masks([])[0]) == ""
    assert not c.push(ids("b")[0])


# ---- thinking


def run(c: Constraints, text: str) -> str:
    """What comes of a model that wants to say `text`: forced tokens come before its own."""
    said, wanted = "", ids(text)
    while wanted:
        mask = c.masks([])[0]
        token = wanted.pop(0) if mask is None or bits.holds(mask, wanted[0]) else c.forced()[0]
        assert c.push(token)
        said += chr(32 + token)
    return said


@pytest.mark.parametrize("budget", [0, 1, 3, 7])
def test_thinking_ends_at_its_budget(budget: int) -> None:
    c = make("hi <think> ", thinking_budget=budget)
    said = run(c, "abcdefghijklmnop")
    assert said.startswith("abcdefghijklmnop"[:budget] + "</think>")
    assert (c.num_thinking, c.num_forced) == (budget, len("</think>"))


def test_thinking_that_ends_by_itself_is_left_alone() -> None:
    c = make("<think>", thinking_budget=12)
    assert run(c, "ab</think>" + "c" * 30) == "ab</think>" + "c" * 30
    assert c.num_forced == 0


def test_thinking_may_be_opened_by_the_answer() -> None:
    c = make("hi", thinking_budget=2)
    assert run(c, "o <think>abcdefghijkl").startswith("o <think>ab</think>c")


@pytest.mark.parametrize("prompt", ["a <think> b", "<think></think>", "<think>x</think> "])
def test_thinking_is_open_only_where_the_prompt_ends_with_it(prompt: str) -> None:
    c = make(prompt, thinking_budget=1)
    assert run(c, "abcdefgh") == "abcdefgh"


def test_far_from_the_budget_nothing_must_be_known() -> None:
    c = make("<think>", thinking_budget=20)
    assert not c.reaches(20)
    assert c.reaches(21)
    run(c, "abcdefghijklmnop")
    assert not c.reaches(4)
    assert c.reaches(5)
    run(c, "</think>")
    assert make(bad_words=("a",)).reaches(1)


def test_a_budget_is_kept_inside_a_draft() -> None:
    c = make("<think>", thinking_budget=3)
    assert c.validate(ids("abcdef")) == 3
    assert c.validate(ids("abc</think>def")) == len("abc</think>def")
    assert letters(c.masks(ids("abc</"))[5]) == "t"


@catches(
    "what follows the opening tag within its last token is lost",
    "mlxspec.sampling.thinking:Thinking._opened",
    lambda right: lambda self, tail: right(self, b""),
    case="one token",
)
@pytest.mark.parametrize(
    ("text", "phases"),
    [
        (["(", ")"], ["open", "done"]),
        (["x()"], ["done"]),
        (["()", "a"], ["done", "done"]),
        (["x(/", ">"], ["open", "done"]),
    ],
    ids=["two tokens", "one token holds it", "one token, then more", "one token begins it"],
)
def test_one_token_may_end_the_opening_tag_and_begin_or_hold_the_closing_one(
    text: list[str], phases: list[str]
) -> None:
    close = "/>" if any("/" in t for t in text) else ")"
    words = ["(", ")", "a", "x()", "()", "x(/", "/>", ">"]
    vocabulary = SimpleNamespace(
        spelled=lambda token: words[token].encode(), encode=lambda tag: [words.index(tag)]
    )
    thinking = Thinking(("(", close), 5, vocabulary)  # type: ignore[arg-type]
    state = thinking.start([words.index("a")])
    found = []
    for word in text:
        state = thinking.step(state, words.index(word))
        found.append(state.phase)
    assert found == phases
    assert thinking.forced(state) == []


def test_a_grammar_begins_behind_thinking() -> None:
    c = make("<think>", json_schema=SCHEMA, thinking_budget=30)
    assert c.forced() == []
    masks = c.masks(ids('ab</think>{"x'))
    assert all(letters(mask) == ALL_BUT_END for mask in masks[:10])
    assert letters(masks[10]) == "{"
    assert c.validate(ids('ab</think>{"x')) == 12
    said = run(c, "ab</think>")
    assert said == "ab</think>"
    assert "".join(chr(32 + t) for t in c.forced()) == '{"name": "ab'


@catches(
    "a grammar forbids thinking",
    "mlxspec.sampling.thinking:Thinking.is_closed",
    lambda right: lambda self, prompt: True,
)
@catches(
    "a grammar that waits is not known",
    "mlxspec.sampling.constraints:Constraints.awaits_grammar",
    lambda right: False,
)
def test_a_grammar_may_begin_behind_thinking_that_the_answer_opens() -> None:
    for text, allowed in (
        ("", "<a"),
        ("<", "t"),
        ("<think>", None),
        ("<think>so</think>", "a"),
        ("<think>so</think>a", "b"),
        ("a", "b"),
    ):
        found = make(regex="ab", thinks_first=True)
        (mask,) = found.masks(())[:1]
        for token in ids(text):
            assert found.push(token), text
        (mask,) = found.masks(())
        assert mask is None or allowed is None or letters(mask) == allowed, text
        assert found.awaits_grammar == (allowed is None), text
        along = make(regex="ab", thinks_first=True).masks(ids(text))[-1]
        assert (along is None) == (mask is None)
        assert along is None or np.array_equal(along, mask), text
    assert not make(regex="ab", thinks_first=True).push(ids("b")[0])
    assert letters(make(regex="<ta", thinks_first=True).masks(ids("<t"))[-1]) == "ah"
    for closed in ("<think></think>", "<think></think> "):
        assert letters(make(prompt=closed, regex="ab", thinks_first=True).masks(())[0]) == "a"
    assert letters(make(regex="ab").masks(())[0]) == "a"


@catches(
    "thinking takes the place of what the grammar says of it",
    "mlxspec.sampling.thinking:Thinking.must_open",
    lambda right: lambda self, grammar: False,
)
def test_a_grammar_that_begins_with_the_opening_tag_holds_in_thinking() -> None:
    found = make(regex="<think>ab</think>c", thinks_first=True)
    for token in ids("<think>ab</think>"):
        assert found.push(token)
        assert not found.awaits_grammar
    assert letters(found.masks(())[0]) == "c"
    for regex in (
        "(<think>ab</think>)?c",
        "<t(hink>ab</think>|able>)c",
        "<think",
    ):  # some texts begin otherwise
        found = make(regex=regex, thinks_first=True)
        for token in ids("<think>"):
            assert found.push(token)
        assert found.awaits_grammar, regex


def test_an_answer_does_not_end_before_its_grammar_has_begun() -> None:
    c = make("<think>", regex="a+", bad_words=("cc",))
    assert c.validate([*ids("bc"), EOS, *ids("b")]) == 2
    assert letters(c.masks(ids("bc"))[2]) == ALL_BUT_END.replace("c", "")
    assert run(c, "b</think>") == "b</think>"
    assert letters(c.masks(ids("a"))[1]) == "a$"
    free = make("<think>", thinking_budget=30)
    assert free.masks([*ids("b"), EOS]) == [None] * 3


@given(text=st.text(st.sampled_from("ab</think>"), max_size=40), budget=st.integers(0, 12))
def test_whatever_is_thought_the_budget_holds(text: str, budget: int) -> None:
    c = make("<think>", thinking_budget=budget)
    said = run(c, text)
    # the tag that a budget forces is cut off only where `text` ran out
    thought = re.split("</think>", said + "".join(chr(32 + t) for t in c.forced()))[0]
    assert len(thought) <= budget + len("</think>") - 1 + (budget == 0)
    assert c.num_thinking <= budget or budget == 0


def test_a_schema_without_white_space_rules_of_its_own_is_written_as_json_dumps_does() -> None:
    c = make(json_schema=SCHEMA)
    assert c.validate(ids(json.dumps({"name": "abc", "n": 12}))) == 24
    style = {"whitespace_flexible": True, "item_separator": ",", "key_separator": ":"}
    loose = make(json_schema={**SCHEMA, "x-guidance": style})
    assert loose.validate(ids('{"name":"abc" , "n":12}')) == 23
