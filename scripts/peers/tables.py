"""The page of a comparison, from what contest.py found, and the picture of a page. Measures nothing."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any, NamedTuple

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


class Speeds(NamedTuple):
    """Tokens a second of an engine's plain decoding, and of its drafting method with the best speed-up over that, as far as measured and
    with the text of plain decoding."""

    plain: float | None = None
    drafted: float | None = None
    speedup: float | None = None

    def with_cell(self, cell: str, *, is_plain: bool) -> Speeds:
        speed = re.match(r"(\d+)(?:; \*\*([\d.]+)x)?", cell)
        if speed is None:
            return self
        if is_plain:
            return self._replace(plain=float(speed[1]))
        if speed[2] is None or float(speed[2]) <= (self.speedup or 0):
            return self
        return self._replace(drafted=float(speed[1]), speedup=float(speed[2]))


def speeds(page: str) -> dict[str, dict[str, dict[str, Speeds]]]:
    """Dtype -> workload -> engine -> its speeds with one row, out of the tables of a page."""
    found: dict[str, dict[str, dict[str, Speeds]]] = {}
    dtype, workloads, is_wanted = "", list[str](), False
    for line in page.splitlines():
        if line.startswith("## "):
            dtype = line[3:]
        elif line.startswith("### "):
            is_wanted, workloads = line == "### Drafting, 1 row", []
        elif is_wanted and line.startswith("| "):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            if not workloads:
                workloads = cells
                continue
            engine = next(n for n in ORDER if name.startswith(f"{n} "))
            for workload, cell in zip(workloads, cells, strict=True):
                by = found.setdefault(dtype, {}).setdefault(workload, {})
                by[engine] = by.get(engine, Speeds()).with_cell(cell, is_plain=name == f"{engine} plain")
    return found


def plot(page: str, path: Path) -> None:
    """A picture of a page's tables: tokens a second of each engine by workload, one row, plain and with its best drafting method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = speeds(page)
    figure, axes = plt.subplots(len(found), 1, figsize=(10, 3.4 * len(found)), squeeze=False)
    for axis, (dtype, workloads) in zip(axes[:, 0], found.items(), strict=True):
        engines = [n for n in ORDER if any(n in by for by in workloads.values())]
        width = 0.86 / (2 * len(engines))
        for i, name in enumerate(engines):
            middle = (i - (len(engines) - 1) / 2) * 2 * width
            by_engine = [by.get(name, Speeds()) for by in workloads.values()]
            left = [x + middle - width / 2 for x in range(len(by_engine))]
            axis.bar(left, [s.plain or 0 for s in by_engine], width, color=COLOURS[name], alpha=0.4)
            right = [x + width for x in left]
            bars = axis.bar(
                right, [s.drafted or 0 for s in by_engine], width, color=COLOURS[name], label=name
            )
            ratios = ["" if s.speedup is None else f"{s.speedup:.2f}x" for s in by_engine]
            axis.bar_label(bars, ratios, fontsize=8, rotation=90, padding=2)
        axis.set_xticks(range(len(workloads)), list(workloads))
        axis.set_title(dtype, fontsize=10, loc="left")
        axis.set_ylabel("tokens a second")
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(0, 1.2 * axis.get_ylim()[1])  # room for the labels
    figure.legend(*axes[0][0].get_legend_handles_labels(), frameon=False, ncols=len(ORDER), loc="upper right")
    figure.suptitle(
        "pale: plain decoding. full: best drafting method, with its speed over plain",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
