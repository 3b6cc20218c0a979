"""Converts a folder to GGUF with llama.cpp's own converter: to_gguf.py SOURCE_OF_LLAMA_CPP MODEL OUT TYPE [OPTION ...].

The converter refuses tokenizers whose fingerprint it does not know. Peers are fed token ids, so which of its pre-tokenizers is written
does not matter: it is told one. Runs in an environment with torch, transformers and gguf.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    source, model, out, kind, *rest = sys.argv[1:]
    sys.path[:0] = [str(Path(source) / "gguf-py"), source]
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"  # type: ignore[method-assign]
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", out, "--outtype", kind, *rest]
    runpy.run_path(str(Path(source) / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main()
