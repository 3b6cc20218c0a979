"""Counters of the server, in Prometheus' text form. They contain nothing of a request's content."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxspec.engine.stats import RequestStats

_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_HELP = {
    "requests_total": ("counter", "HTTP requests by route and status."),
    "cancelled_total": ("counter", "Requests whose client went away before the end."),
    "answers_total": ("counter", "Answers that came to their end, by reason."),
    "prompt_tokens_total": ("counter", "Tokens of prompts."),
    "cached_tokens_total": ("counter", "Of those, tokens that did not have to be read again."),
    "generated_tokens_total": ("counter", "Tokens of answers."),
    "rounds_total": ("counter", "Verify rounds that rows of answers took part in."),
    "drafted_tokens_total": ("counter", "Drafted tokens that were verified, by drafter."),
    "accepted_tokens_total": ("counter", "Drafted tokens that were accepted, by drafter."),
    "judged_drafts_total": ("counter", "Drafts whose first token was compared with the text, by drafter."),
    "right_drafts_total": ("counter", "Of those, drafts whose first token was accepted, by drafter."),
    "loops_total": ("counter", "Texts that looped and were closed or ended (loop_breaker)."),
    "prefill_seconds_total": ("counter", "Seconds until first tokens."),
    "decode_seconds_total": ("counter", "Seconds behind first tokens; answers side by side count each."),
    "log_left_out_total": ("counter", "Lines that the log left out."),
    "model_loads_total": ("counter", "How often a model was loaded."),
    "open_requests": ("gauge", "Answers that were asked for and have not ended."),
    "rows_running": ("gauge", "Rows in the engine: prompts being read, or answers growing."),
    "rows_waiting": ("gauge", "Requests that wait for a row."),
    "state_bytes": ("gauge", "Bytes of all rows' state."),
    "prefix_bytes": ("gauge", "Bytes kept for prompts that begin like earlier texts."),
    "prefix_disk_bytes": ("gauge", "Bytes of the files of the prefix cache on disk."),
    "prefix_disk_read_bytes_total": ("counter", "Bytes that were read from them."),
    "prefix_disk_written_bytes_total": ("counter", "Bytes that were written to them."),
    "prefix_disk_lost_total": ("counter", "Texts that left memory before they were written."),
    "prefix_disk_failed_total": ("counter", "Files that could not be written, or not be read as they were."),
    "past_texts_failed_total": ("counter", "Earlier texts that could not be written."),
    "stores_off": ("gauge", "Stores that are not written at the moment, as the disk refused."),
    "exact_width": (
        "gauge",
        "Tokens of the widest round with the bits of plain steps, 0 where that is not known.",
    ),
    "memory_bytes": ("gauge", "Bytes of all arrays: weights, rows, what is kept."),
    "ready": ("gauge", "Whether a model is loaded and answers."),
}


class Metrics:
    """The counters of a server, by name and labels."""

    def __init__(self) -> None:
        self._values: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._waits = [0] * (len(_BUCKETS) + 1)
        self._wait_sum = 0.0

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        shown = ",".join(f'{k}="{_label(v)}"' for k, v in sorted(labels.items()))
        self._values[name, shown] += value

    def first_token(self, seconds: float) -> None:
        self._wait_sum += seconds
        self._waits[next((i for i, b in enumerate(_BUCKETS) if seconds <= b), len(_BUCKETS))] += 1

    def answer(self, reason: str, stats: RequestStats) -> None:
        self.add("answers_total", reason=reason)
        self.add("prompt_tokens_total", stats.num_prompt)
        self.add("cached_tokens_total", stats.num_cached)
        self.add("generated_tokens_total", stats.num_generated)
        self.add("rounds_total", stats.num_rounds)
        self.add("loops_total", stats.num_loops)
        self.add("prefill_seconds_total", stats.prefill_seconds)
        self.add("decode_seconds_total", stats.decode_seconds)
        for drafter, found in stats.drafters.items():
            self.add("drafted_tokens_total", found.num_drafted, drafter=drafter)
            self.add("accepted_tokens_total", found.num_accepted, drafter=drafter)
            self.add("judged_drafts_total", found.num_judged, drafter=drafter)
            self.add("right_drafts_total", found.num_right, drafter=drafter)

    def text(self, gauges: Mapping[str, float]) -> str:
        """Return all counters and these gauges in Prometheus' text form."""
        lines: list[str] = []
        for name, (kind, what) in _HELP.items():
            values = {shown: v for (n, shown), v in self._values.items() if n == name}
            if name in gauges:
                values[""] = gauges[name]
            lines += [f"# HELP mlxspec_{name} {what}", f"# TYPE mlxspec_{name} {kind}"]
            for shown, value in sorted((values or {"": 0}).items()):
                lines.append(f"mlxspec_{name}{f'{{{shown}}}' if shown else ''} {value:.17g}")
        return "\n".join(lines + self._histogram()) + "\n"

    def _histogram(self) -> list[str]:
        name = "mlxspec_first_token_seconds"
        lines = [f"# HELP {name} From a request to its first token.", f"# TYPE {name} histogram"]
        total = 0
        for bound, count in zip([*map(str, _BUCKETS), "+Inf"], self._waits, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._wait_sum:.17g}", f"{name}_count {total}"]


def _label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
