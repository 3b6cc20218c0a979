"""scripts/read_report: a report of scripts/mac_check becomes a line of docs/measurements.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import measurements
import pytest
import read_report

REPORT = """\
### Report to paste

```text
Apple M3 Max (applegpu_g15s), 64 GiB, backend metal
macOS-26.6-arm64-arm-64bit, Python 3.13.5, 2026-12-01
mlxspec 0.1.0, mlx 0.32.4, mlx-lm 0.32.2, numpy 2.5.5
float32 products rounded to TF32: off
kernels: conv_qkv ok, gdn_round ok, qmv_rows FAILED
0.8B in bfloat16, plain decoding: 151 tok/s, mlx-lm 140
0.8B in bfloat16, prompt of 512 tokens: 4,100 tok/s | mlx-lm 4,000
failed: nothing; 214 s
```

## Machine
"""
CELLS = [
    "2026-12-01", "Apple M3 Max, 64 GiB", "macOS-26.6-arm64-arm-64bit", "0.1.0, 0.32.4", "conv_qkv ok, gdn_round ok, qmv_rows FAILED",
    "151 tok/s, mlx-lm 140", "4,100 tok/s / mlx-lm 4,000", "nothing",
]  # fmt: skip


def test_a_report_is_read_with_its_day_and_chip() -> None:
    assert read_report.parsed(REPORT).cells == CELLS
    alone = REPORT.split("```")[1].removeprefix("text\n")
    assert read_report.parsed(alone).cells == CELLS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hello", "no whole report"),
        (REPORT.replace("backend metal", "backend cpu"), "backend cpu"),
        (REPORT.replace("failed: nothing; 214 s\n", ""), "is cut"),
        (REPORT.replace("mlxspec 0.1.0", "other 1"), "no whole report"),
    ],
)
def test_what_is_no_report_is_refused_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_report.parsed(text)


def test_the_newest_report_comes_first_and_one_of_the_same_day_is_replaced() -> None:
    record = json.loads(read_report.RECORD.read_text(encoding="utf-8"))
    older = read_report.parsed(REPORT.replace("2026-12-01", "2026-11-30"))
    for report in (read_report.parsed(REPORT), older, read_report.parsed(REPORT)):
        record = read_report.added(record, report, "")
    rows = record["tables"]["reports"]["rows"]
    assert [row[0] for row in rows if row[1] == CELLS[1]] == ["2026-12-01", "2026-11-30"]


def test_the_page_gets_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "measurements").mkdir()
    for name in measurements.DOCS.glob("measurements/*.json"):
        (tmp_path / "measurements" / name.name).write_bytes(name.read_bytes())
    page = tmp_path / "measurements.md"
    page.write_bytes(measurements.PAGE.read_bytes())
    monkeypatch.setattr(measurements, "DOCS", tmp_path)
    monkeypatch.setattr(measurements, "PAGE", page)
    monkeypatch.setattr(read_report, "RECORD", tmp_path / "measurements" / "macs.json")
    file = tmp_path / "report.md"
    file.write_text(REPORT)
    monkeypatch.setattr(sys, "argv", ["read_report", str(file)])
    assert read_report.main() == 0
    assert "| " + " | ".join(CELLS) + " |" in page.read_text(encoding="utf-8")
    file.write_bytes(b"\xff\xfe")
    assert read_report.main() == 2
    assert capsys.readouterr().err.count("\n") == 1
