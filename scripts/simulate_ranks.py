#!/usr/bin/env python3
"""What ranks send each other for published models, computed; and a simulation of two Macs that run one model together.

    scripts/simulate_ranks [--acceptance 0.8] [--bandwidth 0.8] [--sent | --speed]

The first table follows from the models' configs (mlxspec/models/traffic.py). The second is a SIMULATION: nothing in it was measured on two
Macs by this project. Models are in 4 bits, groups of 64.

    time of a forward of w tokens on N Macs = weights that it reads / N / (memory bandwidth x --bandwidth) x what w tokens cost there
                                              + messages x latency + bytes sent / bandwidth of the link
    time of a drafted token                 = weights of the MTP head, which is whole on each Mac, and of a share of the language-model
                                              head, / bandwidth + 2 messages + their bytes
    tokens of a round of depth d            = 1 + p + ... + p^d, where p is --acceptance

What w tokens cost: published curves (scripts/simulation/machines.py); experts are read as often as tokens go to different ones. Left out:
the host's work, attention over long contexts, rank 0's orders, and waiting for the slower Mac.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from simulation.machines import MACHINES

from mlxspec.checkpoints.known import CONFIGS
from mlxspec.models.ranks import Ranks, share
from mlxspec.models.reads import Reads, reads
from mlxspec.models.registry import architecture
from mlxspec.models.traffic import Topology, Traffic, of_forward, of_mtp_drafts, of_round
from mlxspec.policy.cost import Curve

MODELS = ("Qwen3.5-0.8B", "Qwen3.5-9B", "Qwen3.5-27B", "Qwen3.5-35B-A3B", "gemma-4-E4B")
SIZES = (2, 4)
DEPTHS = range(5)
VERIFY = 4  # tokens
_BYTES_A_WEIGHT = 4.5 / 8  # 4 bits, and a scale and a bias of 16 bits for each 64 weights
_ITEM = 2  # bytes of a bfloat16


@dataclass(frozen=True, kw_only=True)
class Mac:
    """bandwidth: of memory, bytes a second, as Apple states it. curve: name of a machine of scripts/simulation."""

    name: str
    bandwidth: float
    curve: str


@dataclass(frozen=True, kw_only=True)
class Link:
    """Between two Macs. latency: seconds that a message adds to a forward, beside its bytes; bandwidth: bytes a second."""

    name: str
    latency: float
    bandwidth: float
    topology: Topology
    source: str


MACS = (
    Mac(name="M4 Pro", bandwidth=273e9, curve="M4 Pro"),
    Mac(name="M3 Ultra", bandwidth=819e9, curve="M3 Ultra"),
)
# Reported on 2026-09-15 in mlx-lm #990: Qwen3.8-27B in 4 bits over two M4 Pro by JACCL, tokens a second without and with its MTP head.
REPORTED = 17.0, 25.0
RING = Link(
    name="TCP",
    latency=300e-6,
    bandwidth=2.5e9,
    topology="ring",
    source="300 us (J. Geerling, 2025-12-18, before RDMA); its bandwidth is assumed",
)
RDMA = Link(
    name="RDMA",
    latency=50e-6,
    bandwidth=7e9,
    topology="mesh",
    source="under 50 us (the same); 7.1 GB/s at 1 MiB (pytorch #181087)",
)


class Model:
    """One of CONFIGS. target, head: what a forward and a drafted token read, in bytes."""

    def __init__(self, name: str) -> None:
        self.name, config = name, CONFIGS[name][1]
        kind = architecture(config)
        self.config = kind.parse(config)
        model = kind.build(self.config)
        self.target = _packed(reads(model))
        has_head = kind.head is not None and getattr(self.config, "num_mtp_layers", 0)
        self.head = _packed(reads(kind.head(self.config, model), head=0)) if kind.head and has_head else None
        self.weights = _weights(model)
        self.largest = {size: max(_share(kind, self.config, r, size) for r in range(size)) for size in SIZES}

    def forward(self, mac: Mac, curve: Curve, share: float, size: int, num_tokens: int) -> float:
        """Seconds without messages."""
        w = self.target
        experts = w.bytes(num_tokens) - w.dense - w.head
        return ((w.dense + w.head) * curve.seconds(num_tokens) + experts) / size / (mac.bandwidth * share)

    def draft(self, mac: Mac, share: float, size: int) -> float:
        """Seconds of a drafted token without messages."""
        if self.head is None:
            raise ValueError(f"{self.name} has no MTP head")
        return (self.head.bytes() + self.target.head / size) / (mac.bandwidth * share)


def _packed(found: Reads) -> Reads:
    """From float32 to 4 bits."""
    scale = _BYTES_A_WEIGHT / 4
    return Reads(
        dense=round(scale * found.dense),
        stacks=round(scale * found.stacks),
        each=found.each,
        head=round(scale * found.head),
        layers=found.layers,
    )


def _weights(model: Any) -> int:
    return sum(value.size for _, value in tree_flatten(model.parameters()))


def _share(kind: Any, config: Any, rank: int, size: int) -> int:
    """Weights of one rank."""
    return _weights(kind.build(share(config, Ranks(rank=rank, size=size)).config))


def seconds(traffic: Traffic, link: Link) -> float:
    """Of all messages between two Macs."""
    return traffic.messages * link.latency + traffic.sent(2, _ITEM, link.topology) / link.bandwidth


def tokens(acceptance: float, depth: int) -> float:
    """Of a round."""
    return sum(acceptance**k for k in range(depth + 1))


def curve_of(mac: Mac) -> Curve:
    return next(machine for machine in MACHINES if machine.name == mac.curve).curve()


def rate(
    model: Model, mac: Mac, size: int, link: Link | None, depth: int, *, acceptance: float, share: float
) -> float:
    """Tokens a second. link None: one Mac."""
    time = model.forward(mac, curve_of(mac), share, size, depth + 1)
    time += depth * model.draft(mac, share, size) if depth else 0.0
    if link is not None:
        time += seconds(of_round(model.config, size, depth), link)
    return tokens(acceptance, depth) / time


def fitted(share: float) -> Link:
    """The latency with which the simulation gives the plain rate that was reported of two M4 Pro."""
    model, mac = Model("Qwen3.5-27B"), MACS[0]
    traffic = of_forward(model.config, 2)
    left = 1 / REPORTED[0] - model.forward(mac, curve_of(mac), share, 2, 1)
    left -= traffic.sent(2, _ITEM, RDMA.topology) / RDMA.bandwidth
    return Link(
        name="as reported",
        latency=left / traffic.messages,
        bandwidth=RDMA.bandwidth,
        topology=RDMA.topology,
        source=f"what {REPORTED[0]:g} tokens a second of Qwen3.8-27B over two M4 Pro by JACCL leave for each message (mlx-lm #990)",
    )


def table_of_sent() -> Iterator[str]:
    yield (
        "| model | ranks | largest share | messages: plain, verify, draft | kB of a token: ring, mesh | kB of a verify of 4: ring, mesh | "
        "kB of a drafted token: ring, mesh |"
    )
    yield "|---|---|---|---|---|---|---|"
    for model in map(Model, MODELS):
        for size in SIZES:
            one, four = of_forward(model.config, size), of_forward(model.config, size, VERIFY)
            draft = None if model.head is None else of_mtp_drafts(model.config, size, 1, 1)

            def sent(traffic: Traffic | None, size: int = size) -> str:
                if traffic is None:
                    return "-"
                kinds: tuple[Topology, ...] = ("ring", "mesh")
                return ", ".join(f"{traffic.sent(size, _ITEM, kind) / 1000:,.0f}" for kind in kinds)

            yield (
                f"| {model.name} | {size} | {model.largest[size] / model.weights:.3f} | {one.messages}, {four.messages}, "
                f"{'-' if draft is None else draft.messages} | {sent(one)} | {sent(four)} | {sent(draft)} |"
            )


def table_of_speed(acceptance: float, share: float) -> Iterator[str]:
    links = (RING, fitted(share), RDMA)
    yield "| model | Mac | one: plain, drafted | link | two: plain, drafted | time in messages: plain, drafted |"
    yield "|---|---|---|---|---|---|"
    for model in map(Model, MODELS):
        for mac in MACS:
            depths = DEPTHS if model.head is not None else (0,)

            def best(
                size: int, link: Link | None, model: Model = model, mac: Mac = mac, depths: Any = depths
            ) -> tuple[float, int]:
                return max(
                    (rate(model, mac, size, link, d, acceptance=acceptance, share=share), d) for d in depths
                )

            alone = rate(model, mac, 1, None, 0, acceptance=acceptance, share=share)
            for link in links:
                plain = rate(model, mac, 2, link, 0, acceptance=acceptance, share=share)
                drafted, depth = best(2, link)
                parts = [
                    seconds(of_round(model.config, 2, d), link) * r / tokens(acceptance, d)
                    for d, r in ((0, plain), (depth, drafted))
                ]
                yield (
                    f"| {model.name} | {mac.name} | {alone:.1f}, {_told(best(1, None))} | {link.name}, {link.latency * 1e6:.0f} us | "
                    f"{plain:.1f}, {_told((drafted, depth))} | {parts[0]:.0%}, {parts[1]:.0%} |"
                )


def _told(found: tuple[float, int]) -> str:
    return f"{found[0]:.1f} (depth {found[1]})" if found[1] else "-"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--acceptance", type=float, default=0.8, help="of a drafted token behind accepted ones"
    )
    parser.add_argument(
        "--bandwidth", type=float, default=0.8, help="share of the memory's bandwidth that is reached"
    )
    parser.add_argument("--sent", action="store_true", help="the computed table only")
    parser.add_argument("--speed", action="store_true", help="the simulated table only")
    options = parser.parse_args()
    for name in ("acceptance", "bandwidth"):
        if not 0.0 < getattr(options, name) <= 1.0:
            parser.error(f"--{name} must be above 0 and at most 1")
    mx.set_default_device(mx.cpu)  # arrays of the models' shapes are made, and none is computed
    if not options.speed:
        print("Computed from configs: what one rank sends, in bfloat16.\n")
        print("\n".join(table_of_sent()))
    if not options.sent:
        print(
            "\nSIMULATED, not measured: tokens a second of one and of two Macs, one row, models in 4 bits.\n"
        )
        print("\n".join(table_of_speed(options.acceptance, options.bandwidth)))
        print("\nLinks:")
        for link in (RING, fitted(options.bandwidth), RDMA):
            print(
                f"  {link.name}: {link.latency * 1e6:.0f} us a message, {link.bandwidth / 1e9:g} GB/s: {link.source}."
            )
        depth, told = 1, fitted(options.bandwidth)
        found = rate(
            Model("Qwen3.5-27B"),
            MACS[0],
            2,
            told,
            depth,
            acceptance=options.acceptance,
            share=options.bandwidth,
        )
        print(
            f"  The same report has {REPORTED[1]:g} tokens a second with the MTP head; simulated at depth {depth}: {found:.1f}."
        )


if __name__ == "__main__":
    main()
