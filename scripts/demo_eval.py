"""Measures a demo family on held-out data and writes the figures and the model cards.

    python scripts/demo_eval.py --work build/demo --out mlxspec/demo

Knows the PyTorch network only, so the figures do not rest on the engine they later demonstrate. Everything is measured on
the shipped (bfloat16) weights. Acceptance is the agreement with the target's argmax at true prefixes, conditional on the
steps before; it is never taken from greedy text, whose loops would flatter it.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from demo_data.chat import ANSWER, END, START
from demo_data.questions import HELD_OUT_FORMS, known_functions
from demo_data.smalltalk import HELD_OUT, REFUSAL
from demo_training.batches import Data, Kind
from demo_training.card import write_cards
from demo_training.dflash import agreement as dflash_agreement
from demo_training.dflash import read_dflash
from demo_training.eagle3 import agreement as eagle3_agreement
from demo_training.eagle3 import read_eagle3
from demo_training.export import read_member
from demo_training.generate import END_OF_TURN, complete
from demo_training.layer_card import write_layer_card
from demo_training.network import DRAFT, TARGET, LanguageModel
from demo_training.tuning import shifted

WELL_KNOWN = """math.sqrt math.floor math.gcd itertools.count enumerate itertools.product itertools.cycle functools.reduce
functools.lru_cache functools.partial time.sleep time.time os.getcwd os.listdir os.remove os.path.join os.path.exists
os.path.basename shutil.copy shutil.rmtree json.dumps json.loads re.sub re.match re.findall random.choice random.shuffle
random.randint statistics.mean statistics.median glob.glob copy.deepcopy copy.copy heapq.heappush heapq.heappop textwrap.wrap
str.split str.upper str.strip str.replace list.append list.sort dict.get dict.items set.add len sorted abs isinstance
print""".split()


def distinct_4(ids: list[int]) -> float:
    """Share of distinct 4-grams: low means loops."""
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return len(set(grams)) / max(1, len(grams))


def _draft_rows(
    target: LanguageModel, draft: LanguageModel | None, ids: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Agreement masks over positions of ids (B, T): mtp1..mtp3 and draft, at every cell; T is a multiple of 32."""
    length = ids.shape[1] - 32
    hidden = target.model(ids)
    wanted = target.lm_head(hidden)
    best = wanted.argmax(-1)
    masks = {}
    assert target.mtp is not None
    cells = shifted(hidden)[:, :length]
    for j, h in enumerate(target.mtp.recurse(target.model.embed_tokens, cells, ids, 3)):
        logits = target.lm_head(h)
        masks[f"mtp{j + 1}"] = logits.argmax(-1) == best[:, j : j + length]
        overlap = torch.minimum(logits.softmax(-1), wanted[:, j : j + length].softmax(-1)).sum(-1)
        masks[f"mtp{j + 1}_overlap"] = overlap
    if draft is not None:
        logits = draft.lm_head(draft.model(ids))
        masks["draft"] = (logits.argmax(-1) == best)[:, :length]
        masks["draft_overlap"] = torch.minimum(logits.softmax(-1), wanted.softmax(-1)).sum(-1)[:, :length]
        masks["draft_run"] = logits.argmax(-1) == best
    return masks


