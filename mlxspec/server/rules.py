"""The rules of an answer: which tools it may or must call, and the grammar of its calls or of the requested format."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxspec.errors import GrammarError
from mlxspec.parsers.call_grammar import calls_grammar
from mlxspec.parsers.formats import ChatFormat
from mlxspec.parsers.lark_regex import regex_of
from mlxspec.parsers.patterns import usable_pattern
from mlxspec.parsers.tool_schemas import ToolSchemas
from mlxspec.server.answer_format import held, held_schema
from mlxspec.server.errors import BadField
from mlxspec.server.job import ChatRequest, CustomGrammar, Loosen, ToolChoice, function_of, tool_name
from mlxspec.server.messages import call_lead

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine

_AUTO, _NONE = ToolChoice(kind="auto"), ToolChoice(kind="none")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The constraints of an answer. params: the fields of SamplingParams that enforce them. notices: sentences on what is not enforced.
    loosen: makes a less strict grammar of calls, where this one cannot be compiled."""

    params: Mapping[str, Any]
    notices: Sequence[str] = ()
    loosen: Loosen | None = None


def allowed_tools(
    talk: ChatRequest, form: ChatFormat, engine: Engine
) -> tuple[list[Mapping[str, Any]], ToolChoice]:
    """Return the tools that the prompt lists, and the choice of those that the answer may or must call. Raises BadField for a choice
    that cannot be honoured."""
    choice = talk.tool_choice or (_AUTO if talk.tools else _NONE)
    if choice.kind != "none" and talk.tool_choice is not None and not talk.tools:
        raise BadField("tool_choice", "tool_choice needs tools.")
    tools = [] if choice.kind == "none" else list(talk.tools)
    names = set(map(tool_name, tools))
    for name in choice.allowed or () if choice.named is None else (choice.named,):
        if name not in names:
            raise BadField("tool_choice", f"There is no tool {name[:60]!r}.")
    if choice.kind == "required" and not choice.of(tools):
        raise BadField("tool_choice", "tool_choice allows none of the tools.")
    if choice.kind == "required" and tools and form.tools is None and (form.takes_tools or form.is_unknown):
        raise BadField(
            "tool_choice", f"A call cannot be required of {engine.name}: no grammar of its notation is known."
        )
    if tools and not (form.takes_tools or form.is_unknown):
        raise BadField("tools", f"The chat template of {engine.name} takes no tools.")
    return tools, choice


def rules_of(
    talk: ChatRequest,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    form: ChatFormat,
    engine: Engine,
) -> Rules:
    """Return the rules of an answer. They enforce the requested format, or a required call, or either of the two; without both they
    enforce the form of the calls that the answer happens to contain. Raises BadField, GrammarError."""
    found = _rules(talk, tools, choice, form, engine)
    return replace(found, notices=[*found.notices, *_not_enforced(talk, form)])


def _rules(
    talk: ChatRequest,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    form: ChatFormat,
    engine: Engine,
) -> Rules:
    wanted, must_call = talk.wanted, choice.kind == "required"
    notices: list[str] = []
    schema = None
    if wanted is not None and must_call:
        notices.append(f"{wanted.field} is for answers of text: this one must be a call of a tool")
        wanted = None
    if wanted is not None and wanted.kind != "json_schema":
        return Rules(params={wanted.kind: wanted.value}, notices=notices)
    if wanted is not None:
        schema, notices = held_schema(wanted)
    chosen = choice.of(tools)
    if schema is not None and not chosen:
        return Rules(params={"json_schema": schema}, notices=notices)
    tags = form.call_tags
    if not chosen or (tags is None and not must_call and schema is None):
        return Rules(params={}, notices=notices)
    is_free = not must_call and schema is None
    schemas = ToolSchemas([_with_pattern(tool, talk.customs, form) for tool in chosen])
    write = partial(
        calls_grammar,
        form,
        schemas=schemas,
        tokens=special_tags(form, engine),
        several=choice.named is None and talk.several_calls and not is_free,
        lead="" if is_free else _lead(talk, form, engine),
        is_opened=is_free,
        texts={c.tool: c.definition for c in talk.customs if _is_written_as_lark(c, form)},
        otherwise=None if must_call else schema,
    )
    loose: dict[str, str] = {}
    grammar = write(chosen, loose=loose)
    for name in schemas:
        strict, path = schemas.is_strict(name) and not is_free, f"tools.{name}.parameters"
        if name in loose and strict:
            raise BadField(path, loose[name])
        if name not in loose and (schemas.is_strict(name) or not is_free):
            notices += held(schemas.left_out(name), path, strict=strict)
    at = {"lark_at": tags.open, "lark_once": not talk.several_calls} if is_free and tags else {}
    strict_ones = frozenset() if is_free else frozenset(filter(schemas.is_strict, schemas))
    loosening = Loosening(write=write, tools=chosen, loose=loose, strict=strict_ones)
    return Rules(
        params={"lark": grammar, **at}, notices=[*notices, *loose.values()], loosen=loosening.loosened
    )


