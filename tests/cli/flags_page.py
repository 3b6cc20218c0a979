"""The tables of docs/flags.md, made from the package's own: `python tests/cli/flags_page.py` writes them into the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mlxspec.cli import other_programs
from mlxspec.server.forms.chat import ChatCompletionRequest
from mlxspec.server.forms.shared import HARMLESS, REFUSED, Continued

PAGE = Path(__file__).resolve().parents[2] / "docs" / "flags.md"
FATES = {"same": "is", "needless": "not needed", "refused": "refused"}


def flag_rows() -> Iterator[str]:
    """| flags | what becomes of them |, those with one fate and one reason together."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for flag, meanings in other_programs.table().items():
        for meant in meanings:
            own = meant.target if meant.fixed is None else f"{meant.target} {meant.fixed}"
            found.setdefault((meant.program, meant.fate, own), []).append(f"`{flag}`")
    for (program, fate, own), flags in found.items():
        shown = f"`{own}`" if fate == "same" else own
        yield f"| {' '.join(flags)} | {program} | {FATES[fate]}: {shown} |"


def field_rows() -> Iterator[str]:
    """Of requests, in the same form."""
    forms = (Continued, ChatCompletionRequest)
    own = dict.fromkeys(f.alias or name for form in forms for name, f in form.model_fields.items())
    yield f"| {' '.join(f'`{name}`' for name in own)} | honoured |"
    found: dict[str, list[str]] = {}
    for name, refused in REFUSED.items():
        found.setdefault(f"refused: {refused.why}", []).append(name)
    for name, why in HARMLESS.items():
        found.setdefault(f"accepted: {why}", []).append(name)
    for why, names in found.items():
        yield f"| {' '.join(f'`{name}`' for name in names)} | {why} |"


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
