"""Latency curves to simulate on: published measurements of Apple machines, the measured CPU, and the two ends of what is possible.

Widths in tokens, costs in plain steps of that machine. Where only matmuls were published they stand for the whole step, which makes wide
verifies dearer than they are. What a draft costs was published for few machines: an MTP head in 4 bit took 0.085 steps on an M5 Max beside
a 27B model in 4 bit, and that is taken for all Macs; a small draft model is taken at 0.1. Drafters that read the model's layers were not
measured: by what they read of weights beside that model in 4 bit, EAGLE-3 (one layer, a head of 32,000 rows) is taken at a third of the
head, and DFlash (five layers and the head of 248,000 rows) at 0.15 steps times what the machine takes for a forward of a block's width.
Knows numbers only.
"""

from __future__ import annotations

from mlxspec.policy.costs import DraftCost

from .requests import Machine


def _mac(at_a_block: float) -> dict[str, DraftCost]:
    """Costs of drafters. at_a_block: plain steps that a forward of a block's width takes."""
    return {
        "mtp": DraftCost(step=0.085, queued=0.01),
        "draft-model": DraftCost(step=0.1, queued=0.01),
        "eagle3": DraftCost(step=0.03, queued=0.01),
        "dflash": DraftCost(call=0.15 * at_a_block, queued=0.01),
    }


_CPU = {
    "mtp": DraftCost(call=0.2, step=0.28, queued=0.05),
    "draft-model": DraftCost(call=0.2, step=0.4, queued=0.05),
    "eagle3": DraftCost(call=0.2, step=0.28, queued=0.05),
    "dflash": DraftCost(call=0.9, queued=0.1),
}

MACHINES = (
    Machine(
        name="M1 Ultra",
        widths={1: 1.0, 2: 1.74, 3: 2.44, 4: 3.1, 8: 5.6},
        drafts=_mac(5.6),
        step_ms=42.6,
        source="27B in 4 bit, mlxcel's measurements",
    ),
    Machine(
        name="M3 Max",
        widths={1: 1.0, 2: 1.0, 4: 1.28, 6: 2.04, 8: 2.5, 10: 3.95, 32: 3.95},
        drafts=_mac(2.5),
        step_ms=50.0,
        source="4-bit matmuls of 5120 x 17408, mlx#3863",
    ),
    Machine(
        name="M3 Ultra",
        widths={1: 1.0, 2: 1.17, 5: 1.68, 33: 6.44},
        drafts=_mac(2.19),
        step_ms=30.0,
        source="31B, 0.83 + 0.17 a token, mlxcel's measurements",
    ),
    Machine(
        name="M4 Pro",
        widths={1: 1.0, 2: 1.03, 3: 1.22, 4: 1.47, 8: 2.69},
        drafts=_mac(2.69),
        step_ms=60.0,
        source="4-bit matmuls of 4096 x 24576, mlx#3839",
    ),
    Machine(
        name="M3 Max with our kernels",
        widths={1: 1.0, 4: 1.0, 6: 1.07, 8: 1.07, 16: 1.77, 24: 2.59, 32: 3.33},
        drafts=_mac(1.07),
        step_ms=50.0,
        source="the fastest of MLX's and our products of few rows, by scripts/simulate_device.py",
    ),
    Machine(
        name="M5 Max with our kernels",
        widths={1: 1.0, 3: 1.12, 4: 1.29, 6: 1.43, 8: 1.43, 16: 2.37, 24: 3.46, 32: 4.47},
        drafts=_mac(1.43),
        step_ms=30.0,
        source="the same",
    ),
    Machine(
        name="flat",
        widths={1: 1.0, 2: 1.0},
        drafts=_mac(1.0),
        step_ms=30.0,
        source="the ideal: any width costs one step",
    ),
    Machine(
        name="linear",
        widths={1: 1.0, 2: 2.0},
        drafts=_mac(8.0),
        step_ms=30.0,
        source="the worst: every token costs one step",
    ),
    Machine(
        name="CPU",
        widths={1: 1.0, 2: 1.6, 4: 1.75, 8: 2.5, 17: 3.25},
        rows={
            2: {1: 0.9, 2: 1.25, 3: 2.4, 8: 2.5, 18: 4.0, 34: 5.6},
            3: {1: 0.7, 3: 1.5, 4: 2.5, 9: 3.0, 19: 4.2, 35: 6.4, 51: 7.4},
            4: {1: 0.6, 4: 1.6, 5: 2.8, 7: 3.0, 16: 3.9, 20: 4.3, 36: 6.4, 52: 8.3, 68: 10.0},
        },
        pause=0.3,
        drafts=_CPU,
        step_ms=1.3,
        prefill=0.05,
        head=0.17,
        look=0.0,
        source="4.4M parameters in float32 with OpenBLAS, 2 x86-64 cores: whole rounds, of which plain ones run ahead",
    ),
)
