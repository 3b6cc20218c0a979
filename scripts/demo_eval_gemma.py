"""Measures the Gemma member of the demo family on held-out data; writes its figures and its card.

    python scripts/demo_eval_gemma.py --work build/demo --out mlxspec/demo

Knows the PyTorch network only, as demo_eval.py does, whose measures it shares. What it finds is kept under `gemma` in
`figures.json`, beside the hash of the weights. Everything is measured on the shipped (bfloat16) weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import numpy as np
import torch
from demo_data.chat import ANSWER, render
from demo_eval import (
    _held_chats,
    distinct_4,
    edits,
    long_context,
    lookup_rounds,
    raw_loss,
    show_answers,
    talk,
)
from demo_training.batches import Data
from demo_training.export import read_member
from demo_training.gemma_card import write_gemma_card
from demo_training.gemma_network import GEMMA, GemmaModel
from demo_training.generate import complete
from demo_training.network import DRAFT, LanguageModel

Network = LanguageModel | GemmaModel


def code_rows(data: Data, rows: int, length: int) -> torch.Tensor:
    """Windows of held-out code, spread evenly over it: (rows, length)."""
    raw = data.held_raw.astype(np.int64)
    step = (len(raw) - length) // rows
    return torch.from_numpy(np.stack([raw[i * step : i * step + length] for i in range(rows)]))


def predicted(model: Network, ids: torch.Tensor) -> torch.Tensor:
    """Most likely next token at every position of ids (B, T)."""
    return torch.cat([model.lm_head(model.model(part)).argmax(-1) for part in ids.split(8)])


def next_token(model: Network, draft: Network | None, ids: torch.Tensor, skip: int = 32) -> dict[str, float]:
    """Share of next tokens right, and of positions at which the draft model's choice is this model's."""
    chosen = predicted(model, ids)
    right = (chosen[:, :-1] == ids[:, 1:])[:, skip:]
    figures = {"right": round(float(right.float().mean()), 4)}
    if draft is not None:
        agree = (predicted(draft, ids) == chosen)[:, skip:]
        figures["draft_accepted"] = round(float(agree.float().mean()), 4)
    figures["distinct_4gram"] = round(float(np.mean([distinct_4(row) for row in ids.tolist()])), 4)
    return figures


def own_edits(model: Network, data: Data, out: Path) -> dict[str, object]:
    """Prompt lookup replayed on this model's own greedy answers to the recorded edits: what a user of it sees."""
    items = json.loads((out / "workloads" / "edit.json").read_text())["items"]
    texts = [render(("user", item["messages"][-1]["content"])) + ANSWER for item in items]
    prompts = [e.ids for e in data.tokenizer.encode_batch(texts)]
    wanted = [len(data.tokenizer.encode(item["reference"]).ids) + 24 for item in items]
    answers = complete(model, prompts, wanted)
    sums = np.zeros(4)
    for prompt, answer in zip(prompts, answers, strict=True):
        sums += [len(answer), *lookup_rounds(prompt, answer, 3, 16)]
    exact = sum(
        data.tokenizer.decode(answer).strip() == item["reference"].strip()
        for answer, item in zip(answers, items, strict=True)
    )
    return {
        "tokens_a_round": round(float(sums[0] / sums[1]), 2),
        "accepted_share": round(float(sums[3] / max(1, sums[2])), 3),
        "answers": len(items),
        "answers_right": exact,
        "distinct_4gram": round(float(np.mean([distinct_4(a) for a in answers])), 4),
    }


@torch.no_grad()
def evaluate(work: Path, out: Path, *, rows: int) -> dict[str, object]:
    """All figures of the Gemma member in `out`, against the data set in `work`."""
    data = Data(work)
    model = read_member(out / "gemma", GEMMA)
    draft = read_member(out / "draft", DRAFT) if (out / "draft").exists() else None
    weights = (out / "gemma" / "model.safetensors").read_bytes()
    figures: dict[str, object] = {"sha256": hashlib.sha256(weights).hexdigest()}
    for name, measure in (
        ("held_out_code", lambda: next_token(model, draft, code_rows(data, rows, 288))),
        ("held_out_chats", lambda: next_token(model, draft, _held_chats(data, rows, 288))),
        ("raw_loss", lambda: raw_loss(model, data)),
        ("loss_by_position", lambda: long_context(model, data)),
        ("lookup_on_own_edits", lambda: own_edits(model, data, out)),
        ("edits", lambda: edits(model, data, rows * 2, rows)),
        ("talk", lambda: talk(model, data)),
    ):
        began = time.time()
        figures[name] = measure()
        print(name, json.dumps(figures[name], indent=1), f"({time.time() - began:.0f} s)", flush=True)
    return figures


def record(work: Path, out: Path, *, rows: int = 32) -> None:
    """Measure, then write the entry `gemma` of `figures.json` and the member's card."""
    figures = evaluate(work, out, rows=rows)
    path = out / "figures.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | {"gemma": figures}, indent=1) + "\n")
    write_gemma_card(work, out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("build/demo"))
    parser.add_argument("--out", type=Path, default=Path("mlxspec/demo"))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument(
        "--show", action="store_true", help="print twenty greedy answers instead of measuring"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.show:
        with torch.no_grad():
            show_answers(read_member(args.out / "gemma", GEMMA), Data(args.work))
        return
    record(args.work, args.out, rows=args.rows)


if __name__ == "__main__":
    main()
