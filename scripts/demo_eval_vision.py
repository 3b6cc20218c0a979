"""How well the demo reads pictures that it has not seen, and what true image rows are worth to its multi-token head.

    python scripts/demo_eval_vision.py --work build/demo --pictures 200

Prints the part of the characters that are right for each kind of picture, and how many drafts of the multi-token head's first step are the
token that the text network writes next: with the tower's rows at image positions, and with the placeholder's row there. Needs torch.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path

import torch
from demo_data.chat import END
from demo_data.pictures import QUESTIONS, Picture, picture
from demo_training.vision_network import Reader
from demo_training.vision_phase import IMAGE, TEXT, TOWER, batch_of
from tokenizers import Tokenizer

_LONGEST = 40  # tokens of an answer
_SEED = 9001  # no seed of training


@dataclass
class Score:
    """right, characters: of what pictures say; whole: pictures read without a fault; accepted: drafts, by what the head was fed."""

    pictures: int = 0
    whole: int = 0
    right: int = 0
    characters: int = 0
    drafts: int = 0
    accepted: dict[str, int] = field(default_factory=lambda: {"rows": 0, "placeholder": 0})


def read(work: Path) -> Reader:
    """The trained network."""
    reader = Reader(TEXT, TOWER)
    state = torch.load(work / "vision.pt")["model"]
    reader.load_state_dict({k[2:]: v for k, v in state.items() if k.startswith("0.")})
    return reader.requires_grad_(False).eval()


@torch.no_grad()
def answer(reader: Reader, tokenizer: Tokenizer, shown: Picture, score: Score) -> str:
    """What the text network writes, greedily; drafts are counted in `score`."""
    batch = batch_of(tokenizer, [shown])
    image = reader.visual(batch.pixels, *batch.grid)
    start = int((batch.targets[0] != -100).nonzero()[0]) + 1
    ids = torch.zeros(1, -(-(start + _LONGEST) // 32) * 32, dtype=torch.long)
    ids[0, :start] = batch.ids[0, :start]
    last = batch.positions[start - 1]
    later = last + torch.arange(1, ids.shape[1] - start + 1)[:, None]
    positions = torch.cat([batch.positions[:start], later.expand(-1, 3)])
    end = tokenizer.token_to_id(END)
    for at in range(start, start + _LONGEST):
        embedded, hidden = reader.hidden(ids, image, batch.places, positions)
        ids[0, at] = reader.text.lm_head(hidden[0, at - 1]).argmax()
        if ids[0, at] == end:
            break
    embedded, hidden = reader.hidden(ids, image, batch.places, positions)
    blind = embedded.index_copy(
        1, batch.places, reader.text.model.embed_tokens.weight[IMAGE].expand(1, len(batch.places), -1)
    )
    score.drafts += at - start
    for name, given in (("rows", embedded), ("placeholder", blind)):
        reader.turn(positions)
        drafted = reader.text.lm_head(reader.drafts(given, hidden)[0]).argmax(-1)
        score.accepted[name] += int((drafted[start - 1 : at - 1] == ids[0, start + 1 : at + 1]).sum())
    return tokenizer.decode(ids[0, start:at].tolist(), skip_special_tokens=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("build/demo"))
    parser.add_argument(
        "--target", type=Path, default=Path("mlxspec/demo/target"), help="whose tokenizer is used"
    )
    parser.add_argument("--pictures", type=int, default=200)
    args = parser.parse_args()
    reader, tokenizer = read(args.work), Tokenizer.from_file(str(args.target / "tokenizer.json"))
    rng, scores = random.Random(_SEED), {kind: Score() for kind in QUESTIONS}
    for _ in range(args.pictures):
        shown = picture(rng)
        score = scores[shown.kind]
        said = answer(reader, tokenizer, shown, score)
        matched = SequenceMatcher(None, said, shown.text, autojunk=False).get_matching_blocks()
        score.pictures += 1
        score.whole += said == shown.text
        score.right += sum(block.size for block in matched)
        score.characters += max(len(said), len(shown.text))
    for kind, s in scores.items():
        if s.pictures and s.drafts:
            rows, placeholder = (s.accepted[name] / s.drafts for name in ("rows", "placeholder"))
            print(
                f"{kind}: {s.pictures} pictures, {s.whole / s.pictures:.1%} without a fault, "
                f"{s.right / s.characters:.1%} of the characters; "
                f"first drafts accepted {rows:.1%} with image rows, {placeholder:.1%} with the placeholder's"
            )


if __name__ == "__main__":
    main()
