"""Reads the format that a request sets for its whole answer, from the dozen fields that published APIs have for it.

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
    """The format that a whole answer must have. field: the name of the request's field that sets it. kind: the field of SamplingParams
    that enforces it. value: a JSON schema (an object) or a text, depending on `kind`. is_strict: the request requires that every
    keyword of the schema is enforced."""

    field: str
    kind: Kind
    value: Any
    is_strict: bool = False


def answer_format(
    given: Mapping[str, Any], own: AnswerFormat | None = None, under: str = ""
) -> AnswerFormat | None:
    """Return the format that a request sets for its answer; None for free text. given: the values of the fields in FORMATS, by name.
    own: the format that the API's own field sets. under: the text before those names in the body, for errors. Raises BadField where
    two fields set a format, GrammarError for invalid GBNF."""
    made = (make(under + name, given[name]) for name, make in FORMATS.items() if given.get(name) is not None)
    found = [own, *made]
    first, second = [*filter(None, found), None, None][:2]
    if first is not None and second is not None:
        raise BadField(second.field, f"{second.field} and {first.field} both say what the answer looks like.")
    return first


def held_schema(wanted: AnswerFormat) -> tuple[dict[str, Any], list[str]]:
    """Return the JSON schema that the grammar of an answer enforces, and sentences on the keywords that it leaves out. Raises BadField
    for such a keyword where the request is strict, GrammarError for a value that is no schema."""
    try:
        schema = Schema(wanted.value)
    except GrammarError as error:
        raise GrammarError(f"The JSON schema in {wanted.field} cannot be used: {error}") from error
    return schema.json(), held(schema.left_out, wanted.field, strict=wanted.is_strict)


def held(left_out: Sequence[Unheld], field: str, *, strict: bool) -> list[str]:
    """Return sentences on keywords of a schema that no grammar enforces, for the first 20 of them. field: the request's field that holds
    the schema. strict: raise BadField where there is such a keyword."""
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
    """Return the format of a field that holds a JSON schema, as an object or as JSON text. Raises BadField for a text that is no JSON
    object."""
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
    """Return the format of a field that holds a grammar: GBNF where the text contains `::=`, else Lark."""
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
