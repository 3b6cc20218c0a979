"""Random requests, answered plainly and drafted: models, dtypes, quantizations, drafters, policies, rows, constraints and turns in any
mixture.

A case is made from its number alone, so one that fails can be run again by itself. Plain decoding answers each request alone in an engine
without drafters and without a prefix store. The drafted engine gets all rows of a turn, together or one after the other, and keeps prefixes
from turn to turn; a row may be cancelled on the way. `equality.same` judges: a first difference is excused only where plain decoding's two
best tokens are closer than rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.eagle3 import Eagle3
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine, Result
from mlxspec.engine.request import Request
from mlxspec.models.qwen3_5 import Qwen35
from tests import tiny_models
from tests.engine import equality

BLOCKS = ("DFlash", "DFlash2", "DSpark")
MODELS = ("mtp", "eagle3", "dflash", "draft-model")
DRAFTERS = (*MODELS, "ngram-simple", "ngram-map-k", "ngram-map-k4v", "forced")
TARGETS = ("hybrid", "qwen3-moe")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}},
    "required": ["a", "b"],
}
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": "[a-f]{3,20}(x|yz)*"},
    {"regex": "(ab|cd){2,9}!"},
    {"json_schema": SCHEMA},
)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One row of a turn: tokens that go behind the conversation so far, and its parameters. is_cancelled: it ends after a few steps."""

    added: tuple[int, ...]
    params: SamplingParams
    is_cancelled: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    """Conversations that run side by side. target: one of TARGETS. block: the kind of block drafter. turns[i][r]: what row r asks in turn
    i. is_staggered: rows join one after the other."""

    number: int
    target: str
    block: str
    form: str
    spec: SpecConfig
    turns: tuple[tuple[Ask, ...], ...]
    is_staggered: bool

    def __str__(self) -> str:
        names = "+".join(self.spec.drafters) or "plain"
        return f"case {self.number} ({self.target}, {self.form}, {names}, {self.spec.policy})"


def case(number: int, forms: Sequence[str] = tuple(tiny_models.FORMS)) -> Case:
    """The case of that number; equal numbers and forms give equal cases."""
    rng = np.random.default_rng(number)
    num_rows, num_turns = int(rng.choice([1, 1, 2, 3, 4])), int(rng.choice([1, 1, 2, 3]))
    form = str(rng.choice(list(forms)))
    # where a router's two best experts are nearly equal, rounding in 16 bits changes logits by more than rounding
    is_moe = tiny_models.FORMS[form].dtype == mx.float32 and rng.random() < 0.25
    return Case(
        number=number,
        target=TARGETS[is_moe],
        block=str(rng.choice(BLOCKS)),
        form=form,
        spec=_spec(rng, [n for n in DRAFTERS if n != "mtp" or not is_moe]),
        turns=tuple(
            tuple(_ask(rng, is_first=turn == 0) for _ in range(num_rows)) for turn in range(num_turns)
        ),
        is_staggered=bool(rng.random() < 0.3),
    )


def _spec(rng: np.random.Generator, there: Sequence[str]) -> SpecConfig:
    names = [str(n) for n in rng.permutation(there)[: int(rng.choice([1, 1, 2, 3, len(there)]))]]
    n_max = int(rng.choice([1, 2, 3, 5, 8, 16]))
    return SpecConfig(
        drafters=tuple(names),
        policy="auto" if rng.random() < 0.3 else "fixed",
        n_max=n_max,
        p_min=float(rng.choice([0.0, 0.0, 0.3, 0.6])),
        ngram_m=int(rng.choice([2, 8, 16])),
        n_min=min(n_max, int(rng.choice([0, 0, 0, 2]))),
    )


def _ask(rng: np.random.Generator, *, is_first: bool) -> Ask:
    length = int(rng.choice([1, 2, 5, 17, 40, 70])) if is_first else int(rng.choice([1, 3, 9]))
    tokens = rng.integers(0, tiny_models.EOS, length).tolist()
    if rng.random() < 0.3:
        tokens = (tokens[:6] * 12)[:length]
    return Ask(added=tuple(tokens), params=_params(rng), is_cancelled=bool(rng.random() < 0.04))


