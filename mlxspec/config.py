"""What a caller can ask for: sampling, speculation and engine options, checked when they are made.

Plain Python: knows no arrays, no models, no command line. Every class is frozen; to change one, `dataclasses.replace` it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from mlxspec.errors import ConfigError

MAX_DRAFT = 256  # tokens one draft may have: a verify wider than this is a prefill
MAX_ROWS = 64
MAX_CONTEXT = 1 << 24
MAX_BYTES = 1 << 50
FIXED_DEPTH, AUTO_DEPTH = 3, 8  # tokens a model drafts at once, unless told otherwise
DRAFT_BITS = (4, 8, 16)
KV_BITS = (4, 8, 16)  # of keys and values; 16 stands for whatever they are computed in
MAX_TOP_LOGPROBS = 20
Policy = Literal["fixed", "auto"]
LoopBreaker = Literal["off", "thinking", "all"]
DRAFTER_NAME = re.compile(r"[A-Za-z][\w.-]{0,63}")
READ_AT_LOAD = (  # of SpecConfig: what drafters are made with; ngram_m limits a request's drafts as well
    "ngram_n",
    "ngram_m",
    "ngram_min_hits",
    "draft_vocab",
    "draft_bits",
    "draft_kv_bits",
)
BY_REQUEST = ("forced", "predicted")  # drafters that a request brings along; any list of drafters has them
ALWAYS_THERE = (*BY_REQUEST, "suffix")  # without being loaded
DRAFTER_NAMES = (  # those that come with mlxspec
    *ALWAYS_THERE,
    "mtp",
    "eagle3",
    "dflash",
    "draft-model",
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
)
ONE_ACCEPTANCE = (  # why nobody can choose how drafts are accepted
    "a draft is accepted where it equals the token that the model samples there, "
    "so that a seed gives the same text with and without drafting"
)
OTHER_NAMES = dict.fromkeys(("ngram-mod", "ngram-cache"), ("suffix", "ngram-simple"))  # llama.cpp's


def check_number(name: str, value: object, low: float, high: float, *, integer: bool = False) -> None:
    """Raise ConfigError unless `value` is a finite number (not a bool) in [low, high]."""
    kind = "an integer" if integer else "a number"
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)):
        raise ConfigError(f"{name} must be {kind}, not {shown(value)}.")
    if not low <= value <= high:  # also false for nan; isfinite would choke on integers beyond float
        ends = (int(end) if float(end).is_integer() else end for end in (low, high))
        raise ConfigError(f"{name} must be between {' and '.join(map(str, ends))}, not {shown(value)}.")


def shown(value: object) -> str:
    """A value as an error message may show it."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to spell integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_kv_bits(name: str, value: object) -> None:
    """Raise ConfigError for a number of bits in which keys and values cannot be kept."""
    if type(value) is not int or value not in KV_BITS:
        raise ConfigError(f"{name} must be one of {', '.join(map(str, KV_BITS))}, not {shown(value)}.")


def _strings(name: str, value: object) -> tuple[str, ...]:
    """A string, or several of them, as a tuple. Raises ConfigError for anything else, and for empty ones."""
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    if any(not isinstance(item, str) or not item for item in found):
        raise ConfigError(f"{name} must be non-empty strings, not {shown(value)}.")
    return tuple(str(item) for item in found)


def drafter_names(given: str | Iterable[str]) -> tuple[str, ...]:
    """Drafters by the names that they bear, each once. Raises ConfigError for what is no name, and for one that is given twice."""
    names = _strings("drafters", given)
    for name in names:
        if not DRAFTER_NAME.fullmatch(name):
            raise ConfigError(f"A drafter's name is letters, digits and dashes, not {shown(name)}.")
    if len(set(names)) != len(names):
        raise ConfigError(f"A drafter is named twice in {', '.join(names)}.")
    return tuple(dict.fromkeys(own for name in names for own in OTHER_NAMES.get(name, (name,))))


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {shown(value)}.")


@dataclass(frozen=True)
class Span:
    """The numbers that an option may have, from low to high; above: without low itself."""

    low: float
    high: float
    whole: bool = False
    above: bool = False


def _whole(low: int, high: int) -> Span:
    return Span(low, high, whole=True)


