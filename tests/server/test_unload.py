"""Memory that is not needed goes back: a model nobody asked for a while is unloaded, and loaded again for the next request."""

from __future__ import annotations

import json
import time

from tests.server.serving import LONG, Served

SEEN = """
import sys, threading, time
import mlx.core as mx
def look():
    while True:
        time.sleep(0.2)
        print(f"active {mx.get_active_memory()} cached {mx.get_cache_memory()}", file=sys.stderr, flush=True)
threading.Thread(target=look, daemon=True).start()
"""


def test_an_idle_model_leaves_memory_and_comes_back() -> None:
    with Served("--idle-unload", "0.5", plant="from mlxspec.platform import device\n" + SEEN) as served:
        first = served.chat(max_tokens=8)["choices"][0]["message"]["content"]
        until = time.monotonic() + LONG
        while json.loads(served.ask("GET", "/health")[2])["model"] != "unloaded" and time.monotonic() < until:
            time.sleep(0.2)
        assert json.loads(served.ask("GET", "/health")[2])["model"] == "unloaded"
        served.lines.clear()
        # the thread may still be letting go; the demo's weights alone have 17 million bytes
        served.wait_for(r"active \d{1,6} cached \d{1,6}$")
        assert served.metrics()["mlxspec_ready"] == 0
        assert served.chat(max_tokens=8)["choices"][0]["message"]["content"] == first
        assert served.metrics()["mlxspec_model_loads_total"] >= 2
