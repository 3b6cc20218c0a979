#!/usr/bin/env python3
"""Prints dependencies of mlxspec pinned to the lowest versions that pyproject.toml allows on this machine, as pip takes them.

python scripts/lowest_version.py mlx        # on a Mac: mlx==0.32.4
python scripts/lowest_version.py --jobs mlx     # for a workflow: ["newest"], or ["lowest", "newest"] where they differ
pip install --editable .[dev] $(python scripts/lowest_version.py)       # an environment of the lowest versions of all of them
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def lowest(name: str, dependencies: list[str]) -> str:
    """The first of `dependencies` that is `name` and applies here, pinned. Raises ValueError where none has a lowest version."""
    for requirement in applying(dependencies):
        if requirement.name == name:
            versions = [s.version for s in requirement.specifier if s.operator == ">="]
            if len(versions) == 1:
                extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
                return f"{name}{extras}=={versions[0]}"
    raise ValueError(f"pyproject.toml names no lowest version of {name} for this machine.")


def applying(dependencies: list[str]) -> list[Requirement]:
    """Those that are needed on this machine."""
    return [r for r in map(Requirement, dependencies) if r.marker is None or r.marker.evaluate()]


def jobs(name: str, dependencies: list[str], newest: str) -> list[str]:
    """Which versions a workflow has to test: the newest, and the lowest where that is another."""
    return ["newest"] if lowest(name, dependencies).endswith(f"=={newest}") else ["lowest", "newest"]


def newest(name: str) -> str:
    """What pip would install. Raises ValueError where its index does not say."""
    command = [sys.executable, "-m", "pip", "index", "versions", name]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.match(rf"{re.escape(name)} \(([^)]+)\)", said)
    if found is None:
        raise ValueError(f"pip names no newest version of {name}.")
    return found[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="of dependencies, such as mlx; all if none is given")
    parser.add_argument("--jobs", metavar="NAME", help="print which versions of it a workflow has to test")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dependencies = project["dependencies"]
    options = parser.parse_args()
    names = options.names or [r.name for r in applying(dependencies)]
    try:
        if options.jobs:
            print(json.dumps(jobs(options.jobs, dependencies, newest(options.jobs))))
            return 0
        print("\n".join(lowest(name, dependencies) for name in names))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
