"""Variants of a kernel that a device cannot run: each costs its own race and nothing else, in this process and in later ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from planting import catches

from mlxspec.kernels import exactness, launch, products, races
from mlxspec.kernels.quantized_weight import QuantizedWeight, race_key

ROOT = Path(__file__).resolve().parents[2]
TOO_MANY = "Thread group size (128) is greater than the maximum allowed threads per threadgroup (96)."
Refuses = Callable[[dict[str, Any], int], bool]


def stand_in(refuses: Refuses) -> Callable[..., Any]:
    """Return a factory of kernels that multiply by MLX's own operation, and raise where `refuses` says so of a template and the number of
    launches before."""
    launches: list[dict[str, Any]] = []

    def factory(*, name: str, **_: Any) -> Callable[..., list[mx.array]]:
        def run(*, inputs: list[mx.array], template: list[tuple[str, Any]], **_: Any) -> list[mx.array]:
            given = dict(template)
            same = sum(given == earlier for earlier in launches)
            launches.append(given)
            if refuses(given, same):
                raise ValueError(TOO_MANY)
            w, scales, biases, x = inputs
            rows = [
                mx.quantized_matmul(
                    x[i : i + 1], w, scales, biases, group_size=given["GROUP"], bits=given["BITS"]
                )
                for i in range(x.shape[0])
            ]
            return [mx.concatenate(rows)]

        return run

    return factory


@pytest.fixture
def weight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[QuantizedWeight]:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
    launch.forget()
    launch.add_report(launch.KernelReport(name="qmv_rows", in_use=True, reason="-"))
    launch.add_report(launch.KernelReport(name="qmm_few", in_use=False, reason="-"))
    yield QuantizedWeight.of(mx.random.normal((8, 512), key=mx.random.key(0)))
    launch.call_before_races(None)
    launch.forget()


def raced(weight: QuantizedWeight) -> dict[int, float]:
    found = products.tune(weight).get("qmv_rows", {})
    return {n: found[key] for n in products.RACED_ROWS if (key := race_key(n, weight, mx.float32)) in found}


@pytest.mark.parametrize(
    "refuses",
    [
        lambda template, before: template.get("M") == 8,
        lambda template, before: (
            template.get("M") == 8 and before == 1
        ),  # in the timed part, not when results are compared
    ],
    ids=["at the first launch", "at the second launch"],
)
@catches(
    "a race that raises ends the others",
    "mlxspec.kernels.launch:attempt",
    lambda right: lambda n, w, run: run(),
)
def test_a_variant_that_raises_has_lost_and_the_others_are_raced(
    refuses: Refuses, weight: QuantizedWeight
) -> None:
    found: dict[int, float] = {}
    with launch.using(stand_in(refuses)), suppress(ValueError):
        found = raced(weight)
    assert set(found) == set(range(1, 9)), "a race that raised has ended the others"
    assert found[8] == launch.LOST
    assert launch.refusals() == {"qmv_rows": {race_key(8, weight, mx.float32): TOO_MANY.rstrip(".")}}
    (report,) = (r for r in launch._all_reports() if r.name == "qmv_rows")
    assert report.in_use
    assert "cannot run 1 of the kernel qmv_rows's variants" in str(report.notice)
    assert products.chosen(8, weight, mx.float32) is None


def test_a_variant_that_was_refused_is_not_run_again(weight: QuantizedWeight) -> None:
    tried: list[int] = []

    def refuses(template: dict[str, Any], before: int) -> bool:
        tried.append(template["M"])
        return template["M"] == 8

    with launch.using(stand_in(refuses)):
        raced(weight)
        tried.clear()
        assert raced(weight)[8] == launch.LOST
    assert 8 not in tried
    races.save()
    launch.forget()
    races.restore()
    assert launch.speedup("qmv_rows", race_key(8, weight, mx.float32)) == launch.LOST


HANGS = """
import sys, time
import mlx.core as mx
from mlxspec.kernels import launch, products, races
from mlxspec.kernels.quantized_weight import QuantizedWeight
from tests.kernels.test_refused_variants import stand_in

def hangs(template, before):
    print(template["M"], flush=True)
    while template["M"] == 8:
        time.sleep(1)
    return False

launch.add_report(launch.KernelReport(name="qmv_rows", in_use=True, reason="-"))
launch.add_report(launch.KernelReport(name="qmm_few", in_use=False, reason="-"))
races.restore()
launch.call_before_races(races.mark)
with launch.using(stand_in(hangs)):
    found = products.tune(QuantizedWeight.of(mx.random.normal((8, 512), key=mx.random.key(0))))
races.save()
print("done", launch.refusals())
"""


@catches(
    "no variant is marked before it runs",
    "mlxspec.kernels.races:mark",
    lambda right: lambda name, width: None,
)
def test_a_variant_that_ends_the_process_is_marked(weight: QuantizedWeight) -> None:
    def ends(template: dict[str, Any], before: int) -> bool:
        if template["M"] == 3:
            raise SystemExit
        return False

    launch.call_before_races(races.mark)
    with launch.using(stand_in(ends)), pytest.raises(SystemExit):
        raced(weight)
    launch.forget()
    races.restore()
    key = race_key(3, weight, mx.float32)
    assert launch.refusals() == {"qmv_rows": {key: "an earlier process ended while it ran"}}
    assert set(launch.speedups()["qmv_rows"]) == {race_key(n, weight, mx.float32) for n in (1, 2, 3)}


def test_a_variant_that_hangs_is_not_run_by_the_next_process(weight: QuantizedWeight, tmp_path: Path) -> None:
    """The process is killed, as a person or the system does; the next one races everything else."""
    log = tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
    with log.open("w") as out:
        first = subprocess.Popen([sys.executable, "-c", HANGS], cwd=ROOT, stdout=out, env=environment)
        try:
            while "8\n" not in log.read_text():
                assert first.poll() is None
                time.sleep(0.05)
        finally:
            first.kill()
            first.wait()
    assert not log.read_text().endswith("done")
    key = race_key(8, weight, mx.float32)
    launch.forget()
    races.restore()
    assert launch.refusals() == {"qmv_rows": {key: "an earlier process ended while it ran"}}
    second = subprocess.run(
        [sys.executable, "-c", HANGS], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert second.returncode == 0, second.stderr
    assert "8\n" not in second.stdout
    assert "done" in second.stdout


def test_a_mark_is_gone_once_the_race_is_over(weight: QuantizedWeight) -> None:
    launch.call_before_races(races.mark)
    with launch.using(stand_in(lambda template, before: False)):
        raced(weight)
    races.save()
    launch.forget()
    races.restore()
    assert launch.refusals() == {}
    assert len(launch.speedups()["qmv_rows"]) == 8


@catches(
    "the self-check looks at one number of rows only",
    "mlxspec.kernels.quantized_weight:product",
    lambda right: lambda formats, tried: right(formats, tried[:1]),
)
def test_exact_rounds_check_every_number_of_rows_before_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "is_demanded", True)
    launch.forget()
    seen: set[int] = set()

    def refuses(template: dict[str, Any], before: int) -> bool:
        seen.add(template["M"])
        return bool(template["M"] == 8)

    with launch.using(stand_in(refuses)):
        assert not launch.in_use("qmv_rows")
    assert seen == set(range(1, 9))
    launch.forget()
