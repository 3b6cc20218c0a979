"""Parses tool calls written as <function=NAME><parameter=KEY>value</parameter></function>: Qwen 3 Coder, Qwen 3.5 and later.

Values are bare text; the tool's schema gives their types (values.py). Text values are passed on while they are written. The format follows
Qwen's own parser, of which mlx-lm has a copy; tests compare the two. Models forget tags and write tags as text, so an end counts only if
what follows it fits: `</parameter>` before the next parameter or the end of the call; `</function>` before the end of the calls; and a
declared parameter's name on a line of its own begins a new value.
"""

from __future__ import annotations

import json
import re

from mlxspec.parsers.call import Call
from mlxspec.parsers.pieces import overlap
from mlxspec.parsers.tool_schemas import ToolSchemas
from mlxspec.parsers.values import convert, escaped, is_text

_PARAMETER, _END_PARAMETER, _END, _CLOSE = "<parameter=", "</parameter>", "</function>", "</tool_call>"
_TAG = re.compile("|".join(map(re.escape, (_END_PARAMETER, _PARAMETER, _END, _CLOSE))))
_FOLLOWS = {  # what must come behind a tag, white space left aside, for it to be one; or nothing
    _END_PARAMETER: (_PARAMETER, _END, _CLOSE, "<function="),
    _END: (_CLOSE, "<function=", "<tool_call>"),
    _CLOSE: ("<tool_call>",),
}
_LONGEST_NAME = 200


class XmlCall(Call):
    """Feed it text from behind `<function=` on."""

    def __init__(self, schemas: ToolSchemas) -> None:
        super().__init__(schemas)
        self._text = ""  # that waits
        self._ready = ["{"]
        self._num_parameters = 0
        self._value: _Value | None = None
        self._in_header = False  # of a parameter

    def push(self, text: str) -> str:
        self._text += text
        while not (self.is_done or self.is_broken) and self._go_on(is_last=False):
            pass
        rest, self._text = (self._text, "") if self.is_done or self.is_broken else ("", self._text)
        return rest

    def finish(self, *, cut: bool) -> str:
        while not (self.is_done or self.is_broken) and self._go_on(is_last=not cut):
            pass
        return self.take_arguments()

    def _go_on(self, *, is_last: bool) -> bool:
        """One element; False to wait for more text."""
        if self._named is None or self._in_header:
            return self._header()
        if self.name is None:
            return self._begin(self._named)
        if self._value is not None:
            return self._go_on_value(is_last=is_last)
        found = _TAG.search(self._text)
        if found is None:
            self._text = self._text[
                len(self._text) - max(overlap(self._text, t) for t in (_PARAMETER, _END, _CLOSE)) :
            ]
            return False
        tag, self._text = found[0], self._text[found.end() :]
        self._in_header = tag == _PARAMETER
        if tag in (_END, _CLOSE):
            self._ready.append("}")
            self._end()
            self._text = (tag if tag == _CLOSE else "") + self._text
        return True

    def _begin(self, name: str) -> bool:
        """A parameter or the end of the call must follow the name. Anything else speaks of a call, and is none."""
        text, tags = self._text.lstrip(), (_PARAMETER, _END, _CLOSE)
        if text.startswith(tags):
            self.name = name
            return True
        self.is_broken = not any(tag.startswith(text) for tag in tags)
        return False

    def _header(self) -> bool:
        """A name up to its `>`, or to the end of the line where that was forgotten."""
        found = re.search(r">|\n" if self._named is not None else r">|\n|<", self._text)
        if found is not None and found[0] == "<":  # of another tag
            self.is_broken = True
            return False
        if found is None or (found[0] == "\n" and not self._text[: found.start()].strip()):
            if found is not None and found[0] == "\n":
                self._text = self._text[found.end() :]
                return True
            return False
        name = self._text[: found.start()].strip()
        self._text = ("\n" if found[0] == "\n" else "") + self._text[found.end() :]
        if self._named is None:
            self._take_name(name)
            return True
        self._in_header = False
        self._ready.append(f"{', ' if self._num_parameters else ''}{json.dumps(name, ensure_ascii=False)}: ")
        self._num_parameters += 1
        self._value = _Value(self._schemas.kinds(self._named, name))
        return True

    def _go_on_value(self, *, is_last: bool) -> bool:
        value = self._value
        if value is None:
            return False
        for found in _TAG.finditer(self._text):
            is_end = self._ends(found, value, is_last=is_last)
            if is_end is False:
                continue
            place = found.start()
            if is_end is None:
                place -= self._text[:place].endswith(
                    "\n"
                )  # the tag is looked at again, with the line's beginning
            value.push(self._text[:place])
            self._text = self._text[place:]
            if is_end is None:
                return False
            self._end_value()
            if found[0] == _END_PARAMETER:
                self._text = self._text[len(_END_PARAMETER) :]
            return True
        keep = max(overlap(self._text, tag) for tag in (_END_PARAMETER, _PARAMETER, _END, _CLOSE))
        keep += self._text[: len(self._text) - keep].endswith("\n")  # whether a line begins there
        value.push(self._text[: len(self._text) - keep])
        self._text = self._text[len(self._text) - keep :]
        return False

    def _ends(self, found: re.Match[str], value: _Value, *, is_last: bool) -> bool | None:
        """Whether a tag in the text of a value ends it; None while too little has come to say."""
        behind = self._text[found.end() :]
        if found[0] == _PARAMETER:
            if not (self._text[: found.start()].endswith("\n") or (value.is_empty and found.start() == 0)):
                return False
            header = re.match(r"([^>\n]*)>", behind)
            if header is None:
                return None if "\n" not in behind and len(behind) < _LONGEST_NAME and not is_last else False
            return self._schemas.declares(self.name or "", header[1].strip())
        behind = behind.lstrip()
        follows = _FOLLOWS[found[0]]
        if behind.startswith(follows):
            return True
        if not any(tag.startswith(behind) for tag in follows):
            return False
        return True if is_last else None

    def _end_value(self) -> None:
        if self._value is not None:
            self._ready.append(self._value.finish())
            self._value = None

    def take_arguments(self) -> str:
        if self._value is not None:
            self._ready.append(self._value.take())
        return super().take_arguments()


class _Value:
    """One parameter's text to JSON. A newline at either end belongs to the tags."""

    def __init__(self, kinds: frozenset[str] | None) -> None:
        self._kinds = kinds
        self._text: list[str] = []  # not given out yet
        self._opened = False
        self.is_empty = True  # nothing has come

    def push(self, text: str) -> None:
        if self.is_empty and text:
            text = text.removeprefix("\n")
            self.is_empty = False
        self._text.append(text)

    def take(self) -> str:
        """JSON that is certain so far."""
        if not is_text(self._kinds):
            return ""
        text = "".join(self._text)
        may_be_null = self._kinds is None or "null" in self._kinds
        if (
            not self._opened
            and may_be_null
            and any(f"{n}\n".startswith(text.strip(" ").lower()) for n in ("null", "none"))
        ):
            return ""
        held = len(text) - text.endswith("\n")
        out, self._text = text[:held], [text[held:]]
        if not out:
            return ""
        quote = "" if self._opened else '"'
        self._opened = True
        return quote + escaped(out)

    def finish(self) -> str:
        text = "".join(self._text).removesuffix("\n")
        if self._opened:
            return escaped(text) + '"'
        return json.dumps(convert(text, self._kinds), ensure_ascii=False, allow_nan=False)
