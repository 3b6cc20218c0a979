"""The page and the plot of a comparison. Knows what contest.py found; measures nothing."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

ORDER = ("mlxspec", "mlx-lm", "mlx-vlm", "llama.cpp")
COLOURS = {"mlxspec": "#1b6ca8", "mlx-lm": "#8a8a8a", "mlx-vlm": "#c77f2a", "llama.cpp": "#3c8d5a"}
INTRO = """\
# Side by side

The demo family (4.4M-parameter Qwen3.5-style hybrid with an MTP head, 0.9M draft model) through four engines on one machine's CPU, in
turn, in one run of `scripts/compare_peers.py`: every engine in a process of its own, fed the same token ids, answers as long as plain
decoding's. Figures are medians over rounds; speed-ups are medians of ratios within rounds, over the *same engine's* plain decoding. A
speed-up stands only where the engine's drafted text equals its plain text. Nothing here was run on Apple hardware, and a model this
small says nothing about how large ones do there: it compares what engines spend around the arithmetic, and llama.cpp's CPU kernels with
MLX's.
"""
HOST = [
    "*Host busy* is the share of a round's wall time in which the calling thread computed; *time outside evaluation* the share in which",
    "the thread that MLX evaluates on did not, so waited for the host. They overlap: a host that is ahead keeps nobody waiting.",
]


def page(found: dict[str, Any]) -> str:
    """Markdown of everything that was found."""
    machine = found["machine"]
    lines = [
        INTRO,
        f"Machine: {machine['device']}, {machine['threads']} threads, BLAS {machine['blas']}, {machine['system']}.",
        "",
    ]
    for name, why in found["missing"].items():
        lines += [f"**{name} is missing:** {why}", ""]
    for dtype, part in found["dtypes"].items():
        versions = ", ".join(f"{name} {version}" for name, version in part["versions"].items())
        lines += [f"## {dtype}", "", versions + ".", ""]
        lines += _plain(part) if "decode" in part else []
        for num_rows in (1, 4):
            lines += _drafting(part, num_rows) if f"rows {num_rows}" in part else []
        lines += _lacking(part)
    return "\n".join(lines).rstrip() + "\n"


def _plain(part: dict[str, Any]) -> list[str]:
    names = [n for n in ORDER if n in part["decode"]]
    rows = [["", *names]]
    for length, by in part["prefill"].items():
        rows.append([f"prefill of {length}, ms", *(f"{1e3 * by[n]['seconds']:.0f}" for n in names)])
    for length, by in part["prefill"].items():
        rows.append(
            [f"prefill of {length}, its time over ours", *(f"{by[n]['over ours']:.2f}" for n in names)]
        )
    decode = part["decode"]
    rows.append(["plain decode of 256, tok/s", *(f"{decode[n]['tok/s']:.0f}" for n in names)])
    rows.append(["our speed over its", *(f"{1 / decode[n]['over ours']:.2f}" for n in names)])
    rows.append(["host busy, share of a plain round", *(_share(decode[n]["host busy"]) for n in names)])
    rows.append(["time outside evaluation, plain round", *(_outside([decode[n]]) for n in names)])
    rows.append(["the same, MTP round", *(_outside(_mtp(part, n)) for n in names)])
    rows.append(
        ["graph nodes a step", *(str(part["nodes"][n].get("nodes", {}).get("1", "–")) for n in names)]
    )
    rows.append(["peak memory, MB", *(_megabytes(part["memory"][n]) for n in names)])
    return ["### Plain decoding and prefill", "", *_table(rows), *HOST, ""]


def _drafting(part: dict[str, Any], num_rows: int) -> list[str]:
    lines = [f"### Drafting, {num_rows} row{'s' * (num_rows > 1)}", ""]
    workloads = part[f"rows {num_rows}"]
    rows = [["", *(f"{w}" for w in workloads)]]
    for name in ORDER:
        methods = {m for by in workloads.values() for m in by.get(name, {})}
        for method in sorted(methods, key=lambda m: (m != "plain", m)):
            cells = [_cell(by.get(name, {}).get(method), method) for by in workloads.values()]
            rows.append([f"{name} {method.replace('fixed:', '').replace('auto:', 'auto ')}", *cells])
    note = "tok/s"
    note += "; speed-up over the engine's own plain; accepted share of drafts" + (
        "; tokens a round" if num_rows == 1 else ""
    )
    return [*lines, f"Cells: {note}. {part[f'said {num_rows}']}", "", *_table(rows)]


def _cell(figures: dict[str, Any] | None, method: str) -> str:
    if figures is None:
        return "–"
    parts = [f"{figures['tok/s']:.0f}"]
    if method != "plain":
        same, of = figures["same text"]
        parts.append(
            f"**{figures['speed-up']:.2f}x**" if same == of else f"text differs in {of - same} of {of}"
        )
        if figures["acceptance"] is not None:
            parts.append(f"{100 * figures['acceptance']:.0f} %")
        if figures["tokens a round"] is not None:
            parts.append(f"{figures['tokens a round']:.2f}")
    return "; ".join(parts)


def _lacking(part: dict[str, Any]) -> list[str]:
    reasons = [f"- {what}: {why}" for what, why in sorted(part["lacks"].items())]
    return ["Not run:", "", *reasons, ""] if reasons else []


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _outside(figures: list[dict[str, Any]]) -> str:
    """Share of rounds in which MLX evaluated nothing, the middle one of several."""
    known = [1 - f["evaluating"] for f in figures if f["evaluating"] is not None]
    return _share(statistics.median(known) if known else None)


def _mtp(part: dict[str, Any], engine: str) -> list[dict[str, Any]]:
    """Figures of an engine's MTP drafting alone, one row, by workload."""
    methods = [by.get(engine, {}) for by in part["rows 1"].values()]
    return [f for by in methods for name, f in by.items() if name in ("mtp", "fixed:mtp")]


