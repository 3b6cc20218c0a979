"""What drafting did, in one line for a person and as plain data for a program.

Knows request statistics and the device report; knows no stream and no colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mlxspec.events import FinishReason

if TYPE_CHECKING:
    from mlxspec.engine.stats import DrafterStats, RequestStats
    from mlxspec.kernels.launch import KernelReport


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One answer that has ended: its statistics and why it ended."""

    stats: RequestStats
    reason: FinishReason


def summary(answers: Sequence[Finished], decode_seconds: float | None = None) -> str:
    """One line on one answer or several. `decode_seconds`: wall time of rounds that several rows shared; None adds the rows' own."""
    all_stats = [a.stats for a in answers]
    tokens = sum(s.num_generated for s in all_stats)
    decoded = sum(s.num_decoded for s in all_stats)
    seconds = sum(s.decode_seconds for s in all_stats) if decode_seconds is None else decode_seconds
    prompt, prompt_seconds = sum(s.num_prompt for s in all_stats), sum(s.prefill_seconds for s in all_stats)
    read = sum(s.num_read for s in all_stats)
    rounds = sum(s.num_rounds for s in all_stats)
    parts = [
        _ending(answers) + f"{_count(tokens, 'token')}{_speed(decoded, seconds)}",
        f"prompt {_count(prompt, 'token')}{_speed(read, prompt_seconds)}",
        _count(rounds, "round") + (f", {decoded / rounds:.2f} tokens a round" if rounds else ""),
        *drafting(all_stats),
        *_shares(answers),
    ]
    return " · ".join(parts)


def _shares(answers: Sequence[Finished]) -> list[str]:
    """`drafting 9 %, verifying 83 % of the time` and `plain decoding would be at 210 tok/s`, of one answer for which somebody drafted."""
    stats = answers[0].stats
    if len(answers) > 1 or not stats.drafters or not stats.decode_seconds:
        return []
    parts = [
        f"drafting {_percent(stats.draft_seconds, stats.decode_seconds)}, "
        f"verifying {_percent(stats.verify_seconds, stats.decode_seconds)} of the time"
    ]
    if stats.plain_speed:  # unknown where nothing has measured plain rounds
        parts.append(f"plain decoding would be at {stats.plain_speed:.0f} tok/s")
    return parts


def turn(answer: Finished) -> str:
    """One short line below an answer in a chat: speed, who drafted how deep and how much of it stood, the prompt, memory."""
    import mlx.core as mx

    stats = answer.stats
    speed = f", {stats.decode_speed:.1f} tok/s" if stats.decode_speed else ""
    plain = getattr(stats, "plain_speed", None)  # where something has measured plain rounds
    if speed and plain:
        speed += f" (plain about {plain:.0f})"
    methods = [
        f"{name} {work.num_drafted / work.num_rounds:.1f} deep {_percent(work.num_accepted, work.num_drafted)} accepted"
        for name, work in stats.drafters.items()
        if work.num_drafted
    ]
    rounds = [f"{stats.tokens_per_round:.2f} tokens a round"] if methods and stats.num_rounds else []
    parts = [
        f"{_ending([answer])}{_count(stats.num_generated, 'token')}{speed}",
        *rounds,
        ", ".join(methods) or "nothing drafted",
        f"prompt {stats.num_prompt:,} ({stats.num_cached:,} cached) {stats.prefill_seconds:.1f} s",
        size(mx.get_peak_memory()),
    ]
    return " · ".join(parts)


def drafting(all_stats: Sequence[RequestStats]) -> list[str]:
    """`drafted 120, accepted 86 (72 %)` and one part a drafter; ["nothing drafted"] where nothing was."""
    drafted, accepted = sum(s.num_drafted for s in all_stats), sum(s.num_accepted for s in all_stats)
    if not drafted:
        return ["nothing drafted"]
    parts = [f"drafted {drafted}, accepted {accepted} ({_percent(accepted, drafted)})"]
    for name, works in by_drafter(all_stats).items():
        tried, stood, rounds = (
            sum(getattr(w, f) for w in works) for f in ("num_drafted", "num_accepted", "num_rounds")
        )
        if tried:
            parts.append(f"{name} {stood}/{tried} ({stood / rounds:.2f} a draft)")
    return parts


