"""A tokenizer with a token for every byte, written as a model's folder would hold it."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer as InnerTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

END = "<|end|>"


def write(folder: Path, *, beginning: bool = False, **settings) -> Path:
    """tokenizer.json and tokenizer_config.json; `beginning` puts a token in front of plain texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = InnerTokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END, "<|begin|>"])
    if beginning:
        inner.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", 257)]
        )
    inner.enable_truncation(5)
    inner.enable_padding(length=9)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, **settings}))
    return folder
