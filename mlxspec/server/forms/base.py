"""The building blocks of request forms: `Fields`, the types of fields, and `review`, which checks a body and returns it as a form, or
raises an error with one sentence on the fault.

A form describes a body to readers (openapi.py), and is what a body becomes: no other code reads the body. Each field that a published
API names is one of:

    honoured   a field of the form; one with `x-another-name-of` is another name of an honoured field
    refused    in the form's table `refused`: the request is an error that names the field, unless its value changes nothing
    harmless   in the form's table `harmless`: it is accepted and changes nothing about the answer, for the reason given there

A field that is none of these is ignored, and the answer's `mlxspec.notices` name it. Nested forms have tables of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    create_model,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.option import Option, near, options, span
from mlxspec.server.errors import BadField

T = TypeVar("T")
F = TypeVar("F", bound="Fields")


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A field that cannot be honoured. why: the end of the sentence "FIELD cannot be honoured: ...". neutral: values that change
    nothing, and are accepted; null is always accepted."""

    why: str
    neutral: tuple[Any, ...] = ()


OFF: tuple[Any, ...] = (False, 0, "", [], {})


def refuse(names: str, why: str, *neutral: Any) -> dict[str, Refused]:
    """Return entries of a form's table `refused`. names: of the fields, separated by blanks. why: the end of the sentence "FIELD cannot
    be honoured: ...". neutral: values that change nothing, and are accepted."""
    return dict.fromkeys(names.split(), Refused(why=why, neutral=neutral))


def harmless(names: str, why: str) -> dict[str, str]:
    """Return entries of a form's table `harmless`. names: of the fields, separated by blanks. why: the reason why the field changes
    nothing."""
    return dict.fromkeys(names.split(), why)


class Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    refused: ClassVar[Mapping[str, Refused]] = {}
    harmless: ClassVar[Mapping[str, str]] = {}
    is_list: ClassVar[bool] = False  # a body that is a list, checked as the field `body`
    parts: ClassVar[frozenset[str]] = (
        frozenset()
    )  # types of parts of a conversation that are read (usable.py)
    result_parts: ClassVar[frozenset[str]] = frozenset()  # the same of results of tools within a message
    under: ClassVar[str] = (
        ""  # of an object whose members are fields of the body behind this, like `speculative.`
    )


class LeftOut(Fields):
    """A field that a published API has and this server cannot use. It is accepted without a look at its members, and a notice names it."""

    model_config = ConfigDict(extra="ignore")


def optional(about: str | None = None, *, name: str | None = None, same_as: str | None = None) -> Any:
    """Return pydantic's declaration of a field that may be left out, and is None then. about: the field's description. name: the field's
    name in a body, where it cannot be a Python name. same_as: the field that this one is another name of."""
    extra: Any = None if same_as is None else {"x-another-name-of": same_as}
    return Field(None, alias=name, description=about, json_schema_extra=extra)


def answer(_name: str, _optional: str = "", **fields: Any) -> Any:
    """Return a pydantic model of an answer, to describe it in /openapi.json. _optional: names of fields that may be left out, separated
    by blanks. fields: the type of each field."""
    left_out = _optional.split()
    return create_model(_name, **{n: (kind, None if n in left_out else ...) for n, kind in fields.items()})  # type: ignore[call-overload]


def many(kind: Any) -> Any:
    """Return the type of a list of `kind`. A function, because type checkers accept no type that is made at run time."""
    return list[kind]


def table_of(kind: Any) -> Any:
    """Return the type of an object whose members all are of type `kind`."""
    return dict[str, kind]


def either(*kinds: Any) -> Any:
    """Return the union of these types."""
    return reduce(or_, kinds)


