"""How many drafted tokens stand, by the rule that accepts them; and what grammars, penalties and masks cost. On the demo family.

    python scripts/bench_acceptance.py [--tokens 96] [--seeds 3] [--json]            acceptance at temperature 0.7 and 1
    python scripts/bench_acceptance.py --grammar [--repeats 5]                       fill-this-schema, drafting off and on
    python scripts/bench_acceptance.py --masks [--vocab 248320] [--repeats 20]       processors alone, with random logits

Acceptance is by model drafts of three tokens, the same prompts and seeds for every rule: argmax drafts, drafts with noise of their own and
with the target's, all accepted by matching; and by rejection. distinct-4: how many of the text's runs of four tokens are different, beside
plain decoding's: a rule that changed the text would show there. Speeds are ratios of medians, contestants taking turns; with --grammar
answers are compared with plain decoding's, and a ratio is given for equal ones only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from alternating import alternate, median, ratio  # noqa: E402

from mlxspec import load  # noqa: E402
from mlxspec.bench.demo_prompts import PROMPTS  # noqa: E402
from mlxspec.config import SamplingParams, SpecConfig  # noqa: E402
from mlxspec.platform import device  # noqa: E402

RULES: dict[str, dict[str, str]] = {
    "argmax drafts": {"draft_sampling": "argmax"},
    "own noise": {"draft_sampling": "independent"},
    "shared noise": {"draft_sampling": "shared"},
    "rejection": {"acceptance": "rejection"},
}
RECORD = {
    "type": "object",
    "properties": {
        "function_name": {"type": "string", "maxLength": 24, "pattern": "^[a-z_]+$"},
        "number_of_arguments": {"type": "integer", "minimum": 0, "maximum": 9},
        "return_type": {"enum": ["int", "str", "list", "dict", "None"]},
        "raises_an_error": {"type": "boolean"},
        "short_description": {"type": "string", "maxLength": 40, "pattern": "^[A-Za-z ]+$"},
    },
    "required": [
        "function_name",
        "number_of_arguments",
        "return_type",
        "raises_an_error",
        "short_description",
    ],
    "additionalProperties": False,
}
FUNCTIONS = (
    "def count_words(lines):",
    "def read_settings(path):",
    "def main(args=None):",
    "def close(self):",
)


def distinct(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """Different runs of n tokens over all of them."""
    runs = [tuple(t[i : i + n]) for t in texts for i in range(len(t) - n + 1)]
    return len(set(runs)) / len(runs) if runs else 0.0


def prompts(engine: Any) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        if prompt.is_chat and engine.tokenizer.template is not None:
            found.append(engine.chat_prompt([{"role": "user", "content": prompt.text}]))
        else:
            found.append(engine.tokenizer.encode(prompt.text))
    return found


def acceptance(engine: Any, drafter: str, tokens: int, seeds: int) -> list[dict[str, Any]]:
    texts, out = prompts(engine), []
    for temperature in (0.7, 1.0):
        params = [
            SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed)
            for seed in range(seeds)
            for _ in texts
        ]
        plain = engine.generate(texts * seeds, params, spec=SpecConfig())
        for name, options in RULES.items():
            spec = SpecConfig(drafters=(drafter,), n_max=3, **options)
            results = engine.generate(texts * seeds, params, spec=spec)
            stats = [r.stats for r in results]
            drafted, stood = sum(s.num_drafted for s in stats), sum(s.num_accepted for s in stats)
            first = [w.by_position[0] for s in stats for w in s.drafters.values() if w.by_position]
            out.append(
                {
                    "temperature": temperature,
                    "rule": name,
                    "acceptance": stood / max(1, drafted),
                    "first": sum(s for _, s in first) / max(1, sum(t for t, _ in first)),
                    "tokens_a_round": sum(s.num_decoded for s in stats)
                    / max(1, sum(s.num_rounds for s in stats)),
                    "distinct_4": distinct([r.tokens for r in results]),
                    "distinct_4_plain": distinct([r.tokens for r in plain]),
                    "same_text": sum(a.tokens == b.tokens for a, b in zip(plain, results, strict=True)),
                    "texts": len(results),
                }
            )
    return out


def grammar(engine: Any, names: tuple[str, ...], repeats: int) -> dict[str, Any]:
    params = SamplingParams(max_tokens=160, json_schema=RECORD)
    asked = [f"Describe this function as JSON.\n\n{f}" for f in FUNCTIONS]
    texts = [
        engine.chat_prompt([{"role": "user", "content": a}])
        if engine.tokenizer.template is not None
        else engine.tokenizer.encode(a)
        for a in asked
    ]
    ways = {
        "plain": SpecConfig(),
        "forced": SpecConfig(drafters=("forced",)),
        "drafted": SpecConfig(drafters=names),
    }
    last: dict[str, list[Any]] = {}

    def run(name: str) -> None:
        last[name] = [engine.generate(t, params, spec=ways[name]) for t in texts]

    taken = alternate({n: (lambda n=n: run(n)) for n in ways}, rounds=repeats)
    base = [r.tokens for r in last["plain"]]
    return {
        name: {
            "seconds": median(taken, name),
            "speed_over_plain": 1 / ratio(taken, name, "plain"),
            "same_text": [r.tokens for r in results] == base,
            "valid": all(
                set(json.loads(r.text)) == set(RECORD["required"])
                for r in results
                if r.finish_reason == "stop"
            ),
            "finished": sum(r.finish_reason == "stop" for r in results),
            "rounds": sum(r.stats.num_rounds for r in results),
            "tokens": sum(r.stats.num_generated for r in results),
            "drafters": {
                n: [
                    sum(getattr(r.stats.drafters[n], f) for r in results if n in r.stats.drafters)
                    for f in ("num_accepted", "num_drafted")
                ]
                for n in sorted({n for r in results for n in r.stats.drafters})
            },
        }
        for name, results in last.items()
    }


def masks(vocab: int, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds to choose at one position and at four, of this vocabulary; a mask's host part and device part together."""
    import mlx.core as mx
    import numpy as np

    from mlxspec.sampling import bits
    from mlxspec.sampling.sampler import BatchSampler, RowSampler

    rng, out = np.random.default_rng(0), []
    prompt = rng.integers(0, vocab, 512).tolist()
    base = SamplingParams(seed=1, temperature=0.8)
    kinds = {
        "greedy": SamplingParams(seed=1),
        "temperature": base,
        "top-p": replace(base, top_p=0.9),
        "penalties": replace(base, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1),
        "bias": replace(base, logit_bias={3: 1.0}),
        "mask": base,
    }
    for num in (1, 4):
        logits = mx.array(rng.standard_normal((num, vocab)).astype(np.float32))
        samplers = {n: BatchSampler([RowSampler(p, prompt, vocab)], vocab) for n, p in kinds.items()}
        one = bits.only(range(0, vocab, 3), vocab)

        def run(
            name: str, num: int = num, logits: Any = logits, samplers: Any = samplers, one: Any = one
        ) -> None:
            chosen = [one] * num if name == "mask" else None
            mx.eval(samplers[name].sample(logits, [0] * num, list(range(num)), None, chosen))

        taken = alternate({n: (lambda n=n: run(n)) for n in kinds}, rounds=repeats, warmup=3)
        out += [{"positions": num, "kind": n, "milliseconds": 1e3 * median(taken, n)} for n in kinds]
    return out


def table(rows: Sequence[dict[str, Any]]) -> str:
    names = list(rows[0])
    cells = [[f"{r[n]:.3f}" if isinstance(r[n], float) else str(r[n]) for n in names] for r in rows]
    widths = [max(len(n), *(len(c[i]) for c in cells)) for i, n in enumerate(names)]
    return "\n".join(
        "  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)) for line in [names, *cells]
    )


def main() -> None:
    device.compile_kernels()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft-model")
    parser.add_argument("--drafter", default="mtp", help="mtp or draft-model")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=248_320)
    parser.add_argument("--grammar", action="store_true")
    parser.add_argument("--masks", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.masks:
        found: Any = masks(args.vocab, args.repeats)
    else:
        names = ("ngram-simple", args.drafter) if args.grammar else (args.drafter,)
        engine = load(args.model, draft=names, draft_model=args.draft_model)
        if args.grammar:
            found = [{"way": n, **r} for n, r in grammar(engine, names, args.repeats).items()]
        else:
            found = acceptance(engine, args.drafter, args.tokens, args.seeds)
    print(json.dumps(found, indent=1) if args.json else table(found))


if __name__ == "__main__":
    main()
