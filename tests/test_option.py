"""One line of a config class makes the check, the flag with its help, and the field of a request with its other names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from mlxspec.cli import options as command_line
from mlxspec.cli.flags import option_rows
from mlxspec.cli.parser import CommandParser, declare_options, options_given
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.errors import ConfigError
from mlxspec.option import check_options, option, options, shown
from mlxspec.server.errors import BadField
from mlxspec.server.forms.base import Fields, review, with_options
from mlxspec.server.forms.shared import Continued

pytestmark = pytest.mark.smoke


@dataclass(frozen=True, kw_only=True)
class Made:
    width: int = option(int, 3, "how wide it is", 1, 9, "N", off=-1, aliases="breadth size.width")
    words: Any = option(list, (), "words of it", high=2, metavar="WORD", flag="--word")
    kind: str = option(("thin", "thick"), "thin", "which kind it is", metavar="KIND", body="")

    def __post_init__(self) -> None:
        check_options(self)


@with_options(Made)
class Body(Fields):
    """A body."""


@with_options(Made, under="size.")
class Size(Fields):
    """Names behind a point, in an object."""


@pytest.mark.parametrize(
    "wrong", [{"width": 0}, {"width": 10}, {"width": True}, {"kind": "fat"}, {"words": [""]}]
)
def test_the_class_checks_itself(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Made(**wrong)


def test_texts_are_kept_as_a_tuple() -> None:
    assert Made(words="a").words == ("a",)
    assert Made(words=["a", "b"]).words == ("a", "b")


def test_flags_and_help() -> None:
    parser = CommandParser(prog="x")
    declare_options(parser, Made)
    said = " ".join(parser.format_help().split())
    for words in (
        "--width N how wide it is (default: 3)",
        "--word WORD words of it; may be given again",
        "--kind KIND",
    ):
        assert words in said
    args = parser.parse_args(["--width=5", "--word=a", "--word=b"])
    assert options_given(args, Made) == {"width": 5, "words": ["a", "b"]}
    assert options_given(parser.parse_args([]), Made) == {}


def test_fields_of_a_request() -> None:
    assert {f.alias or name for name, f in Body.model_fields.items()} == {
        "width",
        "breadth",
        "size.width",
        "words",
    }
    assert list(Size.model_fields) == ["width"]
    _, (ignored,) = review(Body, {"width": -1, "size.width": -1.0, "words": ["a"], "kind": "thin"})
    assert ignored == "kind is no field of this request and was ignored"
    for wrong in ({"width": 10}, {"breadth": 0}, {"words": ["a", "b", "c"]}):
        with pytest.raises(BadField, match=next(iter(wrong))):
            review(Body, wrong)


def test_no_option_is_declared_beside_its_line() -> None:
    """The flags of `serve` and the fields of a request that configure sampling, drafting and the engine are all made from the classes."""
    known = {s for a in command_line.parser_of("serve")._actions for s in a.option_strings}
    for config in (SamplingParams, SpecConfig, EngineConfig):
        for own in options(config).values():
            assert not own.flag or own.flag in known, own.name
            fields = (own.body, *own.aliases) if config is not EngineConfig and own.body else ()
            assert set(fields) <= {f.alias or name for name, f in Continued.model_fields.items()}, own.name
    assert len({name for _, _, name, *_ in option_rows()}) == len(list(option_rows())) > 60


def test_a_long_path_is_shown_with_its_end() -> None:
    path = f"/models/{'folder/' * 20}absent.txt"
    assert len(shown(path)) == 80
    assert shown(path).startswith("'/models/folder/")
    assert shown(path).endswith("/absent.txt'")
    assert shown("short") == "'short'"
