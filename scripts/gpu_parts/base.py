"""What sections share: sizes, the report, running one after the other, tables, times and random data."""

from __future__ import annotations

import contextlib
import io
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
from alternating import alternate, ratio

from mlxspec.kernels.quantized_weight import QuantizedWeight
from mlxspec.platform import device

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured, and how often. rounds: measured turns of each time. repeat: calls evaluated together, so that the wait for the GPU
    does not hide them. layers: value heads of a Gated DeltaNet layer, by the model's name. matmuls: (out, in). tokens: of prompts.
    prompt: tokens before plain decoding. contexts: tokens of keys and values behind which rounds are timed. num_layers, vocab_size,
    hidden_size: cut the 0.8B shape; None keeps it whole."""

    rounds: int = 5
    repeat: int = 8
    layers: Mapping[str, int] = field(default_factory=lambda: {"0.8B": 16, "9B": 32, "27B": 48})
    key_heads: int = 16
    widths: tuple[int, ...] = (1, 2, 4, 8, 16)
    matmuls: tuple[tuple[int, int], ...] = ((3584, 1024), (12288, 4096), (17408, 5120))
    tokens: tuple[int, ...] = (512, 2048)
    context: int = 8192
    verify_widths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10, 11, 13, 16, 24, 32)
    prompt: int = 128
    contexts: tuple[int, ...] = (1024, 8192, 32768)
    new_tokens: int = 64
    num_layers: int | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None


FULL = Sizes()
QUICK = Sizes(
    rounds=3,
    layers={"0.8B": 16},
    widths=(1, 4),
    matmuls=((3584, 1024),),
    tokens=(512,),
    context=1024,
    verify_widths=(1, 2, 4, 5, 6, 8, 10, 11, 13),
    contexts=(256, 1024),
    new_tokens=24,
    num_layers=4,
    vocab_size=4096,
)
WITHOUT_METAL = Sizes(  # MLX's quantized products on a CPU take seconds a token at the full width
    rounds=1,
    repeat=1,
    layers={"0.8B": 16},
    widths=(1, 4),
    matmuls=((512, 1024),),
    tokens=(16,),
    context=256,
    verify_widths=(1, 2, 5),
    prompt=12,
    contexts=(32, 64),
    new_tokens=8,
    num_layers=4,
    vocab_size=512,
    hidden_size=256,
)


Sections = Mapping[str, tuple[str, Callable[[], None]]]  # title and function by name


class Skipped(Exception):
    """A section that cannot run here; its text says why."""


@dataclass(kw_only=True)
class Here:
    """This run. folder: for files that go when it ends. ends: on time.perf_counter's clock. summary: lines of the short report. tables:
    figures to keep, by name, each a head and rows."""

    sizes: Sizes
    has_metal: bool
    folder: Path
    ends: float = float("inf")
    summary: list[str] = field(default_factory=list)
    tables: dict[str, list[list[str]]] = field(default_factory=dict)

    def needs_metal(self) -> None:
        """Raises Skipped."""
        if not self.has_metal:
            raise Skipped("there is no Metal here")

    def tell(self, line: str) -> None:
        """Into the details and the short report."""
        print(line)
        self.summary.append(line)

    @property
    def seconds_left(self) -> float:
        return self.ends - time.perf_counter()

    def compare(self, runs: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Seconds of `sizes.repeat` calls evaluated together, by name and round."""

        def timed(function: Callable[[], object]) -> Callable[[], object]:
            return lambda: mx.eval([function() for _ in range(self.sizes.repeat)])

        contestants = {name: timed(run) for name, run in runs.items()}
        return alternate(contestants, rounds=self.sizes.rounds, warmup=2)


def run(here: Here, chosen: Sections) -> tuple[str, list[str]]:
    """Everything that was printed, and the names of sections that failed."""
    texts, failed = [], []
    for name, (title, section) in chosen.items():
        if here.seconds_left <= 0:
            text, problem = f"skipped: the time was over; run it alone with --only {name}", False
            here.summary.append(f"{title}: skipped, the time was over (--only {name})")
        else:
            text, problem = run_section(section)
        if problem:
            failed.append(name)
        texts.append(f"### {title}\n\n{text.rstrip()}\n")
        print(texts[-1], flush=True)
    return "\n".join(texts), failed


def run_section(section: Callable[[], None]) -> tuple[str, bool]:
    """What it printed, and whether it failed."""
    caught = io.StringIO()
    try:
        with contextlib.redirect_stdout(caught), device.private_kernels():
            section()
    except Skipped as why:
        return f"{caught.getvalue()}skipped: {why}", False
    except Exception:
        return f"{caught.getvalue()}FAILED\n\n```\n{traceback.format_exc(limit=-3)}```", True
    finally:
        mx.clear_cache()
    return caught.getvalue(), False


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(row) + " |")


def relative(taken: Mapping[str, list[float]], name: str, base: str) -> str:
    return f"{ratio(taken, name, base):.2f}" if name in taken else "-"


def normal(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(0)).astype(dtype)


def quantized(out: int, size: int, bits: int) -> QuantizedWeight:
    return QuantizedWeight.of(normal(out, size), 64, bits)


def same_bits(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a, b).item())
