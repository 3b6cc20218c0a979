"""`python slow_steps.py chat ...`: the command line with an engine that sleeps before each step.

An answer of 1,500 tokens then takes 75 seconds or more, so that it outlasts what a test does while it comes.
"""

from __future__ import annotations

import sys
import time

from mlxspec.__main__ import main
from mlxspec.engine.engine import Engine
from mlxspec.events import Event

SECONDS = 0.05
_step = Engine.step


def _slow_step(engine: Engine) -> list[Event]:
    time.sleep(SECONDS)
    return _step(engine)


if __name__ == "__main__":
    Engine.step = _slow_step  # type: ignore[method-assign]
    sys.exit(main())
