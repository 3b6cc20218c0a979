"""Renders chat templates: messages to the text format that a model was trained on.

A template is an untrusted program, so it runs in a sandbox (sandbox.py) with bounds on what it computes.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxspec.errors import ConfigError, TokenizerError
from mlxspec.loading.spelled_tokens import Spellings, with_marks

_END = "\ue000mlxspec\ue001"  # private-use characters: no message holds them by chance


class ChatTemplate:
    """One model's template. `render` is pure. source: its text. spellings: of the vocabulary's control tokens, which messages may spell
    without writing one; the text that is rendered holds marks there, which the tokenizer reads (spelled_tokens.py)."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Raises TokenizerError when the template does not compile."""
        from jinja2 import TemplateError

        from mlxspec.loading.sandbox import LONGEST, Sandbox

        if len(source) > LONGEST:
            raise TokenizerError(f"The chat template has more than {LONGEST} characters.")
        self._sandbox = environment = Sandbox()
        environment.add_filter("tojson", _to_json)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError, MemoryError, SyntaxError) as error:
            why = str(error).split("\n")[0].rstrip(".") or type(error).__name__
            raise TokenizerError(f"The chat template does not compile: {why}.") from error
        self._special = dict(special)
        self.source = source
        self.spellings = Spellings(())

    @classmethod
    def from_folder(cls, folder: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
        """chat_template.jinja, else `chat_template` in tokenizer_config.json, else None. Raises TokenizerError."""
        path = folder / "chat_template.jinja"
        try:
            source = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
        except (OSError, ValueError) as error:
            raise TokenizerError(f"chat_template.jinja in {folder} is no readable text.") from error
        if isinstance(source, list):  # several named ones
            named = (t.get("template") for t in source if isinstance(t, dict) and t.get("name") == "default")
            source = next(named, None)
        if not isinstance(source, str):
            return None
        special = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = settings.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                special[name] = value
        return cls(source, special)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> str:
        """The text that a template makes of messages.

        continue_final_message: the text ends within the last message, behind its content (its reasoning_content where the content is
        empty), so that an answer goes on with it; add_generation_prompt is not used then. Raises ConfigError when the template refuses
        the messages.
        """
        messages = [self.spellings.marked(message) for message in messages]
        if not continue_final_message:
            return self._render(messages, add_generation_prompt, options)
        marked = _marked(messages)
        text, mark, _ = self._render(marked, False, options).rpartition(_END)
        if not mark:
            raise ConfigError(
                "The chat template does not write the last message as it is, so no answer can go on with it."
            )
        return text

    def _render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, options: Mapping[str, Any]
    ) -> str:
        from jinja2 import TemplateError

        from mlxspec.loading.sandbox import HEAVIEST

        values = {
            **self._special,
            **options,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        pieces, size = [], 0
        try:
            with self._sandbox.budget(values.values()):
                for piece in self._template.generate(values):
                    size += len(piece)
                    if size > HEAVIEST:
                        raise ConfigError("The chat template writes more text than any prompt may have.")
                    pieces.append(piece)
        except ConfigError:
            raise
        except (
            TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            RecursionError,
            ArithmeticError,
            MemoryError,
        ) as error:
            why = str(error).split("\n")[0].rstrip(".") or type(error).__name__
            raise ConfigError(f"The chat template refuses these messages: {why}.") from error
        return with_marks("".join(pieces))


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with _END behind what is to be continued: whatever a template does with white space at an end, it does behind it."""
    last = dict(messages[-1])
    name = "content" if last.get("content") or not last.get("reasoning_content") else "reasoning_content"
    last[name] = f"{last.get(name) or ''}{_END}"
    return [*messages[:-1], last]


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(str(message).rstrip("."))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
