"""Figures of what `tune` and `bench` measured: costs by width, speed by depth or by kind of prompt, acceptance by position, and the rounds
of an answer. Knows numbers and matplotlib, which is optional; measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from mlxspec.bench.answer_rounds import AnswerRound
from mlxspec.bench.turns import Score, added
from mlxspec.errors import ConfigError

FORMATS = (".png", ".svg", ".pdf")
_FEWEST = 5  # verified drafts that a position must have to be shown
_DEEPEST = 16  # positions shown


def check(path: Path) -> None:
    """Raise ConfigError unless a figure could be written to `path` now."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is optional: pip install matplotlib.")
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--plot writes {', '.join(FORMATS)} files, not {path.name!r}.")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {path.parent} to write to.")


def draw(path: Path, title: str, curve: Mapping[int, float], scores: Sequence[Score]) -> None:
    """Draw the measurements of `tune`. curve: seconds by the number of verified tokens. Raises ConfigError where the file cannot be
    written."""
    alone = {s.drafters[0]: s for s in scores if len(s.drafters) == 1 and not s.name.startswith("policy")}
    with _figure(path, title) as (costs, depths, positions):
        _draw_costs(costs, curve)
        _draw_depths(depths, scores)
        _draw_positions(
            positions, {n: work.by_position for s in alone.values() for n, work in s.works.items()}
        )


def draw_bench(path: Path, title: str, scores: Sequence[Score], rounds: Sequence[AnswerRound]) -> None:
    """Draw the measurements of `bench`: speeds by kind of prompt, acceptance rates by position, and the rounds of one answer. Raises
    ConfigError where the file cannot be written."""
    positions: dict[str, list[tuple[int, int]]] = {}
    for score in scores:
        for name, work in score.works.items():
            positions[name] = added(positions.get(name, ()), work.by_position)
    with _figure(path, title) as (kinds, shares, timeline):
        _draw_kinds(kinds, scores)
        _draw_positions(shares, positions)
        _draw_rounds(timeline, rounds)


@contextmanager
def _figure(path: Path, title: str) -> Iterator[Sequence[Any]]:
    """Yield three axes next to each other, and write them to `path` at the end."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    several = figure.subplots(1, 3)
    yield several
    for axes in several:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot: {path} cannot be written: {error.strerror}.") from error


def _draw_kinds(axes: Any, scores: Sequence[Score]) -> None:
    """Draw medians without and with drafting, with whiskers from the slowest run to the fastest."""
    names = [s.name for s in scores]
    for offset, label, color in ((-0.12, "off", "0.45"), (0.12, "on", "#2f5d8a")):
        speeds = [[pair[label == "off"] for pair in s.pairs] for s in scores]
        medians = [median(found) for found in speeds]
        below = [m - min(found) for m, found in zip(medians, speeds, strict=True)]
        above = [max(found) - m for m, found in zip(medians, speeds, strict=True)]
        places = [i + offset for i in range(len(names))]
        axes.errorbar(
            places, medians, [below, above], fmt="o", color=color, label=label, elinewidth=0.8, capsize=2
        )
    axes.set_xticks(range(len(names)), names, fontsize=8, rotation=40, ha="right", rotation_mode="anchor")
    axes.set(title="Speed by kind of prompt", ylabel="tokens a second", ylim=(0, None))
    _legend(axes)


def _draw_rounds(axes: Any, rounds: Sequence[AnswerRound]) -> None:
    """Draw one bar for each round, with its verified draft tokens and the accepted ones of these, and the rounds' times as a line."""
    places = range(1, len(rounds) + 1)
    axes.bar(places, [r.num_drafted for r in rounds], color="0.85", label="drafted")
    axes.bar(places, [r.num_accepted for r in rounds], color="#2f5d8a", label="accepted")
    axes.set(title="One answer, round by round", xlabel="round", ylabel="tokens", ylim=(0, None))
    times = axes.twinx()
    times.plot(places, [1e3 * r.seconds for r in rounds], color="C1", linewidth=1.0)
    times.set(ylabel="milliseconds a round", ylim=(0, None))
    _legend(axes)


def _draw_costs(axes: Any, curve: Mapping[int, float]) -> None:
    widths = sorted(curve)
    axes.plot(widths, [curve[w] / curve[1] for w in widths], marker="o", markersize=4, color="#2f5d8a")
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set(title="What a round costs", xlabel="tokens verified", ylabel="plain rounds", ylim=(0, None))


def _draw_depths(axes: Any, scores: Sequence[Score]) -> None:
    """Draw model drafters along their depths, then each drafter without depths at a place of its own, with whiskers from the slowest
    pair to the fastest."""
    shown = [s for s in scores if not s.ratio.refusal and not s.whole]
    depths = sorted({s.depth for s in shown if s.depth is not None})
    others = [s for s in shown if s.depth is None]
    names = dict.fromkeys(s.name for s in shown if s.depth is not None)
    for i, name in enumerate(names):
        line = [s for s in shown if s.name == name and s.depth is not None]
        _whiskers(axes, [depths.index(s.depth or 0) for s in line], line, "o-", f"C{i}", f"{name}, by depth")
    for i, score in enumerate(others):
        _whiskers(axes, [len(depths) + i], [score], "s", "black" if " " in score.name else "0.45", None)
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    labels = [str(d) for d in depths] + [s.name for s in others]
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    for label in axes.get_xticklabels()[len(depths) :]:
        label.set(rotation=40, ha="right", rotation_mode="anchor")
    axes.set(title="Speed", ylabel="times plain decoding", ylim=(0, None))
    _legend(axes)


def _whiskers(
    axes: Any, places: Sequence[int], scores: Sequence[Score], style: str, color: str, label: str | None
) -> None:
    ratios = [s.ratio for s in scores]
    medians = [r.median for r in ratios]
    below, above = [r.median - r.least for r in ratios], [r.most - r.median for r in ratios]
    axes.errorbar(
        places,
        medians,
        [below, above],
        fmt=style,
        color=color,
        label=label,
        markersize=5,
        elinewidth=0.8,
        capsize=2,
    )


def _draw_positions(axes: Any, positions: Mapping[str, Sequence[tuple[int, int]]]) -> None:
    """Draw acceptance rates by position. positions: by drafter, the verified and accepted tokens at each."""
    for order, (name, counts) in enumerate(positions.items()):
        shares = [
            (i + 1, accepted / verified)
            for i, (verified, accepted) in enumerate(counts[:_DEEPEST])
            if verified >= _FEWEST
        ]
        if shares:
            thick = max(1.0, 4.0 - 0.6 * order)  # curves that coincide are all seen
            axes.plot(
                *zip(*shares, strict=True), marker="o", markersize=3 + thick, linewidth=thick, label=name
            )
    axes.set(
        title="Acceptance by position",
        xlabel="position in the draft",
        ylabel="share of verified tokens that were accepted",
        ylim=(0, 1.02),
    )
    _legend(axes)


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False)
