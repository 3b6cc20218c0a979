"""All prompts in prefill, and the choice of the one whose piece is read next.

Knows prefills, turns and what is still on its way from the disk; runs no forward and knows no rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from mlxspec.engine.prefill import Prefill
from mlxspec.engine.request import Request
from mlxspec.engine.schedule import Turns

_DISK_SECONDS = 0.01  # between two times that it is asked what has come from the disk


class Prefills:
    """One engine's, the oldest request's first. Iterating, indexing and `len` are over those that are not parked."""

    def __init__(self) -> None:
        self._prefills: list[Prefill] = []
        self.parked: dict[Request, Prefill] = {}  # read on later, from where they are
        self._turns = Turns()

    def __len__(self) -> int:
        return len(self._prefills)

    def __iter__(self) -> Iterator[Prefill]:
        return iter(tuple(self._prefills))

    def __getitem__(self, place: int) -> Prefill:
        return self._prefills[place]

    def add(self, prefill: Prefill) -> None:
        self._prefills.append(prefill)
        self._prefills.sort(key=lambda p: p.request.number)

    def remove(self, prefill: Prefill) -> None:
        """It is read, or its request has ended."""
        if self.parked.pop(prefill.request, None) is None:
            self._prefills.remove(prefill)

    def park(self, request: Request) -> None:
        """Nothing of its prompt is read until `unpark`."""
        (prefill,) = (p for p in self._prefills if p.request is request)
        self._prefills.remove(prefill)
        self.parked[request] = prefill

    def unpark(self, request: Request) -> None:
        self.add(self.parked.pop(request))

    @property
    def nbytes(self) -> int:
        """Of their states, parked ones included."""
        return sum(p.cache.nbytes for p in (*self._prefills, *self.parked.values()))

    def pieces(self, chunk: int, *, is_busy: bool) -> Iterator[tuple[Prefill, int | None]]:
        """What is read next, together at most `chunk` tokens: a prompt, and up to where. The caller reads each piece before it asks for
        the next one. None instead of a place: one of the prompt's images has gone through the tower, which counts as a chunk, whatever its
        size. is_busy: whether rows decode. A request whose images or kept states fail ends with the error."""
        left, ready = chunk, self._arrived(is_busy=is_busy)
        while ready:
            served = [p.num_pieces for p in ready]
            prefill = ready[self._turns.next(served, [p.request.client for p in ready])]
            end = prefill.next_end(chunk)
            if left < chunk and end - prefill.num_done > left:
                return
            self._turns.took()
            if _read_image(prefill, end):
                yield prefill, None
                return
            left -= end - prefill.num_done
            yield prefill, end
            ready = [p for p in ready if p in self._prefills]

    def _arrived(self, *, is_busy: bool) -> list[Prefill]:
        """Prompts of which nothing is on its way from the disk. Waits a little for that where there is nothing else to do."""
        ready = [p for p in self._prefills if _arrive(p, is_busy=is_busy)]
        waiting = [p for p in self._prefills if p.request.finish_reason is None]
        if not ready and waiting and not is_busy:
            waiting[0].wait(_DISK_SECONDS)
        return ready


def _read_image(prefill: Prefill, end: int) -> bool:
    """Whether an image of the prompt went through the tower, or failed to."""
    try:
        return prefill.read_image(end)
    except Exception as error:
        prefill.request.fail(error)
        return True


def _arrive(prefill: Prefill, *, is_busy: bool) -> bool:
    try:
        return prefill.arrive(is_busy=is_busy)
    except Exception as error:
        prefill.request.fail(error)
        return False
