"""Options of a caller: sampling, speculation and engine options, checked when they are made.

Plain Python: knows no arrays, no models, no command line. Every class is frozen; to change one, `dataclasses.replace` it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from mlxspec.drafter_kinds import KINDS
from mlxspec.errors import ConfigError
from mlxspec.option import check_number, check_options, fields_by_name, option, options, shown, texts

MAX_DRAFT = 256  # tokens one draft may have: a verify wider than this is a prefill
MAX_ROWS = 64
MAX_CONTEXT = 1 << 24
MAX_BYTES = 1 << 50
FIXED_DEPTH, AUTO_DEPTH = 3, 8  # tokens a model drafts at once, unless told otherwise
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
BY_REQUEST = tuple(kind.name for kind in KINDS if kind.by_request)  # any list of drafters has them
ALWAYS_THERE = (*BY_REQUEST, "suffix")  # without being loaded
DRAFTER_NAMES = tuple(kind.name for kind in KINDS)
ONE_ACCEPTANCE = (  # why nobody can choose how drafts are accepted
    "a draft is accepted where it equals the token that the model samples there, "
    "so that a seed gives the same text with and without drafting"
)
OTHER_NAMES = dict.fromkeys(("ngram-mod", "ngram-cache"), ("suffix", "ngram-simple"))  # llama.cpp's


def drafter_names(given: str | Iterable[str]) -> tuple[str, ...]:
    """Return drafters by their full names, each once. Raises ConfigError for an unknown name, and for one that is given twice."""
    names = texts("drafters", given)
    for name in names:
        if not DRAFTER_NAME.fullmatch(name):
            raise ConfigError(f"A drafter's name is letters, digits and dashes, not {shown(name)}.")
    if len(set(names)) != len(names):
        raise ConfigError(f"A drafter is named twice in {', '.join(names)}.")
    return tuple(dict.fromkeys(own for name in names for own in OTHER_NAMES.get(name, (name,))))


@fields_by_name()
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The rules by which the next token is chosen from the target's logits; one object per request.

    The order is: DRY, repetition penalty, presence and frequency penalties, logit bias and allowed_token_ids, forbidden tokens (bad
    words, grammar, thinking budget, min_tokens), top-n-sigma, temperature, top-k, top-p, min-p, typical-p, XTC. Temperature 0 takes the
    argmax. The repetition penalty covers prompt and answer; presence and frequency penalties cover the answer only (OpenAI's meaning).
    repeat_last_n: the number of last tokens that penalties cover.

    min_tokens: the answer does not end before it has this number of tokens. stop_token_ids: tokens that end it and are not part of it.
    keeps_stop: the stop string that ends the answer is part of it. stop_outside: spans of text in which stop strings are ignored, each
    by the text that opens the span, the text that follows that (white space ignored), and the text that closes it. dry_*: see
    sampling/history.py; the other filters: sampling/filters.py.

    `seed` None draws a fresh seed for the request; equal seeds give equal text with and without drafting.

    logprobs: return log-probabilities of the answer's tokens, and of the `top_logprobs` most likely ones at each place (top_logprobs
    implies logprobs). They are those of the model's own distribution, before all rules above. prompt_logprobs: the same for the prompt's
    tokens after the first; the whole prompt is then read, without the prefix cache. bad_words: strings that the answer's bytes never
    contain, however they are divided into tokens. json_schema (a mapping, or JSON text), regex, lark: at most one; the answer follows
    it. lark_at: a text with which `lark` begins: the grammar holds from each place where that text begins a line, or is a special token,
    outside thinking and code, and the rest of the answer is free; with lark_once the answer ends after the first such call.
    thinking_budget: after this number of tokens inside thinking_tags the closing tag is forced. A grammar begins after thinking that the
    prompt has opened, and with thinks_first after thinking that the answer begins with, unless each of the grammar's texts begins with
    the opening tag.

    loop_breaker: what happens to a text that repeats itself, see sampling/loops.py. "thinking" closes thinking that loops; "all" also
    ends an answer that loops outside thinking, with finish_reason "length". None is "all", and "thinking" where a grammar, min_tokens or
    ignore_eos decides where the answer ends. A notice reports it. The text up to there is unchanged. While loops are searched for, a
    draft has at most 128 tokens.

    adapters: weights by adapter name, of the adapters that the model was loaded with; adapters not named are not used.

    logits_processors: callables (tokens (n,), logits (1, V)) -> logits (1, V), as in mlx-lm, called in order and before all rules above,
    with all tokens before the position. sampler: a callable, log-probabilities (1, V) -> token, that draws in place of temperature,
    top-k, top-p and min-p. Both are called at every position that a round verifies, including drafted tokens that are then rejected, so
    they must depend on nothing but their arguments (a sampler may use a random generator). One that raises ends its request with an
    error.
    """

    # fmt: off
    max_tokens: int = option(int, 256, "longest answer in tokens", 1, MAX_CONTEXT, "N", off=-1, aliases="n_predict")
    temperature: float = option(float, 0.0, "0 always takes the most likely token", 0, 100, "T", flag="--temp")
    top_p: float = option(float, 1.0, "keep the most likely tokens up to this probability; 1: off", 0, 1, "P", above=True)
    top_k: int = option(int, 0, "keep the K most likely tokens; 0: off", 0, 1 << 30, "K", off=-1)
    min_p: float = option(float, 0.0, "keep tokens at least P times as likely as the likeliest; 0: off", 0, 1, "P")
    repetition_penalty: float = option(
        float, 1.0, "above 1: tokens that occurred become less likely", 0.01, 100, "R", aliases="repeat_penalty"
    )
    presence_penalty: float = option(float, 0.0, "above 0: tokens of the answer become less likely", -100, 100, "R")
    frequency_penalty: float = option(float, 0.0, "above 0: tokens become less likely each time they occur in the answer", -100, 100, "R")
    repeat_last_n: int = option(int, -1, "penalties look at the last N tokens only; -1: at all", -1, MAX_CONTEXT, "N")
    top_n_sigma: float = option(float, 0.0, "keep logits within N deviations of the highest; 0: off", 0, 1000, "N", off=-1)
    typical_p: float = option(
        float, 1.0, "keep tokens whose surprise is nearest to the entropy, up to this probability; 1: off", 0, 1, "P", above=True
    )
    xtc_probability: float = option(float, 0.0, "XTC: how often tokens above the threshold go, but the least likely", 0, 1, "P")
    xtc_threshold: float = option(float, 0.1, "XTC: the least probability of a token above the threshold", 0, 1, "P")
    dry_multiplier: float = option(float, 0.0, "above 0: DRY, against repeating sequences", 0, 100, "M")
    dry_base: float = option(float, 1.75, "DRY: factor of the penalty for each further repeated token", 1, 100, "B")
    dry_allowed_length: int = option(int, 2, "DRY: the shortest repeated sequence that costs", 1, MAX_CONTEXT, "N")
    dry_penalty_last_n: int = option(int, -1, "DRY looks at the last N tokens only; -1: at all", -1, MAX_CONTEXT, "N")
    dry_sequence_breakers: str | Sequence[str] = option(
        list, ("\n", ":", '"', "*"), "DRY: no sequence goes beyond this text", high=16, metavar="TEXT", flag="--dry-sequence-breaker",
        unset="line break, colon, quote and asterisk; none: none",
    )
    min_tokens: int = option(int, 0, "nothing ends the answer before N tokens", 0, MAX_CONTEXT, "N")
    seed: int | None = option(int, None, "the same seed gives the same text, with drafting and without", 0, 2**63 - 1, "S", off=-1)
    stop: str | Sequence[str] = option(list, (), "end the answer before this text", high=16, metavar="TEXT")
    bad_words: str | Sequence[str] = option(list, (), "the answer never contains this text", high=1000, metavar="TEXT", flag="--bad-word")
    thinking_budget: int | None = option(
        int, None, "close the model's thinking after N tokens", 0, MAX_CONTEXT, "N", off=-1, unset="no limit",
        aliases="thinking_token_budget thinking_budget_tokens reasoning_budget_tokens",
    )
    loop_breaker: LoopBreaker | None = option(
        get_args(LoopBreaker), None, "all: close thinking that loops, and end answers that loop; thinking: only the former; off",
        metavar="WHAT", unset="all, unless a grammar, min_tokens or ignore_eos says where the answer ends",
    )
    json_schema: Mapping[str, Any] | str | None = option("schema", None, "the answer is JSON of this schema", metavar="JSON")
    regex: str | None = option("grammar", None, "the answer matches this expression", metavar="REGEX")
    lark: str | None = option("grammar", None, "the answer is of this Lark grammar", metavar="GRAMMAR")
    keeps_stop: bool = option(bool, False, "the stop string is part of the answer", flag="", body="include_stop_str_in_output")
    ignore_eos: bool = option(bool, False, "end tokens do not end the answer", flag="")
    allowed_token_ids: Sequence[int] = option("ids", (), "an answer has no other tokens", 0, 1 << 30, flag="")
    stop_token_ids: Sequence[int] = option("ids", (), "they end the answer, and are no part of it", 0, 1 << 30, flag="")
    logprobs: bool = option(bool, False, "log-probabilities of the answer's tokens", flag="", body="")
    top_logprobs: int = option(int, 0, "and of so many likeliest tokens at each place", 0, MAX_TOP_LOGPROBS, flag="", body="")
    prompt_logprobs: bool = option(bool, False, "log-probabilities of the prompt's tokens", flag="", body="")
    # fmt: on
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    thinking_tags: tuple[str, str] = ("<think>", "</think>")
    thinks_first: bool = False
    stop_outside: Sequence[tuple[str, str, str]] = ()
    lark_at: str = ""
    lark_once: bool = False
    adapters: Mapping[str, float] = field(default_factory=dict)
    logits_processors: Sequence[Callable[[Any, Any], Any]] = ()
    sampler: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        check_options(self)
        check_number("min_tokens", self.min_tokens, 0, self.max_tokens, integer=True)
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError("logit_bias must map token ids to numbers.")
        for token, bias in self.logit_bias.items():
            check_number("a token id in logit_bias", token, 0, 1 << 30, integer=True)
            check_number(f"logit_bias of token {token}", bias, -1e9, 1e9)
        self._check_grammar()
        tags = texts("thinking_tags", self.thinking_tags)
        if len(tags) != 2 or tags[0] == tags[1]:
            raise ConfigError(
                "thinking_tags must be two different strings: what opens and what closes thinking."
            )
        object.__setattr__(self, "thinking_tags", tags)
        object.__setattr__(self, "stop_outside", _spans(self.stop_outside))
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
        own = options(SamplingParams)
        for name in ("temperature", "top_p", "top_k", "min_p", "top_n_sigma", "typical_p", "xtc_probability"):
            if getattr(self, name) != own[name].default:
                raise ConfigError(
                    f"sampler and {name} contradict each other: a sampler draws by its own rules."
                )

    def _check_grammar(self) -> None:
        given = [name for name in ("json_schema", "regex", "lark") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"An answer can follow one grammar only, not {' and '.join(given)}.")
        if not isinstance(self.thinks_first, bool):
            raise ConfigError("thinks_first must be true or false.")
        if not isinstance(self.lark_at, str) or not isinstance(self.lark_once, bool):
            raise ConfigError("lark_at must be a text, and lark_once true or false.")
        if self.lark_once and not self.lark_at:
            raise ConfigError("lark_once needs a text in lark_at.")
        if self.lark_at and self.lark is None:
            raise ConfigError("lark_at needs a grammar in lark, which begins with that text.")
        if self.lark_at:
            return  # it says nothing of where the answer ends
        if given and self.ignore_eos:
            raise ConfigError(
                f"ignore_eos and {given[0]} contradict each other: what follows a grammar ends."
            )
        if given and self.min_tokens:
            raise ConfigError(
                f"min_tokens and {given[0]} contradict each other: a grammar says where an answer ends."
            )

    @property
    def has_grammar(self) -> bool:
        return self.json_schema is not None or self.regex is not None or self.lark is not None

    @property
    def has_hooks(self) -> bool:
        """Return whether the request has functions of the caller's: logits processors or a sampler."""
        return bool(self.logits_processors) or self.sampler is not None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs or self.top_logprobs > 0 or self.prompt_logprobs

    @property
    def has_penalties(self) -> bool:
        """Return whether the repetition, presence or frequency penalty is on. DRY does not count."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_window(self) -> bool:
        """Return whether penalties look at the last tokens only."""
        return self.has_penalties and self.repeat_last_n >= 0

    @property
    def needs_text(self) -> bool:
        """Return whether the host must know all tokens before a position to choose the token there: with logits processors or a sampler
        of the caller's, with penalties that cover the last tokens only, or with DRY."""
        return self.has_hooks or self.has_window or self.dry_multiplier > 0

    @property
    def has_filters(self) -> bool:
        """Return whether a filter that runs after min-p (typical-p, XTC) is on. Such filters need the scores of all tokens."""
        return self.typical_p < 1.0 or self.xtc_probability > 0.0


