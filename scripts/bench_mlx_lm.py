"""Times a model that runs by mlx-lm's code beside mlx-lm itself: plain decoding, and policy `auto`, by kind of prompt.

    .venv/bin/python scripts/bench_mlx_lm.py FOLDER [--rounds 7] [--tokens 64] [--dtype float32]

Every contestant once a round in turning order; ratios are medians of a round's own. Where we have code for the model too, `own` is that
code, without drafts. Graph nodes of a plain step are counted for each.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mlxspec.platform import device  # isort: skip  (before MLX: it loads the BLAS)  # noqa: F401

import mlx.core as mx
from alternating import alternate, median, ratio
from bench_gate import count_nodes
from mlx_lm.generate import generate_step

from mlxspec import Engine, EngineConfig, SamplingParams, SpecConfig, load
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.folder import ModelFolder
from mlxspec.models.registry import ARCHITECTURES

CODE = "def area(w, h):\n    return w * h\n\ndef volume(w, h, d):\n    return w * h * d\n"
KINDS = {
    "chat": "Explain in a few sentences why the sky is blue.",
    "edit": f"Write this code again and rename w to width:\n\n{CODE}",
    "copy": f"Repeat this text exactly, three times:\n\n{CODE}",
    "list": "Count from one to twenty in words, one word on each line.",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"))
    options = parser.parse_args()
    config = EngineConfig(prefix_budget=0, past_texts=0)  # mlx-lm reads the prompt each time
    engines = {"adapted": load(options.folder, dtype=options.dtype, engine="mlx-lm", config=config)}
    if ModelFolder(options.folder).config().get("model_type") in ARCHITECTURES:
        engines["own"] = load(options.folder, dtype=options.dtype, draft="off", images=False, config=config)
    for name, engine in engines.items():
        print(f"{name}: {nodes_of_a_step(engine)} graph nodes in a plain step")
    for kind, text in KINDS.items():
        print(f"{kind}: {timed(engines, text, options.tokens, options.rounds)}", flush=True)


def timed(engines: dict[str, Engine], text: str, num: int, rounds: int) -> str:
    """Ratios of times for one prompt, and whether the texts are equal."""
    engine = engines["adapted"]
    prompt, params = engine.chat_prompt([{"role": "user", "content": text}]), SamplingParams(max_tokens=num)
    if isinstance(prompt, str):
        prompt = engine.tokenizer.encode(prompt)
    texts: dict[str, list[int]] = {}
    module, ends = engine.model.module, engine.tokenizer.eos_ids

    def theirs() -> None:
        found: list[int] = []
        for token, _ in generate_step(mx.array(list(prompt)), module, max_tokens=num):
            if int(token) in ends:
                break
            found.append(int(token))
        texts["mlx-lm"] = found

    def ours(name: str, who: Engine, spec: SpecConfig | None) -> None:
        texts[name] = list(who.generate(list(prompt), params, spec=spec).tokens)

    contestants = {
        "mlx-lm": theirs,
        "plain": lambda: ours("plain", engine, SpecConfig(drafters=())),
        "auto": lambda: ours("auto", engine, None),
    }
    if "own" in engines:
        contestants["own"] = lambda: ours("own", engines["own"], SpecConfig(drafters=()))
    taken = alternate(contestants, rounds=rounds)
    same = all(t == texts["mlx-lm"] for t in texts.values())
    speeds = [f"mlx-lm {len(texts['mlx-lm']) / median(taken, 'mlx-lm'):.1f} tokens/s"]
    speeds += [
        f"{name} {ratio(taken, 'mlx-lm', name):.3f} x mlx-lm" for name in contestants if name != "mlx-lm"
    ]
    speeds.append(f"auto {ratio(taken, 'plain', 'auto'):.3f} x plain")
    return ", ".join([*speeds, "texts equal" if same else "texts differ"])


def nodes_of_a_step(engine: Engine) -> int:
    cache = engine.model.make_cache(1)
    engine.model.forward(mx.array([1, 2, 3], mx.int32), FlatRows((3,)), cache, certain=True)
    cache.commit()
    mx.eval(cache.arrays)
    out = engine.model.forward(mx.array([4], mx.int32), FlatRows((1,)), cache, certain=True)
    return count_nodes(mx.argmax(out.logits, -1), *cache.arrays)


if __name__ == "__main__":
    main()
