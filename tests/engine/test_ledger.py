"""The walk of ledger.py over random lives of engines, and the faults that it must find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from planting import catches

from mlxspec.cache.model_cache import ModelCache
from mlxspec.engine.engine import Engine
from mlxspec.engine.places import Rows
from mlxspec.engine.request import Request
from tests.engine.ledger import Walk
from tests.engine.memory_faults import without_own_row

FAST = (1, 2)  # one of them is in the fast tier
SEEDS = (*FAST, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, *range(3, 40))))


def parks_at_once(_: Any) -> Any:
    def park(self: Rows, request: Request) -> None:
        kept = self.parked[request] = self.cache.snapshot(self.requests.index(request))  # type: ignore[union-attr]
        mx.eval(kept.arrays)
        self.leave([request])

    return park


def pops_first(_: Any) -> Any:
    def unpark(self: Rows, request: Request, cache: ModelCache) -> None:
        cache.restore(self.parked.pop(request))
        self.join(request, cache)

    return unpark


def begins_unguarded(right: Any) -> Any:
    """As if nothing were around it: what it raises leaves the request as it is."""

    def begin(self: Engine, request: Request) -> None:
        try:
            right(self, request)
        except BaseException as error:
            request.fail = lambda _: None  # type: ignore[method-assign]
            raise error

    return begin


ENGINE, SCHEDULE, PREFIX = (
    "mlxspec.engine.engine:Engine.",
    "mlxspec.engine.schedule:",
    "mlxspec.engine.prefix.",
)
MEMORY = "mlxspec.engine.memory:EngineMemory."
# What the walk finds, by the seed that does.
FAULTS: tuple[tuple[int, str, str, Callable[[Any], Any]], ...] = (
    # places and shares
    (1, "no row makes room for another client", f"{SCHEDULE}makes_room", lambda _: lambda *_: None),
    (
        1,
        "places go to whoever came first",
        f"{SCHEDULE}Shares.next",
        lambda _: lambda self, waiting, places: min(waiting, key=lambda r: r.number, default=None),
    ),
    (
        1,
        "what waits for memory holds up who has it",
        f"{SCHEDULE}Shares.next",
        lambda right: (
            lambda self, waiting, places: right(self, [r for r in waiting if not r.num_generated], places)
        ),
    ),
    (1, "rows that nobody reads go on", f"{ENGINE}rest", lambda _: lambda self, numbers: None),
    (0, "a row that cannot be parked is in two places", "mlxspec.engine.places:Rows.park", parks_at_once),
    (9, "a row that cannot be restored is lost", "mlxspec.engine.places:Rows.unpark", pops_first),
    (2, "a request that cannot begin has no end", f"{ENGINE}_begin", begins_unguarded),
    (
        1,
        "an end is not told",
        f"{ENGINE}_leave",
        lambda right: lambda self, request: (right(self, request), self._outbox.clear())[0],
    ),
    (
        1,
        "rows that go on change their places",
        "mlxspec.cache.attention:AttentionLayerCache.select",
        lambda right: lambda self, rows: right(self, rows[::-1]),
    ),
    # memory
    (
        1,
        "bytes of requests that left stay reserved",
        f"{MEMORY}release",
        lambda _: lambda self, request: None,
    ),
    (
        1,
        "parked rows count for nothing",
        "mlxspec.engine.places:Rows.nbytes",
        lambda _: property(lambda self: 0 if self.cache is None else self.cache.nbytes),
    ),
    (
        1,
        "drafters keep rows that left",
        "mlxspec.drafters.drafts:Drafts.close",
        lambda _: lambda self, number: None,
    ),
    (2, "a row that joins takes no part in rounds", f"{MEMORY}has_room", without_own_row),
    (0, "memory is never reserved for more", f"{MEMORY}grow", lambda _: lambda *_: None),
    (2, "the budget is not looked at", f"{MEMORY}_fits", lambda _: lambda *_: True),
    # the prefix cache in memory
    (
        1,
        "a smaller budget drops nothing",
        f"{PREFIX}tree:PrefixTree.shrink",
        lambda _: lambda self, most: None,
    ),
    (
        1,
        "the key of a text has no owner",
        f"{PREFIX}tree:KeyedText.__init__",
        lambda right: lambda self, tokens, owner="", scales=(): right(self, tokens, "", scales),
    ),
    (
        1,
        "a prefix hit begins with empty keys",
        "mlxspec.cache.attention:AttentionLayerCache.restore",
        lambda right: lambda self, *pieces: right(self, *([x * 0 for x in piece] for piece in pieces)),
    ),
    # on disk
    (
        2,
        "no room is made",
        "mlxspec.engine.kept_files:KeptFiles._make_room",
        lambda _: lambda self, size: None,
    ),
    (
        1,
        "checksums of files are not compared",
        "mlxspec.engine.kept_files:_is_same",
        lambda _: lambda digest, checksum: True,
    ),
    (0, "weights are not part of a signature", f"{PREFIX}signature:fingerprint", lambda _: lambda module: ""),
    (
        2,
        "files are looked at in the caller's thread",
        "mlxspec.engine.thread:JobThread.run",
        lambda _: lambda self, job, *, is_urgent=False: job(),
    ),
    (1, "nobody is told that texts are not kept", f"{ENGINE}stores_off", lambda _: property(lambda self: ())),
    # streams, and what is read ahead
    (1, "nothing is read ahead", "mlxspec.engine.worker:read_ahead", lambda _: lambda *_: iter(())),
    (
        1,
        "what is known is read once more",
        f"{PREFIX}rows:Prefix.num_unknown",
        lambda _: lambda self, request, drafts: len(request.prompt),
    ),
    # rounds
    (
        1,
        "a round on its way is not dropped when a row leaves",
        "mlxspec.engine.pipeline:Pipeline.drop",
        lambda _: lambda self, cache: None,
    ),
    (
        1,
        "a drafted round is launched behind while rows wait to be parked",
        "mlxspec.engine.places:RequestPlaces.admit",
        lambda right: lambda self, *given, is_on_way: right(self, *given, is_on_way=False),
    ),
    (
        1,
        "a rejected token is accepted",
        "mlxspec.sampling.acceptance:match",
        lambda _: lambda drafted, sampled: len(drafted),
    ),
)


def catches_all(test: Any) -> Any:
    for seed, name, target, wrong in FAULTS:
        test = catches(name, target, wrong, case=f"[{seed}]", errors=(ValueError,))(test)
    return test


@catches_all
@pytest.mark.parametrize("seed", SEEDS)
def test_the_books_are_right_after_every_step(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = ("weights", "settings")[seed % 2]
    walk = Walk(tmp_path, seed, monkeypatch, kind, is_tight=seed % 4 > 1)
    walk.run()
    assert walk.did["ended by length"] > 3
    assert walk.did["ended by error"] > 0
