#!/usr/bin/env python3
"""How busy a GPU would be: real rounds of the engine, replayed against a device that takes published times. Estimates, not measurements.

    scripts/simulate_device [--models 0.8B,4B] [--machines "M1 Max,M5 Max"] [--drafts plain,mtp,dflash,dflash2] [--sampling greedy,qwen]
                            [--depth 3] [--policy auto] [--accepted 0.8] [--rows 1,4] [--kv-bits 16,8] [--products mlx,best]

Recorded: what an engine builds, hands over and waits for in its steady rounds, in order. The model has all layers and the vocabulary of the
real one and is 64 wide; nothing is evaluated, every kernel is one node of MLX's graph (tests/models/metal_graph.py), and all drafts are
accepted, so the rounds are those of a row that drafts all the time. A row of the table scales that to `--accepted`.

Replayed: the host takes a time for each node that it builds and for each kernel that it hands over; the device takes kernels one by one,
as soon as it has them; a wait ends some time after its last kernel. A kernel takes what its launch takes, and what its weights, in 4 bits,
take to be read; of the head, where a drafter may, the rows that it proposes from (models/proposal_rows.py). Bandwidths are Apple's, and
0.82 of them is what was measured where 27B models decode plainly; the microseconds of `Machine` are guesses that fit what was published.

A product of several rows takes longer than one of one row, by what multiplies them (`row_cost`): MLX's own kernels by published timings;
ours by the longer of two times, of their bytes and of their instructions; `best`: the fastest, as races choose. Experts are taken to be
bound by their bytes. Left out: keys and values, recurrent states (read and written, 2 % of a plain round of the 27B), copies, and the
arithmetic of attention and of prompts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mlxspec.platform import device  # noqa: E402, F401  # isort: skip  (before MLX: it loads the BLAS)

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from write_checkpoint import SIZES  # noqa: E402

from mlxspec.cache.quantized import PLAIN  # noqa: E402
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig  # noqa: E402
from mlxspec.drafters.base import Drafter  # noqa: E402
from mlxspec.drafters.dflash import DFlashDrafter  # noqa: E402
from mlxspec.drafters.mtp import Mtp  # noqa: E402
from mlxspec.engine import pipeline  # noqa: E402
from mlxspec.engine.engine import Engine  # noqa: E402
from mlxspec.engine.round import Round  # noqa: E402
from mlxspec.models.dflash import DFlash  # noqa: E402
from mlxspec.models.dflash_config import DFlashConfig  # noqa: E402
from mlxspec.models.proposal_rows import DEFAULT_ROWS  # noqa: E402
from mlxspec.models.qwen3_5 import Qwen35  # noqa: E402
from mlxspec.models.qwen3_5_config import Qwen35Config  # noqa: E402
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp  # noqa: E402
from mlxspec.models.reads import Reads, reads  # noqa: E402
from mlxspec.platform import host  # noqa: E402
from mlxspec.policy.controller import Controller  # noqa: E402
from mlxspec.policy.costs import CostModel, DraftCost  # noqa: E402
from tests.models.metal_graph import VIEWS, as_on_metal, nodes  # noqa: E402

MODELS = {
    "0.8B": "qwen3.5-0.8b",
    "4B": "qwen3.5-4b",
    "9B": "qwen3.5-9b",
    "27B": "qwen3.6-27b",
    "35B-A3B": "qwen3.6-35b-a3b",
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "qwen": {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
}
DRAFTS = ("plain", "mtp", "dflash", "dflash2")
TINY: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 64)
TINY |= dict.fromkeys(("num_heads", "num_kv_heads"), 1) | dict.fromkeys(("num_k_heads", "num_v_heads"), 2)
TINY |= {"k_head_dim": 32, "v_head_dim": 32, "rope_dims": 16, "rope_sections": (3, 3, 2)}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_token": 2,
    "expert_size": 64,
    "shared_expert_size": 64,
}
BLOCK = 5  # layers of the block drafter, as DFlash's published ones have
BLOCK_DRAFTS = 7
PROMPT, WARM, ROUNDS = 40, 4, 8  # tokens; rounds before those that are recorded; recorded ones
CURVE = {1: 1.0, 2: 1.02, 4: 1.05, 8: 1.2, 17: 1.6}  # seconds by width, on which drafting always pays


# Instructions a weight of a product's loop, by rows: counted by nvcc for 4 bits in groups of 64 (tests/metal/nvcc.py). Of qmm_few a
# product of 8 x 8 matrices counts as its multiplications, 8 a weight and 8 rows, as an Apple GPU before M5 takes as long for it.
INSTRUCTIONS = {
    "qmv_rows": {1: 5.7, 2: 7.8, 4: 12.1, 5: 14.2, 8: 20.7},
    "qmm_few": {8: 13.1, 16: 21.7, 24: 31.7, 32: 40.9},
}
TAKES = {"qmv_rows": range(2, 9), "qmm_few": range(5, 33)}  # rows
WEIGHT_BYTES = 4.5 / 8
PRODUCTS = ("mlx", *INSTRUCTIONS, "best", "bytes")


class Machine(NamedTuple):
    """bandwidth: GB/s of memory, as Apple publishes it; share: of it that weights are read at; lanes: of the GPU, 128 a core; clock: GHz.
    rows: published costs of MLX's own 4-bit products by rows, over one row; behind the last one it is taken to be flat. alike: rows up to
    which those have the bits of single rows, so that qmm_few does not compete.

    Microseconds: launch: of a kernel whose data take no time, with its barrier; node: the host's for a node of the graph; encode: for a
    kernel that it hands over; wake: from the last kernel's end until the host goes on; round: the host's own work in a round, policy and
    text."""

    bandwidth: float
    share: float = 0.82
    lanes: int = 40 * 128
    clock: float = 1.4
    rows: Mapping[int, float] = MappingProxyType({1: 1.0})
    alike: int = 1
    launch: float = 2.0
    node: float = 0.8
    encode: float = 0.7
    wake: float = 120.0
    round: float = 100.0

    def row_cost(self, products: str, num_rows: int) -> float:
        """What a product of so many rows takes, over one of one row."""
        if products == "bytes" or num_rows == 1:
            return 1.0
        if products == "best":
            ours = [one for one in TAKES if one != "qmm_few" or num_rows > self.alike]
            return min(self.row_cost(one, num_rows) for one in ("mlx", *ours))
        if products == "mlx" or num_rows not in TAKES[products]:
            return _between(self.rows, num_rows)
        counted = INSTRUCTIONS[products]
        rows = -(-num_rows // 8) * 8 if products == "qmm_few" else num_rows
        at_work = _between(counted, rows) / (self.lanes * self.clock)
        return max(1.0, at_work * self.bandwidth * self.share / WEIGHT_BYTES)


def _between(known: Mapping[int, float], num_rows: int) -> float:
    return float(np.interp(num_rows, sorted(known), [known[n] for n in sorted(known)]))


# rows: M1 mlxcel's measurements of an M1 Ultra; M3 Max mlx #3863; M4 Pro mlx #3839; M5 Max mlx #3791 (whole models)
MACHINES = {
    "M1 Max": Machine(
        400.0,
        lanes=32 * 128,
        clock=1.3,
        rows={1: 1.0, 2: 1.74, 3: 2.44, 4: 3.1, 8: 5.6},
        alike=8,
        launch=3.0,
        node=1.1,
        encode=1.0,
        wake=150.0,
    ),
    "M3 Max": Machine(400.0, rows={1: 1.0, 2: 1.0, 4: 1.28, 6: 2.04, 8: 2.5, 10: 3.95}, launch=2.5),
    "M4 Pro": Machine(
        273.0, lanes=20 * 128, clock=1.58, rows={1: 1.0, 2: 1.03, 3: 1.22, 4: 1.47, 8: 2.69}, launch=2.0
    ),
    "M5 Max": Machine(
        614.0, clock=1.6, rows={1: 1.0, 3: 1.12, 5: 1.45, 8: 2.2, 12: 3.2}, launch=1.8, node=0.7, encode=0.6
    ),
}


class Build(NamedTuple):
    """The host has built and hands over: nodes of the graph, kernels, and by rows of the products bytes of weights that these read."""

    num_nodes: int
    num_kernels: int
    reads: Mapping[int, float] = MappingProxyType({})


class Wait(NamedTuple):
    """The host waits until what the first `given` builds hold is computed."""

    given: int


class End(NamedTuple):
    """A round has been read. drafted: tokens of it that were drafts, of all rows."""

    drafted: int


Event = Build | Wait | End


# --- models: tiny ones to count on, real shapes for their bytes


class Shape:
    """One published model: what its forwards read, and a tiny twin. Only the twin's weights are ever made."""

    def __init__(self, size: str, num_layers: int | None = None) -> None:
        """num_layers: of the model, None for all."""
        config = Qwen35Config.from_dict(SIZES[size]["text_config"])
        self.config = replace(config, is_linear=config.is_linear[:num_layers])
        real = Qwen35(self.config)
        self.target = reads(_quantized(real))
        few = self.target.head * min(DEFAULT_ROWS, self.config.vocab_size) // self.config.vocab_size
        self.mtp = reads(_quantized(Qwen35Mtp(self.config, real)), head=few)
        self.blocks = {
            drafts: reads(_quantized(DFlash(_block(self.config, drafts), real)), head=head)
            for drafts, head in {"dflash": few, "dflash2": self.target.head}.items()
        }
        experts = {name: size for name, size in EXPERTS.items() if getattr(self.config, name)}
        self.tiny = replace(self.config, **TINY, **experts)

    def engine(self, drafts: str, kv_bits: int = PLAIN) -> Engine:
        """Of the tiny twin. kv_bits: of the keys and values of model and drafter."""
        model = _made(Qwen35(self.tiny))
        drafters: list[Drafter] = []
        if drafts == "mtp":
            drafters = [Mtp(_made(Qwen35Mtp(self.tiny, model)), 4096, kv_bits=kv_bits)]
        if drafts in self.blocks:
            drafters = [DFlashDrafter(_made(DFlash(_block(self.tiny, drafts), model)), 4096, kv_bits=kv_bits)]
        return Engine(model, drafters=drafters, config=EngineConfig(kv_bits=kv_bits))