NUMBERS = {  # of the classes below, by field; forms of requests have them from here
    # SamplingParams
    "max_tokens": _whole(1, MAX_CONTEXT),
    "temperature": Span(0, 100),
    "top_p": Span(0, 1, above=True),
    "top_k": _whole(0, 1 << 30),
    "min_p": Span(0, 1),
    "top_n_sigma": Span(0, 1000),
    "typical_p": Span(0, 1),
    "xtc_probability": Span(0, 1),
    "xtc_threshold": Span(0, 1),
    "repetition_penalty": Span(0.01, 100),
    "presence_penalty": Span(-100, 100),
    "frequency_penalty": Span(-100, 100),
    "repeat_last_n": _whole(-1, MAX_CONTEXT),
    "dry_multiplier": Span(0, 100),
    "dry_base": Span(1, 100),
    "dry_allowed_length": _whole(1, MAX_CONTEXT),
    "dry_penalty_last_n": _whole(-1, MAX_CONTEXT),
    "seed": _whole(0, 2**63 - 1),
    "min_tokens": _whole(0, MAX_CONTEXT),
    "top_logprobs": _whole(0, MAX_TOP_LOGPROBS),
    "thinking_budget": _whole(0, MAX_CONTEXT),
    # SpecConfig
    "n_max": _whole(0, MAX_DRAFT),
    "n_min": _whole(0, MAX_DRAFT),
    "p_min": Span(0, 1),
    "ngram_n": _whole(1, 64),
    "ngram_m": _whole(1, MAX_DRAFT),
    "ngram_min_hits": _whole(1, 1024),
    "draft_vocab": _whole(0, MAX_CONTEXT),
    # EngineConfig
    "max_rows": _whole(1, MAX_ROWS),
    "max_waiting": _whole(1, 1 << 20),
    "memory_budget": _whole(1, MAX_BYTES),
    "prefix_budget": _whole(0, MAX_BYTES),
    "prefix_disk": _whole(0, MAX_BYTES),
    "past_texts": _whole(0, MAX_BYTES),
    "past_texts_disk": _whole(0, MAX_BYTES),
    "prefill_chunk": _whole(16, 1 << 16),
    "max_context": _whole(2, MAX_CONTEXT),
}


