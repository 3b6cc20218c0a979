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
PEER, MEMORY, LLAMA = "mlx-lm.jsonl", "memory.jsonl", "llama.cpp.jsonl"
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
    peer = read(results / PEER)
    found = summary(
        {**modes, "float32": compared(modes["float32"], peer)},
        _timed(results),
        memory=read(results / MEMORY),
        llama=read(results / LLAMA),
    )
    data = docs / "data" / "real-model.json"
    data.parent.mkdir(exist_ok=True)
    # speeds of an earlier run, which say their own commit and machine
    if found["speeds"] is None and data.is_file():
        found["speeds"] = json.loads(data.read_text(encoding="utf-8"))["speeds"]
    data.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    page = docs / "real-model.md"
    page.write_text(filled(page.read_text(encoding="utf-8"), found), encoding="utf-8")


def compared(rows: Sequence[Row], peer: Sequence[Row]) -> list[Row]:
    """Rows of plain decoding in float32, with whether mlx-lm's text for the same prompt is the same; rows without one as they are."""
    known = {(row["name"], row["digest"]): row for row in peer if "name" in row}

    def with_peer(row: Row) -> Row:
        other = known.get((row.get("name"), row.get("digest")))
        if other is None:
            return row
        found = {**row, "same_peer": other["tokens"] == row["tokens"]}
        return {**found, "peer_decoded": other["decoded"], "peer_read": other["read"]}

    return [with_peer(row) for row in rows]


