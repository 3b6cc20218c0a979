"""Random requests, answered plainly and drafted: families, forms of weights, drafters, policies, samplers, rows, turns and cancels in any
mixture.

A case is made from its number alone, so one that fails can be run again by itself. Plain decoding answers each request alone in an engine
without drafters and without a prefix cache. The drafted engine gets all rows of a turn, together or one after the other, and keeps prefixes
from turn to turn; a row may be cancelled on the way. `equality.same` judges: a first difference is excused only where plain decoding's two
best tokens are closer than rounding. AXES are what a test may hold fast: `case(7, family=("gemma3",), policy=("auto",))`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine, Result
from mlxspec.engine.request import Request
from mlxspec.sampling import opening
from tests import engines, families, tiny_models
from tests.engine import equality

NGRAMS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "suffix")
DRAFTERS = ("none", "mtp", "eagle3", "dflash", "draft-model", "own", "forced", *NGRAMS)


def doubled(tokens: mx.array, logits: mx.array) -> mx.array:
    return mx.array(2.0 * np.asarray(logits.astype(mx.float32)))


def least_surprising(logprobs: mx.array) -> mx.array:
    return mx.array(int(np.asarray(logprobs).argmax()))


# what the next token is chosen by
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 1.5},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "top-k": {"temperature": 1.0, "top_k": 8},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "top-n-sigma": {"temperature": 1.0, "top_n_sigma": 1.0},
    "typical-p": {"temperature": 1.0, "typical_p": 0.6},
    "xtc": {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "dry": {"dry_multiplier": 4.0, "dry_allowed_length": 1},
    "repetition": {"repetition_penalty": 1.3},
    "repetition below 1": {"repetition_penalty": 0.9, "frequency_penalty": 1.0},
    "presence": {"presence_penalty": 0.8, "frequency_penalty": 0.4, "temperature": 0.7},
    "last tokens": {"repetition_penalty": 1.3, "presence_penalty": 0.8, "repeat_last_n": 4},
    "logit bias": {"logit_bias": {5: 5.0, 40: -20.0}},
    "processor": {"logits_processors": (doubled,)},
    "callable": {"sampler": least_surprising},
    "all": equality.EVERY_FILTER,
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}},
    "required": ["a", "b"],
}


# what an answer must keep to, beside the sampler
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "none": {},
    "regex": {"regex": "[a-f]{3,20}(x|yz)*"},
    "counted": {"regex": "(ab|cd){2,9}!"},
    "schema": {"json_schema": SCHEMA},
    "stop": {"stop": ["e", "Q7"], "keeps_stop": True},
    "end tokens": {"stop_token_ids": [17, 60]},
    "bad words": {"bad_words": ["a", "bc"]},
    "thinking": {"thinking_budget": 3, "thinking_tags": ("(", ")")},
    "allowed": {"allowed_token_ids": [*range(10, tiny_models.EOS + 1)]},
    "least": {"min_tokens": 9},
}
# a grammar that a tag opens: asked for by name alone, as a tag may stand anywhere in such a case (`play`)
OPENED = {"lark": 'start: ahead /[a-z]{2,9}/ ";"\nahead[suffix="F"]: /(?s:.*)/', "lark_at": "F"}
# a grammar behind thinking that the answer may open
THOUGHT = {
    "regex": "[(a-f]{3,20}(x|yz)*",
    "thinks_first": True,
    "thinking_budget": 3,
    "thinking_tags": ("(", ")"),
    "logit_bias": {8: 9.0},
}
GRAMMARS = ("regex", "counted", "schema", "thought")
AXES: dict[str, Sequence[Any]] = {
    "family": families.NAMES,
    "form": tuple(tiny_models.FORMS),
    "kv_bits": (16, 8, 4),
    "some_rows": (False, True),
    "block": ("DFlash", "DFlash2", "DSpark"),
    "policy": ("fixed", "auto"),
    "n_max": (1, 2, 3, 5, 8, 12, 16),
    "p_min": (0.0, 0.0, 0.3, 0.6, 1.0),
    "n_min": (0, 0, 0, 2),
    "prefix_budget": (0, 100_000, 4 << 20),
    "num_rows": (1, 1, 2, 3, 4),
    "num_turns": (1, 1, 2, 3),
    "joins": ("together", "staggered", "at random"),
    "drafter": DRAFTERS,
    "sampler": tuple(SAMPLERS),
    "constraint": (*["none"] * 12, *CONSTRAINTS),
}


class Anywhere:
    """Stands for Place: every place of a text begins a line, as a random model writes few lines."""

    begins_line, in_fence, in_code = True, False, False

    def push(self, text: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One row of a turn: tokens that go behind the conversation so far, and its parameters. is_cancelled: it ends after a few steps."""

    added: tuple[int, ...]
    params: SamplingParams
    sampler: str
    constraint: str
    is_cancelled: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    """Conversations that run side by side. turns[i][r]: what row r asks in turn i. The others: see engines.drafting and AXES."""

    number: int
    family: str
    form: str
    kv_bits: int
    some_rows: bool
    block: str
    prefix_budget: int
    joins: str
    spec: SpecConfig
    turns: tuple[tuple[Ask, ...], ...]

    def __str__(self) -> str:
        names = "+".join(self.spec.drafters) or "plain"
        return f"case {self.number} ({self.family}, {self.form}, {names}, {self.spec.policy})"