def _check_numbers(config: Any) -> None:
    """Raise ConfigError for a field out of its span; None is allowed where it is the default."""
    for option in fields(config):
        span, value = NUMBERS.get(option.name), getattr(config, option.name)
        if span is not None and not (value is None and option.default is None):
            check_number(option.name, value, span.low, span.high, integer=span.whole)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen from the target's logits; one per request.

    The order is: DRY, repetition penalty, presence and frequency penalties, logit bias and allowed_token_ids, what is forbidden (bad words,
    grammar, thinking budget, min_tokens), top-n-sigma, temperature, top-k, top-p, min-p, typical-p, XTC. Temperature 0 takes the argmax.
    Repetition looks at prompt and answer; presence and frequency look at the answer only (OpenAI's meaning). repeat_last_n: at so many of
    the last tokens.

    min_tokens: before so many tokens nothing ends the answer. stop_token_ids: tokens that end it and are no part of it. keeps_stop: the
    stop string that ends it is a part. dry_*: see sampling/history.py; the others: sampling/filters.py.

    `seed` None draws a fresh seed for the request; equal seeds give equal text with and without drafting.

    logprobs: give log-probabilities of the answer's tokens, and of the `top_logprobs` most likely ones at each place (which asks for
    logprobs too). They are those of the model's own distribution, before everything above.
    prompt_logprobs: the same of the prompt's tokens behind the first, all of which are then read anew; asks for logprobs too. bad_words:
    strings that the answer's bytes will not hold, however they are cut into tokens. json_schema (a mapping, or JSON text), regex, lark: at
    most one, the answer is of that language. thinking_budget: after so many tokens inside thinking_tags the closing tag is forced; a
    grammar begins behind thinking that the prompt has opened.

    loop_breaker: what is done about a text that loops, see sampling/loops.py. "thinking" closes thinking that loops, "all" also ends an
    answer that loops outside it, with finish_reason "length". A notice says so. The text up to there is the same. While loops are looked
    for, a draft has at most 128 tokens.

    adapters: of those that the model was loaded with beside its weights, by name, how much each counts; the others do not.

    logits_processors: callables (tokens (n,), logits (1, V)) -> logits (1, V), as in mlx-lm, in order and before everything above, with
    tokens all that stands before the position. sampler: a callable, log-probabilities (1, V) -> token, that draws in place of temperature,
    top-k, top-p and min-p. Both are called at every position a round verifies, also for drafts that do not stand, so they must depend on
    nothing but their arguments (a sampler may use a random generator). One that raises ends its request with an error.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    top_n_sigma: float = 0.0  # 0: off
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = -1  # -1: all
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # -1: all
    dry_sequence_breakers: str | Sequence[str] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()  # none: all
    seed: int | None = None
    stop: str | Sequence[str] = ()
    keeps_stop: bool = False
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    bad_words: str | Sequence[str] = ()
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    lark: str | None = None
    thinking_budget: int | None = None
    thinking_tags: tuple[str, str] = ("<think>", "</think>")
    loop_breaker: LoopBreaker = "thinking"
    adapters: Mapping[str, float] = field(default_factory=dict)
    logits_processors: Sequence[Callable[[Any, Any], Any]] = ()
    sampler: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.top_p == 0:
            raise ConfigError(
                "top_p must be above 0: at 0 no token is left; use temperature 0 for the most likely token."
            )
        if self.typical_p == 0:
            raise ConfigError("typical_p must be above 0: at 0 no token is left.")
        breakers = _strings("dry_sequence_breakers", self.dry_sequence_breakers)
        object.__setattr__(self, "dry_sequence_breakers", breakers)
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError("logit_bias must map token ids to numbers.")
        for token, bias in self.logit_bias.items():
            check_number("a token id in logit_bias", token, 0, 1 << 30, integer=True)
            check_number(f"logit_bias of token {token}", bias, -1e9, 1e9)
        for name in ("stop_token_ids", "allowed_token_ids"):
            given = getattr(self, name)
            if not isinstance(given, (list, tuple)):
                raise ConfigError(f"{name} must be a list of token ids, not {shown(given)}.")
            for token in given:
                check_number(f"a token id in {name}", token, 0, 1 << 30, integer=True)
            object.__setattr__(self, name, tuple(given))
        check_number("min_tokens", self.min_tokens, 0, self.max_tokens, integer=True)
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        for name in ("keeps_stop", "ignore_eos", "logprobs", "prompt_logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, not {shown(getattr(self, name))}.")
        object.__setattr__(self, "bad_words", _strings("bad_words", self.bad_words))
        self._check_grammar()
        tags = _strings("thinking_tags", self.thinking_tags)
        if len(tags) != 2 or tags[0] == tags[1]:
            raise ConfigError(
                "thinking_tags must be two different strings: what opens and what closes thinking."
            )
        object.__setattr__(self, "thinking_tags", tags)
        _check_choice("loop_breaker", self.loop_breaker, get_args(LoopBreaker))
        if not isinstance(self.adapters, Mapping) or not all(isinstance(name, str) for name in self.adapters):
            raise ConfigError("adapters must map names to numbers.")
        for name, scale in self.adapters.items():
            check_number(f"the scale of adapter {shown(name)}", scale, -100, 100)
        self._check_hooks()

    def _check_hooks(self) -> None:
        given = self.logits_processors
        if not isinstance(given, (list, tuple)) or not all(callable(p) for p in given):
            raise ConfigError(f"logits_processors must be a list of callables, not {shown(given)}.")
        object.__setattr__(self, "logits_processors", tuple(given))
        if self.sampler is None:
            return
        if not callable(self.sampler):
            raise ConfigError(f"sampler must be a callable, not {shown(self.sampler)}.")
        own = SamplingParams.__dataclass_fields__
        for name in ("temperature", "top_p", "top_k", "min_p", "top_n_sigma", "typical_p", "xtc_probability"):
            if getattr(self, name) != own[name].default:
                raise ConfigError(
                    f"sampler and {name} contradict each other: a sampler draws by its own rules."
                )

    def _check_grammar(self) -> None:
        given = [name for name in ("json_schema", "regex", "lark") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"An answer can follow one grammar only, not {' and '.join(given)}.")
        if given and self.ignore_eos:
            raise ConfigError(
                f"ignore_eos and {given[0]} contradict each other: what follows a grammar ends."
            )
        if given and self.min_tokens:
            raise ConfigError(
                f"min_tokens and {given[0]} contradict each other: a grammar says where an answer ends."
            )
        for name in ("regex", "lark"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name} must be a non-empty string, not {shown(value)}.")
        if self.json_schema is not None and not isinstance(self.json_schema, (Mapping, str)):
            raise ConfigError(f"json_schema must be a mapping or JSON text, not {shown(self.json_schema)}.")

    @property
    def has_grammar(self) -> bool:
        return self.json_schema is not None or self.regex is not None or self.lark is not None

    @property
    def has_hooks(self) -> bool:
        """Whether callables of the user's take part."""
        return bool(self.logits_processors) or self.sampler is not None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs or self.top_logprobs > 0 or self.prompt_logprobs

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_window(self) -> bool:
        """Whether penalties look at some of the last tokens only."""
        return self.has_penalties and self.repeat_last_n >= 0

    @property
    def needs_text(self) -> bool:
        """Whether logits depend on where tokens stand in the text, so that the host must know it."""
        return self.has_hooks or self.has_window or self.dry_multiplier > 0

    @property
    def has_filters(self) -> bool:
        """Whether all of a position's scores are needed behind top-k, top-p and min-p."""
        return self.typical_p < 1.0 or self.xtc_probability > 0.0


