"""The tables of docs/flags.md, made from the package's own: `python tests/cli/flags_page.py` writes them into the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mlxspec.cli import other_programs
from mlxspec.server.forms.chat import ChatCompletionRequest
from mlxspec.server.forms.shared import HARMLESS, Continued

PAGE = Path(__file__).resolve().parents[2] / "docs" / "flags.md"


def flag_rows() -> Iterator[str]:
    """| flags | program | option |: flags that are other names of ours, those of one option together."""
    found: dict[tuple[str, str], list[str]] = {}
    for flag, meanings in other_programs.table().items():
        for meant in meanings:
            if meant.fate == "same":
                own = meant.target if meant.fixed is None else f"{meant.target} {meant.fixed}"
                found.setdefault((meant.program, own), []).append(f"`{flag}`")
    for (program, own), flags in found.items():
        yield f"| {' '.join(flags)} | {program} | `{own}` |"


def field_rows() -> Iterator[str]:
    """Of requests: | fields | what becomes of them |. Refused ones are left out: their error says what to use."""
    forms = (Continued, ChatCompletionRequest)
    own = dict.fromkeys(f.alias or name for form in forms for name, f in form.model_fields.items())
    yield f"| {' '.join(f'`{name}`' for name in own)} | honoured |"
    found: dict[str, list[str]] = {}
    for name, why in HARMLESS.items():
        found.setdefault(why, []).append(f"`{name}`")
    for why, names in found.items():
        yield f"| {' '.join(names)} | no effect: {why} |"


def with_tables(page: str) -> str:
    """The page with its tables as they should be."""
    kept = [line for line in page.splitlines() if not line.startswith("| `")]
    out = []
    for line in kept:
        out.append(line)
        if line == "|---|---|---|":
            out += flag_rows()
        elif line == "|---|---|":
            out += field_rows()
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