def case(number: int, **only: Sequence[Any]) -> Case:
    """The case of that number; equal numbers give equal cases. only: by axis, what to choose from. Raises ValueError where nothing of that
    fits together."""
    rng = np.random.default_rng(number)
    for _ in range(1000):
        drawn = {name: _one(rng, only.get(name, values)) for name, values in AXES.items()}
        if _fits(drawn):
            return _made(number, rng, drawn, only)
    raise ValueError(f"No case fits {only}.")


def there(family: str) -> tuple[str, ...]:
    """All drafters of its engines, and "none" for plain rows."""
    return ("none", *families.drafting(family), "own", "forced", *NGRAMS)


def _one(rng: np.random.Generator, values: Sequence[Any]) -> Any:
    return values[int(rng.integers(len(values)))]


def _fits(drawn: dict[str, Any]) -> bool:
    family, form = drawn["family"], drawn["form"]
    if drawn["drafter"] not in there(family) or (drawn["kv_bits"] < 16 and family != "wide"):
        return False
    if family in families.ADAPTED:
        return form == "float32" and not drawn["some_rows"]
    # where a router's two best experts are nearly equal, rounding in 16 bits changes logits by more than rounding
    is_wide = drawn["num_rows"] > 1 or drawn["num_turns"] > 1
    return family not in families.HAS_EXPERTS or tiny_models.FORMS[form].dtype == mx.float32 or not is_wide


def _made(
    number: int, rng: np.random.Generator, drawn: dict[str, Any], only: dict[str, Sequence[Any]]
) -> Case:
    allowed = [n for n in there(drawn["family"]) if n in only.get("drafter", DRAFTERS)]
    others = [n for n in allowed if n not in (drawn["drafter"], "none")]
    num_others = int(rng.choice([0, 0, 1, 2, len(others)]))
    chosen = [drawn["drafter"], *(str(n) for n in rng.permutation(others)[:num_others])]
    spec = SpecConfig(
        drafters=() if drawn["drafter"] == "none" else tuple(str(n) for n in rng.permutation(chosen)),
        policy=drawn["policy"],
        n_max=drawn["n_max"],
        p_min=drawn["p_min"],
        ngram_m=int(rng.choice([2, 8, 12])),
        n_min=min(drawn["n_max"], drawn["n_min"]),
    )
    asks = [
        [_ask(rng, only, is_first=turn == 0) for _ in range(drawn["num_rows"])]
        for turn in range(drawn["num_turns"])
    ]
    return Case(
        number=number,
        spec=spec,
        turns=tuple(map(tuple, asks)),
        **{
            n: drawn[n] for n in ("family", "form", "kv_bits", "some_rows", "block", "prefix_budget", "joins")
        },
    )


def _ask(rng: np.random.Generator, only: dict[str, Sequence[Any]], *, is_first: bool) -> Ask:
    length = int(rng.choice([1, 2, 5, 17, 40, 70])) if is_first else int(rng.choice([1, 3, 9]))
    tokens = rng.integers(0, tiny_models.EOS, length).tolist()
    if rng.random() < 0.3:
        tokens = (tokens[:6] * 12)[:length]
    sampler, constraint = (_one(rng, only.get(n, AXES[n])) for n in ("sampler", "constraint"))
    most = int(rng.integers(1, 32))
    chosen: dict[str, Any] = {"max_tokens": most, "seed": int(rng.integers(1 << 30))}
    chosen |= SAMPLERS[sampler] | {**CONSTRAINTS, "opened": OPENED, "thought": THOUGHT}[constraint]
    chosen["min_tokens"] = min(most, chosen.get("min_tokens", 0))
    if constraint not in GRAMMARS and rng.random() < 0.5:
        chosen["ignore_eos"] = True
    if rng.random() < 0.2:
        chosen["top_logprobs"] = int(rng.choice([1, 3]))
    return Ask(
        added=tuple(tokens),
        params=SamplingParams(**chosen),
        sampler=sampler,
        constraint=constraint,
        is_cancelled=bool(rng.random() < 0.05),
    )


def plain_engine(made: Case) -> Engine:
    return engines.plain(made.family, made.form, kv_bits=made.kv_bits)


