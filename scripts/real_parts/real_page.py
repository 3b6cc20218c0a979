"""Results of bench_real_model.py as docs/data/real-model.json and as tables of docs/real-model.md. Knows rows; runs nothing."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from real_parts.prompts import KINDS

Row = Mapping[str, Any]
PEER = "mlx-lm.jsonl"
OURS = {"float32": "float32", "bfloat16": "bfloat16", "4bit": "4 bits"}
TEMPERATURES = (0.0, 1.0)


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a file; a last line that an interruption cut is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def write(results: Path, docs: Path) -> None:
    """Both files, from what `results` holds. The page must be there: its text stays, its tables are written anew."""
    modes = {mode: read(results / f"{mode}.jsonl") for mode in OURS}
    found = summary({**modes, "float32": compared(modes["float32"], read(results / PEER))}, _timed(results))
    data = docs / "data" / "real-model.json"
    data.parent.mkdir(exist_ok=True)
    data.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    page = docs / "real-model.md"
    page.write_text(filled(page.read_text(encoding="utf-8"), found), encoding="utf-8")


def compared(rows: Sequence[Row], peer: Sequence[Row]) -> list[Row]:
    """Rows of plain decoding in float32, with whether mlx-lm's text for the same prompt is the same; rows without one as they are."""
    known = {(row["name"], row["digest"]): row["tokens"] for row in peer if "name" in row}

    def with_peer(row: Row) -> Row:
        expected = known.get((row.get("name"), row.get("digest")))
        return row if expected is None else {**row, "same_peer": expected == row["tokens"]}

    return [with_peer(row) for row in rows]


def _timed(results: Path) -> dict[str, Any] | None:
    path = results / "timed.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def summary(modes: Mapping[str, Sequence[Row]], timed: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the page says, by mode and kind. modes: each mode's rows; timed: what --timed wrote, None where it has not run."""
    texts, differences, memory, commits = {}, [], {}, set()
    for mode, rows in modes.items():
        prompts = [row for row in rows if "name" in row]
        texts[mode] = {kind: _counts([r for r in prompts if r["kind"] == kind]) for kind in KINDS}
        differences += [_difference(mode, row) for row in prompts if _differs(row)]
        ends = [row["summary"] for row in rows if "summary" in row]
        memory[mode] = {k: max(e[k] for e in ends) for k in ("peak_bytes", "weight_bytes")} if ends else None
        commits |= {row["commit"] for row in prompts}
    return {
        "commits": sorted(commits),
        "python": platform.python_version(),
        "texts": texts,
        "flips": {mode: _flips(rows) for mode, rows in modes.items()},
        "differences": differences,
        "memory": memory,
        "speeds": None if timed is None else _speeds(timed),
    }


def _counts(rows: Sequence[Row]) -> dict[str, int]:
    compared = [row for row in rows if "same_peer" in row]
    return {
        "prompts": len(rows),
        "same_drafted": sum(row["same_drafted"] for row in rows),
        "compared_with_mlx_lm": len(compared),
        "same_as_mlx_lm": sum(row["same_peer"] for row in compared),
        "longest_prompt": max((row["prompt"] for row in rows), default=0),
        **{name: sum(row[name] for row in rows) for name in ("prompt", *_SUMS)},
    }


_SUMS = ("cached", "drafted", "accepted", "rounds", "decoded")


def _differs(row: Row) -> bool:
    return not row["same_drafted"] or not row.get("same_peer", True)


def _difference(mode: str, row: Row) -> dict[str, Any]:
    kept = ("name", "same_drafted", "same_hit", "flip", "same_peer", "peer_flip")
    return {"mode": mode} | {k: row[k] for k in kept if k in row}


def _flips(rows: Iterable[Row]) -> dict[str, Any]:
    """Drafted texts that part from plain ones; each parts once, so tokens are counted up to there."""
    prompts = [row for row in rows if "name" in row]
    parted = [row["flip"] for row in prompts if not row["same_drafted"]]
    gaps = [flip["gap"] for flip in parted if flip["gap"] is not None]
    compared = sum(row["flip"]["place"] + 1 if "flip" in row else len(row["tokens"]) for row in prompts)
    return {
        "flips": len(parted),
        "also_without_drafts": sum(row.get("same_hit") is False for row in prompts),
        "tokens": compared,
        "per_1000_tokens": 1000 * len(parted) / compared if compared else None,
        "largest_gap": max(gaps, default=None),
    }


def _speeds(timed: Mapping[str, Any]) -> dict[str, Any]:
    rows = timed["rows"]
    by = {
        f"temperature {temperature:g}": {
            kind: _ratios([r for r in rows if (r["kind"], r["temperature"]) == (kind, temperature)])
            for kind in KINDS
        }
        for temperature in TEMPERATURES
    }
    return {"machine": timed["machine"], "commit": timed["commit"], "auto_over_plain": by}


