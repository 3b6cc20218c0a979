"""Reads the format that a request asks of its whole answer, from the dozen fields by which published APIs name it.

JSON of a schema       response_format, json_schema, guided_json, structured_outputs.json, .json_object
a regular expression   regex, guided_regex, structured_outputs.regex
a grammar              lark; grammar (GBNF), guided_grammar and structured_outputs.grammar (GBNF or Lark)
one of several texts   guided_choice, structured_outputs.choice
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxspec.errors import GrammarError
from mlxspec.parsers.schema import Schema, Unheld
from mlxspec.server.errors import BadField

Kind = Literal["json_schema", "regex", "lark"]
_MOST_SENTENCES = 20
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """field: what the request called it. value: a schema (an object) or a text, by `kind`, which is a field of SamplingParams. is_strict:
    the request asks for a schema to be held to the last keyword."""

    field: str
    kind: Kind
    value: Any
    is_strict: bool = False


def answer_format(
    given: Mapping[str, Any], own: AnswerFormat | None = None, under: str = ""
) -> AnswerFormat | None:
    """The format that a request asks for; None for free text. given: values of FORMATS by name. own: what an API's own field asks for.
    under: what stands in front of the names in a body. Raises BadField where two are asked for, GrammarError for broken GBNF."""
    made = (make(under + name, given[name]) for name, make in FORMATS.items() if given.get(name) is not None)
    found = [own, *made]
    first, second = [*filter(None, found), None, None][:2]
    if first is not None and second is not None:
        raise BadField(second.field, f"{second.field} and {first.field} both say what the answer looks like.")
    return first


def held_schema(wanted: AnswerFormat) -> tuple[dict[str, Any], list[str]]:
    """Return the part of a schema that a grammar holds, and sentences on the rest. Raises BadField where the request is strict,
    GrammarError for what is no schema."""
    try:
        schema = Schema(wanted.value)
    except GrammarError as error:
        raise GrammarError(f"The JSON schema in {wanted.field} cannot be used: {error}") from error
    return schema.json(), held(schema.left_out, wanted.field, strict=wanted.is_strict)


def held(left_out: Sequence[Unheld], field: str, *, strict: bool) -> list[str]:
    """Sentences on keywords that no grammar holds. Raises BadField for the first where the request is strict."""
    if left_out and strict:
        place = left_out[0].place
        raise BadField(
            field,
            f"{field}.{place} cannot be enforced here: leave it out of the schema, or leave `strict` out.",
        )
    return [
        f"{field}.{found.place} is not enforced: an answer may break it."
        for found in left_out[:_MOST_SENTENCES]
    ]


def _json(field: str, value: Any) -> AnswerFormat:
    """A schema as an object or as its text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadField(field, f"{field} is no valid JSON.") from error
        if not isinstance(value, dict):
            raise BadField(field, f"{field} must hold a JSON object.")
    return AnswerFormat(field=field, kind="json_schema", value=value)


def _json_object(field: str, value: bool) -> AnswerFormat | None:
    return AnswerFormat(field=field, kind="json_schema", value=ANY_OBJECT) if value else None


def _regex(field: str, value: str) -> AnswerFormat:
    return AnswerFormat(field=field, kind="regex", value=value)


def _lark(field: str, value: str) -> AnswerFormat:
    return AnswerFormat(field=field, kind="lark", value=value)


def _grammar(field: str, value: str) -> AnswerFormat:
    """GBNF, which is told by its `::=`, or Lark."""
    return _lark(field, _lark_of_gbnf(field, value) if "::=" in value else value)


def _gbnf(field: str, value: str) -> AnswerFormat:
    return _lark(field, _lark_of_gbnf(field, value))


def _choice(field: str, value: list[str]) -> AnswerFormat:
    return _lark(field, "start: " + " | ".join(json.dumps(v, ensure_ascii=False) for v in value))


def _lark_of_gbnf(field: str, text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except RecursionError as error:
        raise GrammarError(f"{field} is nested too deeply.") from error
    except Exception as error:  # the converter's parser raises whatever it stumbles on
        why = str(error).strip().split("\n")[0].rstrip(".:") or type(error).__name__
        raise GrammarError(f"{field} is no valid GBNF: {why[:200]}.") from error


# By the names of the fields that all APIs share.
FORMATS: dict[str, Callable[[str, Any], AnswerFormat | None]] = {
    "json_schema": _json,
    "regex": _regex,
    "lark": _lark,
    "grammar": _gbnf,
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "structured_outputs.json": _json,
    "structured_outputs.json_object": _json_object,
    "structured_outputs.regex": _regex,
    "structured_outputs.choice": _choice,
    "structured_outputs.grammar": _grammar,
}
