"""Counts the files that a prompt with an image passes and one without does not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from PIL import Image
from planting import catches

import mlxspec
from mlxspec.config import SamplingParams
from mlxspec.models.vision.qwen import QwenVisionTower

ROOT = Path(mlxspec.__file__).parent
MOST = 10
PARAMS = SamplingParams(max_tokens=2)


def files_run(work: Callable[[], object]) -> set[str]:
    """Return the files of the package of which `work` runs functions, in all threads."""
    found: set[str] = set()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT):
            found.add(str(file.relative_to(ROOT)))

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def files_of_an_image() -> set[str]:
    """Return the files that a prompt with an image runs and a longer one without does not, and the one in which both meet."""
    engine = mlxspec.load("demo-vision", draft="off")
    first, second = (
        {"type": "image", "image": Image.fromarray(pixels)}
        for pixels in np.random.default_rng(0).integers(0, 255, (2, 64, 64, 3)).astype(np.uint8)
    )

    def ask(*content: dict[str, Any]) -> Callable[[], object]:
        return lambda: engine.chat([{"role": "user", "content": [*content]}], PARAMS)

    ask({"type": "text", "text": "Warm up."}, first)()
    plain = files_run(ask({"type": "text", "text": "what is it? " * 40}))
    seen = files_run(ask({"type": "text", "text": "what?"}, second))
    engine.close()
    found = {file for file in seen - plain if not file.startswith("platform/")}  # what a CPU multiplies with
    return found | {"engine/image_prompt.py"}


def _elsewhere(right: Any) -> Any:
    """Return a function that does as the right one and passes one more file."""
    from mlxspec.images.gemma import Gemma4Images

    def scratch_bytes(self: QwenVisionTower, tokens: int) -> int:
        Gemma4Images()
        return int(right(self, tokens))

    return scratch_bytes


@catches(
    "an image passes one more file", "mlxspec.models.vision.qwen:QwenVisionTower.scratch_bytes", _elsewhere
)
def test_an_image_passes_few_files() -> None:
    found = files_of_an_image()
    assert {"images/source.py", "images/qwen.py", "models/image_rows.py"} <= found
    assert len(found) <= MOST, sorted(found)
