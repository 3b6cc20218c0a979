"""How far a growing piece of Markdown can be shown for good: whole words, and no emphasis, code or link that is still open.

What is shown is never taken back, so an opener that finds no end within LONGEST characters is made a plain character once and for all.
Knows the inline marks of CommonMark roughly, on the careful side; renders nothing.
"""

from __future__ import annotations

import re

LONGEST = 200  # characters that an opener may wait for its end
_MARK = re.compile(r"\\.|`+|\*+|_+|~~|!?\[|\]|.", re.DOTALL)


def settle(source: str) -> tuple[str, int]:
    """(source, place): source[:place] renders the same whatever follows. Openers that waited too long come back escaped."""
    while True:
        opened = first_open(source)
        if opened is None or len(source) - opened[0] <= LONGEST:
            break
        place, length = opened
        escaped = "".join("\\" + c for c in source[place : place + length])
        source = source[:place] + escaped + source[place + length :]
    place = len(source) - len(
        re.split(r"\s", source)[-1]
    )  # the last word may grow, and may end what began before it
    opened = first_open(source[:place])
    return source, place if opened is None else opened[0]


def first_open(source: str) -> tuple[int, int] | None:
    """Place and length of the first mark whose end has not come."""
    stack: list[list[int | str]] = []  # [place, mark, how many of its characters are open]
    i = 0
    while i < len(source):
        mark = _MARK.match(source, i)[0]  # type: ignore[index]  # matches any character
        end = i + len(mark)
        if mark[0] == "`":
            close = re.compile(rf"(?<!`){mark}(?!`)").search(source, end)
            if close is None or close.end() == len(source):  # more backticks may come
                stack.append([i, mark, len(mark)])
                break
            end = close.end()
        elif mark[0] in "*_" or mark == "~~":
            _run(stack, source, i, mark)
        elif mark.endswith("["):
            stack.append([i, "[", len(mark)])
        elif mark == "]" and any(m[1] == "[" for m in stack):
            target = _target(source, end)
            if target is None:
                break
            end = target
            while stack.pop()[1] != "[":  # emphasis that did not end inside the brackets is none
                pass
        i = end
    return (int(stack[0][0]), len(str(stack[0][1]))) if stack else None


def _run(stack: list[list[int | str]], source: str, i: int, mark: str) -> None:
    """A run of emphasis characters at i: closes what it can, opens with the rest."""
    before, after = source[i - 1 : i], source[i + len(mark) : i + len(mark) + 1]
    inside_word = mark[0] == "_" and before.isalnum() and after.isalnum()
    left = len(mark)
    if before.strip() and not inside_word:
        while left and stack and str(stack[-1][1])[0] == mark[0]:
            taken = min(left, int(stack[-1][2]))
            stack[-1][2] = int(stack[-1][2]) - taken
            left -= taken
            if not stack[-1][2]:
                stack.pop()
    if left and after.strip() and not inside_word:
        stack.append([i, mark, left])


def _target(source: str, i: int) -> int | None:
    """Behind `](...)` where the parenthesis at i ends; i itself where there is none; None if that is not known yet."""
    if i == len(source):
        return None
    if source[i] != "(":
        return i
    close = source.find(")", i)
    return None if close < 0 else close + 1