def drafting_engine(made: Case) -> Engine:
    """Kept for all cases of that kind: what one case leaves there, the next one finds."""
    return engines.drafting(
        made.family,
        made.form,
        block=made.block,
        kv_bits=made.kv_bits,
        some_rows=made.some_rows,
        prefix_budget=made.prefix_budget,
    )


def play(made: Case, engine: Engine | None = None) -> Counter[str]:
    """Run a case and compare. engine: in place of a drafting engine of this process. Returns counts: requests, tokens compared, drafted,
    accepted, cancelled, cached prompt tokens. Raises AssertionError where a text differs without an excuse, a draft is longer or shorter
    than was asked for, or a request has a notice or an error that plain decoding has not."""
    with patch.object(opening, "Place", Anywhere):
        return _play(made, engine)


def _play(made: Case, engine: Engine | None) -> Counter[str]:
    counts: Counter[str] = Counter()
    engine, plain_ = engine or drafting_engine(made), plain_engine(made)
    told = [d for d in engine.drafts.drafters.values() if isinstance(d, (equality.Nudged, equality.Oracle))]
    texts: list[list[int]] = [[] for _ in made.turns[0]]
    going = list(range(len(texts)))
    for turn, asks in enumerate(made.turns):
        prompts = [[*texts[r], *asks[r].added] for r in going]
        wanted = [
            plain_.generate(p, asks[r].params, spec=equality.PLAIN)
            for r, p in zip(going, prompts, strict=True)
        ]
        for drafter in told:
            drafter.learn([[*p, *plain.tokens] for p, plain in zip(prompts, wanted, strict=True)])
        specs = [_predicting(made, (turn, r), plain.tokens) for r, plain in zip(going, wanted, strict=True)]
        results = _answers(engine, made, prompts, [asks[r] for r in going], specs)
        kept = []
        for row, prompt, plain, got in zip(going, prompts, wanted, results, strict=True):
            what = f"{made}, turn {turn}, row {row}"
            counts["requests"] += 1
            _check_drafts(made.spec, got, what)
            if asks[row].is_cancelled:
                counts["cancelled"] += 1
                assert list(got.tokens) == list(plain.tokens[: len(got.tokens)]), what
                continue
            told_of = f"{what}: {got.error} {got.stats.notices}"
            assert (got.error, got.stats.notices) == (plain.error, plain.stats.notices), told_of
            texts[row] = [*prompt, *plain.tokens]
            kept.append(row)
            is_whole = (
                len(prompt) <= engine.memory.full_chunk
            )  # the plain engine reads all prompts in one piece
            is_alone = len(going) == 1 and not got.stats.num_cached and is_whole
            equality.same(
                plain,
                got,
                prompt,
                asks[row].params,
                what,
                plain_.model,
                is_alone=is_alone,
                kv_bits=made.kv_bits,
            )
            if is_alone and got.tokens == plain.tokens and equality.keeps_bits(plain_.model):
                assert got.logprobs == plain.logprobs, what
            counts["tokens"] += len(plain.tokens)
            counts["drafted"] += sum(d.num_drafted for d in got.stats.drafters.values())
            counts["accepted"] += sum(d.num_accepted for d in got.stats.drafters.values())
            counts["cached"] += got.stats.num_cached
        going = kept
    assert engine.is_idle
    assert engine.nbytes == 0
    engine.prefix.tree.check()
    return counts


def _check_drafts(spec: SpecConfig, got: Result, what: str) -> None:
    """Drafts are as long as the request allows."""
    models = {"mtp", "eagle3", "draft-model", "dflash"} & got.stats.drafters.keys()
    for name in models:
        did = got.stats.drafters[name]
        assert len(did.by_position) <= (spec.n_max or 0), what
        if spec.policy == "fixed" and name != "dflash":
            assert did.num_drafted >= spec.n_min * did.num_rounds, what


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
    """Rows together, each a step or two behind the one before, or at random moments; those to be cancelled are after a few more steps. In
    every third case rows rest now and then, as those of clients that do not read."""
    requests: list[Request] = []
    rng = np.random.default_rng(made.number)

    def step() -> None:
        if made.number % 3 == 0:
            engine.rest(frozenset(r.number for r in requests if rng.random() < 0.2))
        engine.step()

    for prompt, ask, spec in zip(prompts, asks, specs, strict=True):
        requests.append(engine.submit(prompt, ask.params, spec=spec))
        for _ in range({"together": 0, "staggered": 2, "at random": int(rng.integers(0, 9))}[made.joins]):
            step()
    for _ in range(int(rng.integers(1, 6))):
        step()
    for request, ask in zip(requests, asks, strict=True):
        if ask.is_cancelled:
            engine.cancel(request.number)
    while not engine.is_idle:
        step()
    engine.rest(frozenset())
    engine.step()
    return [Result.of(request) for request in requests]
