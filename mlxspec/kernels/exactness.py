"""Whether each row must be computed with the bits that it has alone, where operations have a faster form without them.

One switch a process, set before a model's first forward: compiled forwards keep the form that they were traced with.
"""

from __future__ import annotations

is_demanded = False


def demand() -> None:
    """Let every operation from now on compute with the bits that a single row would get."""
    global is_demanded
    is_demanded = True
