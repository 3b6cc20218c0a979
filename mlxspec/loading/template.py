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


class _OwnRefusal(ConfigError):
    """An error that a template raises itself about its messages."""


class ChatTemplate:
    """A model's chat template. It may have a second text, `tool_use`, for conversations with tools.

    source: all texts of the template. defaults: variables that are used where a call of `render` does not give them. spellings: of the
    vocabulary's control tokens. Where a message spells one, the rendered text holds a mark (spelled_tokens.py), and the tokenizer reads
    the spelling as plain text.
    """

    def __init__(self, source: str | Mapping[str, str], special: Mapping[str, str]) -> None:
        """Create a template. source: one text, or texts by name, among them `default`. special: texts of the tokens that the template
        may use as variables, by name, such as `bos_token`."""
        named = {_DEFAULT: source} if isinstance(source, str) else source
        self._texts = {name: named[name] for name in (_DEFAULT, _WITH_TOOLS) if name in named}
        self.source = "\n".join(self._texts.values())
        self._special = dict(special)
        self.defaults: Mapping[str, Any] = {}
        self.spellings = Spellings(())

    def unread(self, variables: Iterable[str]) -> list[str]:
        """Return those of the given names of variables that do not occur in the template."""
        own = "continue_final_message"  # which is no variable of a template
        return [name for name in variables if name not in self.source and name != own]

    def prepare(self) -> None:
        """Start the helper process that renders templates, without waiting for it."""
        helper.prepare(PROGRAM)

    def check(self) -> str | None:
        """Compile the template and render a user's message with it. Returns a sentence on why it cannot be used, None where it can, also
        where it refuses that message itself. May wait for the helper process to start."""
        try:
            for text in self._texts.values():
                self._run({"source": text}, replace(PROGRAM, seconds=_CHECK_SECONDS))
            self.render([{"role": "user", "content": "Hello"}])
        except _OwnRefusal:
            return None
        except (ConfigError, HelperError) as error:
            return str(error)
        return None

    @classmethod
    def from_file(cls, path: Path, special: Mapping[str, str]) -> ChatTemplate:
        """Return the template in a file. special: as in `__init__`. Raises ConfigError where the file cannot be read."""
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
        """Return the template of a model's folder, None where there is none. default: path of the default text; others: paths of named
        texts; given: `chat_template` of the model's settings, a text or texts by name, used where none of the files exists; special:
        as in `__init__`. Raises TokenizerError where a file cannot be read."""
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
        """Return the text that the template makes of messages. options: further variables of the template, such as `tools`.

        add_generation_prompt: end the text with the beginning of an answer. continue_final_message: end the text within the last
        message, after its content (after its reasoning_content where the content is empty), so that the answer continues it;
        add_generation_prompt is then ignored. Raises ConfigError where the template refuses the messages or does not compile,
        HelperError where it takes too much time or memory.
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
        """Return the defaults that apply with these options. Where the options request a reasoning effort, a default of
        `enable_thinking` does not apply."""
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
            kind = _OwnRefusal if said["is_own"] else ConfigError
            raise kind(f"The chat template refuses these messages: {said['refused']}.")
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise ConfigError("The chat template writes no text.") from error


def special_tokens(settings: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the tokens that templates may use as variables, by name, such as `bos_token`. settings: tokenizer_config.json;
    beside: special_tokens_map.json, which is used where the settings list no added tokens, as in transformers."""
    found = {**settings, **({} if "added_tokens_decoder" in settings else beside)}
    extra = found.get("extra_special_tokens")
    found |= extra if isinstance(extra, dict) else {}
    texts = {
        n: v.get("content") if isinstance(v, dict) else v for n, v in found.items() if n.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _text(path: Path) -> str:
    """Return the text of a file. Raises OSError where it cannot be read, ValueError where it is not UTF-8."""
    return path.read_text(encoding="utf-8")


def _given(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message as transformers gives it to templates: without members that are None, and with its reasoning under both names
    that templates read, `reasoning_content` and `thinking`."""
    kept = {name: value for name, value in message.items() if value is not None}
    thought = next((kept[name] for name in _THOUGHTS if name in kept), None)
    return kept if thought is None else {"thinking": thought, **kept, "reasoning_content": thought}


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with the marker _END after the text of the last one. The rendered text is cut at the marker, so that white
    space which a template strips or adds there is not lost."""
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
    """Return a value that JSON can represent: a mapping as a dict, a sequence as a list, anything else as the name of its type, as
    transformers does."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    return f"<{type(value).__name__}>"
