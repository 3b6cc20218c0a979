#!/usr/bin/env python3
"""Writes the repository's address into README.md and pyproject.toml, as the release workflow does before it builds the package.

    python scripts/name_repository.py OWNER/NAME TAG

Relative links and pictures of the README become addresses of this tag, so that they work on the page of a package index. pyproject.toml
gets the project's URLs. Nothing else in the repository names an owner: a fork releases under its own.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")


def with_addresses(readme: str, repository: str, tag: str) -> str:
    """The README with whole addresses in place of relative links. Pictures are linked as files, everything else as pages."""

    def whole(found: re.Match[str]) -> str:
        kind = "raw" if found[1] else "blob"
        return f"{found[1]}[{found[2]}](https://github.com/{repository}/{kind}/{tag}/{found[3]})"

    return _LINK.sub(whole, readme)


def with_urls(pyproject: str, repository: str) -> str:
    """pyproject.toml with the project's URLs. Raises ValueError where it has some already."""
    if "[project.urls]" in pyproject:
        raise ValueError("pyproject.toml names URLs already.")
    at = f"https://github.com/{repository}"
    table = f'[project.urls]\nSource = "{at}"\nIssues = "{at}/issues"\n\n'
    return pyproject.replace("[project.scripts]\n", f"{table}[project.scripts]\n", 1)


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("repository", help="OWNER/NAME")
    parser.add_argument("tag", help="of the release, such as v0.1.0")
    options = parser.parse_args(arguments)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", options.repository):
        parser.error(f"a repository is OWNER/NAME, not {options.repository!r}")
    readme, project = root / "README.md", root / "pyproject.toml"
    try:
        described = with_urls(project.read_text(encoding="utf-8"), options.repository)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    linked = with_addresses(readme.read_text(encoding="utf-8"), options.repository, options.tag)
    project.write_text(described, encoding="utf-8")
    readme.write_text(linked, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
