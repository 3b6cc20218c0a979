"""mlx-lm's `generate`, `stream_generate`, `generate_step` and `batch_generate` on our engine.

Knows mlx-lm's calls and responses, and our engine's; knows no rounds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import BatchResponse, BatchStats, GenerationResponse, generation_stream
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.cache.quantized import GROUP
from mlxspec.compat.mlx_lm.models.cache import PromptCache, checked
from mlxspec.compat.mlx_lm.utils import LoadedModel
from mlxspec.config import MAX_CONTEXT, SamplingParams, SpecConfig, check_kv_bits
from mlxspec.engine.engine import Engine
from mlxspec.engine.request import Request
from mlxspec.errors import ConfigError, MlxspecError
from mlxspec.events import Event, FinishEvent, PrefillEvent, TokensEvent

# What mlx-lm's functions take besides, and we cannot: fine only as None.
_REFUSED = {
    "max_kv_size": "a cache that forgets the middle of a text",
    "input_embeddings": "embeddings in place of a prompt",
    "prefill_batch_size": "reading so many prompts at a time: they take turns by chunks (prefill_step_size)",
}
# what goes with kv_bits, and the one value that we do; mean nothing without it, as in mlx-lm
_WITH_KV_BITS = {"kv_group_size": GROUP, "quantized_kv_start": 0}
_STEP_OPTIONS = (
    "sampler",
    "logits_processors",
    "prompt_cache",
    "num_draft_tokens",
    "prefill_step_size",
    "prompt_progress_callback",
    "kv_bits",
)
_BATCH_OPTIONS = ("sampler", "logits_processors", "completion_batch_size", "prefill_step_size", "kv_bits")
_BATCH_ROWS = 32  # mlx-lm's default of completion_batch_size
_DRAFT_TOKENS = 2  # mlx-lm's default

Processor = Callable[[mx.array, mx.array], mx.array]


class TokenStep(NamedTuple):
    """A token, its position's log-probabilities (V,) where they are recorded, and whether it was drafted."""

    token: int
    logprobs: mx.array | None
    from_draft: bool


