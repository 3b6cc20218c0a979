"""Regular expressions of JSON Schema (ECMA-262) in the syntax of the grammar compiler (Rust's), and terms that texts are made of.

Both share most of their syntax. Look-around, back-references and word boundaries have no counterpart: such a pattern is not usable.
`\\d` and `\\w` are ASCII in ECMA-262 and Unicode in Rust, so they are spelled out.
"""

from __future__ import annotations

import re

_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_"}
_LONGEST = 2000  # characters of a pattern
_ESCAPES = frozenset("dwsDWSnrtfv\\/.*+?()[]{}|^$-")
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
    """The same pattern for the grammar compiler and for Python; empty where it excludes nothing, None where there is none."""
    if len(pattern) > _LONGEST:
        return None
    out, i, in_class = [], 0, False
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            following = pattern[i + 1 : i + 2]
            step = 2
            if following in _CLASSES:
                out.append(_CLASSES[following] if in_class else f"[{_CLASSES[following]}]")
            elif following in ("D", "W"):
                if in_class:
                    return None
                out.append(f"[^{_CLASSES[following.lower()]}]")
            elif following == "u" and re.match(r"[0-9A-Fa-f]{4}", pattern[i + 2 : i + 6]):
                number, step = int(pattern[i + 2 : i + 6], 16), 6
                if 0xD800 <= number < 0xE000:
                    return None
                out.append(re.escape(chr(number)))
            elif following == "x" and re.match(r"[0-9A-Fa-f]{2}", pattern[i + 2 : i + 4]):
                out.append(re.escape(chr(int(pattern[i + 2 : i + 4], 16))))
                step = 4
            elif following == "/":
                out.append("/")
            elif following in _ESCAPES:
                out.append(char + following)
            elif following and not following.isalnum():
                out.append(re.escape(following))
            else:  # boundaries, back-references, property classes
                return None
            i += step
            continue
        if in_class:
            in_class = char != "]"
            out.append("\\[" if char == "[" else "\\&" if char == "&" else "\\~" if char == "~" else char)
        elif char == "[":
            in_class = True
            out.append(char)
            if pattern[i + 1 : i + 2] == "^":
                out.append("^")
                i += 1
            if pattern[i + 1 : i + 2] == "]":
                return None  # an empty class means one thing there and another here
        elif char == "(" and pattern[i + 1 : i + 2] == "?":
            if pattern[i + 2 : i + 3] != ":":
                if not re.match(r"\?<[A-Za-z]\w*>", pattern[i + 1 :]):
                    return None  # look-around, flags
                i += pattern[i:].index(">")
            else:
                i += 2
            out.append("(?:")
        else:
            out.append(char)
        i += 1
    found = "".join(out)
    try:
        re.compile(found)
    except (re.error, RecursionError, OverflowError):
        return None
    if in_class or _has_inner_anchor(found):
        return None
    return "" if found in (".*", "^.*$", "^", "$", "^.*", ".*$") else found


def whole(pattern: str) -> str:
    """A pattern that is searched for, as one that the whole text matches."""
    parts = []
    for part in _options(pattern):
        begin = "" if part.startswith("^") else "(?s:.*)"
        end = "" if part.endswith("$") and not part.endswith("\\$") else "(?s:.*)"
        inner = part[1:] if not begin else part
        inner = inner[:-1] if not end else inner
        parts.append(f"{begin}(?:{inner}){end}")
    return "|".join(parts)


def slashed(pattern: str) -> str:
    """As a terminal of the grammar: between slashes."""
    return "/" + re.sub(r"\\?[\x00-\x1f\x7f]|\\.|/", _slashed_part, pattern) + "/"


def _slashed_part(found: re.Match[str]) -> str:
    last = found[0][-1]
    return f"\\x{ord(last):02x}" if not last.isprintable() else "\\/" if last == "/" else found[0]


def _options(pattern: str) -> list[str]:
    """The alternatives at the outermost level."""
    parts, depth, start, i, in_class = [], 0, 0, 0, False
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            i += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            parts.append(pattern[start:i])
            start = i + 1
        i += 1
    return [*parts, pattern[start:]]


def _has_inner_anchor(pattern: str) -> bool:
    """Whether `^` or `$` stands anywhere but at the ends of an outermost alternative."""
    for part in _options(pattern):
        inner = part[1:] if part.startswith("^") else part
        inner = inner[:-1] if inner.endswith("$") and not inner.endswith("\\$") else inner
        i, in_class = 0, False
        while i < len(inner):
            char = inner[i]
            if char == "\\":
                i += 1
            elif in_class:
                in_class = char != "]"
            elif char == "[":
                in_class = True
                i += inner[i + 1 : i + 2] == "^"
            elif char in "^$":
                return True
            i += 1
    return False
