"""mypy accepts what the docs show to callers: every Python block, as a user's type checker sees it by default."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import PAGES, ROOT, blocks

INSIDE = ("adding-a-kernel", "adding-a-model")  # pages on mlxspec's own modules, beside its tests
PLANTED = 'import mlxspec\n\nmlxspec.load("demo").chat(7)\nmlxspec.SamplingParams(max_tokens="many")\n'
SETTINGS = """
[mypy]
follow_imports = silent
ignore_missing_imports = true
[mypy-mlx.*,mlx_lm.*,transformers.*,huggingface_hub.*,tokenizers.*,numpy.*,matplotlib.*]
follow_imports = skip
follow_imports_for_stubs = true
"""


def checked(folder: Path) -> str:
    """What mypy says of a folder of scripts with its own defaults, but for packages without types."""
    settings = folder / "mypy.ini"
    settings.write_text(SETTINGS)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            str(settings),
            str(folder),
        ],
        cwd=folder,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_types_accept_what_the_docs_show(tmp_path: Path) -> None:
    pages = [page for page in PAGES if blocks(page) and page.stem not in INSIDE]
    assert len(pages) >= 3
    for page in pages:
        name = page.stem.replace("-", "_").lower()
        (tmp_path / f"{name}_page.py").write_text("\n\n".join(blocks(page)))
    said = checked(tmp_path)
    assert "Success" in said, said
    (tmp_path / "planted.py").write_text(PLANTED)
    found = checked(tmp_path)
    lines = [line for line in found.splitlines() if "planted.py" in line and " error: " in line]
    assert len(lines) == 2, found