def _spans(given: Any) -> tuple[tuple[str, str, str], ...]:
    """Return stop_outside as a tuple of triples: the text that opens a span, the text that must follow it (may be empty), and the text that
    closes it. Raises ConfigError for any other form."""
    spans = given if isinstance(given, (list, tuple)) else ((),)
    for span in spans:
        is_triple = isinstance(span, (list, tuple)) and len(span) == 3
        if not is_triple or not all(isinstance(text, str) for text in span) or not (span[0] and span[2]):
            raise ConfigError(
                "stop_outside must hold triples of texts: what opens, what follows it or an empty text, what closes."
            )
    return tuple((a, b, c) for a, b, c in spans)


@fields_by_name(acceptance=ONE_ACCEPTANCE, draft_sampling=ONE_ACCEPTANCE)
@dataclass(frozen=True, kw_only=True)
class SpecConfig:
    """The drafters that run, and how long their drafts may be.

    `drafters` are tried in the order given, and the first that proposes anything drafts the round; empty means plain decoding. `n_max`,
    `n_min` and `p_min` mean what they mean in llama.cpp: a draft has at most n_max tokens; it ends before the first token whose probability
    under the drafter is below p_min; a draft shorter than n_min is dropped. n_max applies to drafters that run a model; p_min and n_min
    apply to those that know probabilities (models, ngram-map-k4v, suffix). N-gram lookup has lengths of its own: `ngram_n` tokens must
    repeat, then up to `ngram_m` are drafted. `ngram_min_hits`: for ngram-map-*, the number of earlier occurrences that these tokens need.
    ngram-mod and ngram-cache are other names for suffix and ngram-simple together. Tokens that a grammar forces are drafted before all
    others wherever any drafter is listed; `forced` names that alone. Drafters of the caller's (`load(drafters=...)`) go by their own names.

    owner: the owner of the texts that `suffix` drafts from, to which a finished answer is added, and of the part of the prefix cache that
    is used. Owners never see each other's texts.

    predicted: the probable answer, as text or token ids, for example a file that is to be returned with a change. It is drafted from before
    other drafters are asked. Where the answer departs from it, drafting resumes at the place where the two agree again. It never changes
    the text.

    draft_vocab: the number of tokens that drafters with a model choose from. They then read only those rows of the language-model head: the
    most frequent tokens, all added tokens, and the tokens of the text itself. Verification is not affected. 0: all tokens; None: all, or
    32,768 where reading the head would be a large part of the cost of a drafted token. draft_bits: precision of the weights of an MTP head,
    of a block drafter and of the rows above, where these are stored as floats and the model is quantized: 4 or 8 bits; 16 leaves the
    floats. draft_kv_bits: precision of the drafters' own keys and values, as `kv_bits` of EngineConfig is for the target. All three take
    effect when the model is loaded.

    policy: "fixed" always tries the drafters in order, to the lengths above. "auto" lets the controller choose in each round who drafts and
    how much is verified, plain decoding included, so that no setting makes decoding slow; the lengths are then upper limits. None: the
    engine's own policy, which `load` makes "auto" and an Engine made by hand "fixed".

    A drafted token is accepted if the target samples the same token there, so a seed gives the same text with and without drafting.
    Drafters that run a model sample with the target's own noise.
    """

    drafters: tuple[str, ...] = ()
    # fmt: off
    n_max: int | None = option(
        int, None, "most tokens a model drafts at once", 0, MAX_DRAFT, "N", flag="--draft-max", aliases="speculative.n_max",
        unset=f"{AUTO_DEPTH}, policy fixed {FIXED_DEPTH}",
    )
    n_min: int = option(int, 0, "drop drafts shorter than this", 0, MAX_DRAFT, "N", flag="--draft-min", aliases="speculative.n_min")
    p_min: float = option(
        float, 0.0, "end a draft before a token less probable than this", 0, 1, "P", flag="--draft-p-min", aliases="speculative.p_min"
    )
    # ngram_n 3 with ngram_m 16 is the best of those tried on held-out edits: docs/tried.md
    ngram_n: int = option(int, 3, "n-gram lookup: tokens that must repeat", 1, 64, "N", body="")
    ngram_m: int = option(int, 16, "n-gram lookup: most tokens drafted", 1, MAX_DRAFT, "M", body="")
    ngram_min_hits: int = option(int, 1, "ngram-map-*: how often they must have stood before", 1, 1024, "N", body="")
    draft_vocab: int | None = option(
        int, None, "a model proposes over the N most frequent tokens only; 0: all", 0, MAX_CONTEXT, "N", body="",
        unset="32768 of a large vocabulary",
    )
    draft_bits: int = option(
        (4, 8, 16), 4, "bits of a drafter's weights if the model is quantized, 16 to leave floats", metavar="B", body=""
    )
    draft_kv_bits: int = option(KV_BITS, 16, "bits of drafters' own keys and values, as of kv_bits", metavar="B", body="")
    policy: Policy | None = option(get_args(Policy), None, "auto drafts where it pays, fixed always", metavar="NAME", unset="auto")
    # fmt: on
    predicted: str | tuple[int, ...] = ()
    owner: str = ""

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "drafters", drafter_names(self.drafters))
        if not isinstance(self.owner, str):
            raise ConfigError(f"owner must be a string, not {shown(self.owner)}.")
        if not isinstance(self.predicted, str):
            self._check_predicted()
        # only drafters that know probabilities drop short drafts
        longest = {
            kind.name: ("n_max", self.model_depth)
            for kind in KINDS
            if kind.folders and not (kind.drafts_blocks and self.n_max is None)  # then it drafts whole blocks
        }
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
        """Return the most tokens that a model drafts: n_max, or the policy's own number."""
        return self.n_max if self.n_max is not None else FIXED_DEPTH if self.policy == "fixed" else AUTO_DEPTH