@dataclass(frozen=True)
class Range:
    """The range of a number: from low to high, or one of `also`. above: low itself is excluded. A whole number written as 5.0 is
    accepted as an integer."""

    low: float
    high: float
    also: tuple[int, ...] = ()
    above: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        number = handler(source)
        if source is int:
            number = core_schema.no_info_before_validator_function(_whole, number)
        return core_schema.no_info_after_validator_function(self._check, number)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        low = "exclusiveMinimum" if self.above else "minimum"
        found = {**handler(schema), low: self.low, "maximum": self.high}
        return {"anyOf": [{"type": "integer", "enum": [*self.also]}, found]} if self.also else found

    def _check(self, value: float) -> float:
        if value not in self.also and not (
            self.low <= value <= self.high and not (self.above and value == self.low)
        ):
            said = span(self.low, self.high, above=self.above)
            raise PydanticCustomError("range", f"must be {said}.")  # type: ignore[arg-type]
        return value


def option(name: str) -> Range:
    """Return the range of an option of SamplingParams or SpecConfig."""
    return _range((options(SamplingParams) | options(SpecConfig))[name])


def _range(own: Option) -> Range:
    return Range(own.low, own.high, also=() if own.off is None else (own.off,), above=own.above)


def with_options(config: type[Any], without: str = "", under: str = "") -> Callable[[type[F]], type[F]]:
    """Return a class decorator that adds the options of a config class, and their other names, as fields to a form. without: options to
    leave out, separated by blanks. under: if given, add only those other names that begin with this text, and remove it from them."""

    def add(form: type[F]) -> type[F]:
        added: dict[str, Any] = {}
        for own in options(config).values():
            kind = _type_of(own)
            if under:
                inner = [alias.removeprefix(under) for alias in own.aliases if alias.startswith(under)]
                added |= dict.fromkeys(inner, (kind, optional(own.about)))
            elif own.body and own.name not in without.split():
                added[own.body] = (kind, optional(_about(own)))
                for alias in own.aliases:
                    name = alias.replace(".", "_")
                    added[name] = (kind, optional(name=alias if name != alias else None, same_as=own.body))
        made = create_model(
            form.__name__, __base__=form, __doc__=form.__doc__, __module__=form.__module__, **added
        )
        made.under = under
        return made

    return add


def _about(own: Option) -> str:
    return own.about if own.off is None else f"{own.about}; {own.off}: not set"


def _type_of(own: Option) -> Any:
    """Return the type of the field that an option becomes in a form."""
    if isinstance(own.kind, tuple):
        return Literal[own.kind] | None
    if own.kind is list:
        return Annotated[Many[Word], Field(max_length=int(own.high))] | None
    made: dict[Any, Any] = {bool: bool, "grammar": Grammar, "schema": Object | Grammar, "ids": TokenIds}
    return (made[own.kind] if own.kind in made else Annotated[own.kind, _range(own)]) | None


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _pause(value: T) -> T:
    """Return the value unchanged. As a validator of list items it lets other threads run during a long validation: Python changes
    threads only in Python code."""
    return value


