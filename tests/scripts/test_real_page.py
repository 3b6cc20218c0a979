"""What bench_real_model.py says of its results: counts, flips and ratios by kind, tables in a page; and the prompts that it asks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from real_parts import real_page
from real_parts.prompts import KINDS, LENGTHS, PER_KIND, prompts

ROOT = Path(real_page.__file__).resolve().parents[2]


def row(kind: str, number: int, **changes: Any) -> dict[str, Any]:
    found = {
        "name": f"{kind}-{number:02}",
        "kind": kind,
        "digest": "d",
        "prompt": 100 + number,
        "commit": "abc",
        "tokens": list(range(10)),
        "cached": 50,
        "drafted": 8,
        "accepted": 6,
        "rounds": 3,
        "decoded": 9,
        "same_drafted": True,
    }
    return found | changes


def timed(kind: str, temperature: float, ratio: float | None, **changes: Any) -> dict[str, Any]:
    found = {
        "kind": kind,
        "temperature": temperature,
        "ratio": ratio,
        "decoded": 9,
        "rounds": 4,
        "same": True,
    }
    return found | changes


SURE = {"sure": True, "margin": 0.0042, "place": 3}
MEMORY = [
    {"mode": mode, "prompt": prompt, "weight_bytes": 1e6, "peak_bytes": peak, "resident_bytes": 3e6}
    for mode, prompt, peak in (("4bit", 2000, 2e6), ("float32", 8000, 2.5e6), ("float32", 2000, 2e6))
]
LLAMA = [
    {"name": name, "kind": "code", "digest": "d", "decoded": 9, "rounds": 3, "drafted": 8, "accepted": 6}
    | {"plain_seconds": 3.0, "seconds": 2.0, "same": True}
    for name in ("code-00", "code-07")
]
MODES = {
    "float32": [
        row("code", 0, same_peer=True, peer_decoded=False, peer_read=SURE),
        row("code", 1, same_peer=False, peer_decoded=True, peer_read=None),
        row("json", 0),
        {"summary": {"peak_bytes": 3_000_000, "weight_bytes": 1_000_000}, "commit": "abc"},
        {"summary": {"peak_bytes": 2_000_000, "weight_bytes": 1_000_000}, "commit": "abc"},
    ],
    "bfloat16": [
        row("code", 0, same_drafted=False, same_hit=False, flip={"place": 4, "gap": 0.01}),
        row("code", 1, same_drafted=False, same_hit=True, flip={"place": 9, "gap": None}, commit="abd"),
        row("json", 0),
    ],
    "4bit": [],
}
TIMED = {
    "machine": {"device": "cpu"},
    "commit": "abe",
    "rows": [
        *(timed("code", 0.0, ratio) for ratio in (1.5, 1.0, 2.0)),
        timed("code", 0.0, None, decoded=0),
        timed("code", 1.0, 0.9, same=False),
        timed("json", 0.0, 1.2),
    ],
}


def test_texts_are_compared_with_mlx_lms_for_the_same_prompt() -> None:
    peer = [
        {"name": "code-00", "digest": "d", "tokens": list(range(10)), "decoded": False, "read": SURE},
        {"name": "code-01", "digest": "d", "tokens": list(range(9)), "decoded": True, "read": None},
        {"name": "json-00", "digest": "another prompt", "tokens": [], "decoded": True, "read": None},
        {"summary": {}},
    ]
    rows = [row("code", 0), row("code", 1), row("json", 0), {"summary": {}}]
    assert [r.get("same_peer") for r in real_page.compared(rows, peer)] == [True, False, None, None]


def test_texts_and_flips_are_counted() -> None:
    found = real_page.summary(MODES, None)
    code = found["texts"]["float32"]["code"]
    assert (code["prompts"], code["same_as_mlx_lm"], code["compared_with_mlx_lm"]) == (2, 1, 2)
    assert (code["same_drafted"], code["longest_prompt"], code["accepted"]) == (2, 101, 12)
    assert found["texts"]["float32"]["json"]["compared_with_mlx_lm"] == 0
    flips = found["flips"]["bfloat16"]
    # 5 tokens up to the first flip, 10 up to the second, 10 of the text that is the same
    assert (flips["flips"], flips["tokens"], flips["per_1000_tokens"]) == (2, 25, 80)
    assert (flips["also_without_drafts"], flips["largest_gap"]) == (1, 0.01)
    assert found["flips"]["4bit"]["per_1000_tokens"] is None
    assert [(d["mode"], d["name"]) for d in found["differences"]] == [
        ("float32", "code-01"),
        ("bfloat16", "code-00"),
        ("bfloat16", "code-01"),
    ]
    assert found["mlx_lm"] == {"decoded": 1, "read": 1, "smallest_lead": 0.0042}
    assert found["commits"] == ["abc", "abd"]


def test_speeds_are_medians_by_kind() -> None:
    speeds = real_page.summary(MODES, TIMED)["speeds"]["auto_over_plain"]
    code = speeds["temperature 0"]["code"]
    assert (code["prompts"], code["median"], code["least"], code["most"], code["same"]) == (
        3,
        1.5,
        1.0,
        2.0,
        4,
    )
    assert speeds["temperature 1"]["code"]["same"] == 0
    assert speeds["temperature 0"]["long"]["median"] is None


def test_the_page_keeps_its_text_and_gets_its_tables(tmp_path: Path) -> None:
    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    docs.mkdir()
    shutil.copyfile(ROOT / "docs" / "real-model.md", docs / "real-model.md")
    peer = [row("code", n, tokens=list(range(10 - n)), decoded=False, read=SURE) for n in (0, 1)]
    for mode, rows in {**MODES, "mlx-lm": peer}.items():
        text = "".join(json.dumps(r) + "\n" for r in rows)
        (results / f"{mode}.jsonl").write_text(text + '{"name": "code-0')  # an interrupted line
    for name, lines in ((real_page.MEMORY, MEMORY), (real_page.LLAMA, LLAMA)):
        (results / name).write_text("".join(json.dumps(r) + "\n" for r in lines))
    (results / "timed.json").write_text(json.dumps(TIMED))
    real_page.write(results, docs)
    page = (docs / "real-model.md").read_text()
    assert "| code | 101 | 1 of 2 | 2 of 2 | 0 of 2 | 0 of 0 | 12/16 | 3.00 | 50 % |" in page
    assert "| all | 101 | 1 of 2 | 3 of 3 | 1 of 3 | 0 of 0 |" in page
    assert "mlx-lm decoded 0 of these texts token by token and read 2. The smallest lead" in page
    assert "| bfloat16 | 25 | 2 | 80.00 | 1 | 0.0100 |" in page
    assert "| code | 3 | **1.50** | 1.00 to 2.00 | **0.90** | 0.90 to 0.90 |" in page
    lines = ["| float32 | 2,000 | 1 MB | 2 MB | 3 MB |", "| float32 | 8,000 | 1 MB | 2 MB | 3 MB |"]
    assert "\n".join([*lines, "| 4 bits | 2,000 | 1 MB | 2 MB | 3 MB |"]) in page
    assert "| code | 1 | 1 of 1 | 6/8 | 3.00 | 6/8 | 3.00 | 1.50 |" in page
    real_page.write(results, docs)
    assert (docs / "real-model.md").read_text() == page
    (results / "timed.json").unlink()  # speeds of an earlier run stay
    real_page.write(results, docs)
    assert (docs / "real-model.md").read_text() == page


def test_the_page_in_the_docs_shows_its_data() -> None:
    data = json.loads((ROOT / "docs" / "data" / "real-model.json").read_text())
    page = (ROOT / "docs" / "real-model.md").read_text()
    assert real_page.filled(page, data) == page


def test_a_page_without_results_says_so() -> None:
    page = (ROOT / "docs" / "real-model.md").read_text()
    found = real_page.summary({mode: [] for mode in MODES}, None)
    assert real_page.filled(page, found).count("Not measured yet.") == 5


def test_a_page_without_places_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for the table texts"):
        real_page.filled("# A page\n", real_page.summary(MODES, None))


@pytest.mark.slow
def test_prompts_are_the_same_ones_on_every_run() -> None:
    """Also in another process, whose hashes are others."""

    def encode(text: str) -> list[int]:
        return list(text.encode())

    found = prompts(encode)
    assert Counter(p.kind for p in found) == dict.fromkeys(KINDS, PER_KIND)
    assert len({p.tokens for p in found}) == len(found)
    assert [len(p.tokens) for p in found if p.kind == "long"] == [n for lengths in LENGTHS for n in lengths]
    code = (
        "import sys; sys.path[:0] = ['scripts']\nfrom real_parts.prompts import prompts\n"
        "print([(p.name, p.tokens) for p in prompts(lambda t: list(t.encode()), per_kind=2)])"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    first = [(p.name, p.tokens) for p in found if int(p.name[-2:]) < 2]
    assert other.strip() == str(first)
