"""Names of models as users type them: addresses of Hugging Face, and short names of common models with a colon. Uses no network."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).with_suffix(".toml")
_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:models/)?((?!datasets/|spaces/)[^/?#]+/[^/?#]+)(?:[/?#].*)?"
)


class ShortName(NamedTuple):
    """A short name of a common model. repo: the repository that it stands for. gb: size of the weights in GB. head: whether `mlxspec
    pull` can fetch the model's MTP head. also: other spellings."""

    name: str
    repo: str
    gb: float
    head: bool
    also: Sequence[str] = ()


@functools.cache
def short_names() -> tuple[ShortName, ...]:
    """Return all short names, in the order of the file. Where a user leaves out the size after the colon, the first entry of that name
    is meant."""
    return tuple(ShortName(**row) for row in tomllib.loads(DATA.read_text(encoding="utf-8"))["model"])


def repository(model: str) -> str:
    """Return the repository (owner/name) that an address of Hugging Face or a short name stands for; any other text is returned
    unchanged.

    `qwen3.5:4b`, `qwen3.5-4b` and `qwen3.5` (its first size) are short names; case is ignored.
    """
    address = _ADDRESS.fullmatch(model.strip())
    if address is not None:
        return address[1]
    plain = model.strip().lower().removesuffix(":latest")
    for known in short_names():
        spelled = (known.name, *known.also)
        if plain in (*spelled, *(name.replace(":", "-") for name in spelled), known.name.partition(":")[0]):
            return known.repo
    return model