@dataclass(frozen=True, kw_only=True)
class SpecConfig:
    """Which drafters run and how long their drafts may be.

    `drafters` is tried in the order given and the first that proposes anything wins the round; empty means plain
    decoding. `n_max`, `n_min`, `p_min` mean what they mean in llama.cpp: a draft has at most n_max tokens; it
    ends before the first token whose probability under the drafter is below p_min; a draft shorter than n_min is
    dropped. n_max holds for drafters that run a model, p_min and n_min for those that know probabilities (models,
    ngram-map-k4v, suffix). n-gram lookup has lengths of its own: `ngram_n` tokens must repeat, then up to `ngram_m`
    are drafted. `ngram_min_hits`: how often they must have stood before (ngram-map-*). ngram-mod and ngram-cache
    are other names for suffix and ngram-simple together. What a grammar forces is drafted before anything else
    wherever there are drafters at all; the name for that alone is `forced`. Drafters of your own (`load(drafters=...)`) go by the names
    they bear.

    owner: whose earlier texts `suffix` drafts from, and adds to when an answer has ended, and whose
    part of the prefix cache is used. Owners never see each other's.

    predicted: what the answer will probably be, as text or as token ids: a file that is to be returned with a change, say. It is drafted
    from before other drafters are asked, and found again behind what differs. It never changes the text.

    draft_vocab: over how many tokens drafters that run a model propose. Of the language-model head they read those rows alone: the most
    frequent tokens, all added ones, and those that the text itself holds. What is verified is not affected. 0: all tokens; None: all, or
    32,768 where the vocabulary is so large that the head is much of what a drafted token reads. draft_bits: how the weights of an MTP head
    and the rows above are kept where they are floats and the model is quantized: 4 or 8 bits, or 16 for as they are. draft_kv_bits: in how
    many bits drafters keep keys and values of their own, as `kv_bits` of EngineConfig has it for the target. All three are read when the
    model is loaded.

    policy: "fixed" tries the drafters in order, always, to the lengths above; "auto" lets the controller choose each round who drafts
    and how much of it is verified, plain decoding included, so that no setting makes decoding slow: the lengths are then the most it
    may take. None is what the engine was made with: `load` makes it "auto", and an Engine made by hand "fixed".

    A draft is accepted while it equals the token that the target samples there, so a seed gives the same text with and without drafting.
    Drafters that run a model draw with the target's own noise. acceptance and draft_sampling, which chose otherwise, are refused.
    """

    drafters: tuple[str, ...] = ()
    n_max: int | None = None
    n_min: int = 0
    p_min: float = 0.0
    ngram_n: int = 3  # with ngram_m 16 the best of those tried on held-out edits: docs/tried.md
    ngram_m: int = 16
    ngram_min_hits: int = 1
    predicted: str | tuple[int, ...] = ()
    owner: str = ""
    draft_vocab: int | None = None
    draft_bits: int = 4
    draft_kv_bits: int = 16
    policy: Policy | None = None
    acceptance: InitVar[None] = None
    draft_sampling: InitVar[None] = None

    def __post_init__(self, acceptance: object, draft_sampling: object) -> None:
        for name, value in (("acceptance", acceptance), ("draft_sampling", draft_sampling)):
            if value is not None:
                raise ConfigError(f"There is no {name}: {ONE_ACCEPTANCE}.")
        if self.policy is not None:
            _check_choice("policy", self.policy, get_args(Policy))
        object.__setattr__(self, "drafters", drafter_names(self.drafters))
        if not isinstance(self.owner, str):
            raise ConfigError(f"owner must be a string, not {shown(self.owner)}.")
        if not isinstance(self.predicted, str):
            self._check_predicted()
        _check_numbers(self)
        check_number("draft_bits", self.draft_bits, 4, 16, integer=True)
        if self.draft_bits not in DRAFT_BITS:
            raise ConfigError(f"draft_bits must be one of 4, 8, 16, not {self.draft_bits}.")
        check_kv_bits("draft_kv_bits", self.draft_kv_bits)
        # only drafters that know probabilities drop short drafts
        longest = dict.fromkeys(("mtp", "eagle3", "draft-model"), ("n_max", self.model_depth))
        if self.n_max is not None:  # else a block drafter drafts whole blocks
            longest["dflash"] = "n_max", self.n_max
        longest["ngram-map-k4v"] = "ngram_m", self.ngram_m
        limits = [longest.get(name, ("", MAX_DRAFT)) for name in self.drafters]
        if limits and all(limit < self.n_min for _, limit in limits):
            name, limit = max(limits, key=lambda found: found[1])
            raise ConfigError(
                f"n_min ({self.n_min}) is above {name} ({limit}), so every draft would be dropped."
            )

    def _check_predicted(self) -> None:
        given = self.predicted
        if not isinstance(given, (list, tuple)) or any(type(t) is not int or t < 0 for t in given):
            raise ConfigError(f"predicted is a string or a list of token ids, not {shown(given)}.")
        object.__setattr__(self, "predicted", tuple(given))

    @property
    def model_depth(self) -> int:
        """n_max, or what suits the policy."""
        return self.n_max if self.n_max is not None else FIXED_DEPTH if self.policy == "fixed" else AUTO_DEPTH


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of the engine: how many rows decode together, how a prompt is cut, how long a row may grow.

    `max_context` None takes the model's own limit. `max_waiting`: so many submitted requests may wait for a row. `prefill_chunk` is in
    tokens: so much of prompts is read between two rounds of the rows that decode; None: 2,048 on a GPU, 512 on a CPU. `memory_budget`:
    bytes the engine may take in all,
    weights included; None: what this machine gives. `prefix_budget`: bytes, within those, of what is kept for prompts that begin like
    earlier texts; 0 keeps nothing, None takes a share. `prefix_disk`: bytes of files that keep it beyond the end of the process, in the
    folder `prefix_dir` (None: `prefix` in the cache folder); None or 0: no files.

    `past_texts`: bytes of memory, within the budget, for texts that the drafter suffix has heard; 0 keeps none.
    `past_texts_disk`: bytes of files that keep them beyond the end of the process, in `texts` in the cache folder; None or 0: no files.

    `kv_bits`: layers that attend to the whole context keep keys and values in 8 or 4 bits, one scale and one bias for 64 numbers of a head;
    16 keeps them as they are computed. Sliding windows and recurrent states stay as they are. The text is then that of plain decoding with
    the same kv_bits.

    `exact`: at the start it is probed up to which width a round has the very bits of plain steps on this machine, and no round is wider.
    That may cost all drafting, and decoding rows together. Without it, greedy text is that of plain decoding up to near ties.
    """

    max_rows: int = 8
    max_waiting: int = 512
    prefill_chunk: int | None = None
    memory_budget: int | None = None
    prefix_budget: int | None = None
    prefix_disk: int | None = None
    prefix_dir: str | Path | None = None
    past_texts: int = 64 << 20
    past_texts_disk: int | None = None
    max_context: int | None = None
    kv_bits: int = 16
    exact: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.exact, bool):
            raise ConfigError(f"exact must be True or False, not {shown(self.exact)}.")
        check_kv_bits("kv_bits", self.kv_bits)
        _check_numbers(self)
        self._check_disk()

    def _check_disk(self) -> None:
        path = self.prefix_dir
        if path is not None and (not isinstance(path, (str, Path)) or not str(path)):
            raise ConfigError(f"prefix_dir must be a folder's path, not {shown(path)}.")
        if self.prefix_disk and self.prefix_budget == 0:
            raise ConfigError(
                "prefix_disk needs a prefix_budget above 0: what is written is kept in memory first."
            )
        if path is not None and not self.prefix_disk:
            raise ConfigError("prefix_dir needs prefix_disk: how many bytes may be written there.")