def _params(rng: np.random.Generator) -> SamplingParams:
    def maybe(share: float, **made: Any) -> dict[str, Any]:
        return made if rng.random() < share else {}

    token = int(rng.integers(0, tiny_models.EOS))
    chosen: dict[str, Any] = {"max_tokens": int(rng.integers(1, 32)), "seed": int(rng.integers(1 << 30))}
    chosen |= maybe(0.5, temperature=float(rng.choice([0.3, 0.8, 1.0, 1.5])))
    chosen |= maybe(0.2, top_p=float(rng.choice([0.5, 0.9, 0.99])))
    chosen |= maybe(0.2, top_k=int(rng.choice([1, 5, 20, 200])))
    chosen |= maybe(0.15, min_p=float(rng.choice([0.02, 0.2])))
    chosen |= maybe(0.2, repetition_penalty=float(rng.choice([0.9, 1.1, 1.3])))
    chosen |= maybe(0.15, presence_penalty=float(rng.choice([-0.5, 0.8])))
    chosen |= maybe(0.15, frequency_penalty=float(rng.choice([0.4, 1.0])))
    chosen |= maybe(0.15, logit_bias={token: 5.0, (token + 7) % tiny_models.EOS: -20.0})
    chosen |= maybe(0.15, stop=[chr(32 + int(rng.integers(0, 95))), "e" + chr(32 + token)])
    chosen |= maybe(0.15, bad_words=[chr(32 + token), "ab"])
    chosen |= maybe(0.2, top_logprobs=int(rng.choice([1, 3])))
    chosen |= maybe(0.1, thinking_budget=int(rng.choice([0, 3, 8])), thinking_tags=("(", ")"))
    if rng.random() < 0.2:
        chosen |= GRAMMARS[int(rng.integers(len(GRAMMARS)))]
        chosen.pop("bad_words", None)  # a banned letter may leave a grammar without any way on
    else:
        chosen |= maybe(0.5, ignore_eos=True)
    rng = np.random.default_rng(
        chosen["seed"]
    )  # what stands above is drawn as it was before these were there
    chosen |= maybe(0.1, top_n_sigma=float(rng.choice([0.5, 1.0, 2.0])))
    chosen |= maybe(0.1, typical_p=float(rng.choice([0.3, 0.9])))
    chosen |= maybe(0.1, xtc_probability=float(rng.choice([0.5, 1.0])), xtc_threshold=0.05)
    chosen |= maybe(
        0.1, dry_multiplier=float(rng.choice([0.8, 4.0])), dry_allowed_length=int(rng.choice([1, 2]))
    )
    chosen |= maybe(0.15, repeat_last_n=int(rng.choice([0, 4, 16])))
    if "thinking_budget" not in chosen:  # whose closing tag has to be allowed
        chosen |= maybe(0.1, allowed_token_ids=[*range(10, tiny_models.EOS + 1)])
    chosen |= maybe(0.1, stop_token_ids=[int(rng.integers(0, tiny_models.EOS))], keeps_stop=True)
    if not {"json_schema", "regex", "lark"} & chosen.keys():
        chosen |= maybe(0.1, min_tokens=int(rng.integers(1, chosen["max_tokens"] + 1)))
    else:
        chosen.pop("allowed_token_ids", None)  # which may leave a grammar without any way on
    return SamplingParams(**chosen)


def target_of(target: str, form: str) -> Qwen35:
    return tiny_models.target(form) if target == "hybrid" else tiny_models.qwen3_moe(form)


@cache
def plain_engine(target: str, form: str) -> Engine:
    return _engine(target, [], form, prefix_budget=0)


@cache
def drafting_engine(target: str, form: str, block: str) -> Engine:
    """With every drafter and a prefix store, kept for all cases of that form: what one case leaves there, the next one finds."""
    model, is_hybrid = target_of(target, form), target == "hybrid"
    small = tiny_models.echo(form=form) if is_hybrid else tiny_models.qwen3(form)
    eagle = (
        tiny_models.eagle3(form)
        if is_hybrid
        else tiny_models.eagle3_for(tiny_models.QWEN3_MOE, model, form=form)
    )
    drafters: list[Drafter] = [
        *([Mtp(tiny_models.mtp_head(form), model.max_context)] if is_hybrid else []),
        Eagle3(eagle, model.max_context),
        equality.Nudged(
            tiny_models.make_dflash(model, block, form=form, window=None if block == "DFlash" else 9),
            model.max_context,
        ),
        DraftModel(small, model.vocab_size),
        ngram_lookup("ngram-simple", 2, 12),
        ngram_lookup("ngram-map-k", 2, 8, 1),
        ngram_lookup("ngram-map-k4v", 2, 8, 1),
    ]
    return _engine(target, drafters, form, prefix_budget=4 << 20)