def _timed(results: Path) -> dict[str, Any] | None:
    path = results / "timed.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def summary(
    modes: Mapping[str, Sequence[Row]],
    timed: Mapping[str, Any] | None,
    *,
    memory: Sequence[Row] = (),
    llama: Sequence[Row] = (),
) -> dict[str, Any]:
    """What the page says, by mode and kind. modes: each mode's rows; timed: what --timed wrote, None where it has not run; memory, llama:
    rows of --memory and of --llama-server."""
    texts, differences, commits = {}, [], set()
    for mode, rows in modes.items():
        prompts = [row for row in rows if "name" in row]
        texts[mode] = {kind: _counts([r for r in prompts if r["kind"] == kind]) for kind in KINDS}
        differences += [_difference(mode, row) for row in prompts if _differs(row)]
        commits |= {row["commit"] for row in prompts}
    return {
        "commits": sorted(commits),
        "python": platform.python_version(),
        "texts": texts,
        "flips": {mode: _flips(rows) for mode, rows in modes.items()},
        "differences": differences,
        "mlx_lm": _readings(modes["float32"]),
        "memory": list(memory),
        "llama_cpp": {
            kind: _llama([row for row in llama if row["kind"] == kind], modes["float32"]) for kind in KINDS
        },
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


def _readings(rows: Sequence[Row]) -> dict[str, Any]:
    """How many of mlx-lm's texts it decoded token by token, how many it only read, and the smallest lead of a token that it read."""
    found = [row for row in rows if "same_peer" in row]
    margins = [row["peer_read"]["margin"] for row in found if row["peer_read"] and row["peer_read"]["sure"]]
    decoded = sum(row["peer_decoded"] for row in found)
    return {"decoded": decoded, "read": len(found) - decoded, "smallest_lead": min(margins, default=None)}


def _llama(rows: Sequence[Row], ours: Sequence[Row]) -> dict[str, Any]:
    """Counts of both for the prompts that both ran."""
    known = {(row["name"], row["digest"]): row for row in ours if "name" in row}
    both = [(row, known[key]) for row in rows if (key := (row["name"], row["digest"])) in known]
    ratios = [row["plain_seconds"] / row["seconds"] for row, _ in both if row["seconds"]]
    sums = ("decoded", "rounds", "drafted", "accepted")
    return {
        "prompts": len(both),
        "same": sum(row["same"] for row, _ in both),
        "llama_cpp": {name: sum(row[name] for row, _ in both) for name in sums},
        "mlxspec": {name: sum(own[name] for _, own in both) for name in sums},
        "speed_up": statistics.median(ratios) if ratios else None,
    }


_SUMS = ("cached", "drafted", "accepted", "rounds", "decoded")


def _differs(row: Row) -> bool:
    return not row["same_drafted"] or not row.get("same_peer", True)


def _difference(mode: str, row: Row) -> dict[str, Any]:
    kept = ("name", "same_drafted", "same_hit", "flip", "same_peer", "peer_read")
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
    return {
        "prompts": len(ratios),
        "median": statistics.median(ratios) if ratios else None,
        "least": ratios[0] if ratios else None,
        "most": ratios[-1] if ratios else None,
        "same": sum(row["same"] for row in rows),
        "tokens": sum(row["decoded"] for row in rows),
        "rounds": sum(row["rounds"] for row in rows),
    }


# --- tables

_NOTHING = "Not measured yet."


def filled(page: str, found: Mapping[str, Any]) -> str:
    """The page with its tables written anew, between `<!-- begin NAME -->` and `<!-- end NAME -->`."""
    tables: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "texts": texts_table,
        "flips": flips_table,
        "memory": memory_table,
        "llama": llama_table,
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
    return _table(head, rows) + "\n\n" + _said_of_readings(found["mlx_lm"])


def _said_of_readings(found: Mapping[str, Any]) -> str:
    lead = found["smallest_lead"]
    smallest = "" if lead is None else f" The smallest lead of a token that it read was {lead:.4f}."
    return (
        f"mlx-lm decoded {found['decoded']} of these texts token by token and read {found['read']}.{smallest}"
    )


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
        counts = [str(flips[k]) for k in ("tokens", "flips")]
        rows.append([name, *counts, rate, str(flips["also_without_drafts"]), gap])
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
    """Peaks by dtype and length of the prompt."""
    if not found["memory"]:
        return _NOTHING
    names = ("weight_bytes", "peak_bytes", "resident_bytes")
    order = {mode: i for i, mode in enumerate(OURS)}
    rows = [
        [OURS[row["mode"]], f"{row['prompt']:,}", *(f"{row[k] / 1e6:,.0f} MB" for k in names)]
        for row in sorted(found["memory"], key=lambda row: (order[row["mode"]], row["prompt"]))
    ]
    head = ["", "tokens of the prompt", "weights", "peak of MLX behind the load", "peak of the process"]
    return _table(head, rows)


def llama_table(found: Mapping[str, Any]) -> str:
    """n-gram drafting of both, by kind."""
    rows = []
    for kind, both in found["llama_cpp"].items():
        if both["prompts"]:
            cells = [kind, str(both["prompts"]), f"{both['same']} of {both['prompts']}"]
            for name in ("mlxspec", "llama_cpp"):
                counts = both[name]
                cells.append(f"{counts['accepted']}/{counts['drafted']}")
                cells.append(f"{counts['decoded'] / counts['rounds']:.2f}" if counts["rounds"] else "")
            rows.append([*cells, f"{both['speed_up']:.2f}" if both["speed_up"] else ""])
    if not rows:
        return _NOTHING
    ours = ["mlxspec: accepted/drafted", "tokens a round"]
    theirs = [
        "llama.cpp: drafted = plain",
        "llama.cpp: accepted/drafted",
        "tokens a round",
        "time of plain / drafted",
    ]
    return _table(["kind", "prompts", theirs[0], *ours, *theirs[1:]], rows)


def speeds_table(found: Mapping[str, Any]) -> str:
    """`auto` over plain by kind."""
    speeds = found["speeds"]
    if speeds is None:
        return _NOTHING
    cold, warm = (speeds["auto_over_plain"][f"temperature {t:g}"] for t in TEMPERATURES)
    rows = []
    for kind in KINDS:
        cells = [kind, str(cold[kind]["prompts"])]
        for part in (cold[kind], warm[kind]):
            known = part["median"] is not None
            cells += [f"**{part['median']:.2f}**" if known else "", _range(part) if known else ""]
        rows.append(cells)
    head = ["kind", "prompts", "temperature 0", "least to most", "temperature 1", "least to most"]
    return _table(head, rows)


def _range(part: Mapping[str, Any]) -> str:
    return f"{part['least']:.2f} to {part['most']:.2f}"