def _megabytes(answer: dict[str, Any]) -> str:
    return f"{answer['bytes'] / 1e6:.0f}" if answer.get("bytes") else "–"


def _table(rows: list[list[str]]) -> list[str]:
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in body), ""]


def plot(found: dict[str, Any], path: Path) -> None:
    """Speed-up over own plain decoding, best method of each engine by workload, one row; bars are labelled with tok/s."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    dtypes = [dtype for dtype, part in found["dtypes"].items() if "rows 1" in part]
    figure, axes = plt.subplots(1, len(dtypes), figsize=(6.5 * len(dtypes), 4), squeeze=False, sharey=True)
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        workloads = found["dtypes"][dtype]["rows 1"]
        engines = [n for n in ORDER if any(n in by for by in workloads.values())]
        width = 0.8 / len(engines)
        for i, name in enumerate(engines):
            best = [_best(by.get(name, {})) for by in workloads.values()]
            places = [x + (i - (len(engines) - 1) / 2) * width for x in range(len(best))]
            bars = axis.bar(places, [b[0] for b in best], width, color=COLOURS[name], label=name)
            axis.bar_label(bars, [f"{b[1]:.0f}" for b in best], fontsize=7, rotation=90, padding=2)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(workloads)), list(workloads))
        axis.set_title(f"{dtype}: best method over own plain decoding (labels: tok/s)", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("speed-up")
    top = axes[0][0].get_ylim()[1]
    axes[0][0].set_ylim(0, 1.25 * top)  # room for labels and the legend above them
    axes[0][0].legend(frameon=False, fontsize=8, ncols=len(ORDER), loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _best(methods: dict[str, Any]) -> tuple[float, float]:
    """(speed-up, tok/s) of the fastest method whose text is that of plain."""
    honest = [f for f in methods.values() if f["same text"][0] == f["same text"][1]]
    top = max(honest, key=lambda f: f["speed-up"], default=None)
    return (top["speed-up"], top["tok/s"]) if top else (0.0, 0.0)
