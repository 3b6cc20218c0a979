"""llama.cpp for compare_peers.py: built from a source folder, fed GGUF files, spoken to as llama-server, one server a method.

Answers what workers answer (talk.py). Its host is C++ inside the server, so there is no host time to give.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.talk import LIMIT, Answer, PeerError

HERE = Path(__file__).resolve().parent
TYPES = {"float32": "f32", "bfloat16": "bf16"}
# Lengths of the lookup as our own (n 3, m 16 suit the demo's edits best); llama.cpp's defaults are for larger vocabularies.
METHODS: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "draft-model": ("--spec-type", "draft-simple", "-md", "{draft}", "--spec-draft-n-max", "3"),
    "ngram-simple": (
        *("--spec-type", "ngram-simple"),
        *("--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "16"),
    ),
    "ngram-mod": (
        *("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", "3"),
        *("--spec-ngram-mod-n-min", "2", "--spec-ngram-mod-n-max", "16"),
    ),
    "mtp": ("--spec-type", "draft-mtp", "--spec-draft-n-max", "2"),
    "ngram-simple,mtp": (
        *("--spec-type", "ngram-simple,draft-mtp", "--spec-draft-n-max", "2"),
        *("--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "16"),
    ),
}


def build(source: Path, folder: Path, log: Path) -> Path:
    """llama-server, built from `source` if it is not in `folder` yet. Raises PeerError."""
    server = folder / "bin" / "llama-server"
    if server.is_file():
        return server
    options = (
        "-DCMAKE_BUILD_TYPE=Release",
        "-DLLAMA_BUILD_TESTS=OFF",
        "-DLLAMA_BUILD_EXAMPLES=OFF",
        "-DLLAMA_BUILD_UI=OFF",
    )
    steps: tuple[Sequence[str], ...] = (
        ("cmake", "-S", str(source), "-B", str(folder), *options),
        ("cmake", "--build", str(folder), "-j", str(os.cpu_count() or 1), "--target", "llama-server"),
    )
    with log.open("a") as out:
        for step in steps:
            try:
                subprocess.run(step, check=True, stdout=out, stderr=out)
            except (OSError, subprocess.CalledProcessError) as error:
                raise PeerError(f"llama.cpp could not be built ({error}); see {log}.") from error
    return server


def convert(python: Path, source: Path, model: Path, out: Path, dtype: str, log: Path, *, head: bool) -> Path:
    """A GGUF file of a checkpoint. Raises PeerError."""
    if out.is_file() and out.stat().st_mtime > (model / "config.json").stat().st_mtime:
        return out
    command = [str(python), str(HERE / "to_gguf.py"), str(source), str(model), str(out), TYPES[dtype]]
    with log.open("a") as output:
        try:
            subprocess.run(
                [*command, *(() if head else ("--no-mtp",))], check=True, stdout=output, stderr=output
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise PeerError(f"{model.name} could not be converted to GGUF ({error}); see {log}.") from error
    return out


def revision(source: Path) -> str:
    """The commit of a checkout, or "unknown"."""
    found = subprocess.run(
        ["git", "-C", str(source), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


@dataclass(kw_only=True)
class LlamaCpp:
    """Servers by method and number of rows, started when first asked for."""

    server: Path
    model: Path
    draft: Path
    threads: int
    log: Path
    context: int = 4096  # tokens a row
    _running: dict[tuple[str, int], tuple[subprocess.Popen[bytes], int]] = field(default_factory=dict)

    def ask(self, do: str, **question: Any) -> Answer:
        """`run` and `prefill` as in the workers; raises PeerError for anything else it cannot do."""
        if do == "run":
            return self._run(question["prompts"], question["num_tokens"], question["method"])
        if do == "prefill":
            answer = self._post(("plain", 1), question["prompt"], 1)
            return {"seconds": answer["timings"]["prompt_ms"] / 1e3, "host_seconds": 0.0}
        if do == "memory":
            peaks = [
                _peak(process.pid) for (method, _), (process, _) in self._running.items() if method == "plain"
            ]
            return {"bytes": max(peaks, default=0)}
        raise PeerError(f"llama.cpp gives no {do}")

    def close(self) -> None:
        for process, _ in self._running.values():
            process.terminate()
        for process, _ in self._running.values():
            process.wait()
        self._running.clear()

    def _run(self, prompts: list[list[int]], num_tokens: list[int], method: str) -> Answer:
        key = (method, len(prompts))
        self._port(key)
        started = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda p, n: self._post(key, p, n), prompts, num_tokens))
        whole = time.perf_counter() - started
        timings = [a["timings"] for a in answers]
        tokens = [a["tokens"][:n] for a, n in zip(answers, num_tokens, strict=True)]
        drafted = sum(t.get("draft_n", 0) for t in timings)
        accepted = sum(t.get("draft_n_accepted", 0) for t in timings)
        timed = sum(max(len(t) - 1, 0) for t in tokens)
        return {
            "tokens": tokens,
            "num_timed": timed,
            "seconds": max(t["predicted_ms"] for t in timings) / 1e3,
            "host_seconds": None,
            "evaluated_seconds": None,
            "whole_seconds": whole,
            "num_rounds": max(len(t) for t in tokens) - 1 - (accepted if len(prompts) == 1 else 0),
            "num_drafted": drafted,
            "num_accepted": accepted,
        }

    def _post(self, key: tuple[str, int], prompt: list[int], count: int) -> Answer:
        body = {
            "prompt": prompt,
            "n_predict": count,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "cache_prompt": False,
            "return_tokens": True,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port(key)}/completion",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=LIMIT) as reply:
                answer: Answer = json.loads(reply.read())
        except OSError as error:
            raise PeerError(f"llama-server did not answer: {error}; see {self.log}.") from error
        return answer

    def _port(self, key: tuple[str, int]) -> int:
        if key not in self._running:
            self._running[key] = self._start(*key)
        return self._running[key][1]

    def _start(self, method: str, rows: int) -> tuple[subprocess.Popen[bytes], int]:
        if method not in METHODS:
            raise PeerError(f"llama.cpp is not asked for {method}")
        port = _free_port()
        command = [str(self.server), "-m", str(self.model), "--host", "127.0.0.1", "--port", str(port)]
        command += [
            "-t",
            str(self.threads),
            "-c",
            str(self.context * rows),
            "-np",
            str(rows),
            "--no-webui",
            "--no-warmup",
        ]
        command += [word.format(draft=self.draft) for word in METHODS[method]]
        with self.log.open("ab") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out)
        until = time.monotonic() + LIMIT
        while time.monotonic() < until and process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
                    if reply.status == 200:
                        return process, port
            except OSError:
                time.sleep(0.2)
        process.kill()
        raise PeerError(f"llama-server did not start for {method}; see {self.log}.")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _peak(pid: int) -> int:
    """Bytes a process has held at most; 0 where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
