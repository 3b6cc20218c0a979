"""`mlxspec inspect`: prints what a model consists of and what running it takes. Knows options and output; counting is
checkpoints/inspect.py's."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mlxspec.cli import options, terminal
from mlxspec.cli.table import print_pairs
from mlxspec.config import EngineConfig, SpecConfig
from mlxspec.option import check_number

if TYPE_CHECKING:
    from mlxspec.checkpoints.inspect import DrafterReport
    from mlxspec.checkpoints.inspect_report import InspectReport, Layers, Tower, Usable

NO_TOKENIZER = "missing: there is neither tokenizer.json nor vocab.json with merges.txt, so no command can answer a text with this model"


def run(args: argparse.Namespace) -> int:
    """Print what a model or drafter consists of and what running it takes, as a table or as one JSON object. Returns 0."""
    from mlxspec.checkpoints.inspect import inspect
    from mlxspec.checkpoints.inspect_report import InspectReport
    from mlxspec.loading import hub
    from mlxspec.policy.cost_file import judged_drafters

    if args.context is not None:
        check_number("--context", args.context, 1, 1 << 24, integer=True)
    check_number("--rows", args.rows, 1, 1024, integer=True)
    with options.named_by_flags():
        EngineConfig(kv_bits=args.kv_bits)
        SpecConfig(draft_kv_bits=args.draft_kv_bits)
    report = inspect(
        args.model,
        revision=args.revision,
        context=args.context,
        rows=args.rows,
        draft_model=args.draft_model,
        kv_bits=args.kv_bits,
        draft_kv_bits=args.draft_kv_bits,
    )
    if not isinstance(report, InspectReport):
        judged: dict[str, tuple[int, int]] = {}
        lines = _drafter_pairs(report)
    else:
        judged = judged_drafters(hub.named(report.name))
        lines = _pairs(report, judged)
    if args.json:
        told = {name: {"judged": num, "right": right} for name, (num, right) in judged.items()}
        terminal.say(json.dumps(report.data() | {"here": told}) + "\n")
    else:
        print_pairs(lines)
    return 0


def _pairs(r: InspectReport, judged: Mapping[str, tuple[int, int]]) -> list[tuple[str, str]]:
    from mlxspec.loading.progress import amount

    experts = f", {r.num_experts} experts, {count(r.active)} active" if r.num_experts else ""
    skipped = f", {amount(r.skipped_bytes)} for images or sound not loaded" if r.skipped_bytes else ""
    m, head = r.memory, r.head
    verdict = "fits" if m.fits else "does not fit"
    vision = f", vision tower {amount(m.vision)}" if m.vision else ""
    vision += f", reading an image {amount(m.reading)}" if m.reading else ""
    return [
        ("model", r.name),
        ("folder", r.folder),
        ("revision", r.revision or "none: a folder, not a repository of the cache"),
        ("architecture", r.model_type),
        ("sizes", f"hidden {r.hidden_size}, vocabulary {r.vocab_size}, context {r.max_context}"),
        ("layers", _layers(r.layers, is_ours=not r.limits)),
        ("parameters", f"{count(r.parameters)}{experts}"),
        ("weights", f"{amount(r.file_bytes)}, {r.bits_per_weight:.2f} bits a parameter{skipped}"),
        *[("", f"{form}: {count(n)}") for form, n in r.formats.items()],
        ("computed in", r.computed_in),
        (
            "MTP head",
            f"{count(head.parameters)}, {amount(head.bytes)}" if head.present else f"none: {head.advice}",
        ),
        *[("", f"{form}: {count(n)}") for form, n in head.formats.items()],
        *([] if r.has_tokenizer else [("tokenizer", NO_TOKENIZER)]),
        ("images", _images(r.vision)),
        (
            "memory",
            f"{amount(m.total)} for {m.rows} x {m.context} tokens; this machine gives {amount(m.machine)}: {verdict}",
        ),
        (
            "",
            f"weights {amount(m.weights)}{vision}, state {amount(m.state)}",
        ),
        ("", f"keys and values: {m.a_token:,} bytes a token"),
        ("", f"drafters' weights {amount(m.drafter_weights)}, state {amount(m.drafter_state)}"),
        *[
            ("" if i else "drafters", f"{'yes' if d.usable else ' no'}  {d.name}: {d.why}{_proposing(d)}")
            for i, d in enumerate(r.drafters)
        ],
        *[("" if i else "limits", line) for i, line in enumerate(r.limits)],
        *[("" if i else "here", line) for i, line in enumerate(_here(r.name, judged))],
    ]


def _here(model: str, judged: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return lines on how fast a model was on this machine, where `mlxspec try` has measured it, and on how often drafts were right.
    judged: by drafter, the number of drafts and of those whose first token was accepted."""
    from mlxspec.engine.drafter_health import is_low
    from mlxspec.engine.measured import measured

    tried = measured(model)
    return [
        *([tried] if tried else []),
        *(
            f"{name}: the first token of {num} drafts was accepted in {right / num:.0%}"
            + (", which is hardly ever" if is_low(num, right) else "")
            for name, (num, right) in sorted(judged.items())
            if num
        ),
    ]


def _images(tower: Tower) -> str:
    from mlxspec.loading.progress import amount

    if not tower.present:
        return tower.advice
    most = f", at most {tower.max_tokens}" if tower.max_tokens != tower.square_tokens else ""
    return f"a tower of {count(tower.parameters)}, {amount(tower.bytes)}; 1024 x 1024 pixels take {tower.square_tokens} tokens{most}"


def _proposing(drafter: Usable) -> str:
    return "" if drafter.proposing is None else f"; {drafter.proposing.sentence}"


def _drafter_pairs(r: DrafterReport) -> list[tuple[str, str]]:
    from mlxspec.loading.progress import amount

    return [
        ("drafter", r.name),
        ("folder", r.folder),
        ("revision", r.revision or "none: a folder, not a repository of the cache"),
        ("kind", f"{r.kind}: {r.use}"),
        ("weights", f"{amount(r.file_bytes)} in {r.num_tensors} tensors"),
    ]


def _layers(layers: Layers, *, is_ours: bool) -> str:
    kinds = {
        "attention": layers.attention,
        "windowed attention": layers.windowed,
        "recurrent (Gated DeltaNet)" if is_ours else "recurrent": layers.recurrent,
        "attention over another layer's keys": layers.shared,
    }
    return f"{layers.total}: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items() if n)


def count(n: int) -> str:
    """Return a number in three digits with a unit: "4.3M", "27.4B"."""
    value, units = float(n), ["", "k", "M", "B"]
    while value >= 999.5 and len(units) > 1:  # what three digits would round to a thousand
        value /= 1000
        units.pop(0)
    return f"{value:.0f}{units[0]}" if value >= 100 else f"{value:.3g}{units[0]}"
