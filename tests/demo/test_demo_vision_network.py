"""The network that learns to read pictures: exported, it is what Transformers and mlxspec compute."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the training network needs PyTorch")

from demo_family.export import write_vision  # noqa: E402
from demo_family.pictures import picture  # noqa: E402
from demo_family.vision import IMAGE, IMAGES, TEXT, TOWER, _letters, batch_of  # noqa: E402
from demo_family.vision_network import Reader  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from mlxspec.demo import TARGET  # noqa: E402
from mlxspec.loading.tokenizer import Tokenizer as OurTokenizer  # noqa: E402

pytestmark = pytest.mark.torch
TOKENIZER = Tokenizer.from_file(str(TARGET / "tokenizer.json"))


@pytest.fixture(scope="module")
def reader() -> Reader:
    torch.manual_seed(0)
    made = Reader(TEXT, TOWER).requires_grad_(False)
    for p in made.parameters():
        if p.ndim == 2 and not p.any():
            p.normal_(std=0.05)  # outputs start at zero, which would hide every mixer
    for p in made.parameters():
        p.copy_(p.bfloat16())  # as the folder stores it
    return made


@pytest.fixture(scope="module")
def folder(reader: Reader, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("vision")
    write_vision(reader, out, TARGET / "tokenizer.json")
    return out


def test_logits_are_transformers(reader: Reader, folder: Path) -> None:
    from transformers import Qwen3_5ForConditionalGeneration

    model = Qwen3_5ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    batch = batch_of(TOKENIZER, [picture(random.Random(1), canvas=(112, 48))])
    _, hidden = reader.hidden(
        batch.ids, reader.visual(batch.pixels, *batch.grid), batch.places, batch.positions
    )
    pixels = batch.pixels[0].reshape(len(batch.pixels[0]), 3, 1, -1).repeat(1, 1, 2, 1).flatten(1)
    with torch.no_grad():
        theirs = model(
            input_ids=batch.ids,
            pixel_values=pixels,
            image_grid_thw=torch.tensor([[1, *batch.grid]]),
            mm_token_type_ids=(batch.ids == IMAGE).int(),
        ).logits
    torch.testing.assert_close(reader.text.lm_head(hidden), theirs, atol=2e-4, rtol=1e-4)


def test_rows_and_prompts_are_ours(reader: Reader, folder: Path) -> None:
    from mlxspec.loading.weights import read_folder
    from mlxspec.models.assemble import assemble_lazily

    config = json.loads((folder / "config.json").read_text())
    made = assemble_lazily(config, lambda: read_folder(folder), images=folder)
    assert made.vision is not None, made.no_images
    assert made.mtp is not None
    assert made.vision.preprocessor == IMAGES
    shown = picture(random.Random(2), "date")
    prepared = made.vision.preprocessor.prepare(shown.image)
    theirs = reader.visual(torch.from_numpy(prepared.pixels)[None], *prepared.grid[1:])[0]
    assert np.abs(np.array(made.vision.tower(prepared)) - theirs.numpy()).max() < 1e-4
    tokenizer = OurTokenizer.from_folder(folder)
    parts = [{"type": "image"}, {"type": "text", "text": shown.question}]
    assert tokenizer.template is not None
    text = tokenizer.template.render([{"role": "user", "content": parts}])
    expanded = made.vision.prompt.expand(tokenizer.encode(text, special=False), [prepared.tokens])
    batch = batch_of(TOKENIZER, [shown])
    assert batch.ids[0, : len(expanded.tokens)].tolist() == expanded.tokens
    assert batch.places.tolist() == list(expanded.spans[0])


def test_letters_lie_where_they_are_drawn() -> None:
    shown = picture(random.Random(5), "number", "DejaVuSansMono", canvas=(160, 48))
    named = _letters(shown, 3, 10).reshape(3, 20)
    middle = named[(shown.top + shown.bottom) // 2 // 16]
    said = "".join(str(n - 1) for n in middle if n)
    assert re.fullmatch(
        "".join(f"{c}+" for c in shown.text), said
    )  # as wide letters fill several halves of blocks
    assert not named[0].any() or shown.top < 16
