"""Renders chat templates: messages to the text format that a model was trained on, in the dialect of transformers.

A template is an untrusted program, so it runs in a sandbox (sandbox.py) in a helper process, which bounds its time and its memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxspec.errors import ConfigError, HelperError, TokenizerError
from mlxspec.loading.spelled_tokens import Spellings, with_marks
from mlxspec.platform import helper

LONGEST = 1 << 18  # characters of a template; those of published models have 20 thousand
MOST_TEXT = 16 << 20  # characters that one may write
PROGRAM = helper.Program(
    file=Path(__file__).with_name("sandbox.py"),
    what="The chat template",
    seconds=1.2,
    memory=192 << 20,
    most=4 * MOST_TEXT,
)
_CHECK_SECONDS = 5.0  # to compile, once, while a model is loaded
_END = "\ue000mlxspec\ue001"  # private-use characters: no message holds them by chance
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # what templates and clients call a thought
_DEFAULT, _WITH_TOOLS = "default", "tool_use"  # names that transformers knows


class ChatTemplate:
    """A model's template, or its named ones, of which `tool_use` is for conversations with tools. `render` is pure.

    source: all of its text. defaults: variables that hold where a call of `render` gives no others. spellings: of the vocabulary's control
    tokens, which messages may spell without writing one; the text that is rendered holds marks there, which the tokenizer reads
    (spelled_tokens.py).
    """

    def __init__(self, source: str | Mapping[str, str], special: Mapping[str, str]) -> None:
        """source: one text, or texts by name, `default` among them. special: the tokens that it may name, as `bos_token`."""
        named = {_DEFAULT: source} if isinstance(source, str) else source
        self._texts = {name: named[name] for name in (_DEFAULT, _WITH_TOOLS) if name in named}
        self.source = "\n".join(self._texts.values())
        self._special = dict(special)
        self.defaults: Mapping[str, Any] = {}
        self.spellings = Spellings(())

    def unread(self, variables: Iterable[str]) -> list[str]:
        """Return the variables of `render` that the template does not name."""
        own = "continue_final_message"  # which is no variable of a template
        return [name for name in variables if name not in self.source and name != own]

    def prepare(self) -> None:
        """Have a helper process start, without waiting for it."""
        helper.prepare(PROGRAM)

    def check(self) -> str | None:
        """Return why the template cannot be used, None where it compiles. May wait for the helper process to start."""
        try:
            for text in self._texts.values():
                self._run({"source": text}, replace(PROGRAM, seconds=_CHECK_SECONDS))
        except (ConfigError, HelperError) as error:
            return str(error)
        return None

    @classmethod
    def from_file(cls, path: Path, special: Mapping[str, str]) -> ChatTemplate:
        """Raises ConfigError."""
        try:
            return cls(_text(path), special)
        except OSError as error:
            raise ConfigError(
                f"The chat template {path} cannot be read: {error.strerror or error}."
            ) from error
        except ValueError as error:
            raise ConfigError(f"The chat template {path} is no readable text.") from error

    @classmethod
    def from_files(
        cls, default: Path, others: Sequence[Path], given: Any, special: Mapping[str, str]
    ) -> ChatTemplate | None:
        """The template in the file `default` and the named ones in others, as far as they are there, else what a model's settings call
        `chat_template`: a text, or texts by name. None where there is none. Raises TokenizerError."""
        paths = {path.stem: path for path in others}
        if default.is_file():
            paths[_DEFAULT] = default
        try:
            found = {name: _text(path) for name, path in paths.items()} or given
        except (OSError, ValueError) as error:
            raise TokenizerError(f"A chat template in {default.parent} is no readable text.") from error
        if isinstance(found, list):
            found = {str(t.get("name")): t.get("template") for t in found if isinstance(t, dict)}
        if isinstance(found, str):
            found = {_DEFAULT: found}
        if not isinstance(found, dict) or not isinstance(found.get(_DEFAULT), str):
            return None
        return cls({name: text for name, text in found.items() if isinstance(text, str)}, special)

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
        the messages or does not compile, HelperError when it takes too much time or memory.
        """
        messages = [self.spellings.marked(_given(message)) for message in messages]
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
        values = {
            "tools": None,
            "documents": None,
            **self._special,
            **self._defaults_beside(options),
            **options,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        with_tools = values["tools"] is not None and _WITH_TOOLS in self._texts
        text = self._run({"source": self._texts[_WITH_TOOLS if with_tools else _DEFAULT], "values": values})
        if not text:
            raise ConfigError("The chat template writes no text for these messages.")
        return with_marks(text)

    def _defaults_beside(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the defaults that hold with these options: a request for an effort is one for thinking, so a default against thinking does
        not hold with it."""
        if options.get("reasoning_effort") in (None, "none"):
            return self.defaults
        return {name: value for name, value in self.defaults.items() if name != "enable_thinking"}

    def _run(self, asked: Mapping[str, Any], program: helper.Program | None = None) -> str:
        if len(asked["source"]) > LONGEST:
            raise ConfigError(f"The chat template has more than {LONGEST} characters.")
        try:
            body = json.dumps(asked, ensure_ascii=False, default=_plain).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"The chat template cannot be given these messages: {error}.") from error
        said, text = helper.run(program or PROGRAM, {"most": MOST_TEXT}, body)
        if "fault" in said:
            raise ConfigError(
                f"The chat template does not compile: {said['fault']}; chat_template (--chat-template FILE) gives another in its place."
            )
        if "refused" in said:
            raise ConfigError(f"The chat template refuses these messages: {said['refused']}.")
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise ConfigError("The chat template writes no text.") from error


def special_tokens(settings: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that templates may name, as transformers finds them: what tokenizer_config.json (settings) calls a token, and what
    special_tokens_map.json (beside) does, which counts where the settings list no added tokens."""
    found = {**settings, **({} if "added_tokens_decoder" in settings else beside)}
    extra = found.get("extra_special_tokens")
    found |= extra if isinstance(extra, dict) else {}
    texts = {
        n: v.get("content") if isinstance(v, dict) else v for n, v in found.items() if n.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _text(path: Path) -> str:
    """Raises OSError, and ValueError for what is no UTF-8."""
    return path.read_text(encoding="utf-8")


def _given(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message as transformers hands it to templates: without members that are None, and with a thought under the names that they read."""
    kept = {name: value for name, value in message.items() if value is not None}
    thought = next((kept[name] for name in _THOUGHTS if name in kept), None)
    return kept if thought is None else {"thinking": thought, **kept, "reasoning_content": thought}


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with _END behind what is to be continued: whatever a template does with white space at an end, it does behind it."""
    last = dict(messages[-1])
    content = last.get("content")
    if isinstance(content, list) and any("text" in part for part in content):
        place = max(i for i, part in enumerate(content) if "text" in part)
        part = {**content[place], "text": f"{content[place]['text']}{_END}"}
        last["content"] = [*content[:place], part, *content[place + 1 :]]
        return [*messages[:-1], last]
    names = ["content"] if content or not last.get("reasoning_content") else ["reasoning_content", "thinking"]
    for name in names:
        last[name] = f"{last.get(name) or ''}{_END}"
    return [*messages[:-1], last]


def _plain(value: Any) -> Any:
    """Return a value as JSON: a container as a dict or a list, anything else by the name of its type, as transformers does."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    return f"<{type(value).__name__}>"
