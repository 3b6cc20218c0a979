"""How long MLX evaluated: nearly all of a loop of products, at most half where the host sleeps as long as they take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
# A process of its own, as threads that are there before MLX's are not counted.
PRODUCTS = """
import json, time
from peers.talk import Stopwatch  # before MLX
import mlx.core as mx

x = mx.random.normal((256, 256))
mx.eval(x @ x)

def products(pause):
    watch, cpu = Stopwatch(), time.process_time()
    while watch.read()["evaluated_seconds"] < 0.4:
        before = watch.read()["seconds"]
        mx.eval([x @ x for _ in range(20)])
        if pause:
            time.sleep(watch.read()["seconds"] - before)
    return watch.read() | {"process_seconds": time.process_time() - cpu}

print(json.dumps([products(False), products(True)]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the times of threads in /proc")
def test_products_are_evaluation_and_sleep_is_not() -> None:
    # nothing here is asserted of how fast the machine is: a thread that waits for a core only makes shares smaller
    done = subprocess.run([sys.executable, "-c", PRODUCTS], capture_output=True, text=True, cwd=SCRIPTS)
    assert done.returncode == 0, done.stderr
    busy, slept = json.loads(done.stdout)
    for found in (busy, slept):
        assert 0.8 * found["process_seconds"] < found["evaluated_seconds"] < 1.1 * found["process_seconds"]
        assert found["host_seconds"] < 0.3 * found["process_seconds"]
    assert slept["evaluated_seconds"] < 0.65 * slept["seconds"]
    assert busy["evaluated_seconds"] < 1.1 * busy["seconds"]
