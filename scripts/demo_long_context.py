"""What the demo target does behind the 2,048 tokens that it was trained on; prints the figures of docs/demo.md.

    python scripts/demo_long_context.py --work build/demo

Loss by position on held-out code up to 8,192 tokens, with the rotary positions as they are and stretched by four; and, for held-out edits
of one function of a whole pasted file (see demo_data/long_edits.py), the part of the reference answer's tokens that is the target's
likeliest at true prefixes, and the part of these likeliest tokens that the MTP head drafts first. Needs PyTorch and the data set.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
import torch
from demo_data.chat import ANSWER, END, START
from demo_data.long_edits import HELD_OUT_FORMS, KINDS, file_of, turn
from demo_training.batches import Data
from demo_training.export import read_member
from demo_training.long_phase import CONTEXT, pieces_of_files
from demo_training.network import CHUNK, TARGET, Attention, LanguageModel
from torch import Tensor

EDGES = (0, 1024, 2048, 4096, 6144, 8191)
_NAMES = "value count name index result items path data size key node left right total".split()


def stretched(kind: str, factor: float = 4.0, original: int = 2048) -> Tensor:
    """Radians a position of the pairs that turn. kind: default, linear or yarn (its ramp from 32 turns to one within `original`)."""
    pairs = int(TARGET.head_dim * TARGET.rotary_fraction) // 2
    rates = TARGET.rope_theta ** (-torch.arange(pairs).float() / pairs)
    if kind == "default":
        return rates
    turns = original * rates / (2 * torch.pi)
    slowed = torch.ones(pairs) if kind == "linear" else 1 - (turns.log() / np.log(32)).clamp(0, 1)
    return rates * (1 - slowed + slowed / factor)


def turn_at(model: LanguageModel, rates: Tensor) -> None:
    """Let all full attention of the model turn at these rates."""

    def angles_of(length: int, offset: int, device: torch.device) -> Tensor:
        angles = torch.arange(offset, offset + length).float()[:, None] * rates
        return torch.cat([angles, angles], -1)

    for module in model.modules():
        if isinstance(module, Attention):
            module.angles_of = angles_of  # type: ignore[method-assign]


def loss_by_position(model: LanguageModel, raw: np.ndarray, windows: int) -> dict[str, float]:
    """And of the last 1,024 tokens where only the 1,024 before them are read."""
    step = (len(raw) - CONTEXT) // windows
    total, alone = torch.zeros(CONTEXT - 1), torch.zeros(2047)
    for i in range(windows):
        ids = torch.from_numpy(raw[i * step : i * step + CONTEXT].astype(np.int64))
        for read, into in ((ids, total), (ids[-2048:], alone)):
            told = model.lm_head(model.model(read[None]))[0, :-1].log_softmax(-1)
            into -= told.gather(1, read[1:, None])[:, 0] / windows
    found = {f"{a}-{b}": round(float(total[a:b].mean()), 3) for a, b in zip(EDGES, EDGES[1:], strict=False)}
    last = {"last 1024": total[-1024:], "last 1024 behind 1024": alone[-1024:]}
    return found | {name: round(float(part.mean()), 3) for name, part in last.items()}


def edits(model: LanguageModel, work: Path, data: Data, size: int, num: int) -> dict[str, object]:
    """Over `num` held-out edits of files of about `size` tokens."""
    assert model.mtp is not None
    files, rnd, said = pieces_of_files(work)[0]["held"], random.Random(size), set()
    right = agreed = total = whole = prompt_tokens = 0
    while len(said) < num:
        file = file_of(rnd.choice(files), size, rnd)
        asked = file and turn(KINDS[len(said) % len(KINDS)], file, _NAMES, rnd, HELD_OUT_FORMS)
        if file is None or asked is None or asked.answer in said:
            continue
        said.add(asked.answer)
        prompt, answer = (
            data.tokenizer.encode(text, add_special_tokens=False).ids
            for text in (f"{START}user\n{asked.question(file)}{END}\n{ANSWER}", asked.answer + END)
        )
        ids = prompt + answer
        padded = torch.tensor([ids + [0] * (-len(ids) % CHUNK)])
        hidden = model.model(padded)
        drafted = model.mtp(model.model.embed_tokens(padded[:, 1:]), hidden[:, :-1])
        # the place whose output predicts each token of the answer; the head's cell of the same token is one earlier in `drafted`
        places = slice(len(prompt) - 1, len(ids) - 1)
        best = model.lm_head(hidden[0, places]).argmax(-1)
        first = model.lm_head(drafted[0, len(prompt) - 2 : len(ids) - 2]).argmax(-1)
        good = best == torch.tensor(answer)
        right, agreed, total = (
            right + int(good.sum()),
            agreed + int((first == best).sum()),
            total + len(answer),
        )
        whole, prompt_tokens = whole + bool(good.all()), prompt_tokens + len(prompt)
    return {
        "edits": num,
        "prompt_tokens": round(prompt_tokens / num),
        "tokens_right": round(right / total, 4),
        "whole_teacher_forced": round(whole / num, 3),
        "head_agrees": round(agreed / total, 4),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("build/demo"))
    parser.add_argument("--out", type=Path, default=Path("mlxspec/demo"))
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--edits", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = Data(args.work)
    model = read_member(args.out / "target", TARGET)
    assert isinstance(model, LanguageModel)
    for size in (300, 1500, 6000):
        print(size, json.dumps(edits(model, args.work, data, size, args.edits)), flush=True)
    for kind in ("default", "yarn", "linear"):
        turn_at(model, stretched(kind))
        print(kind, json.dumps(loss_by_position(model, data.held_raw, args.windows)), flush=True)


if __name__ == "__main__":
    main()
