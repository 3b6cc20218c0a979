#!/usr/bin/env python3
"""Draws the two diagrams of docs/how-it-works.md as SVG files: the life of a round, and a cache transaction.

    python scripts/draw_diagrams.py [--to docs/pictures]

Needs Python only. A test compares the committed files with what this script draws.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INK, MUTED, LINE = "#1f2328", "#59636e", "#8c959f"
FILLS = {
    "host": "#ddf4ff",
    "device": "#fff8c5",
    "kept": "#dafbe1",
    "dropped": "#ffebe9",
    "plain": "#f6f8fa",
}
EDGES = {"host": "#0969da", "device": "#9a6700", "kept": "#1a7f37", "dropped": "#cf222e", "plain": LINE}


class Drawing:
    """Boxes, arrows and lines of text on a white ground, in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{MUTED}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            "<g font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\">",
        ]

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 14,
        color: str = INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, kind: str, lines: Sequence[str]) -> None:
        """A box whose first line is its name; the others explain it."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{FILLS[kind]}" stroke="{EDGES[kind]}"/>'
        )
        top = y + height / 2 - 9 * (len(lines) - 1) + 5
        for number, line in enumerate(lines):
            name = number == 0
            self.text(
                x + width / 2,
                top + 18 * number,
                line,
                size=14 if name else 12,
                color=INK if name else MUTED,
                anchor="middle",
                bold=name,
            )

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        way = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="{way}" fill="none" stroke="{MUTED}" stroke-width="1.5"{dash} marker-end="url(#tip)"/>'
        )

    def cells(
        self, x: float, y: float, names: Sequence[str], kinds: Sequence[str], width: float = 42
    ) -> None:
        """Tokens side by side, one small box each."""
        for i, (name, kind) in enumerate(zip(names, kinds, strict=True)):
            self.parts.append(
                f'<rect x="{x + i * width:g}" y="{y:g}" width="{width - 4:g}" height="28" rx="4" '
                f'fill="{FILLS[kind]}" stroke="{EDGES[kind]}"/>'
            )
            self.text(x + i * width + (width - 4) / 2, y + 19, name, size=13, anchor="middle")

    def svg(self) -> str:
        return "\n".join([*self.parts, "</g>", "</svg>", ""])


def life_of_a_round() -> str:
    """One round of one row whose draft has three tokens, of which two are accepted."""
    d = Drawing(900, 560, "Life of a round")
    d.text(20, 30, "Life of a round: one row, a draft of three tokens, two accepted", size=17, bold=True)
    d.box(20, 44, 14, 14, "host", [])
    d.text(40, 56, "host (Python)", size=12, color=MUTED)
    d.box(140, 44, 14, 14, "device", [])
    d.text(160, 56, "device (MLX)", size=12, color=MUTED)

    names = [
        ("1 draft", "the controller chooses a drafter,", "the drafter proposes d1 d2 d3"),
        ("2 verify", "one target forward", "over x d1 d2 d3"),
        ("3 sample", "one choice a position,", "noise keyed by seed and position"),
        ("4 accept", "drafts equal to the choice", "before them, up to the first miss"),
        ("5 commit", "the cache keeps x d1 d2", "and drops d3"),
        ("6 observe, emit", "drafters hear d1 d2 c3,", "text goes to the caller"),
    ]
    kinds = ["host", "device", "device", "host", "host", "host"]
    for i, (lines, kind) in enumerate(zip(names, kinds, strict=True)):
        x, y = 20 + (i % 3) * 298, 80 if i < 3 else 330
        d.box(x, y, 264, 76, kind, lines)
        if i % 3 != 2:
            d.arrow((x + 264, y + 38), (x + 296, y + 38))
    d.arrow((884, 118), (892, 118), (892, 306), (12, 306), (12, 368), (19, 368))

    d.cells(20, 180, ["x"], ["kept"])
    d.cells(74, 180, ["d1", "d2", "d3"], ["plain"] * 3)
    d.text(20, 232, "x is the newest token of the text.", size=12, color=MUTED)
    d.text(20, 248, "It is not in the cache yet.", size=12, color=MUTED)
    d.cells(318, 180, ["x", "d1", "d2", "d3"], ["plain"] * 4)
    d.text(318, 232, "Rows of a batch lie behind one another;", size=12, color=MUTED)
    d.text(318, 248, "each may have a draft of its own length.", size=12, color=MUTED)
    d.cells(616, 180, ["c1", "c2", "c3", "c4"], ["plain"] * 4)
    d.text(616, 232, "c1 is what the target says after x,", size=12, color=MUTED)
    d.text(616, 248, "c2 what it says after d1, and so on.", size=12, color=MUTED)

    d.cells(20, 430, ["d1 = c1", "d2 = c2", "d3 ≠ c3"], ["kept", "kept", "dropped"], width=70)
    d.text(20, 482, "c3 replaces d3. c4 is not used,", size=12, color=MUTED)
    d.text(20, 498, "because it follows a wrong token.", size=12, color=MUTED)
    d.cells(318, 430, ["x", "d1", "d2", "d3"], ["kept", "kept", "kept", "dropped"])
    d.text(318, 482, "No state is copied: see the", size=12, color=MUTED)
    d.text(318, 498, "picture of a cache transaction.", size=12, color=MUTED)
    d.cells(616, 430, ["d1", "d2", "c3"], ["kept"] * 3)
    d.text(616, 482, "The text has gained three tokens.", size=12, color=MUTED)
    d.text(616, 498, "c3 is the x of the next round.", size=12, color=MUTED)

    d.text(
        20,
        538,
        "A round without drafts is plain decoding. Its token is certain, so its state is committed at once.",
        size=13,
    )
    return d.svg()


def cache_transaction() -> str:
    """What begin, append and commit do to the two kinds of layers, and the replay in the next forward."""
    d = Drawing(900, 575, "A cache transaction")
    d.text(20, 30, "A cache transaction: four tokens are appended, three are kept", size=17, bold=True)
    columns = [20, 318, 616]
    heads = [
        ("begin, append", "the forward writes x d1 d2 d3"),
        ("commit(kept = 3)", "x d1 d2 are accepted"),
        ("next forward", "tokens c3 e1 e2"),
    ]
    for x, (name, what) in zip(columns, heads, strict=True):
        d.box(x, 48, 264, 52, "host", [name, what])
    for x in columns[:2]:
        d.arrow((x + 264, 74), (x + 296, 74))

    d.text(20, 134, "Attention layer: keys and values in a growing buffer", size=14, bold=True)
    past = ["plain"] * 2
    d.cells(
        20, 148, ["a", "b", "x", "d1", "d2", "d3"], [*past, "device", "device", "device", "device"], width=40
    )
    d.cells(318, 148, ["a", "b", "x", "d1", "d2", "d3"], [*past, "kept", "kept", "kept", "dropped"], width=40)
    d.cells(
        616,
        148,
        ["a", "b", "x", "d1", "d2", "c3", "e1", "e2"],
        [*past, *["kept"] * 3, *["device"] * 3],
        width=33,
    )
    d.text(20, 198, "written behind the row's end", size=12, color=MUTED)
    d.text(318, 198, "only the length changes: 5", size=12, color=MUTED)
    d.text(616, 198, "d3 is written over", size=12, color=MUTED)

    d.text(
        20,
        250,
        "Recurrent layer (Gated DeltaNet): one state of fixed size, which has no length",
        size=14,
        bold=True,
    )
    d.box(20, 264, 110, 56, "plain", ["S before", "kept as it is"])
    d.box(146, 264, 138, 56, "device", ["tape of 4", "x d1 d2 d3"])
    d.box(318, 264, 110, 56, "plain", ["S before", "kept as it is"])
    d.box(444, 264, 138, 56, "kept", ["tape, count 3", "x d1 d2 are kept"])
    d.box(616, 264, 264, 56, "device", ["S = replay of 3, then run", "replay gives the forward's own bits"])
    d.text(20, 344, "y = S q is computed on the way; the tape", size=12, color=MUTED)
    d.text(20, 360, "holds what each token did to S: k, delta, g", size=12, color=MUTED)
    d.text(318, 344, "commit stores one number a row;", size=12, color=MUTED)
    d.text(318, 360, "no state is copied, nothing is undone", size=12, color=MUTED)
    d.text(616, 344, "first the accepted tokens of the tape are", size=12, color=MUTED)
    d.text(616, 360, "applied, then c3 e1 e2 make a new tape", size=12, color=MUTED)

    d.text(20, 412, "The other ways to end a transaction", size=14, bold=True)
    d.box(
        20,
        428,
        264,
        64,
        "dropped",
        ["abort()", "nothing of the forward is kept", "lengths and S are as before"],
    )
    d.box(
        318,
        428,
        264,
        64,
        "plain",
        ["commit() of certain tokens", "prompts and plain steps:", "S itself advances, there is no tape"],
    )
    d.box(
        616,
        428,
        264,
        64,
        "plain",
        ["fork()", "a cache that drafters run ahead on;", "it ends when its parent writes"],
    )
    d.text(
        20,
        530,
        "Invariant: after any sequence of these calls, the next forward sees exactly what it would have seen if only the committed",
        size=13,
    )
    d.text(
        20, 550, "tokens had ever been appended. A property test holds this for every kind of layer.", size=13
    )
    return d.svg()


DIAGRAMS = {"life-of-a-round.svg": life_of_a_round, "cache-transaction.svg": cache_transaction}


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the diagrams of docs/how-it-works.md.")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "pictures", help="folder to write to")
    folder = parser.parse_args().to
    for name, draw in DIAGRAMS.items():
        (folder / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