def _ratios(rows: Sequence[Row]) -> dict[str, Any]:
    ratios = sorted(row["ratio"] for row in rows if row["ratio"] is not None)
    peer = [row["llama.cpp"]["ratio"] for row in rows if row.get("llama.cpp", {}).get("ratio")]
    return {
        "prompts": len(ratios),
        "median": statistics.median(ratios) if ratios else None,
        "least": ratios[0] if ratios else None,
        "most": ratios[-1] if ratios else None,
        "same": sum(row["same"] for row in rows),
        "tokens": sum(row["decoded"] for row in rows),
        "rounds": sum(row["rounds"] for row in rows),
        "llama_cpp_median": statistics.median(peer) if peer else None,
    }


# --- tables

_NOTHING = "Not measured yet."


def filled(page: str, found: Mapping[str, Any]) -> str:
    """The page with its tables written anew, between `<!-- begin NAME -->` and `<!-- end NAME -->`."""
    tables: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "texts": texts_table,
        "flips": flips_table,
        "memory": memory_table,
        "speeds": speeds_table,
    }
    for name, table in tables.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, _, rest = page.partition(begin)
        _, mark, after = rest.partition(end)
        if not mark:
            raise ValueError(f"docs/real-model.md has no place for the table {name}.")
        page = f"{before}{begin}\n{table(found)}\n{end}{after}"
    return page


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def texts_table(found: Mapping[str, Any]) -> str:
    """Equal texts by kind."""
    if not _added(found["texts"]["float32"].values())["prompts"]:
        return _NOTHING
    rows = []
    for kind in [*KINDS, "all"]:
        by = {
            mode: _added(kinds.values()) if kind == "all" else kinds[kind]
            for mode, kinds in found["texts"].items()
        }
        first = by["float32"]
        drafted = [f"{c['same_drafted']} of {c['prompts']}" for c in by.values()]
        peer = f"{first['same_as_mlx_lm']} of {first['compared_with_mlx_lm']}"
        share = f"{first['accepted']}/{first['drafted']}"
        per_round = f"{first['decoded'] / first['rounds']:.2f}" if first["rounds"] else ""
        hits = f"{100 * first['cached'] / first['prompt']:.0f} %" if first["prompt"] else ""
        rows.append([kind, str(first["longest_prompt"]), peer, *drafted, share, per_round, hits])
    drafted_heads = [f"drafted = plain, {name}" for name in OURS.values()]
    head = [
        "kind",
        "longest prompt",
        "= mlx-lm",
        *drafted_heads,
        "accepted/drafted",
        "tokens a round",
        "prefix hits",
    ]
    return _table(head, rows)


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    every = list(counts)
    total = {name: sum(c[name] for c in every) for name in every[0]}
    return total | {"longest_prompt": max(c["longest_prompt"] for c in every)}


def flips_table(found: Mapping[str, Any]) -> str:
    """Where drafted texts part from plain ones."""
    if not any(flips["tokens"] for flips in found["flips"].values()):
        return _NOTHING
    rows = []
    for mode, name in OURS.items():
        flips = found["flips"][mode]
        rate = "" if flips["per_1000_tokens"] is None else f"{flips['per_1000_tokens']:.2f}"
        gap = "" if flips["largest_gap"] is None else f"{flips['largest_gap']:.4f}"
        rows.append(
            [name, str(flips["tokens"]), str(flips["flips"]), rate, str(flips["also_without_drafts"]), gap]
        )
    head = [
        "",
        "tokens compared",
        "flips",
        "per 1,000 tokens",
        "also plain, with a prefix hit",
        "largest gap",
    ]
    return _table(head, rows)


def memory_table(found: Mapping[str, Any]) -> str:
    rows = [
        [name, *(f"{found['memory'][mode][k] / 1e6:,.0f} MB" for k in ("weight_bytes", "peak_bytes"))]
        for mode, name in OURS.items()
        if found["memory"][mode]
    ]
    if not rows:
        return _NOTHING
    return _table(["", "weights", "peak of MLX, prefix store included"], rows)


def speeds_table(found: Mapping[str, Any]) -> str:
    """`auto` over plain by kind."""
    speeds = found["speeds"]
    if speeds is None:
        return _NOTHING
    cold, warm = (speeds["auto_over_plain"][f"temperature {t:g}"] for t in TEMPERATURES)
    peer = any(cold[kind]["llama_cpp_median"] for kind in KINDS)
    rows = []
    for kind in KINDS:
        cells = [kind, str(cold[kind]["prompts"])]
        for part in (cold[kind], warm[kind]):
            known = part["median"] is not None
            cells += [f"**{part['median']:.2f}**" if known else "", _range(part) if known else ""]
        llama = cold[kind]["llama_cpp_median"]
        rows.append([*cells, *([f"{llama:.2f}" if llama else ""] if peer else [])])
    head = ["kind", "prompts", "temperature 0", "least to most", "temperature 1", "least to most"]
    return _table([*head, *(["llama.cpp, ngram-simple"] if peer else [])], rows)


def _range(part: Mapping[str, Any]) -> str:
    return f"{part['least']:.2f} to {part['most']:.2f}"
