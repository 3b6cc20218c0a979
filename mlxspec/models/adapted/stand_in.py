"""Stand-ins for children of mlx-lm's modules: for a while calls of them are answered by a function, whatever the module's code does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Place = tuple[Any, Any]  # of a child: its owner, a module or a list, and a name or a number


class _StandIn:
    """A placeholder for a submodule: a function answers its calls, and its attributes are those of the submodule."""

    def __init__(self, child: Any, answer: Callable[..., Any]) -> None:
        self._child, self._answer = child, answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._child, name)

    def __getitem__(self, name: Any) -> Any:
        return self._child[name]


@contextmanager
def standing_in(places: Sequence[Place], answer: Callable[..., Any]) -> Iterator[None]:
    """Replace calls of some submodules by calls of `answer` during the `with` block. places: owner and name of each submodule. answer:
    receives the number of the place, the submodule, and the arguments of the call; its result is the call's result."""
    own = [owner[name] for owner, name in places]

    def of(i: int) -> Callable[..., Any]:
        return lambda *args, **kwargs: answer(i, own[i], *args, **kwargs)

    for i, (owner, name) in enumerate(places):
        owner[name] = _StandIn(own[i], of(i))
    try:
        yield
    finally:
        for (owner, name), child in zip(places, own, strict=True):
            owner[name] = child
