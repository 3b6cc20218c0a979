#!/usr/bin/env python3
"""Prints a dependency of mlxspec pinned to the lowest version that pyproject.toml allows on this machine, as pip takes it.

python scripts/lowest_version.py mlx        # on a Mac: mlx==0.32.4
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def lowest(name: str, dependencies: list[str]) -> str:
    """The first of `dependencies` that is `name` and applies here, pinned. Raises ValueError where none has a lowest version."""
    for requirement in map(Requirement, dependencies):
        if requirement.name == name and (requirement.marker is None or requirement.marker.evaluate()):
            versions = [s.version for s in requirement.specifier if s.operator == ">="]
            if len(versions) == 1:
                extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
                return f"{name}{extras}=={versions[0]}"
    raise ValueError(f"pyproject.toml names no lowest version of {name} for this machine.")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="of a dependency, such as mlx")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    try:
        print(lowest(parser.parse_args().name, project["dependencies"]))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