@dataclass(frozen=True, kw_only=True)
class Loosening:
    """A maker of a less strict grammar of calls, for tools whose grammar cannot be compiled. write: `calls_grammar` with its other
    arguments set. loose: the tools that may have any arguments already: name -> sentence for the client. strict: names of tools whose
    schemas must be enforced."""

    write: Callable[..., str]
    tools: Sequence[Mapping[str, Any]]
    loose: Mapping[str, str]
    strict: Container[str]

    def loosened(self, trouble: Callable[[str], str | None]) -> tuple[str, tuple[str, ...]] | None:
        """Return a grammar in which each tool that cannot be compiled by itself may have any arguments, and sentences on these tools.
        Returns None where no tool is at fault, or a strict one is. trouble: returns the reason why a grammar cannot be compiled, None
        where it can."""
        found = dict(self.loose)
        for tool in self.tools:
            name = tool_name(tool)
            if name not in found and (why := trouble(self.write([tool], loose={}))) is not None:
                found[name] = f"calls of {name} may have any arguments: {why}"
        new = found.keys() - self.loose.keys()
        if not new or any(name in self.strict for name in new):
            return None
        return self.write(self.tools, loose=found), tuple(found[name] for name in sorted(new))


def _pattern(custom: CustomGrammar) -> str | None:
    """Return the regular expression, with anchors, that a custom tool's text must match; None where its grammar cannot be written as
    one."""
    try:
        found = custom.definition if custom.syntax == "regex" else regex_of(custom.definition)
    except GrammarError:
        return None
    return None if usable_pattern(f"^(?:{found})$") is None else f"^(?:{found})$"


def _is_written_as_lark(custom: CustomGrammar, form: ChatFormat) -> bool:
    """Return whether the Lark grammar of a custom tool can be used as it is, because the notation of calls writes texts unchanged. Calls
    in JSON escape them."""
    return custom.syntax == "lark" and form.tools != "json"


def _with_pattern(
    tool: Mapping[str, Any], customs: Sequence[CustomGrammar], form: ChatFormat
) -> Mapping[str, Any]:
    """Return a custom tool with its text's regular expression in its schema. Any other tool, and one whose Lark grammar is used as it
    is, is returned unchanged."""
    found = next((c for c in customs if c.tool == tool_name(tool)), None)
    pattern = None if found is None or _is_written_as_lark(found, form) else _pattern(found)
    if pattern is None:
        return tool
    text = {"type": "string", "pattern": pattern}
    function = function_of(tool)
    schema = {**function["parameters"], "properties": {"input": text}}
    return {**tool, "function": {**function, "parameters": schema}}


def _not_enforced(talk: ChatRequest, form: ChatFormat) -> list[str]:
    """Return notices on grammars of custom tools that only the prompt contains, because no grammar of this model's calls can enforce
    them."""
    why = (
        "no grammar of this model's calls is known"
        if form.tools is None
        else "in this model's calls only what has the form of one regular expression can be held"
    )
    return [
        f"{c.path}.format is told to the model and not enforced: {why}"
        for c in talk.customs
        if form.tools is None or not (_is_written_as_lark(c, form) or _pattern(c))
    ]


def _lead(talk: ChatRequest, form: ChatFormat, engine: Engine) -> str:
    """Return the white space before the first call of an answer, as the chat template writes it."""
    template = None if engine.tokenizer is None else engine.tokenizer.template
    if template is None or talk.goes_on is not None:
        return ""
    return call_lead(template, form, talk.template)


def special_tags(form: ChatFormat, engine: Engine) -> dict[str, int]:
    """Return the tags of the format that are special tokens of the vocabulary, each with its token id."""
    calls, tokenizer = form.notation, engine.tokenizer
    if calls is None or tokenizer is None:
        return {}
    rows = engine.model.vocab_size
    added = tokenizer.added_tokens().items()
    special = {tokenizer.token_text(i): i for i, is_special in added if is_special and i < rows}
    return {tag: special[tag] for tag in form.tags if tag in special}
