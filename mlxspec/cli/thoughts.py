"""Parts what a model thinks from what it says, while both are still coming.

Thinking is what stands between the tags at the beginning of an answer, or up to the closing tag where the prompt has opened it. Tags behind
the beginning are text like any other. Knows two tags; knows no tokens and no terminal.
"""

from __future__ import annotations

from collections.abc import Iterator

TAGS = ("<think>", "</think>")


class Thoughts:
    """Feed it an answer's pieces; it gives (text, whether it is thinking). Blank lines beside the tags belong to nobody."""

    def __init__(self, *, opened: bool = False, tags: tuple[str, str] = TAGS) -> None:
        self._open, self._close = tags
        self._state = "thinking" if opened else "waiting"
        self._held = ""
        self._trims = True  # blanks at the beginning of a part are dropped

    def push(self, text: str) -> Iterator[tuple[str, bool]]:
        self._held += text
        if self._state == "waiting":
            yield from self._wait()
        if self._state == "thinking":
            yield from self._think()
        if self._state == "saying":
            yield from self._give(self._held, thinking=False)
            self._held = ""

    def end(self) -> Iterator[tuple[str, bool]]:
        """What was held back because it might have become a tag."""
        held, self._held = self._held, ""
        yield from self._give(held, thinking=self._state == "thinking")

    def _wait(self) -> Iterator[tuple[str, bool]]:
        bare = self._held.lstrip()
        if bare.startswith(self._open):
            self._state, self._held = "thinking", bare[len(self._open) :]
        elif not self._open.startswith(bare):
            self._state, self._trims = "saying", False
        yield from ()

    def _think(self) -> Iterator[tuple[str, bool]]:
        thought, tag, rest = self._held.partition(self._close)
        if tag:
            yield from self._give(thought.rstrip(), thinking=True)
            self._state, self._held, self._trims = "saying", rest, True
            return
        # a closing tag may have begun, and blanks before it are dropped with it
        keep = max((n for n in range(len(self._close)) if thought.endswith(self._close[:n])), default=0)
        certain = thought[: len(thought) - keep].rstrip()
        self._held = thought[len(certain) :]
        yield from self._give(certain, thinking=True)

    def _give(self, text: str, *, thinking: bool) -> Iterator[tuple[str, bool]]:
        if self._trims:
            text = text.lstrip("\n" if not thinking else None)
        if text:
            self._trims = False
            yield text, thinking
