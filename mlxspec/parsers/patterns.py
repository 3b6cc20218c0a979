"""Regular expressions of JSON Schema (ECMA-262) in the syntax of the grammar compiler (Rust's), and terms that texts are made of.

Both share most of their syntax. Look-around, back-references and word boundaries have no counterpart: such a pattern is not usable.
`\\d` and `\\w` are ASCII in ECMA-262 and Unicode in Rust, so they are spelled out.
"""

from __future__ import annotations

import re

_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_"}
_LONGEST = 2000  # characters of a pattern
_ESCAPES = frozenset("sSnrtfv\\/.*+?()[]{}|^$-")
_ESCAPE = r"\\(?:u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|.)"
_TOKEN = re.compile(rf"{_ESCAPE}|\[\^?(?:\\.|[^\]\\])*\]|\((?:\?(?:<[A-Za-z]\w*>|.))?|.", re.S)
_IN_CLASS = re.compile(rf"{_ESCAPE}|[\[&~]", re.S)
# of values that are written as bare text; a grammar for JSON knows them itself
FORMATS = {
    "date": r"[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])",
    "duration": r"P([0-9]{1,6}[YMWD]|([0-9]{1,6}[YMD])?T[0-9]{1,6}[HMS])",
    "email": r"[A-Za-z0-9_+-]{1,30}(\.[A-Za-z0-9_+-]{1,20}){0,2}@[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?(\.[A-Za-z]{2,20}){1,3}",
    "hostname": r"[A-Za-z0-9]([A-Za-z0-9-]{0,40}[A-Za-z0-9])?(\.[A-Za-z]([A-Za-z0-9-]{0,40}[A-Za-z0-9])?){0,4}",
    "ipv4": r"((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])",
    "ipv6": r"([0-9A-Fa-f]{1,4}:){7}[0-9A-Fa-f]{1,4}|::([0-9A-Fa-f]{1,4}(:[0-9A-Fa-f]{1,4}){0,5})?",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]{1,20}://[A-Za-z0-9.-]{1,60}(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]{0,200})?(\?[A-Za-z0-9._~=&-]{0,200})?(#[A-Za-z0-9._~-]{0,60})?",
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
}
FORMATS["date-time"] = f"({FORMATS['date']})T{FORMATS['time']}"


def usable_pattern(pattern: str) -> str | None:
    """Return a pattern of JSON Schema in the syntax that the grammar compiler and Python share. Returns an empty text where the pattern
    excludes nothing, None where it has no such form."""
    try:
        found = "".join(map(_translated, _TOKEN.findall(pattern[: _LONGEST + 1])))
        re.compile(found)
    except (ValueError, re.error, RecursionError, OverflowError):
        return None
    inner = [token for option in _options(found) for token in _TOKEN.findall(option[slice(*_inside(option))])]
    if len(pattern) > _LONGEST or "^" in inner or "$" in inner:
        return None
    return "" if found in (".*", "^.*$", "^", "$", "^.*", ".*$") else found


def _translated(token: str) -> str:
    """Return one token of a pattern in the syntax of the grammar compiler. Raises ValueError for a token without a counterpart."""
    if token.startswith("\\"):
        return _escaped(token, in_class=False)
    if token.startswith("["):
        begin = "[^" if token.startswith("[^") else "["
        inner = token[len(begin) : -1]
        if not inner:  # an empty class means one thing there and another here
            raise ValueError(token)
        return begin + _IN_CLASS.sub(lambda found: _escaped(found[0], in_class=True), inner) + "]"
    if token.startswith("(?"):
        if token != "(?:" and not token.endswith(">"):  # look-around, flags
            raise ValueError(token)
        return "(?:"
    return token


def _escaped(token: str, *, in_class: bool) -> str:
    if not token.startswith("\\"):
        return "\\" + token
    letter = token[1:2]
    if letter in _CLASSES:
        return _CLASSES[letter] if in_class else f"[{_CLASSES[letter]}]"
    if letter in ("D", "W") and not in_class:
        return f"[^{_CLASSES[letter.lower()]}]"
    if len(token) > 2 and not 0xD800 <= int(token[2:], 16) < 0xE000:
        return re.escape(chr(int(token[2:], 16)))
    if letter in _ESCAPES:
        return "/" if letter == "/" else token
    if len(token) != 2 or letter.isalnum():  # boundaries, back-references, property classes
        raise ValueError(token)
    return re.escape(letter)


def whole(pattern: str) -> str:
    """Return a pattern that matches the whole of every text in which `pattern` finds a match."""
    parts = []
    for part in _options(pattern):
        start, stop = _inside(part)
        begin, end = "" if start else "(?s:.*)", "" if stop else "(?s:.*)"
        parts.append(f"{begin}(?:{part[start:stop]}){end}")
    return "|".join(parts)


def _inside(option: str) -> tuple[int, int | None]:
    """Return the start and the stop of the slice of an alternative that leaves out its anchors `^` and `$`."""
    tokens = _TOKEN.findall(option)
    return int(tokens[:1] == ["^"]), -1 if tokens[-1:] == ["$"] else None


def slashed(pattern: str) -> str:
    """Return a pattern as a regular expression of a Lark grammar: between slashes, with slashes and control characters in it escaped."""
    return "/" + re.sub(r"\\?[\x00-\x1f\x7f]|\\.|/", _slashed_part, pattern) + "/"


def _slashed_part(found: re.Match[str]) -> str:
    last = found[0][-1]
    return f"\\x{ord(last):02x}" if not last.isprintable() else "\\/" if last == "/" else found[0]


def _options(pattern: str) -> list[str]:
    """Return the alternatives of a pattern: the parts between the `|` that are outside of groups."""
    parts, depth = [""], 0
    for token in _TOKEN.findall(pattern):
        depth += token.startswith("(") - (token == ")")
        if token == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    return parts
