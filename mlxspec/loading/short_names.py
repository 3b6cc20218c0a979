"""Names of models as people type them: addresses of Hugging Face, and short names of common models with a colon. Asks nobody."""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).with_suffix(".toml")
_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:models/)?([^/?#]+/[^/?#]+)(?:[/?#].*)?"
)


class ShortName(NamedTuple):
    """gb: of the weights, in powers of 1000. head: whether its MTP head can be fetched beside it (`mlxspec pull`)."""

    name: str
    repo: str
    gb: float
    head: bool


@functools.cache
def short_names() -> tuple[ShortName, ...]:
    """All of them, in the order of the file: of a name without its size the first counts."""
    return tuple(ShortName(**row) for row in tomllib.loads(DATA.read_text(encoding="utf-8"))["model"])


def repository(model: str) -> str:
    """The id of a repository that an address or a short name means; any other text as it is.

    `qwen3.5:4b`, `qwen3.5-4b` and `qwen3.5` (its first size) are short names, in any case.
    """
    address = _ADDRESS.fullmatch(model.strip())
    if address is not None:
        return address[1]
    plain = model.strip().lower().removesuffix(":latest")
    for known in short_names():
        if plain in (known.name, known.name.replace(":", "-"), known.name.partition(":")[0]):
            return known.repo
    return model
