"""Answers that are nothing but calls: in a fence, in the model's own tags, and longer than any answer of calls."""

from __future__ import annotations

from typing import Any

import pytest
from planting import catches

from mlxspec.parsers import whole_call
from mlxspec.parsers.whole_call import WholeCall

TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"properties": {"path": {}}}}}]
OWN = ("<tool_call>",)
CALL = '{"name": "read", "arguments": {"path": "a"}}'


def read(text: str, *, by: int = 1) -> tuple[list[Any], str]:
    """Calls and text of an answer that comes in pieces of `by` characters."""
    parser = WholeCall(TOOLS, OWN)
    said = "".join(parser.push(text[i : i + by]) for i in range(0, len(text), by))
    calls, rest = parser.finish()
    return [(name, dict(arguments)) for name, arguments in calls], said + rest


def not_own(right: Any) -> Any:
    return lambda self, text, *, is_fenced=False: (
        not (is_fenced and text.startswith(OWN)) and right(self, text, is_fenced=is_fenced)
    )


@catches(
    "the model's own tags are text in a fence",
    "mlxspec.parsers.whole_call:WholeCall._may_begin",
    not_own,
    case="fenced tags",
)
@pytest.mark.parametrize("by", [1, 7, 1000])
@pytest.mark.parametrize(
    "text",
    [CALL, f"```json\n{CALL}\n```", f"```\n<tool_call>\n{CALL}\n</tool_call>\n```"],
    ids=["bare", "fenced", "fenced tags"],
)
def test_a_call_that_is_the_whole_answer_is_read(text: str, by: int) -> None:
    assert read(text, by=by) == ([("read", {"path": "a"})], "")


@catches(
    "only the newest piece is counted",
    "mlxspec.parsers.whole_call:WholeCall.push",
    lambda right: lambda self, text: (setattr(self, "_num_held", 0), right(self, text))[1],
)
@pytest.mark.parametrize("by", [1, 16])
def test_what_is_longer_than_any_answer_of_calls_is_given_as_it_comes(
    by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small its pieces are: nothing is held back for ever."""
    monkeypatch.setattr(whole_call, "LONGEST", 200)
    text = '{"name": "read", "arguments": {"path": "' + "a" * 9000
    parser, num_held = WholeCall(TOOLS, OWN), 0
    for i in range(0, len(text), by):
        num_held += by - len(parser.push(text[i : i + by]))
        assert num_held <= whole_call._SETTLED + 200 + by
    assert num_held <= 0