def _engine(target: str, drafters: Sequence[Drafter], form: str, **config: Any) -> Engine:
    return Engine(
        target_of(target, form), tiny_models.tokenizer(), drafters=drafters, config=EngineConfig(**config)
    )


def play(made: Case, engine: Engine | None = None) -> Counter[str]:
    """Run a case and compare. engine: in place of a drafting engine of this process. Returns counts: requests, tokens compared, drafted,
    accepted, cancelled, cached prompt tokens. Raises AssertionError where a text differs without an excuse, or a request has a notice or
    an error that plain decoding has not."""
    counts: Counter[str] = Counter()
    engine = engine or drafting_engine(made.target, made.form, made.block)
    model, block = target_of(made.target, made.form), engine.chain.drafters["dflash"]
    texts: list[list[int]] = [[] for _ in made.turns[0]]
    going = list(range(len(texts)))
    for turn, asks in enumerate(made.turns):
        prompts = [[*texts[r], *asks[r].added] for r in going]
        wanted = [
            plain_engine(made.target, made.form).generate(p, asks[r].params, spec=equality.PLAIN)
            for r, p in zip(going, prompts, strict=True)
        ]
        if isinstance(block, equality.Nudged):
            block.learn([[*p, *plain.tokens] for p, plain in zip(prompts, wanted, strict=True)])
        specs = [_predicting(made, (turn, r), plain.tokens) for r, plain in zip(going, wanted, strict=True)]
        results = _answers(engine, made, prompts, [asks[r] for r in going], specs)
        kept = []
        for row, prompt, plain, got in zip(going, prompts, wanted, results, strict=True):
            what = f"{made}, turn {turn}, row {row}"
            counts["requests"] += 1
            if asks[row].is_cancelled:
                counts["cancelled"] += 1
                assert list(got.tokens) == list(plain.tokens[: len(got.tokens)]), what
                continue
            assert (got.error, got.stats.notices) == (plain.error, plain.stats.notices), (
                f"{what}: {got.error} {got.stats.notices}"
            )
            texts[row] = [*prompt, *plain.tokens]
            kept.append(row)
            is_alone = len(going) == 1 and not got.stats.num_cached
            equality.same(plain, got, prompt, asks[row].params, what, model, is_alone=is_alone)
            counts["tokens"] += len(plain.tokens)
            counts["drafted"] += sum(d.num_drafted for d in got.stats.drafters.values())
            counts["accepted"] += sum(d.num_accepted for d in got.stats.drafters.values())
            counts["cached"] += got.stats.num_cached
        going = kept
    assert engine.is_idle
    return counts


def _predicting(made: Case, place: tuple[int, int], answer: Sequence[int]) -> SpecConfig:
    """Every third request brings along the answer, the answer with an insertion or without two of its tokens, or something else."""
    rng = np.random.default_rng([made.number, *place])
    if not made.spec.drafters or rng.random() > 1 / 3:
        return made.spec
    at, text = int(rng.integers(0, len(answer) + 1)), list(answer)
    edits = [
        text,
        [*text[:at], 7, 7, *text[at:]],
        [*text[:at], *text[at + 2 :]],
        rng.integers(0, 90, 30).tolist(),
    ]
    return replace(made.spec, predicted=tuple(edits[int(rng.integers(4))]))


def _answers(
    engine: Engine,
    made: Case,
    prompts: Sequence[Sequence[int]],
    asks: Sequence[Ask],
    specs: Sequence[SpecConfig],
) -> list[Result]:
    """Rows together, or each a step or two behind the one before; those to be cancelled are after three more steps. In every third case
    rows rest now and then, as those of clients that do not read."""
    requests: list[Request] = []
    rng = np.random.default_rng(made.number)

    def step() -> None:
        if made.number % 3 == 0:
            engine.rest(frozenset(r.number for r in requests if rng.random() < 0.2))
        engine.step()

    for prompt, ask, spec in zip(prompts, asks, specs, strict=True):
        requests.append(engine.submit(prompt, ask.params, spec=spec))
        for _ in range(2 * made.is_staggered):
            step()
    for _ in range(3):
        step()
    for request, ask in zip(requests, asks, strict=True):
        if ask.is_cancelled:
            engine.cancel(request.number)
    while not engine.is_idle:
        step()
    engine.rest(frozenset())
    engine.step()
    return [Result.of(request) for request in requests]