def _block(config: Qwen35Config, drafts: str) -> DFlashConfig:
    """A block drafter beside a target of this shape, DFlash2 with the sizes of z-lab's for the 27B."""
    num, ffn = len(config.is_linear), config.intermediate_size or 3 * config.hidden_size
    text = replace(
        config,
        is_linear=(False,) * BLOCK,
        intermediate_size=ffn,
        num_experts=0,
        num_experts_per_token=0,
        is_gated=False,
        rope_dims=config.head_dim,
        rope_sections=(),
    )
    more: dict[str, Any] = (
        {"kind": "DFlash2", "conv_kernel": 2, "conv_group": 16, "top_k": 16, "rank": 256}
        | {"windows": (2048,) * BLOCK}
        if drafts == "dflash2"
        else {"kind": "DFlash", "windows": (None,) * BLOCK}
    )
    return DFlashConfig(
        text=text,
        causal=(False,) * BLOCK,
        layer_ids=tuple(range(1, num - 1, max(1, num // BLOCK)))[:BLOCK],
        num_target_layers=num,
        mask_id=3,
        num_drafts=BLOCK_DRAFTS,
        **more,
    )


def _quantized(module: Any, group_size: int = 64) -> Any:
    module.set_dtype(mx.bfloat16)
    nn.quantize(module, group_size=group_size, bits=4)
    return module


def _made(module: Any) -> Any:
    mx.eval(_quantized(module, 32).eval().parameters())
    module.fuse()
    mx.eval(module.parameters())
    return module


# --- recording


class Recorder:
    """Stands where an engine meets MLX. events: what it did, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._given: list[mx.array] = []
        self._counted = 0, 0  # nodes and kernels of what was given
        self._holder: dict[int, int] = {}  # by id of a given array: number of builds that hold it
        self._num_builds = 0
        self._inside: list[int] | None = None  # places of builds within the forward that is being built
        # forwards whose last build is to come, and what they read
        self._unread: list[tuple[list[int], Mapping[int, float]]] = []

    def give(self, *arrays: Any) -> None:
        """In place of mx.async_eval."""
        own = list(_flat(arrays))
        self._given += own
        found = nodes(self._given)
        counted = found.total(), sum(num for name, num in found.items() if name not in VIEWS)
        num_nodes, num_kernels = counted[0] - self._counted[0], counted[1] - self._counted[1]
        if num_kernels:
            self._counted, self._num_builds = counted, self._num_builds + 1
            self.events.append(Build(num_nodes, num_kernels))
            if self._inside is not None:
                self._inside.append(len(self.events) - 1)
            unread, self._unread = self._unread, []
            for places, read in unread:
                self._spread([*places, len(self.events) - 1], read)
        for array in own:
            self._holder.setdefault(id(array), self._num_builds)

    def wait(self, *arrays: Any) -> None:
        """In place of mx.eval."""
        before, own = self._num_builds, list(_flat(arrays))
        # an array that nobody gave is in the graph of one that was, or is a build of its own
        known = [self._holder[id(x)] for x in own if id(x) in self._holder]
        self.give(*own)
        if own:
            is_all_given = bool(known) and self._num_builds == before
            self.events.append(Wait(max(known) if is_all_given else self._num_builds))

    @contextmanager
    def forward(self, read: Mapping[int, float]) -> Iterator[None]:
        """Around the building of a forward. read: bytes by rows of the products."""
        self._inside = []
        yield
        self._unread.append((self._inside, read))
        self._inside = None

    def _spread(self, places: Sequence[int], read: Mapping[int, float]) -> None:
        """Among the builds of a forward, by their kernels."""
        builds = [e for i in places if isinstance(e := self.events[i], Build)]
        total = sum(b.num_kernels for b in builds)
        for place, build in zip(places, builds, strict=True):
            share = build.num_kernels / total
            more = {rows: build.reads.get(rows, 0.0) + num * share for rows, num in read.items()}
            self.events[place] = build._replace(reads={**build.reads, **more})


def _flat(values: Any) -> Iterator[mx.array]:
    if isinstance(values, mx.array):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _flat(value)


def _said(x: mx.array) -> np.ndarray:
    """What the host reads: token 0 everywhere, of which drafters are sure."""
    is_float = mx.issubdtype(x.dtype, mx.floating)
    return np.full(x.shape, 0.99 if is_float else 0, np.float32 if is_float else np.int32)


def record(
    shape: Shape, drafts: str, sampling: str, *, depth: int, policy: str, rows: int = 1, kv_bits: int = PLAIN
) -> list[Event]:
    """Rounds of so many rows in their steady state."""
    recorder = Recorder()
    with as_on_metal(pytest.MonkeyPatch()), ExitStack() as stack:

        def put(where: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(where, name, value))

        put(mx, "async_eval", lambda *_: None)
        # the clock of this process says nothing of that device
        put(CostModel, "took", lambda self, curve, width, calls, _: self.seconds(curve, width, calls))
        real_spent = Controller.spent
        put(
            Controller,
            "spent",
            lambda self, parts, num, width, _, *a, **k: real_spent(
                self, parts, num, width, CURVE[1], *a, **k
            ),
        )
        mx.disable_compile()
        engine = shape.engine(drafts, kv_bits)
        costs = {name: DraftCost(step=0.02) for name in engine.drafts.drafters}
        known = CostModel()
        known.know(CURVE, costs)
        engine.follow(known)
        if engine.policies.auto is not None:
            engine.policies.auto.runs_ahead = True  # as on a GPU
        spec = SpecConfig(drafters=tuple(engine.drafts.drafters), policy=policy, n_max=depth)  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=1000, ignore_eos=True, seed=1, **SAMPLING[sampling])
        for _ in range(rows):
            engine.submit(list(range(1, PROMPT + 1)), params, spec=spec)
        while len(engine.places.rows) < rows:
            engine._read() if engine.places.prefills else engine._admit()
        mx.enable_compile()
        real = host.numbers
        own = [module for name, module in sys.modules.items() if name.split(".")[0] == "mlxspec"]
        for module in own:
            if getattr(module, "numbers", None) is real:
                put(module, "numbers", _said)
        put(mx, "async_eval", recorder.give)
        put(mx, "eval", recorder.wait)
        _watch(put, recorder, engine, shape, drafts)
        for _ in range(WARM + ROUNDS):
            engine.step()
    return recorder.events


def _watch(put: Callable[..., None], recorder: Recorder, engine: Engine, shape: Shape, drafts: str) -> None:
    """Forwards say what they read, and rounds that they have been read."""

    def reading(where: Any, name: str, of: Reads) -> None:
        real = getattr(where, name)

        def built(tokens: mx.array, *args: Any, **options: Any) -> Any:
            num = tokens.shape[0]
            dense = float(of.dense + of.head)
            experts = of.bytes(num) - dense
            with recorder.forward({1: experts, num: dense} if num > 1 else {1: experts + dense}):
                return real(tokens, *args, **options)

        put(where, name, built)

    def accept(round_: Round, *args: Any, **options: Any) -> Any:
        found = real_accept(round_, *args, **options)
        recorder.events.append(End(round_.rows.num_tokens - len(engine.places.rows)))
        return found

    real_accept = pipeline.accept
    put(pipeline, "accept", accept)
    reading(engine.model, "forward", shape.target)
    for drafter in engine.drafts.drafters.values():
        if isinstance(drafter, Mtp):
            reading(drafter.model, "forward", shape.mtp)
        if isinstance(drafter, DFlashDrafter):
            reading(drafter.model, "block", shape.blocks[drafts])


# --- replaying


class Estimate(NamedTuple):
    """Of a round. idle: share of its seconds in which the device has nothing to do; waits: those behind which it has nothing to do; read:
    bytes of weights."""

    seconds: float
    idle: float
    waits: float
    drafted: float
    kernels: float
    read: float


def replay(events: Sequence[Event], machine: Machine, products: str = "bytes") -> Estimate:
    """The recorded rounds behind the first WARM. products: what multiplies several rows, of PRODUCTS."""
    now = free = busy = 0.0
    ends = [0.0]
    began, busy_before, num_waits, drafted, num_rounds, num_kernels, read = 0.0, 0.0, 0, 0, 0, 0, 0.0
    for event in events:
        if isinstance(event, Build):
            now += 1e-6 * machine.node * event.num_nodes
            seconds = 1e-6 * machine.launch * event.num_kernels
            num_bytes = sum(event.reads.values())
            at_work = sum(num * machine.row_cost(products, rows) for rows, num in event.reads.items())
            seconds += at_work / (1e9 * machine.bandwidth * machine.share)
            for done in range(0, event.num_kernels, 40):  # MLX closes a command buffer about that often
                part = min(40, event.num_kernels - done)
                now += 1e-6 * machine.encode * part
                took = seconds * part / event.num_kernels
                free = max(free, now) + took
                busy += took
            ends.append(free)
            num_kernels, read = num_kernels + event.num_kernels, read + num_bytes
        elif isinstance(event, Wait):
            num_waits += ends[event.given] >= free
            now = max(now, ends[event.given] + 1e-6 * machine.wake)
        else:
            now += 1e-6 * machine.round
            num_rounds += 1
            drafted += event.drafted
            if num_rounds == WARM:
                began, busy_before, num_waits, drafted, num_kernels, read = now, busy, 0, 0, 0, 0.0
    num, took = num_rounds - WARM, now - began
    return Estimate(
        seconds=took / num,
        idle=max(0.0, 1.0 - (busy - busy_before) / took),
        waits=num_waits / num,
        drafted=drafted / num,
        kernels=num_kernels / num,
        read=read / num,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--drafts", default=",".join(DRAFTS))
    parser.add_argument("--sampling", default="greedy,qwen")
    parser.add_argument("--depth", type=int, default=3, help="drafted tokens of the MTP head")
    parser.add_argument("--policy", choices=("auto", "fixed"), default="auto")
    parser.add_argument("--accepted", type=float, default=0.8, help="probability of a drafted token")
    parser.add_argument("--rows", default="1", help="texts that are decoded together")
    parser.add_argument("--products", default="mlx,best", help=f"what multiplies rows: {', '.join(PRODUCTS)}")
    parser.add_argument("--kv-bits", default=str(PLAIN), help="of the keys and values of model and drafter")
    options = parser.parse_args()
    for name, known in (
        ("models", MODELS),
        ("machines", MACHINES),
        ("drafts", DRAFTS),
        ("sampling", SAMPLING),
        ("rows", {str(num): None for num in range(1, 9)}),
        ("products", dict.fromkeys(PRODUCTS)),
        ("kv_bits", {str(bits): None for bits in (PLAIN, 8, 4, 3)}),
    ):
        wrong = [n for n in getattr(options, name).split(",") if n not in known]
        if wrong:
            parser.error(f"--{name.replace('_', '-')} knows no {wrong[0]!r}; there are {', '.join(known)}")
    if not 1 <= options.depth <= 8 or not 0.0 <= options.accepted <= 1.0:
        parser.error("--depth is 1 to 8, and --accepted 0 to 1")
    print(
        f"Estimates, not measurements. Policy {options.policy}; a drafted token is accepted with probability {options.accepted}."
    )
    print(
        "| model | drafts | sampling | rows | keys | machine | products | kernels | MB | waits | ms a round | idle | tokens/s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for model in options.models.split(","):
        shape = Shape(MODELS[model])
        for drafts, sampling, rows, bits in product(
            *(words.split(",") for words in (options.drafts, options.sampling, options.rows, options.kv_bits))
        ):
            depth = BLOCK_DRAFTS if drafts in shape.blocks else options.depth
            events = record(
                shape,
                drafts,
                sampling,
                depth=depth,
                policy=options.policy,
                rows=int(rows),
                kv_bits=int(bits),
            )
            for machine, kind in product(options.machines.split(","), options.products.split(",")):
                found = replay(events, MACHINES[machine], kind)
                drafted = found.drafted / int(rows)
                tokens = int(rows) * sum(options.accepted**i for i in range(round(drafted) + 1))
                print(
                    f"| {model} | {drafts} {drafted:g} | {sampling} | {rows} | {bits} | {machine} | {kind} | {found.kernels:.0f} "
                    f"| {found.read / 1e6:.0f} | {found.waits:.2g} | {1e3 * found.seconds:.2f} | {100 * found.idle:.0f} % "
                    f"| {tokens / found.seconds:.1f} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