Object = dict[str, Any]
Text = Annotated[str, Field(max_length=1 << 24)]
Tokenized = Annotated[str, Field(max_length=1 << 22)]  # what is tokenized whole, however short the context
Id = Annotated[str, Field(max_length=200)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
ToolName = Annotated[
    str, Field(pattern=r"^[^\s<>{}\"'\\\x00-\x1f]{1,200}$")
]  # as notations of calls can write it
Flag = bool | None
Many = Annotated[list[Annotated[T, BeforeValidator(_pause)]], Field(fail_fast=True)]
Turns = Annotated[Many[T], Field(max_length=20_000)]
Tools = Annotated[Many[T], Field(max_length=2048)]
Word = Annotated[str, Field(min_length=1, max_length=1000)]
Grammar = Annotated[str, Field(min_length=1, max_length=100_000)]
TokenId = Annotated[int, Range(0, 1 << 30)]
TokenIds = Annotated[Many[TokenId], Field(max_length=10_000)]


def review(form: type[F], body: Mapping[str, Any]) -> tuple[F, list[str]]:
    """Check a body, and return it as its form, with sentences on the fields that are ignored. Each value is under the field's own name
    in the form. Raises BadField for the first field that is wrong or cannot be honoured."""
    try:
        checked = form.model_validate(body)
    except ValidationError as error:
        raise _bad_field(error, body, form) from None
    ignored = []
    for owner, path, name, value in unknown(checked):
        if name in owner.refused:
            _refuse(path, value, owner.refused[name])
        elif name not in owner.harmless:
            meant = near(name, _names(owner))
            ignored.append(f"{path} is no field of this request and was ignored{meant and '; '}{meant}")
    _rename(checked)
    return checked, ignored


def plain(value: Any) -> Any:
    """Return a part of a checked body as JSON, without the members that the client left out."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value.model_dump(by_alias=True, exclude_unset=True) if isinstance(value, Fields) else value


def _names(form: type[Fields]) -> list[str]:
    return [field.alias or name for name, field in form.model_fields.items()]


@dataclass(frozen=True)
class Names:
    """The names of a form's fields. attributes: Python attribute by name in a body. other: the field's own name by each other name of
    it. spread: objects whose members are fields of the body itself, each with the text that precedes the members' names there. inner:
    nested objects that have other names of their own, each with its form."""

    attributes: Mapping[str, str]
    other: Mapping[str, str]
    spread: Mapping[str, str]
    inner: Mapping[str, type[Fields]]


def names_of(form: type[Fields]) -> Names:
    """Return the names of a form's fields and of those of its nested forms."""
    if form not in _NAMES:
        fields = {field.alias or name: field for name, field in form.model_fields.items()}
        extra = {name: field.json_schema_extra for name, field in fields.items()}
        kinds = {name: (field.annotation, *get_args(field.annotation)) for name, field in fields.items()}
        objects = {
            n: k for n, found in kinds.items() for k in found if isinstance(k, type) and issubclass(k, Fields)
        }
        _NAMES[form] = Names(
            {field.alias or name: name for name, field in form.model_fields.items()},
            {name: str(more["x-another-name-of"]) for name, more in extra.items() if isinstance(more, dict)},
            {name: kind.under for name, kind in objects.items() if kind.under},
            {name: kind for name, kind in objects.items() if names_of(kind).other},
        )
    return _NAMES[form]


_NAMES: dict[type[Fields], Names] = {}


def _rename(checked: Fields) -> None:
    """Copy each value that is under another name to the field's own name. Raises BadField where two names of one field have different
    values."""
    names = names_of(type(checked))
    attributes, said = names.attributes, dict[str, str]()

    def value(name: str) -> Any:
        return getattr(checked, attributes[name])

    for field, under in names.spread.items():
        inner = value(field)
        for name in () if inner is None else inner.model_fields_set & set(type(inner).model_fields):
            given, other = getattr(inner, name), f"{under}{name}"
            if attributes[other] in checked.model_fields_set and value(other) != given:
                raise BadField(field, f"{field} contradicts {other}.")
            setattr(checked, attributes[other], given)
    for other, name in names.other.items():
        given, own = value(other), value(name)
        if given is None:
            continue
        if own is not None and own != given:
            raise BadField(
                other, f"{other} and {said.get(name, name)} mean the same and contradict each other."
            )
        setattr(checked, attributes[name], given)
        said[name] = other
    for name in names.inner:
        if isinstance(value(name), Fields):
            _rename(value(name))


def unknown(value: Any, path: str = "") -> Iterator[tuple[type[Fields], str, str, Any]]:
    """Yield (form, path, name, value) of every member of a checked body that its form does not describe. Objects with free members, like
    a JSON schema, are not searched."""
    if isinstance(value, Fields):
        dot = f"{path}." if path else ""
        for name, inner in value.__dict__.items():
            if isinstance(inner, (Fields, list)):
                yield from unknown(inner, dot + name)
        for name, inner in (value.__pydantic_extra__ or {}).items():
            yield type(value), f"{dot}{name[:60]}", name, inner
    elif value and isinstance(value[0], (Fields, list)):
        for place, item in enumerate(value):
            yield from unknown(item, f"{path}[{place}]")


def _refuse(path: str, value: Any, refused: Refused) -> None:
    """Raise BadField unless the value of a refused field changes nothing."""
    if value is None or value in refused.neutral:
        return
    raise BadField(path, f"{path} cannot be honoured: {refused.why}.")


# --- sentences

_NOUNS = {
    "string": "text", "literal": "text", "int": "an integer", "float": "a number", "finite": "a number", "bool": "true or false",
    "list": "a list", "dict": "an object", "model": "an object", "union": "an object",
}  # fmt: skip
_RULES = {
    "string_too_short": "must not be empty.",
    "string_too_long": "must have at most {max_length} characters.",
    "string_pattern_mismatch": "must match {pattern}.",
    "too_short": "must have at least {min_length} item{s}.",
    "too_long": "must have at most {max_length} {what}.",
    "missing": "is missing.",
    "literal_error": "must be one of {choices}.",
    "union_tag_invalid": "must be one of {choices}.",
    "union_tag_not_found": "is missing.",
}


def _bad_field(error: ValidationError, body: Mapping[str, Any], form: type[Fields]) -> BadField:
    """Return the error for the first field of a body that pydantic finds wrong. Where a field may have several types, the error of the
    type that the value has is chosen; where it has none of them, the error lists all."""
    errors = [(_path(e, body), e) for e in error.errors(include_url=False)]
    path, found = errors[0]
    while _is_wrong_type(found):
        here = [e for p, e in errors if p == path]
        told = [(path, e) for e in here if not _is_wrong_type(e)]
        told += [(p, e) for p, e in errors if p.startswith((f"{path}.", f"{path}["))]
        if not told:
            *first, last = dict.fromkeys(map(_noun, here))
            return BadField(path, f"{path} must be {', '.join(first)}{' or ' if first else ''}{last}.")
        path, found = told[0]
    kind, known = found["type"], found.get("ctx", {})
    if kind == "extra_forbidden":
        path, _, name = path.rpartition(".")
        return BadField(path, f"{path or 'The body'} must not have {name!r}.")
    if kind.startswith("union_tag"):
        path += ".type"
    strange = set(body) - {*_names(form), *form.refused, *form.harmless}
    if kind == "missing" and len(found["loc"]) == 1 and strange:
        return BadField(path, f"{path} is missing, and {min(strange)[:60]} is no field of this request.")
    chosen = re.findall("'([^']*)'", known.get("expected_tags") or known.get("expected") or "")
    rule = _RULES.get(kind, found["msg"]).format(
        **known,
        s="s" * (known.get("min_length") != 1),
        what="members" if known.get("field_type") == "Dictionary" else "items",
        choices=", ".join(chosen),
    )
    return BadField(path, f'{path} must be "{chosen[0]}".' if len(chosen) == 1 else f"{path} {rule}")


def _is_wrong_type(error: ErrorDetails) -> bool:
    kind = error["type"]
    if kind == "literal_error":
        return not isinstance(error["input"], str)
    if kind == "union_tag_not_found":
        return not isinstance(error["input"], dict)
    return kind.endswith("_type") or kind in ("finite_number", "int_from_float")


def _noun(error: ErrorDetails) -> str:
    return _NOUNS[error["type"].partition("_")[0]]


def _path(error: ErrorDetails, body: Any) -> str:
    """Return the place of a validation error in the body, like `messages[0].role`. pydantic's own location also names each type that was
    tried; such steps are left out."""
    path, value, steps = "", body, error["loc"]
    if steps[-1] == "[key]":
        return f"a name in {_path({**error, 'loc': steps[:-2]}, body)}"
    for number, step in enumerate(steps):
        is_missing = error["type"] == "missing" and number == len(steps) - 1
        if isinstance(step, int) and isinstance(value, list):
            path, value = f"{path}[{step}]", value[step]
        elif isinstance(value, dict) and (is_missing or step in value):
            path, value = f"{path}{'.' if path else ''}{str(step)[:60]}", value.get(step)
    return path
