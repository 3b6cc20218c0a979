"""A random model of the 0.8B's shape with 4-bit weights and an MTP head: its speed beside mlx-lm's, what rounds cost, what drafting would
be worth, and which memory rounds need behind long texts. Nothing is downloaded."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from statistics import median
from typing import Any

import mlx.core as mx
import write_checkpoint
from alternating import alternate

import mlxspec
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine
from mlxspec.engine.rehearsal import measure
from mlxspec.kernels.flat import FlatRows
from mlxspec.policy.costs import CostModel

from .base import ROOT, Here, table

SHAPE = "qwen3.5-0.8b"
BITS = 4
PLAIN = SpecConfig(policy="fixed")
DEPTHS = (1, 2, 3, 4, 6)  # drafted tokens a round
RECOMMENDED = {"temperature": 1.0, "top_k": 20, "top_p": 0.95}  # what models come with, nearly
RATES = (0.5, 0.7, 0.85, 0.95)  # how often a drafted token is accepted, if those before it were
BUFFERS = ((None, None), (20, 20), (100, 100), (200, 200))  # operations, MB a command buffer; None: MLX's own
_FEW_WORDS = 4096  # of a vocabulary that is not what is measured
_PROMPT = 128  # tokens before a verify that is timed
_CHILD = "scripts/gpu_parts/decode_child.py"


def _num_layers(shape: str) -> int:
    config = write_checkpoint.SIZES[shape]
    return int(config.get("text_config", config)["num_hidden_layers"])


class Model:
    """A random model, written and loaded when a section first needs it."""

    def __init__(self, here: Here, shape: str = SHAPE, period: int | None = None) -> None:
        """period: layers of the shape that are there, after which their kinds repeat; None: as `sizes` has it, with an MTP head."""
        self.here, self.shape, self.period = here, shape, period

    @cached_property
    def folder(self) -> str:
        """Where it was written."""
        sizes, folder = self.here.sizes, self.here.folder / self.shape
        num_layers, num_words = sizes.num_layers, sizes.vocab_size
        if self.period is not None:
            num_layers, num_words = self.period, num_words or _FEW_WORDS
        config = write_checkpoint.cut(write_checkpoint.SIZES[self.shape], num_layers, num_words)
        if sizes.hidden_size is not None:
            narrow = {"hidden_size": sizes.hidden_size, "intermediate_size": 2 * sizes.hidden_size}
            config["text_config"] = config["text_config"] | narrow
        write_checkpoint.write(folder, config, bits=BITS)
        return str(folder)

    @cached_property
    def engine(self) -> Engine:
        """With its MTP head; prompts are read anew each time."""
        draft = "mtp" if self.period is None else "off"
        return mlxspec.load(self.folder, draft=draft, spec=PLAIN, config=EngineConfig(prefix_budget=0))

    @cached_property
    def costs(self) -> CostModel:
        """The costs that policy auto decides by, learned from whole rounds now."""
        measure(self.engine)
        return self.engine.policies.costs

    @cached_property
    def peer(self) -> Any:
        """mlx-lm's model over the same files."""
        from pathlib import Path

        from mlx_lm.utils import load_model

        logging.disable(logging.WARNING)
        return load_model(Path(self.folder))[0]

    def prompt(self, length: int) -> list[int]:
        return [5 + 7 * i % 200 for i in range(length)]

    def run(self, length: int, new: int, spec: SpecConfig = PLAIN, **sampling: Any) -> Any:
        """The answer's statistics. sampling: as SamplingParams has it; greedy if none is given."""
        params = SamplingParams(max_tokens=new, ignore_eos=True, **sampling)
        return self.engine.generate(self.prompt(length), params, spec=spec).stats

    def _theirs(self, length: int, new: int) -> tuple[float, float]:
        """Seconds to mlx-lm's first token, and its tokens a second after that."""
        from mlx_lm.generate import generate_step

        started = time.perf_counter()
        stream = generate_step(mx.array(self.prompt(length)), self.peer, max_tokens=new)
        next(stream)
        first = time.perf_counter() - started
        started = time.perf_counter()
        count = sum(1 for _ in stream)
        return first, count / (time.perf_counter() - started)

    def _turns(self, ways: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
        """What each way gives, in an order that turns; the first turn compiles and does not count."""
        found: dict[str, list[float]] = {name: [] for name in ways}
        names = list(ways)
        for turn in range(self.here.sizes.rounds + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                value = ways[name]()
                if turn:
                    found[name].append(value)
        return found

    # ---- sections

    def decode(self) -> None:
        """Plain decoding beside mlx-lm's."""
        new = self.here.sizes.new_tokens
        found = self._turns(
            {
                "ours": lambda: self.run(self.here.sizes.prompt, new).decode_speed,
                "mlx-lm": lambda: self._theirs(self.here.sizes.prompt, new)[1],
            }
        )
        self.here.tell(f"{self._name()}, plain decoding: {_beside(found, 'tok/s')}")

    def prefill(self) -> None:
        """Prompts beside mlx-lm's; the first token is in both."""
        for length in self.here.sizes.tokens:
            found = self._turns(
                {
                    "ours": lambda n=length: n / self.run(n, 1).prefill_seconds,
                    "mlx-lm": lambda n=length: n / self._theirs(n, 2)[0],
                }
            )
            self.here.tell(f"{self._name()}, prompt of {length} tokens: {_beside(found, 'tok/s')}")

    def layers(self) -> None:
        """Prompts of a large model, by a period of its layers: its embedding and head, which few tokens pass, are left out."""
        self.here.needs_metal()
        if self.period is None:
            raise ValueError("all layers are there")
        num, length = _num_layers(self.shape), self.here.sizes.tokens[-1]
        of_all = length * self.period / num
        found = self._turns(
            {
                "ours": lambda: of_all / self.run(length, 1).prefill_seconds,
                "mlx-lm": lambda: of_all / self._theirs(length, 2)[0],
            }
        )
        self.here.tell(
            f"{self.shape}, prompt of {length} tokens, {self.period} of {num} layers timed: {_beside(found, 'tok/s')}"
        )

    def verify(self) -> None:
        """What verifying w tokens costs in plain steps. Steps at 5 to 6, 10 to 11 and 13 are where MLX's quantized kernels change."""
        widths = self.here.sizes.verify_widths
        found = _verify_ms(self.engine, self.here.sizes.rounds, widths)
        curve = " ".join(f"{w}:{found[w] / found[1]:.2f}" for w in widths if w > 1)
        self.here.tell(f"{self._name()}, verify of w tokens over a plain step ({found[1]:.2f} ms): {curve}")

    def drafting(self) -> None:
        """Whole rounds with drafts of the random head at each depth, and the depth that would pay most if drafts were accepted this often.
        What policy auto makes of a head that guesses stands beside it: it must not be slower than plain decoding."""
        new = self.here.sizes.new_tokens
        ways: dict[str, Callable[[], float]] = {
            "plain": lambda: _seconds_a_round(self.run(self.here.sizes.prompt, new))
        }
        for depth in DEPTHS:
            spec = SpecConfig(drafters=("mtp",), policy="fixed", n_max=depth)
            ways[str(depth)] = lambda s=spec: _seconds_a_round(self.run(self.here.sizes.prompt, new, s))
        found = {name: median(values) for name, values in self._turns(ways).items()}
        costs = {depth: found[str(depth)] / found["plain"] for depth in DEPTHS}
        rounds = " ".join(f"{d}:{cost:.2f}" for d, cost in costs.items())
        self.here.tell(f"{self._name()}, round that drafts d tokens over a plain round: {rounds}")
        best = {rate: best_depth(costs, rate) for rate in RATES}
        gains = ", ".join(f"{100 * rate:.0f} %: {d} ({gain:.2f}x)" for rate, (d, gain) in best.items())
        self.here.tell(f"{self._name()}, depth that pays most by acceptance: {gains}")
        self.engine.follow(self.costs)
        auto = SpecConfig(drafters=("mtp",), policy="auto")
        speeds = self._turns(
            {
                "auto": lambda: self.run(self.here.sizes.prompt, new, auto).decode_speed,
                "plain": lambda: self.run(self.here.sizes.prompt, new).decode_speed,
            }
        )
        stats = self.run(self.here.sizes.prompt, new, auto)
        over = median(a / b for a, b in zip(speeds["auto"], speeds["plain"], strict=True))
        self.here.tell(
            f"{self._name()}, policy auto with a head that guesses: {over:.2f}x plain,"
            f" {stats.num_drafted / max(1, stats.num_rounds):.2f} drafted tokens a round"
        )

    def sampled(self) -> None:
        """What the sampling that chat and serve take by default costs: plain rounds and rounds that draft two tokens."""
        new, ways = self.here.sizes.new_tokens, dict[str, Callable[[], float]]()
        kinds: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": RECOMMENDED}
        specs = {"plain": PLAIN, "drafting 2": SpecConfig(drafters=("mtp",), policy="fixed", n_max=2)}
        for kind, params in kinds.items():
            for what, spec in specs.items():
                ways[f"{what}, {kind}"] = lambda s=spec, p=params: _seconds_a_round(
                    self.run(self.here.sizes.prompt, new, s, **p)
                )
        found = {name: median(values) for name, values in self._turns(ways).items()}
        over = ", ".join(f"{w} {found[f'{w}, sampled'] / found[f'{w}, greedy']:.2f}x" for w in specs)
        self.here.tell(f"{self._name()}, top-k 20 and top-p 0.95 over greedy, round for round: {over}")

    def running_ahead(self) -> None:
        """Plain and drafted rounds launched before the one before them was read, over rounds that wait, by the size of keys and values;
        and the memory they take beyond what is held, over the keys and values (1.0: all of them were copied once)."""
        new, rows, told = self.here.sizes.new_tokens, [], []
        drafted = SpecConfig(drafters=("mtp",), policy="fixed", n_max=3)
        for context in self.here.sizes.contexts:
            if context > self.here.sizes.contexts[0] and self.here.seconds_left < 45:
                told.append(f"{context}: no time")
                continue
            speeds: dict[bool, list[float]] = {True: [], False: []}
            peaks = {}
            for turn in range(3):
                for ahead in (True, False):
                    self.engine.pipeline.overlaps = ahead
                    mx.clear_cache()
                    stats, more = self._behind(context, new, drafted)
                    peaks[ahead] = more / max(1, self._kv_bytes(context))
                    if turn:
                        speeds[ahead].append(stats.decode_speed)
            self.engine.pipeline.overlaps = True
            over = median(a / b for a, b in zip(speeds[True], speeds[False], strict=True))
            more = [f"{peaks[a]:.2f}" for a in (True, False)]
            rows.append([str(context), f"{self._kv_bytes(context) / 1e6:.1f}", f"{over:.2f}", *more])
            told.append(f"{context}: {over:.2f}x, more memory {peaks[True]:.2f} of K/V")
        table(["context", "K/V, MB", "ahead over waiting", "more memory over K/V, ahead", "waiting"], rows)
        said = f"{self._name()}, drafted rounds ahead over rounds that wait, by context"
        self.here.tell(f"{said}: {'; '.join(told)}")

    def _behind(self, context: int, new: int, spec: SpecConfig) -> tuple[Any, int]:
        """Statistics of an answer behind so many tokens, and the most memory that decoding it took above what was held before."""
        params = SamplingParams(max_tokens=new, ignore_eos=True)
        request = self.engine.submit(self.prompt(context), params, spec=spec)
        while not self.engine.num_running or request in [p.request for p in self.engine.places.prefills]:
            self.engine.step()
        mx.synchronize()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        while not self.engine.is_idle:
            self.engine.step()
        return request.stats, mx.get_peak_memory() - held

    def _kv_bytes(self, context: int) -> int:
        """Of keys and values of all attention layers of the model."""
        config = json.loads((self.here.folder / "model" / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config", config)
        layers = sum(kind == "full_attention" for kind in text["layer_types"])
        return 2 * 2 * layers * text["num_key_value_heads"] * text["head_dim"] * context

    def buffers(self) -> None:
        """Decoding under other limits of MLX's command buffers, each in a process of its own: MLX reads them once."""
        found: dict[tuple[int | None, int | None], list[dict[str, float]]] = {b: [] for b in BUFFERS}
        for _ in range(2):
            for limits in BUFFERS:
                if self.here.seconds_left > 20 or not found[limits]:
                    found[limits].append(_child(self.folder, limits, self.here.sizes.new_tokens))
        rows = [
            [_limits(b), *(f"{max(run[way] for run in runs):.0f}" for way in ("plain", "drafted"))]
            for b, runs in found.items()
        ]
        table(["operations, MB a command buffer", "plain tok/s", "drafting 3, tok/s"], rows)
        told = "; ".join(f"{name} {plain}/{drafted}" for name, plain, drafted in rows)
        self.here.tell(f"{self._name()}, command buffers (plain/drafting tok/s): {told}")

    def _name(self) -> str:
        return "0.8B shape" if self.here.sizes.num_layers is None else "cut 0.8B shape"


def _verify_ms(engine: Engine, rounds: int, widths: Sequence[int]) -> dict[int, float]:
    """Milliseconds of a verify by width, behind a prompt."""
    model, prompt = engine.model, mx.array([5 + i % 400 for i in range(_PROMPT)], mx.int32)

    def step(width: int) -> Callable[[], None]:
        cache = model.make_cache(1)
        model.forward(prompt, FlatRows((_PROMPT,)), cache, certain=True)
        cache.commit()
        mx.eval(cache.arrays)
        tokens = mx.array([7] * width, mx.int32)

        def run() -> None:
            out = model.forward(tokens, FlatRows((width,)), cache, certain=width == 1)
            mx.eval(mx.argmax(out.logits, -1), cache.arrays)
            cache.commit([1])

        return run

    taken = alternate({str(w): step(w) for w in widths}, rounds=3 * rounds, warmup=3, inner=4)
    return {w: 1e3 * median(taken[str(w)]) for w in widths}


def best_depth(costs: Mapping[int, float], rate: float) -> tuple[int, float]:
    """Drafted tokens a round that give most tokens a second, 0 for none, and over plain decoding. costs: depth -> rounds' time over a plain
    round's. rate: how often a drafted token is accepted if those before it were."""
    gains = {0: 1.0} | {d: (1 - rate ** (d + 1)) / (1 - rate) / cost for d, cost in costs.items()}
    best = max(gains, key=lambda d: gains[d])
    return best, gains[best]


def _seconds_a_round(stats: Any) -> float:
    return float(stats.decode_seconds / max(1, stats.num_rounds))


def _beside(found: Mapping[str, Sequence[float]], unit: str) -> str:
    over = median(a / b for a, b in zip(found["ours"], found["mlx-lm"], strict=True))
    return f"{median(found['ours']):.0f} {unit}, mlx-lm {median(found['mlx-lm']):.0f} ({over:.2f}x)"


def _limits(limits: tuple[int | None, int | None]) -> str:
    return "MLX's own" if limits == (None, None) else f"{limits[0]}, {limits[1]}"


def _child(folder: str, limits: tuple[int | None, int | None], new: int) -> dict[str, float]:
    """Tokens a second under these limits. Raises RuntimeError where the process fails."""
    names = ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER")
    env = {k: v for k, v in os.environ.items() if k not in names}
    env |= {name: str(limit) for name, limit in zip(names, limits, strict=True) if limit is not None}
    command = [sys.executable, str(ROOT / _CHILD), folder, str(new)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-500:])
    return {k: float(v) for k, v in json.loads(done.stdout.splitlines()[-1]).items()}