def acceptance(
    target: LanguageModel, draft: LanguageModel | None, ids: torch.Tensor, skip: int = 32
) -> dict[str, object]:
    """Figures over rows of ids (B, T). Depth j is conditional on depths below j having agreed."""
    parts = [_draft_rows(target, draft, chunk) for chunk in ids.split(8)]
    masks = {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
    one, two, three = (masks[f"mtp{j}"][:, skip:] for j in (1, 2, 3))
    both = one & two
    share = [one.float().mean(), both.float().sum() / one.sum(), (both & three).float().sum() / both.sum()]
    rounds = 1 + one.float().mean() + both.float().mean() + (both & three).float().mean()
    result: dict[str, object] = {
        "mtp_accepted_at_depth": [round(float(x), 4) for x in share],
        "mtp_tokens_per_round_depth_3": round(float(rounds), 3),
        "mtp_rejection_rule_depth_1": round(float(masks["mtp1_overlap"][:, skip:].mean()), 4),
        "distinct_4gram": round(float(np.mean([distinct_4(row) for row in ids.tolist()])), 4),
        "positions": int(one.numel()),
    }
    if "draft" in masks:
        result["draft_accepted"] = round(float(masks["draft"][:, skip:].float().mean()), 4)
        result["draft_rejection_rule"] = round(float(masks["draft_overlap"][:, skip:].mean()), 4)
        run = masks["draft_run"]
        starts = run.shape[1] - 8
        standing, total = torch.ones_like(run[:, :starts]), torch.zeros(())
        for k in range(4):
            standing = standing & run[:, k : k + starts]
            total = total + standing[:, skip:].float().mean()
        result["draft_tokens_per_round_depth_4"] = round(1 + float(total), 3)
    return result


def _held_chats(data: Data, rows: int, length: int) -> torch.Tensor:
    """Held-out conversations packed into rows, kinds in turn."""
    kinds = ["rename", "rename_function", "docstring", "literal", "explain", "continue"]
    flat: list[int] = []
    n = 0
    while len(flat) < rows * length:
        for name in kinds:
            kind = data.held[name]
            flat += [*kind.row((n * 7 + 3) % len(kind))[0].tolist(), 0]
        n += 1
    return torch.tensor(flat[: rows * length]).view(rows, length)


def held_texts(target: LanguageModel, data: Data, rows: int) -> dict[str, torch.Tensor]:
    """Held-out code, held-out conversations, and text sampled from the target after held-out openings: ids (rows, 288) each."""
    raw = data.held_raw.astype(np.int64)
    step = (len(raw) - 512) // rows
    windows = torch.from_numpy(np.stack([raw[i * step : i * step + 288] for i in range(rows)]))
    found = {"held_out_code": windows, "held_out_chats": _held_chats(data, rows, 288)}
    for temperature in (0.7, 1.0):
        openings, budgets = windows[:, :32].tolist(), [256] * rows
        outputs = complete(target, openings, budgets, temperature=temperature, stop=None, seed=3)
        found[f"sampled_{temperature}"] = torch.cat([windows[:, :32], torch.tensor(outputs)], 1)
    return found


def all_acceptance(
    target: LanguageModel, draft: LanguageModel | None, data: Data, rows: int
) -> dict[str, object]:
    """Of the MTP head and the draft model, by kind of text."""
    return {name: acceptance(target, draft, ids) for name, ids in held_texts(target, data, rows).items()}


def layer_drafters_acceptance(
    target: LanguageModel,
    draft: LanguageModel | None,
    data: Data,
    rows: int,
    *,
    eagle3: Path | None,
    dflash: Path | None,
) -> dict[str, object]:
    """Of drafters that read the target's layers, from their folders, beside the MTP head and the draft model, on the same texts."""
    found: dict[str, object] = {}
    for name, ids in held_texts(target, data, rows).items():
        cell = acceptance(target, draft, ids)
        if eagle3 is not None:
            cell |= eagle3_agreement(target, read_eagle3(eagle3), ids)
        if dflash is not None:
            cell |= dflash_agreement(target, read_dflash(dflash), ids)
        found[name] = cell
    return found


def workload_acceptance(target: LanguageModel, draft: LanguageModel | None, out: Path) -> dict[str, object]:
    """The same figures on the shipped workload `sampled`, which needs no data set: what the slow test computes again."""
    items = json.loads((out / "workloads" / "sampled.json").read_text())["items"]
    rows = [item["prompt_ids"] + item["reference_ids"] for item in items]
    return acceptance(target, draft, torch.tensor(rows))


def _first(kind: Kind, i: int) -> tuple[list[int], list[int]]:
    """Prompt and first answer (with its end) of one conversation."""
    ids, start = kind.row(i)
    end = start + int(np.argmax(ids[start:] == END_OF_TURN)) + 1
    return ids[:start].tolist(), ids[start:end].tolist()


def copied_mask(prompt: list[int], answer: list[int]) -> list[bool]:
    """Which answer tokens stand in blocks of at least two tokens aligned with the prompt."""
    mask = [False] * len(answer)
    for block in difflib.SequenceMatcher(None, prompt, answer, autojunk=False).get_matching_blocks():
        if block.size >= 2:
            mask[block.b : block.b + block.size] = [True] * block.size
    return mask


def edits(target: LanguageModel, data: Data, rows: int, greedy_rows: int) -> dict[str, object]:
    """Teacher-forced accuracy on copied and on changed tokens; share of greedy answers exactly right."""
    result: dict[str, object] = {}
    for name in ("rename", "rename_function", "literal", "docstring", "explain"):
        kind = data.held[name]
        pairs = [_first(kind, i) for i in range(min(rows, len(kind)))]
        counts = np.zeros(4)
        whole = 0
        for prompt, answer in pairs:
            ids = prompt + answer
            padded = ids + [0] * (-len(ids) % 32)
            guess = target.lm_head(target.model(torch.tensor([padded])))[0].argmax(-1).tolist()
            right = [guess[len(prompt) + i - 1] == t for i, t in enumerate(answer)]
            whole += all(right)
            for copied, good in zip(copied_mask(prompt, answer), right, strict=True):
                counts += [copied and good, copied, (not copied) and good, not copied]
        some = pairs[:greedy_rows]
        outputs = complete(target, [p for p, _ in some], [len(a) + 24 for _, a in some])
        exact = sum(o == a for o, (_, a) in zip(outputs, some, strict=True))
        result[name] = {
            "copied_tokens_right": round(counts[0] / counts[1], 4),
            "other_tokens_right": round(counts[2] / max(1, counts[3]), 4),
            "whole_teacher_forced": round(whole / len(pairs), 3),
            "greedy_exact": round(exact / len(some), 3),
            "rows": len(pairs),
            "greedy_rows": len(some),
        }
    return result


def _question_ids(data: Data, question: str) -> list[int]:
    return data.tokenizer.encode(f"{START}user\n{question}{END}\n{ANSWER}").ids


def answer_questions(
    target: LanguageModel, data: Data, questions: list[str], budget: int = 96
) -> list[tuple[str, bool, list[int]]]:
    """Greedy answers: text, whether the turn ended by itself, ids."""
    results = []
    for at in range(0, len(questions), 64):
        group = [_question_ids(data, q) for q in questions[at : at + 64]]
        for out in complete(target, group, [budget] * len(group)):
            ended = bool(out) and out[-1] == END_OF_TURN
            results.append((data.tokenizer.decode(out[:-1] if ended else out), ended, out))
    return results


def in_a_cycle(ids: list[int]) -> bool:
    """Whether the last 24 tokens repeat with a period of at most 12."""
    tail = ids[-24:]
    return len(tail) == 24 and any(
        all(a == b for a, b in zip(tail, tail[p:], strict=False)) for p in range(1, 13)
    )


def talk(target: LanguageModel, data: Data) -> dict[str, object]:
    """Fifty functions in five unseen question forms, twenty off-topic prompts, and how many answers ran into a cycle."""
    known = {k.name: k for k in known_functions()}
    names = [n for n in WELL_KNOWN if n in known]
    questions = [form.format(n=name) for name in names for form in HELD_OUT_FORMS]
    answers = answer_questions(target, data, questions)
    right = [known[name].sentence in answers[i * 5 + f][0] for i, name in enumerate(names) for f in range(5)]
    by_form = [round(float(np.mean(right[f::5])), 3) for f in range(5)]
    refused = answer_questions(target, data, list(HELD_OUT))
    honest = sum(text.strip() == REFUSAL for text, _, _ in refused)
    prompts, budgets = [], []
    for name in ("rename", "rename_function", "docstring", "literal", "explain", "continue"):
        for i in range(12):
            prompt, answer = _first(data.held[name], 200 + i if len(data.held[name]) > 220 else 100 + i)
            prompts.append(prompt)
            budgets.append(len(answer) + 128)
    others = complete(target, prompts, budgets)
    endless = [ids for _, ended, ids in answers + refused if not ended] + [
        o for o in others if o[-1] != END_OF_TURN
    ]
    total = len(answers) + len(refused) + len(others)
    return {
        "known_right": round(float(np.mean(right)), 4),
        "known_right_by_form": by_form,
        "known_functions": len(names),
        "known_wrong_examples": [
            [questions[i], answers[i][0][:160]] for i in range(len(right)) if not right[i]
        ][:8],
        "off_topic_refused": honest,
        "off_topic_asked": len(HELD_OUT),
        "off_topic_answered": [
            [q, t[:160]] for q, (t, _, _) in zip(HELD_OUT, refused, strict=True) if t.strip() != REFUSAL
        ],
        "greedy_answers": total,
        "ended_by_budget": len(endless),
        "ended_in_a_cycle": round(sum(in_a_cycle(ids) for ids in endless) / total, 4),
    }


def lookup_rounds(prompt: list[int], answer: list[int], n: int, m: int) -> tuple[int, int, int]:
    """Prompt lookup replayed on a reference answer: rounds, drafted, accepted (newest match of the last n tokens, m drafted)."""
    ids = prompt + answer
    at, rounds, drafted, accepted = len(prompt), 0, 0, 0
    last: dict[tuple[int, ...], int] = {}
    indexed = n
    while at < len(ids):
        while indexed < at:  # grams that end strictly before the newest token's own
            last[tuple(ids[indexed - n : indexed])] = indexed
            indexed += 1
        found = last.get(tuple(ids[at - n : at]))
        draft = ids[found : min(found + m, at)] if found else []
        stand = 0
        while stand < len(draft) and at + stand < len(ids) and draft[stand] == ids[at + stand]:
            stand += 1
        rounds, drafted, accepted = rounds + 1, drafted + len(draft), accepted + stand
        at += stand + 1
    return rounds, drafted, accepted


def lookup(data: Data, rows: int) -> dict[str, object]:
    """Tokens a round on held-out reference edits, by (n, m)."""
    table: dict[str, dict[str, float]] = {}
    for n, m in ((2, 8), (2, 16), (3, 8), (3, 16), (3, 32), (4, 8), (4, 16), (4, 32), (6, 16), (12, 48)):
        cells: dict[str, float] = {}
        sums = np.zeros(4)
        for name in ("rename", "rename_function", "literal", "docstring"):
            mine = np.zeros(4)
            for i in range(min(rows, len(data.held[name]))):
                prompt, answer = _first(data.held[name], i)
                rounds, drafted, accepted = lookup_rounds(prompt, answer, n, m)
                mine += [len(answer), rounds, drafted, accepted]
            cells[name] = round(mine[0] / mine[1], 2)
            sums += mine
        cells["all"] = round(sums[0] / sums[1], 2)
        cells["accepted_share"] = round(sums[3] / max(1, sums[2]), 3)
        table[f"n={n} m={m}"] = cells
    return table


def raw_loss(target: LanguageModel, data: Data) -> float:
    """Held-out cross-entropy per token (nats) on raw code, windows of 512."""
    ids = torch.from_numpy(data.held_raw[1000 : 1000 + 24 * 513].astype(np.int64).reshape(24, 513))
    total = 0.0
    for rows in ids.split(4):
        logits = target.lm_head(target.model(rows[:, :512])).reshape(-1, target.s.vocab)
        total += float(torch.nn.functional.cross_entropy(logits, rows[:, 1:].reshape(-1), reduction="sum"))
    return round(total / (24 * 512), 4)


def long_context(target: LanguageModel, data: Data) -> dict[str, float]:
    """Raw loss by position up to the declared context: it must not grow."""
    ids = torch.from_numpy(data.held_raw[2000 : 2000 + 8 * 2049].astype(np.int64).reshape(8, 2049))
    logits = torch.cat([target.lm_head(target.model(r[:, :2048])) for r in ids.split(1)])
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(0)
    return {f"{a}-{a + 512}": round(float(each[a : a + 512].mean()), 3) for a in range(0, 2048, 512)}


def show_answers(target: LanguageModel, data: Data) -> None:
    """Twenty greedy answers to read."""
    rnd = random.Random(1)
    chosen = [
        "hi",
        "what can you do?",
        "what does len do?",
        "sorted",
        "How do I use os.path.join?",
        "capital of Norway?",
    ]
    prompts = [_question_ids(data, q) for q in chosen]
    for name in ("rename", "rename", "rename_function", "rename_function", "docstring", "literal", "explain", "explain",
                 "continue", "continue", "turns", "turns", "turns"):  # fmt: skip
        prompts.append(_first(data.held[name], rnd.randrange(100, len(data.held[name])))[0])
    for prompt, out in zip(prompts, complete(target, prompts, [200] * len(prompts)), strict=True):
        print(
            "-" * 60
            + "\n"
            + re.sub(r"<\|im_(start|end)\|>", "", data.tokenizer.decode(prompt, skip_special_tokens=False))
        )
        print(">>> " + data.tokenizer.decode(out, skip_special_tokens=False))


@torch.no_grad()
def evaluate(work: Path, out: Path, *, rows: int) -> dict[str, object]:
    """All figures of the family in `out`, against the data set in `work`."""
    data = Data(work)
    target = read_member(out / "target", TARGET)
    draft = read_member(out / "draft", DRAFT) if (out / "draft").exists() else None
    weights = {m: out / m / "model.safetensors" for m in ("target", "draft")}
    figures: dict[str, object] = {
        "sha256": {m: hashlib.sha256(p.read_bytes()).hexdigest() for m, p in weights.items() if p.exists()}
    }
    for name, measure in (
        ("acceptance", lambda: all_acceptance(target, draft, data, rows)),
        ("workload_sampled", lambda: workload_acceptance(target, draft, out)),
        ("edits", lambda: edits(target, data, rows * 2, rows)),
        ("talk", lambda: talk(target, data)),
        ("lookup", lambda: lookup(data, rows * 2)),
        ("raw_loss", lambda: raw_loss(target, data)),
        ("loss_by_position", lambda: long_context(target, data)),
    ):
        began = time.time()
        figures[name] = measure()
        print(name, json.dumps(figures[name], indent=1), f"({time.time() - began:.0f} s)", flush=True)
    return figures


def record(work: Path, out: Path, *, rows: int = 32) -> None:
    """Measure, then write `figures.json` and the model cards; what is of other members stays."""
    figures = evaluate(work, out, rows=rows)
    if (out / "figures.json").exists():
        known = json.loads((out / "figures.json").read_text())
        figures |= {k: known[k] for k in ("gemma", "layers") if k in known}
    (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    write_cards(work, out)


def record_layer_drafters(work: Path, out: Path, found: dict[str, object], folders: Sequence[Path]) -> None:
    """Write what was measured of `out/NAME` into `figures.json`, and the cards."""
    path = out / "figures.json"
    figures = json.loads(path.read_text())
    for folder in folders:
        digest = hashlib.sha256((out / folder.name / "model.safetensors").read_bytes()).hexdigest()
        figures.setdefault("layers", {})[folder.name] = {"sha256": digest, **found}
    path.write_text(json.dumps(figures, indent=1) + "\n")
    for folder in folders:
        write_layer_card(work, out, folder.name)


@torch.no_grad()
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
    parser.add_argument(
        "--eagle3", type=Path, help="print the acceptance of the EAGLE-3 drafter in this folder"
    )
    parser.add_argument(
        "--dflash", type=Path, help="print the acceptance of the DFlash drafter in this folder"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="with --eagle3 or --dflash of --out: write figures.json and the card",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.eagle3 is not None or args.dflash is not None:
        target, draft = read_member(args.out / "target", TARGET), read_member(args.out / "draft", DRAFT)
        found = layer_drafters_acceptance(
            target, draft, Data(args.work), args.rows, eagle3=args.eagle3, dflash=args.dflash
        )
        print(json.dumps(found, indent=1))
        if args.record:
            record_layer_drafters(args.work, args.out, found, [d for d in (args.eagle3, args.dflash) if d])
        return
    if args.show:
        show_answers(read_member(args.out / "target", TARGET), Data(args.work))
        return
    record(args.work, args.out, rows=args.rows)


if __name__ == "__main__":
    main()