def by_drafter(all_stats: Iterable[RequestStats]) -> dict[str, list[DrafterStats]]:
    """Each drafter's work over several answers, in order of first use."""
    found: dict[str, list[DrafterStats]] = {}
    for stats in all_stats:
        for name, work in stats.drafters.items():
            found.setdefault(name, []).append(work)
    return found


def machine() -> str:
    """`peak memory 28 MB · OpenBLAS 0.3.21, bundled`; off Linux without the BLAS, on a GPU with its name and our kernels in use."""
    import mlx.core as mx

    from mlxspec.platform import device

    report = device.report()
    parts = [f"peak memory {size(mx.get_peak_memory())}"]
    if report.backend != "cpu":
        parts.append(f"{report.backend} {report.device}")
    elif report.blas_kind != "none":
        parts.append(
            report.blas
            + (f", {report.blas_kind}" if report.blas_kind in ("bundled", "path", "preloaded") else "")
        )
    used = [kernel.name for kernel in _kernels() if kernel.in_use]
    if used:
        parts.append(f"kernels {', '.join(used)}")
    return " · ".join(parts)


def computer() -> str:
    """`Apple M3 Max (metal)`; on a CPU with its BLAS."""
    from mlxspec.platform import device

    report = device.report()
    return f"{report.device} ({report.backend if report.backend != 'cpu' else report.blas})"


def notices(all_stats: Iterable[RequestStats]) -> list[str]:
    """Sentences a person should see, each once: drafters that ended, what the machine lacks, kernels that failed their check."""
    from mlxspec.platform import device

    found = [n for stats in all_stats for n in stats.notices]
    off = [f"The kernel {k.name} is switched off: it {k.reason}." for k in _kernels() if k.failed]
    return list(dict.fromkeys([*found, *device.report().notices, *off]))


def as_data(stats: RequestStats) -> dict[str, Any]:
    """One answer's statistics for JSON: counts, seconds and the figures the line shows."""
    data = asdict(stats)
    return data | {
        "num_drafted": stats.num_drafted,
        "num_accepted": stats.num_accepted,
        "tokens_per_round": round(stats.tokens_per_round, 4),
        "other_seconds": stats.other_seconds,
        "plain_tokens_per_second": stats.plain_speed and round(stats.plain_speed, 2),
        "decode_tokens_per_second": round(stats.decode_speed, 2),
        "prompt_tokens_per_second": round(stats.prefill_speed, 2),
    }


def device_data() -> dict[str, Any]:
    """Backend, BLAS, kernels and memory for JSON."""
    import mlx.core as mx

    from mlxspec.platform import device

    report = device.report()
    return {
        "backend": report.backend,
        "device": report.device,
        "blas": report.blas,
        "blas_kind": report.blas_kind,
        "compile_enabled": report.compile_enabled,
        "kernels": [asdict(kernel) for kernel in _kernels()],
        "peak_memory_bytes": mx.get_peak_memory(),
        "notices": list(report.notices),
    }


def _kernels() -> tuple[KernelReport, ...]:
    from mlxspec.kernels import launch

    return launch.needed()


def size(num_bytes: float) -> str:
    """`28 MB`, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def _ending(answers: Sequence[Finished]) -> str:
    """What to say in front when an answer was cut."""
    cut = sum(a.reason == "length" for a in answers)
    stopped = sum(a.reason == "cancelled" for a in answers)
    if len(answers) == 1:
        return "cut at the token limit: " if cut else "stopped: " if stopped else ""
    parts = [f"{cut} cut at the token limit"] * bool(cut) + [f"{stopped} stopped"] * bool(stopped)
    return f"{len(answers)} answers{' (' + ', '.join(parts) + ')' if parts else ''}: "


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _speed(number: int, seconds: float) -> str:
    return (
        f", {number / seconds:.{1 if number < 100 * seconds else 0}f} tok/s" if number and seconds > 0 else ""
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"
