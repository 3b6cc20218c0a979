"""A small tokenizer with the traits of Gemma 3's: byte fallback, a mark for spaces, runs of spaces among the added tokens, several ends.

`beyond` adds special tokens with the next ids, as Gemma 3's text models have one that lies beyond their rows.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as InnerTokenizer

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>")
MARK = "\u2581"  # for a space
NUM_IDS = len(SPECIAL) + 256 + len(string.printable.replace(" ", "")) + 3


def write(folder: Path, *, beyond: tuple[str, ...] = (), **settings: object) -> Path:
    """tokenizer.json, tokenizer_config.json and generation_config.json, with NUM_IDS ids and those beyond."""
    words = [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *string.printable.replace(" ", "")]
    words += [MARK, 2 * MARK, 3 * MARK]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [(MARK, MARK), (2 * MARK, MARK)]
    inner = InnerTokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Replace(" ", MARK)
    steps = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence(steps)
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    inner.add_special_tokens(list(SPECIAL))
    inner.add_tokens([AddedToken(n * MARK, normalized=False) for n in (2, 3)])
    inner.add_special_tokens(list(beyond))
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end_of_turn>", **settings}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4]}))
    return folder