@fields_by_name(
    rollback="every rollback is by the tape",
    num_states="the tape keeps none",
    prefix_states="the prefix cache keeps whole states, which change no text",
)
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of the engine: how many rows decode together, how prompts are divided, and how long a row may grow.

    `max_context`: None takes the model's own limit. `max_waiting`: the most submitted requests that wait for a row. `prefill_chunk`: tokens
    of prompts that are read between two rounds of the decoding rows; None: 2,048 on a GPU, 512 on a CPU. `memory_budget`: the most bytes
    the engine may use, weights included; None: what this machine gives. `prefix_budget`: the bytes of it that the prefix cache may use; 0
    turns the prefix cache off, None takes a share. `prefix_disk`: the most bytes of files that keep the prefix cache for later processes,
    in the folder `prefix_dir` (None: `prefix` in the cache folder); None or 0: no files.

    `past_texts`: the bytes of the budget for earlier texts that the drafter suffix searches; 0 keeps none. `past_texts_disk`: the most
    bytes of files that keep these texts for later processes, in `texts` in the cache folder; None or 0: no files.

    `kv_bits`: precision of keys and values in layers that attend to the whole context: 8 or 4 bits, with one scale and one bias for 64
    numbers of a head; 16 leaves them as they are computed. Sliding windows and recurrent states are never quantized. The text then equals
    that of plain decoding with the same kv_bits.

    `exact`: makes every round equal plain decoding bit for bit. At the start the engine probes which widths of a verify do so on this
    machine, and no round is wider than the widest one up to which all do. Tokens of all rows count as width, so there may be no drafting
    and no decoding of rows together. Without `exact`, greedy text equals that of plain decoding except at near ties.
    """

    # fmt: off
    max_rows: int = option(int, 8, "answers that are decoded together: slots, the batch size", 1, MAX_ROWS, "N")
    max_waiting: int = option(int, 512, "requests that may wait for a row", 1, 1 << 20, flag="")
    prefill_chunk: int | None = option(
        int, None, "tokens of prompts read between two rounds", 16, 1 << 16, "N", unset="2048 on a GPU, 512 on a CPU"
    )
    memory_budget: int | None = option(
        "bytes", None, "memory in all, weights included, like 6G", 1, MAX_BYTES, "SIZE", unset="what is there"
    )
    prefix_budget: int | None = option(
        "bytes", None, "of that, for the prefix cache (prompt cache) of earlier texts; 0: none", 0, MAX_BYTES, "SIZE", unset="a share"
    )
    prefix_disk: int | None = option(
        "bytes", None, "keep the prefix cache in files of at most SIZE bytes, for later runs", 0, MAX_BYTES, "SIZE", unset="none"
    )
    prefix_dir: str | Path | None = option(
        Path, None, "a private folder for these files", metavar="DIR", unset="prefix in the cache folder"
    )
    past_texts: int = option("bytes", 64 << 20, "memory for texts that the drafter suffix has heard", 0, MAX_BYTES, flag="")
    past_texts_disk: int | None = option(
        "bytes", None, "keep texts in files of at most SIZE bytes, for the drafter suffix", 0, MAX_BYTES, "SIZE", unset="none"
    )
    max_context: int | None = option(int, None, "tokens of context", 2, MAX_CONTEXT, "N", unset="the model's")
    kv_bits: int = option(KV_BITS, 16, "bits of keys and values: 8, 4, or 16 for as they are computed", metavar="B")
    exact: bool = option(
        bool, False, "draft only where results equal plain decoding bit for bit; may leave no drafting")
    # fmt: on

    def __post_init__(self) -> None:
        check_options(self)
        if self.prefix_disk and self.prefix_budget == 0:
            raise ConfigError(
                "prefix_disk needs a prefix_budget above 0: what is written is kept in memory first."
            )
        if self.prefix_dir is not None and not self.prefix_disk:
            raise ConfigError("prefix_dir needs prefix_disk: how many bytes may be written there.")
