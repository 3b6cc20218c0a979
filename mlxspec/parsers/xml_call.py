"""Parses tool calls written as <function=NAME><parameter=KEY>value</parameter></function>: Qwen 3 Coder, Qwen 3.5 and later.

Values are bare text; the tool's schema gives their types (values.py). Text values are passed on while they are written. The format follows
Qwen's own parser, of which mlx-lm has a copy; tests compare the two.
"""

from __future__ import annotations

import json

from mlxspec.parsers.call import TaggedCall
from mlxspec.parsers.values import ToolTypes, convert, escaped, is_text

_PARAMETER, _END_PARAMETER, _END = "<parameter=", "</parameter>", "</function>"
_CLOSE = "</tool_call>"  # ends a call that forgot its own end


class XmlCall(TaggedCall):
    """Feed it text from behind `<function=` on."""

    def __init__(self, types: ToolTypes) -> None:
        super().__init__()
        self._types = types
        self._ready = "{"
        self._num_parameters = 0
        self._key: str | None = None
        self._value: _Value | None = None

    def _go_on(self) -> bool:
        if self.name is None:
            name = self._header()
            if name is not None:
                self.name = name
            return name is not None
        if self._value is not None:
            return self._go_on_value(self._value)
        if self._key is None:
            _, tag = self._scanner.take((_PARAMETER, _END, _CLOSE))
            if tag == _PARAMETER:
                self._key = ""
            elif tag is not None:
                self._ready += "}"
                self.is_done = True
                if tag == _CLOSE:
                    self._scanner.put_back(tag)
            return tag is not None
        key = self._header()
        if key is None:
            return False
        self._ready += f"{', ' if self._num_parameters else ''}{json.dumps(key, ensure_ascii=False)}: "
        self._num_parameters += 1
        self._value = _Value(self._types.of(self.name, key))
        return True

    def _header(self) -> str | None:
        """A name up to its `>`, None while it is incomplete."""
        before, tag = self._scanner.take((">",))
        if tag is None:
            self._scanner.put_back(before)
            return None
        return before.strip()

    def _go_on_value(self, value: _Value) -> bool:
        text, tag = self._scanner.take((_END_PARAMETER,))
        self._ready += value.push(text)
        if tag:
            self._ready += value.finish()
            self._key = self._value = None
        return tag is not None


class _Value:
    """One parameter's text to JSON. A newline at either end belongs to the tags."""

    def __init__(self, types: frozenset[str] | None) -> None:
        self._types = types
        self._text: list[str] = []  # not given out yet
        self._begun = self._opened = False

    def push(self, text: str) -> str:
        if not self._begun and text:
            text = text.removeprefix("\n")
            self._begun = True
        self._text.append(text)
        if not is_text(self._types):
            return ""
        text = "".join(self._text)
        if not self._opened and _may_be_null(text):
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
        return json.dumps(convert(text, self._types), ensure_ascii=False)


def _may_be_null(text: str) -> bool:
    return "null\n".startswith(text.lower())
