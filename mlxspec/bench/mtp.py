"""Runs the ten tasks of `mlxspec bench mtp` and counts what drafting did in each, with an engine in this process or against a server of
OpenAI's chat completions. Columns are those of llama.cpp's MTP benchmark: predicted tokens, drafted, accepted, rate, tokens a second.

Knows engines and HTTP; prints nothing.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlxspec.bench.tasks import Task
from mlxspec.config import SamplingParams, SpecConfig, shown
from mlxspec.engine.engine import Engine
from mlxspec.errors import ConfigError, MlxspecError

MAX_TOKENS = 192  # the benchmark's own
_SECONDS = 600  # for one answer
_KEYS = ("MLXSPEC_API_KEY", "OPENAI_API_KEY")

Ask = Callable[[Task, int], "Row"]


class ServerError(MlxspecError):
    """A server that is not there, or whose answer cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One task. drafted and accepted: None where the server does not tell. speed: tokens a second behind the prompt."""

    task: str
    predicted: int
    drafted: int | None
    accepted: int | None
    speed: float

    @property
    def rate(self) -> float | None:
        """Accepted over drafted."""
        return None if not self.drafted or self.accepted is None else self.accepted / self.drafted


@dataclass(frozen=True, kw_only=True)
class MtpReport:
    """All tasks. seconds: wall time of everything, prompts included."""

    rows: tuple[Row, ...]
    seconds: float

    def aggregate(self) -> dict[str, Any]:
        """The benchmark's own summary; None where a server does not tell what it drafted."""
        known = all(r.drafted is not None and r.accepted is not None for r in self.rows)
        drafted = sum(r.drafted or 0 for r in self.rows) if known else None
        accepted = sum(r.accepted or 0 for r in self.rows) if known else None
        return {
            "n_requests": len(self.rows),
            "total_predicted": sum(r.predicted for r in self.rows),
            "total_draft": drafted,
            "total_draft_accepted": accepted,
            "aggregate_accept_rate": round(accepted / drafted, 4)
            if drafted and accepted is not None
            else None,
            "wall_s_total": round(self.seconds, 2),
        }


def run(tasks: Sequence[Task], ask: Ask, max_tokens: int, told: Callable[[Row], None]) -> MtpReport:
    """Every task once, greedy. told: of each as it ends."""
    started = time.perf_counter()
    rows = []
    for task in tasks:
        rows.append(ask(task, max_tokens))
        told(rows[-1])
    return MtpReport(rows=tuple(rows), seconds=time.perf_counter() - started)


def in_process(engine: Engine, spec: SpecConfig) -> Ask:
    """Asks an engine."""

    def ask(task: Task, max_tokens: int) -> Row:
        messages = [{"role": "user", "content": task.prompt}]
        stats = engine.chat(messages, SamplingParams(max_tokens=max_tokens), spec=spec).stats
        return Row(
            task=task.name,
            predicted=stats.num_generated,
            drafted=stats.num_drafted,
            accepted=stats.num_accepted,
            speed=stats.decode_speed,
        )

    return ask


def over_http(url: str, model: str | None = None) -> Ask:
    """Asks a server: `url` is its address, with or without /v1. model None takes the first it lists. Raises ConfigError for a bad address,
    ServerError where nobody answers. A key is taken from MLXSPEC_API_KEY or OPENAI_API_KEY."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must begin with http:// or https://, not {shown(url)}.")
    base = url.rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    name = model or _first_model(base)

    def ask(task: Task, max_tokens: int) -> Row:
        body = {
            "model": name,
            "messages": [{"role": "user", "content": task.prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": False,
        }
        started = time.perf_counter()
        answer = _fetch(f"{base}/chat/completions", body)
        return _row(task, answer, time.perf_counter() - started)

    return ask


def _first_model(base: str) -> str:
    listed = _fetch(f"{base}/models")
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise ServerError(f"The server at {base} lists no model; name one with --model.") from error


def _row(task: Task, answer: dict[str, Any], seconds: float) -> Row:
    """From llama.cpp's `timings` where there are any, else from OpenAI's `usage`, by the clock."""
    try:
        timings, usage = answer.get("timings") or {}, answer.get("usage") or {}
        details = usage.get("completion_tokens_details") or {}
        predicted = int(timings["predicted_n"] if "predicted_n" in timings else usage["completion_tokens"])
        accepted = timings.get("draft_n_accepted", details.get("accepted_prediction_tokens"))
        rejected = details.get("rejected_prediction_tokens")
        drafted = timings.get("draft_n")
        if drafted is None and accepted is not None and rejected is not None:
            drafted = int(accepted) + int(rejected)
        speed = float(timings.get("predicted_per_second") or predicted / seconds)
        return Row(
            task=task.name,
            predicted=predicted,
            drafted=None if drafted is None else int(drafted),
            accepted=None if accepted is None else int(accepted),
            speed=speed,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(
            "The server's answer says neither in `usage` nor in `timings` how many tokens it has."
        ) from error


def _fetch(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    key = next((os.environ[name] for name in _KEYS if os.environ.get(name)), None)
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as response:
            found = json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(500).decode("utf-8", "replace").strip()
        raise ServerError(f"The server at {url} answered with status {error.code}: {shown(said)}.") from error
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
        raise ServerError(f"The server at {url} does not answer ({why}); is it running?") from error
    except ValueError as error:
        raise ServerError(f"The server at {url} answered something that is no JSON.") from error
    if not isinstance(found, dict):
        raise ServerError(f"The server at {url} answered something that is no JSON object.")
    return found
