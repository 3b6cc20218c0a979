"""Describes what drafting did: three numbers below an answer, all figures for `--stats`, and plain data for `--json`.

Knows request statistics and the device report; knows no stream and no colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine
    from mlxspec.engine.receipt import Difference, Receipt
    from mlxspec.engine.request import Request
    from mlxspec.engine.stats import DrafterStats, PlainRounds, RequestStats
    from mlxspec.kernels.launch import KernelReport
    from mlxspec.loading.tokenizer import Tokenizer

Ending = Literal[
    "", "stopped", "ended as it looped", "cut at the token limit", "cut at the end of the context"
]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """An answer that has ended: its statistics, and how it was cut short ("" where it was not)."""

    stats: RequestStats
    ending: Ending = ""


def finished(request: Request) -> Finished:
    """Return the statistics and the kind of ending of a request that has ended."""
    reason = request.finish_reason or "cancelled"
    is_full = len(request.history) >= request.max_context
    cut: Ending = "cut at the end of the context" if is_full else "cut at the token limit"
    if request.stats.num_loops and not is_full and request.num_generated < request.params.max_tokens:
        cut = "ended as it looped"
    ending: Ending = cut if reason == "length" else "stopped" if reason == "cancelled" else ""
    return Finished(stats=request.stats, ending=ending)


def kept_bits(engine: Engine) -> str:
    """Return a phrase on quantized keys and values, ` · keys and values in 8 bits, drafters' in 4`; "" where they are not quantized."""
    drafted = {b for d in engine.drafts.drafters.values() if (b := getattr(d, "kv_bits", 16)) != 16}
    own = engine.config.kv_bits
    said = [f"keys and values in {own} bits"] if own != 16 else []
    said += [
        f"drafters'{'' if said else ' keys and values'} in {bits}{'' if said else ' bits'}"
        for bits in drafted
    ]
    return f" · {', '.join(said)}" if said else ""


def line(answers: Sequence[Finished], plain: PlainRounds, decode_seconds: float | None = None) -> str:
    """Return the line below an answer: `34 tokens · 189 tok/s, 1.62 times as fast as without drafting (1.50 to 1.71) · 58 % of 43
    drafted tokens accepted`.

    The ratio is given for one answer alone, and where enough plain rounds were timed to settle it. decode_seconds: wall time of the
    rounds that several answers shared; None adds up the answers' own times.
    """
    all_stats = [a.stats for a in answers]
    tokens = sum(s.num_generated for s in all_stats)
    seconds = sum(s.decode_seconds for s in all_stats) if decode_seconds is None else decode_seconds
    speed = _speed(sum(s.num_decoded for s in all_stats), seconds)
    ratio = plain.ratio(all_stats[0]) if len(answers) == 1 else None
    beside = f", {ratio.words}" if ratio is not None and ratio.is_settled else ""
    if any(s.num_compiling_rounds for s in all_stats):
        beside = " (compiling included)"
    drafted, accepted = sum(s.num_drafted for s in all_stats), sum(s.num_accepted for s in all_stats)
    parts = [
        _ending(answers) + counted(tokens, "token"),
        *([speed + beside] if speed else []),
        "the text repeated itself"  # and what repeats is accepted
        if any(s.num_loops for s in all_stats)
        else f"{_percent(accepted, drafted)} of {counted(drafted, 'drafted token')} accepted"
        if drafted
        else "nothing drafted",
    ]
    return " · ".join(filter(None, [*parts, _sameness(all_stats)]))


def _sameness(all_stats: Sequence[RequestStats]) -> str:
    """Return a phrase on what is already proved about the texts of drafted answers, "" where nothing is."""
    if not any(s.num_drafted for s in all_stats):
        return ""
    if all(s.is_bit_exact for s in all_stats):
        return "same text, proved"
    width = min(s.exact_width or 1 for s in all_stats)
    return f"same bits in rounds to {width} tokens" if width > 1 else ""


def details(answers: Sequence[Finished]) -> str:
    """Return all other figures of answers on one line: the prompt, rounds, each drafter, shares of the time, the machine."""
    all_stats = [a.stats for a in answers]

    def total(name: str) -> float:
        return sum(getattr(s, name) for s in all_stats)

    prompt, cached, rounds = (int(total(f"num_{name}")) for name in ("prompt", "cached", "rounds"))
    read = _speed(int(total("num_read")), total("prefill_seconds"))
    parts = [
        f"prompt {counted(prompt, 'token')}"
        + (f" ({cached} cached)" if cached else "")
        + (f", {read}" if read else ""),
        counted(rounds, "round")
        + (f", {total('num_decoded') / rounds:.2f} tokens a round" if rounds else ""),
    ]
    for name, works in by_drafter(all_stats).items():
        tried, stood, num = (
            sum(getattr(w, f) for w in works) for f in ("num_drafted", "num_accepted", "num_rounds")
        )
        if tried:
            parts.append(f"{name} {stood}/{tried} ({tried / num:.1f} deep, {stood / num:.2f} accepted)")
    if total("num_drafted") and (seconds := total("decode_seconds")):
        shares = (
            f"{what} {_percent(total(f'{name}_seconds'), seconds)}"
            for what, name in (("drafting", "draft"), ("verifying", "verify"))
        )
        parts.append(f"{', '.join(shares)} of the time")
    return " · ".join([*parts, machine()])


def by_drafter(all_stats: Iterable[RequestStats]) -> dict[str, list[DrafterStats]]:
    """Return each drafter's statistics of several answers, by name, in the order of first use."""
    found: dict[str, list[DrafterStats]] = {}
    for stats in all_stats:
        for name, work in stats.drafters.items():
            found.setdefault(name, []).append(work)
    return found