def generate(
    model: LoadedModel,
    tokenizer: TokenizerWrapper,
    prompt: str | list[int],
    verbose: bool = False,
    **kwargs: Any,
) -> str:
    """The whole answer. kwargs: those of `stream_generate`. verbose: print it as it comes, then speeds and memory."""
    if verbose:
        print("=" * 10)
    text, response = "", None
    for response in _responses(model, tokenizer, prompt, keep_logprobs=False, **kwargs):
        if verbose:
            print(response.text, end="", flush=True)
        text += response.text
    if verbose and response is not None:
        print(f"\n{'=' * 10}")
        print(f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec")
        print(
            f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec"
        )
        print(f"Peak memory: {response.peak_memory:.3f} GB")
    return text


def stream_generate(
    model: LoadedModel,
    tokenizer: TokenizerWrapper,
    prompt: str | mx.array | list[int],
    max_tokens: int = 256,
    draft_model: LoadedModel | None = None,
    stream: Any = generation_stream,
    **kwargs: Any,
) -> Generator[GenerationResponse, None, None]:
    """One response a token, as mlx-lm gives them; several come at once where drafts were accepted.

    kwargs: those of `generate_step`, and num_draft_tokens. Raises MlxspecError subclasses before the first response is asked for.
    """
    return _responses(model, tokenizer, prompt, max_tokens, draft_model, stream, keep_logprobs=True, **kwargs)


def generate_step(
    prompt: mx.array,
    model: LoadedModel,
    stream: Any = generation_stream,
    *,
    max_tokens: int = 256,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: list[Processor] | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list[PromptCache] | None = None,
    prefill_step_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 0,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    input_embeddings: mx.array | None = None,
) -> Generator[tuple[int, mx.array], None, None]:
    """Token ids and log-probabilities (V,) behind a prompt of token ids (n,), past every end token, until max_tokens (-1: until the context
    is full; 0: the prompt is read into prompt_cache and nothing is generated).

    Samplers and processors are called for drafts that may be rejected, so they must depend on nothing but their arguments. prompt_cache is
    extended in place by the prompt and by each token that was yielded. prefill_step_size: tokens of a prompt read at once, at least 16;
    None takes the engine's. kv_bits: 8 or 4, for all keys and values of the text; None takes the engine's. prompt_progress_callback is
    called with the tokens read so far and the prompt's length.
    """
    given = {
        "sampler": sampler,
        "logits_processors": logits_processors,
        "max_kv_size": max_kv_size,
        "prompt_cache": prompt_cache,
        "prefill_step_size": prefill_step_size,
        "kv_bits": kv_bits,
        "kv_group_size": kv_group_size,
        "quantized_kv_start": quantized_kv_start,
        "prompt_progress_callback": prompt_progress_callback,
        "input_embeddings": input_embeddings,
    }
    _check_model(model, stream)
    _check("generate_step", given, _STEP_OPTIONS)
    run = _CachedRun.begin(model, model.engine, _ids(prompt), max_tokens, given, keep_logprobs=True)

    def told() -> Generator[tuple[int, mx.array], None, None]:
        for step in run.steps():
            if step.logprobs is not None:
                yield step.token, step.logprobs

    return told()


def _responses(
    model: LoadedModel,
    tokenizer: TokenizerWrapper,
    prompt: str | mx.array | list[int],
    max_tokens: int = 256,
    draft_model: LoadedModel | None = None,
    stream: Any = generation_stream,
    *,
    keep_logprobs: bool,
    **kwargs: Any,
) -> Generator[GenerationResponse, None, None]:
    if draft_model is not None:
        _check_model(draft_model, stream)
    _check_model(model, stream)
    if max_tokens == 0:
        raise ConfigError("max_tokens must not be 0 (use -1 for no limit).")
    _check("stream_generate", kwargs, _STEP_OPTIONS)
    engine = model.engine if draft_model is None else model.paired(draft_model)
    tokens = _tokens(tokenizer, prompt)
    has_draft = draft_model is not None
    run = _CachedRun.begin(
        model, engine, tokens, max_tokens, kwargs, keep_logprobs=keep_logprobs, has_draft=has_draft
    )
    detokenizer = tokenizer.detokenizer

    def told() -> Generator[GenerationResponse, None, None]:
        began = time.perf_counter()
        num, seconds, step = 0, 0.0, TokenStep(-1, None, False)

        def response(reason: str | None) -> GenerationResponse:
            return GenerationResponse(
                text=detokenizer.last_segment,
                token=step.token,
                logprobs=step.logprobs,
                from_draft=step.from_draft,
                prompt_tokens=len(tokens),
                prompt_tps=len(tokens) / seconds,
                generation_tokens=num,
                generation_tps=num / (time.perf_counter() - began),
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=reason,
            )

        steps = run.steps()
        try:
            for step in steps:
                if num == 0:
                    seconds = time.perf_counter() - began
                    began = time.perf_counter()
                num += 1
                if step.token in tokenizer.eos_token_ids:
                    detokenizer.finalize()
                    yield response("stop")
                    return
                detokenizer.add_token(step.token)
                if num == max_tokens:
                    break
                yield response(None)
            detokenizer.finalize()
            yield response("length")  # or the context is full
        finally:
            steps.close()

    return told()


@dataclass
class _CachedRun:
    """One answer: what the engine is asked for, and what becomes of the prompt cache."""

    engine: Engine
    before: list[int]  # tokens of the prompt cache
    prompt: list[int]
    max_tokens: int
    caches: list[PromptCache]
    progress: Callable[[int, int], None]
    recorder: _Recorder | None
    events: Iterator[Event]
    chunk: int
    kv_bits: int

    @classmethod
    def begin(
        cls,
        model: LoadedModel,
        engine: Engine,
        prompt: list[int],
        max_tokens: int,
        options: dict[str, Any],
        *,
        keep_logprobs: bool,
        has_draft: bool = False,
    ) -> _CachedRun:
        """Raises MlxspecError subclasses for what cannot be done, before anything is."""
        caches = checked(options["prompt_cache"]) if options.get("prompt_cache") is not None else []
        before = list(caches[0].tokens) if caches else []
        if not prompt:
            raise ConfigError("The prompt is empty.")
        recorder = _Recorder() if keep_logprobs else None
        chunk, kv_bits = _chunk(model, options), _kv_bits(model, options)
        engine.keep_kv_in(kv_bits)  # before what a cache's file holds is taken over
        params = _params(max_tokens, options, len(before), recorder)
        spec = _spec(engine, options.get("num_draft_tokens"), has_draft)
        events = engine.stream([*before, *prompt], params, spec=spec)
        progress = options.get("prompt_progress_callback") or (lambda done, total: None)
        run = cls(engine, before, prompt, max_tokens, caches, progress, recorder, events, chunk, kv_bits)
        for cache in caches:
            cache.prepare(engine, model.fingerprint)
            cache.lend(run)
        return run

    def steps(self) -> Generator[TokenStep, None, None]:
        """Tokens as they come. The caches hold the prompt, and every token that was yielded."""
        engine, total = self.engine, len(self.prompt)
        place = len(self.before) + total
        engine.keep_kv_in(self.kv_bits)
        engine.prefill_chunk = self.chunk
        self.progress(0, total)
        num_given, is_read = 0, False
        try:
            for event in self.events:
                if isinstance(event, FinishEvent):
                    if event.reason == "error":
                        raise MlxspecError(event.error or "The engine could not go on.")
                    return
                if isinstance(event, PrefillEvent):
                    is_done = event.num_done == event.num_total
                    if is_done and not is_read:
                        self._extend(self.prompt)
                    is_read = is_read or is_done
                    if not is_done:
                        self.progress(max(0, event.num_done - len(self.before)), total)
                    continue
                for i, token in enumerate(event.tokens):
                    if not num_given:
                        self.progress(total, total)
                    if self.max_tokens == 0:
                        return
                    logprobs = None if self.recorder is None else self.recorder.take(place + num_given)
                    num_given += 1
                    self._extend([token])
                    yield TokenStep(token, logprobs, i < event.num_drafted)
        finally:
            self.events.close()  # type: ignore[attr-defined]

    def _extend(self, tokens: Sequence[int]) -> None:
        for cache in self.caches:
            cache.extend(self, tokens)


class _Recorder:
    """A logits processor that changes nothing and remembers what the model said at each place of the text, for `logprobs`.

    A place behind a draft that was rejected is asked about again, and remembered anew.
    """

    def __init__(self) -> None:
        self._logits: dict[int, mx.array] = {}

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self._logits[tokens.size] = logits
        return logits

    def take(self, place: int) -> mx.array | None:
        """Log-probabilities (V,), lazily; None where nothing is recorded."""
        logits = self._logits.pop(place, None)
        return None if logits is None else (logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0]


def batch_generate(
    model: LoadedModel,
    tokenizer: TokenizerWrapper,
    prompts: list[list[int]],
    prompt_caches: list[list[PromptCache]] | None = None,
    max_tokens: int | list[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    **kwargs: Any,
) -> BatchResponse:
    """Answers to several prompts of token ids, which decode together. max_tokens: of each, or one for all. prompt_caches are not changed.

    kwargs: sampler, logits_processors and prefill_step_size as in `generate_step`; completion_batch_size: so many decode together at most,
    as far as the engine has rows for them. Raises MlxspecError subclasses; no answer is given then.
    """
    _check_model(model, kwargs.pop("stream", None) or generation_stream)
    _check("batch_generate", kwargs, _BATCH_OPTIONS)
    limits = list(max_tokens) if isinstance(max_tokens, (list, tuple)) else [max_tokens] * len(prompts)
    if len(limits) != len(prompts) or (prompt_caches is not None and len(prompt_caches) != len(prompts)):
        raise ConfigError("There must be as many max_tokens and prompt_caches as prompts.")
    caches = (
        [checked(c)[0] for c in prompt_caches]
        if prompt_caches is not None
        else [PromptCache()] * len(prompts)
    )
    rows = [
        _BatchRow.make(model, cache, _ids(prompt), limit, kwargs, return_logprobs)
        for cache, prompt, limit in zip(caches, prompts, limits, strict=True)
    ]
    model.engine.keep_kv_in(_kv_bits(model, kwargs))
    most = kwargs.get("completion_batch_size") or _BATCH_ROWS
    began = time.perf_counter()
    _run(model, rows, tokenizer.eos_token_ids, most, _Told(len(rows), verbose))
    stats = _batch_stats(rows, time.perf_counter() - began)
    if verbose:
        print(f"[batch_generate] Prompt: {stats.prompt_tokens} tokens, {stats.prompt_tps:.3f} tokens-per-sec")
        print(
            f"[batch_generate] Generation: {stats.generation_tokens} tokens, {stats.generation_tps:.3f} tokens-per-sec"
        )
        print(f"[batch_generate] Peak memory: {stats.peak_memory:.3f} GB")
    more = {
        "token_ids": [r.answer for r in rows] if return_token_ids else None,
        "logprobs": [r.logprobs for r in rows] if return_logprobs else None,
    }
    known = {f.name for f in fields(BatchResponse)}
    return BatchResponse(
        texts=[tokenizer.decode(r.answer) for r in rows],
        stats=stats,
        caches=[[r.cache(model)] for r in rows] if return_prompt_caches else None,
        **{name: value for name, value in more.items() if name in known},
    )


@dataclass
class _BatchRow:
    """One answer of a batch. answer: its tokens, without the end token, which is in `given`."""

    before: list[int]
    prompt: list[int]
    params: SamplingParams
    chunk: int
    recorder: _Recorder | None
    request: Request | None = None
    given: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @classmethod
    def make(
        cls,
        model: LoadedModel,
        cache: PromptCache,
        prompt: list[int],
        limit: int,
        options: dict[str, Any],
        record: bool,
    ) -> _BatchRow:
        """Raises MlxspecError subclasses."""
        if not prompt:
            raise ConfigError("The prompt is empty.")
        if limit == 0:
            raise ConfigError("max_tokens must not be 0 (use -1 for no limit).")
        cache.prepare(model.engine, model.fingerprint)
        recorder = _Recorder() if record else None
        params = _params(limit, options, cache.offset, recorder)
        made = cls(list(cache.tokens), prompt, params, _chunk(model, options), recorder)
        model.engine.stream([*made.before, *prompt], params)  # raises what would be raised later
        return made

    def take(self, event: TokensEvent, ends: Sequence[int]) -> bool:
        """Whether the answer has come to its end."""
        for token in event.tokens:
            place = len(self.before) + len(self.prompt) + len(self.given)
            logprobs = None if self.recorder is None else self.recorder.take(place)
            self.given.append(token)
            if token in ends:
                return True
            self.answer.append(token)
            if logprobs is not None:
                self.logprobs.append(float(logprobs[token].item()))
        return False

    def cache(self, model: LoadedModel) -> PromptCache:
        """Of the whole text."""
        made = PromptCache([*self.before, *self.prompt, *self.given])
        made.prepare(model.engine, model.fingerprint)
        return made


class _Told:
    """How far a batch has come, printed."""

    def __init__(self, total: int, verbose: bool) -> None:
        self._total, self._verbose, self._num = total, verbose, -1
        self.one_more()

    def one_more(self) -> None:
        self._num += 1
        if self._verbose:
            end = "\n" if self._num == self._total else "\r"
            print(f"[batch_generate] Finished processing {self._num}/{self._total} ...", end=end)


def _run(model: LoadedModel, rows: Sequence[_BatchRow], ends: Sequence[int], most: int, told: _Told) -> None:
    """All rows to their ends, at most so many at once. Raises MlxspecError where one fails; then none goes on."""
    engine = model.engine
    waiting, running = deque(rows), dict[int, _BatchRow]()
    try:
        while waiting or running:
            while waiting and len(running) < most:
                row = waiting.popleft()
                engine.prefill_chunk = row.chunk
                row.request = engine.submit([*row.before, *row.prompt], row.params)
                running[row.request.number] = row
            for event in engine.step():
                decoding = running.get(event.request)
                if decoding is None:
                    continue
                if isinstance(event, TokensEvent) and decoding.take(event, ends):
                    engine.cancel(event.request)
                    del running[event.request]
                    told.one_more()
                elif isinstance(event, FinishEvent):
                    if event.reason == "error":
                        raise MlxspecError(event.error or "The engine could not go on.")
                    del running[event.request]
                    told.one_more()
    finally:
        for number in running:
            engine.cancel(number)


def _batch_stats(rows: Sequence[_BatchRow], seconds: float) -> BatchStats:
    """mlx-lm's figures of a batch. They differ between its versions."""
    stats = [r.request.stats for r in rows if r.request is not None]
    prompt_time = min(sum(s.prefill_seconds for s in stats), seconds)
    num = sum(len(r.given) for r in rows)
    values = {
        # as mlx-lm counts: the last token of a prompt is read by the first step
        "prompt_tokens": sum(len(r.prompt) - 1 for r in rows),
        "prompt_time": prompt_time,
        "generation_tokens": num,
        "generation_steps": max((s.num_rounds for s in stats), default=0),
        "decode_time": max(seconds - prompt_time, 0.0),
        "wall_time": seconds,
        "peak_memory": mx.get_peak_memory() / 1e9,
    }
    known = {f.name for f in fields(BatchStats)}
    return BatchStats(**{name: value for name, value in values.items() if name in known})


def _check_model(model: LoadedModel, stream: Any) -> None:
    if not isinstance(model, LoadedModel):
        raise ConfigError("The model must come from mlxspec.compat.mlx_lm.load.")
    if stream is not generation_stream:
        raise ConfigError("stream: mlxspec computes on a stream of its own; leave it out.")


def _check(called: str, options: dict[str, Any], known: Sequence[str]) -> None:
    """Raises ConfigError for what we cannot honour, TypeError for what mlx-lm does not know either."""
    for name, value in options.items():
        if name in _REFUSED and value is not None:
            raise ConfigError(f"{name}: mlxspec does not do {_REFUSED[name]}.")
        if name not in known and name not in _REFUSED and name not in _WITH_KV_BITS:
            raise TypeError(f"{called}() got an unexpected keyword argument {name!r}")


def _params(
    max_tokens: int, options: dict[str, Any], num_before: int, recorder: _Recorder | None
) -> SamplingParams:
    """-1 tokens: until the context is full. num_before: tokens of a prompt cache, which mlx-lm's processors do not see."""
    processors = [_behind(p, num_before) for p in options.get("logits_processors") or ()]
    return SamplingParams(
        max_tokens=MAX_CONTEXT if max_tokens < 0 else max(max_tokens, 1),
        ignore_eos=True,  # mlx-lm's tokenizer says what ends an answer
        loop_breaker="off",  # mlx-lm's calls have no place for the notice
        sampler=options.get("sampler"),
        logits_processors=(*processors, *([recorder] if recorder is not None else [])),
    )


def _behind(processor: Processor, num_before: int) -> Processor:
    """A processor that is given the tokens behind the first `num_before`."""
    if not num_before:
        return processor

    def given(tokens: mx.array, logits: mx.array) -> mx.array:
        return processor(tokens[num_before:], logits)

    given.__name__ = getattr(processor, "__name__", type(processor).__name__)
    return given


def _spec(engine: Engine, num_draft_tokens: int | None, has_draft: bool) -> SpecConfig:
    """Who names a draft model or a number of tokens gets what mlx-lm would do: drafts of that length, always."""
    if num_draft_tokens is None and not has_draft:
        return engine.spec
    n_max = _DRAFT_TOKENS if num_draft_tokens is None else num_draft_tokens
    return replace(engine.spec, policy="fixed", n_max=n_max)


def _chunk(model: LoadedModel, options: dict[str, Any]) -> int:
    """Tokens of a prompt to read at once. Raises ConfigError."""
    asked = options.get("prefill_step_size")
    if asked is None:
        return model.prefill_chunk
    if type(asked) is not int or not 16 <= asked <= 1 << 16:
        raise ConfigError(f"prefill_step_size must be an integer between 16 and {1 << 16}, not {asked!r}.")
    return asked


def _kv_bits(model: LoadedModel, options: dict[str, Any]) -> int:
    """In how many bits keys and values are kept. Raises ConfigError."""
    asked = options.get("kv_bits")
    if asked is None:
        return model.kv_bits
    check_kv_bits("kv_bits", asked)
    for name, value in _WITH_KV_BITS.items():
        if options.get(name, value) != value:
            raise ConfigError(f"{name} must be {value} with mlxspec, not {options[name]!r}.")
    return int(asked)


def _tokens(tokenizer: TokenizerWrapper, prompt: str | mx.array | Sequence[int]) -> list[int]:
    """As mlx-lm does: special tokens are added unless the text begins with one."""
    if isinstance(prompt, str):
        begins = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=not begins)
    return _ids(prompt)


def _ids(prompt: mx.array | Sequence[int]) -> list[int]:
    """Token ids of a prompt. Raises ConfigError for a text, which only a tokenizer makes ids of."""
    if isinstance(prompt, str):
        raise ConfigError("The prompt must be token ids here: give tokenizer.encode(text).")
    return [int(t) for t in (prompt.tolist() if isinstance(prompt, mx.array) else prompt)]