def machine() -> str:
    """Return the memory and machine of a run: `peak memory 28 MB · OpenBLAS 0.3.21, bundled`; on a GPU with its name and mlxspec's
    kernels in use in place of the BLAS."""
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
    used = [kernel.name for kernel in _kernels() if kernel.in_use and kernel.notice is None]
    if used:
        parts.append(f"kernels {', '.join(used)}")
    return " · ".join(parts)


def computer() -> str:
    """Return the name of the device with its backend, such as `Apple M3 Max (metal)`; a CPU has the name of its BLAS in place of one."""
    from mlxspec.platform import device

    report = device.report()
    return f"{report.device} ({report.backend if report.backend != 'cpu' else report.blas})"


def notices(all_stats: Iterable[RequestStats]) -> list[str]:
    """Return the sentences that the user should read, each once: on drafters that ended, on what the machine lacks, on kernels that
    failed their check."""
    from mlxspec.platform import device

    found = [n for stats in all_stats for n in stats.notices]
    off = [notice for kernel in _kernels() if (notice := kernel.notice) is not None]
    return list(dict.fromkeys([*found, *device.report().notices, *off]))


def proof(receipt: Receipt, tokenizer: Tokenizer | None) -> str:
    """Return the sentence on a receipt: `proved: plain decoding gives the same 34 tokens, in 0.21 s; with drafting 0.13 s`"""
    if (found := receipt.difference) is None:
        times = f"in {receipt.plain_seconds:.2f} s; with drafting {receipt.seconds:.2f} s"
        return f"proved: plain decoding gives the same {receipt.num_tokens} tokens, {times}"
    return f"NOT THE SAME: {difference(found, tokenizer)}"


def difference(found: Difference, tokenizer: Tokenizer | None) -> str:
    """Return a sentence on where two texts differ: `at token 4 the answer says ' a' (log-probability -0.6931) and plain decoding ends`"""

    def said(token: int | None, logprob: float | None) -> str:
        if token is None:
            return "ends"
        text = repr(token if tokenizer is None else tokenizer.decode([token]))
        return f"says {text}" + ("" if logprob is None else f" (log-probability {logprob:.4f})")

    if found.answer is None and found.plain is None:
        return f"both end after {found.place} tokens, the answer and plain decoding for different reasons"
    return (
        f"at token {found.place + 1} the answer {said(found.answer, found.answer_logprob)} and plain decoding "
        f"{said(found.plain, found.plain_logprob)}"
    )


def device_data() -> dict[str, Any]:
    """Return backend, BLAS, kernels and memory as plain objects, for JSON."""
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
    """Return a number of bytes in decimal units: `28 MB`, `1.5 GB`."""
    from mlxspec.loading.progress import amount

    return amount(int(num_bytes))


def _ending(answers: Sequence[Finished]) -> str:
    """Return the beginning of the statistics line: how the answer was cut short, or the number of several answers and how many of them
    were cut short."""
    if len(answers) == 1:
        return f"{answers[0].ending}: " if answers[0].ending else ""
    cuts = {a.ending: sum(b.ending == a.ending for b in answers) for a in answers if a.ending}
    parts = [f"{number} {ending}" for ending, number in cuts.items()]
    return f"{len(answers)} answers{' (' + ', '.join(parts) + ')' if parts else ''}: "


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 turn`, `2,000 turns`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _speed(number: int, seconds: float) -> str:
    return (
        f"{number / seconds:.{1 if number < 100 * seconds else 0}f} tok/s" if number and seconds > 0 else ""
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"
