"""mlx-lm's `generate`, `stream_generate` and `batch_generate` on our engine. Knows their calls and responses; knows no rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchResponse, BatchStats, GenerationResponse, generation_stream
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.compat.mlx_lm._load import LoadedModel, PromptCache
from mlxspec.config import MAX_CONTEXT, EngineConfig, SamplingParams
from mlxspec.engine.api import Result
from mlxspec.engine.engine import Engine
from mlxspec.errors import ConfigError, MlxspecError
from mlxspec.events import FinishEvent, PrefillEvent, TokensEvent
from mlxspec.option import by_name, near, of_kind

_HONOURED = frozenset(
    "sampler logits_processors prompt_cache num_draft_tokens prefill_step_size kv_bits prompt_progress_callback "
    "completion_batch_size".split()
)
_REFUSED = ("max_kv_size", "input_embeddings", "prefill_batch_size")  # fine as None
_ONE_VALUE = {
    "kv_group_size": 64,
    "quantized_kv_start": 0,
}  # what goes with kv_bits, and the value that we have
# arguments of mlx_lm.sample_utils.make_sampler, which generate once had itself
_OF_SAMPLERS = {"temp": "temp", "temperature": "temp", "top_p": "top_p", "min_p": "min_p", "top_k": "top_k"}
_BATCH_ROWS = 32  # mlx-lm's default of completion_batch_size
_DRAFT_TOKENS = 2  # mlx-lm's default

Processor = Callable[[mx.array, mx.array], mx.array]


@by_name
def generate(
    model: LoadedModel,
    tokenizer: TokenizerWrapper,
    prompt: str | list[int],
    verbose: bool = False,
    **kwargs: Any,
) -> str:
    """Generate an answer and return its text. kwargs: those of `stream_generate`. verbose: print the answer as it is generated, then speeds
    and memory."""
    text, last = "", None
    for last in _responses(model, tokenizer, prompt, has_logprobs=False, **kwargs):
        if verbose:
            print(last.text, end="", flush=True)
        text += last.text
    if verbose and last is not None:
        print(f"\n{'=' * 10}")
        print(f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec")
        print(f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec")
        print(f"Peak memory: {last.peak_memory:.3f} GB")
    return text


@by_name
def stream_generate(
    model: LoadedModel,
    tokenizer: TokenizerWrapper,
    prompt: str | mx.array | list[int],
    max_tokens: int = 256,
    draft_model: LoadedModel | None = None,
    stream: Any = generation_stream,
    **kwargs: Any,
) -> Generator[GenerationResponse, None, None]:
    """Yield one response for each token, as mlx-lm does; several arrive at once where drafts were accepted.

    kwargs: sampler, logits_processors, prompt_cache (extended in place by the prompt and by each token that was yielded), num_draft_tokens,
    prefill_step_size (at least 16), kv_bits (8 or 4), prompt_progress_callback. Samplers and processors are also called for drafts that may
    be rejected, so their results must depend on their arguments only. Raises subclasses of MlxspecError before the first response is
    requested.
    """
    return _responses(model, tokenizer, prompt, max_tokens, draft_model, stream, has_logprobs=True, **kwargs)


@by_name
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
    """Answer several prompts of token ids, which are decoded together, and return mlx-lm's response. max_tokens: for each prompt, or one
    for all. prompt_caches are not changed.

    kwargs: sampler, logits_processors, prefill_step_size and kv_bits as in `stream_generate`; completion_batch_size: the most prompts that
    are decoded together, as far as the engine has rows for them. Raises subclasses of MlxspecError, and returns no answer then.
    """
    _check(model, kwargs.pop("stream", None) or generation_stream, kwargs, "batch_generate")
    of_kind("prompts", prompts, list, tuple)
    limits = list(max_tokens) if isinstance(max_tokens, (list, tuple)) else [max_tokens] * len(prompts)
    caches = [None] * len(prompts) if prompt_caches is None else [_checked(c)[0] for c in prompt_caches]
    if not len(limits) == len(prompts) == len(caches):
        raise ConfigError("There must be as many max_tokens and prompt_caches as prompts.")
    _prepare(model, model.engine, kwargs)
    before = [[] if cache is None else cache.tokens for cache in caches]
    texts = [[*old, *_ids(prompt)] for old, prompt in zip(before, prompts, strict=True)]
    ends: dict[str, Any] = {"stop_token_ids": tuple(tokenizer.eos_token_ids), "logprobs": return_logprobs}
    params = [replace(_params(n, kwargs, len(old)), **ends) for n, old in zip(limits, before, strict=True)]
    began, most = time.perf_counter(), kwargs.get("completion_batch_size") or _BATCH_ROWS
    results = list[Result]()
    for i in range(0, len(texts), most):
        results += model.engine.generate(texts[i : i + most], params[i : i + most])
        if verbose:
            print(f"[batch_generate] Finished processing {len(results)}/{len(texts)} ...")
    failed = next((result.error for result in results if result.error is not None), None)
    if failed is not None:
        raise MlxspecError(failed)
    stats = _batch_stats(prompts, results, time.perf_counter() - began)
    if verbose:
        for name, num, speed in (
            ("Prompt", stats.prompt_tokens, stats.prompt_tps),
            ("Generation", stats.generation_tokens, stats.generation_tps),
        ):
            print(f"[batch_generate] {name}: {num} tokens, {speed:.3f} tokens-per-sec")
    answers = [list(result.tokens) for result in results]
    made = [PromptCache([*text, *answer]) for text, answer in zip(texts, answers, strict=True)]
    more = {
        "token_ids": answers if return_token_ids else None,
        "logprobs": [[t.logprob for t in r.logprobs or ()] for r in results] if return_logprobs else None,
    }
    return BatchResponse(
        texts=[tokenizer.decode(answer) for answer in answers],
        stats=stats,
        caches=[[cache] for cache in made] if return_prompt_caches else None,
        **_known(BatchResponse, more),
    )


def _responses(
    model: LoadedModel,
    tokenizer: TokenizerWrapper,
    prompt: str | mx.array | list[int],
    max_tokens: int = 256,
    draft_model: LoadedModel | None = None,
    stream: Any = generation_stream,
    *,
    has_logprobs: bool,
    **kwargs: Any,
) -> Generator[GenerationResponse, None, None]:
    for each in (model, model if draft_model is None else draft_model):
        _check(each, stream, kwargs, "stream_generate")
    engine = model.engine if draft_model is None else model.paired(draft_model)
    spec, num_drafts = engine.spec, kwargs.get("num_draft_tokens")
    if (
        draft_model is not None or num_drafts is not None
    ):  # drafts of that length, always, as mlx-lm makes them
        spec = replace(spec, policy="fixed", n_max=_DRAFT_TOKENS if num_drafts is None else num_drafts)
    of_kind("tokenizer", tokenizer, TokenizerWrapper)
    if isinstance(prompt, str):  # as mlx-lm does: special tokens are added unless the text begins with one
        begins = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=not begins)
    read, caches = _ids(prompt), _checked(kwargs.get("prompt_cache") or [])
    before, recorder = list(caches[0].tokens) if caches else [], _Recorder()
    params = _params(max_tokens, kwargs, len(before))
    if has_logprobs:
        params = replace(params, logits_processors=(*params.logits_processors, recorder))
    _prepare(model, engine, kwargs)
    events = engine.stream([*before, *read], params, spec=spec)
    progress = kwargs.get("prompt_progress_callback") or (lambda done, total: None)
    writer = object()
    for cache in caches:
        cache.lend(writer)

    def extend(tokens: Sequence[int]) -> None:
        for cache in caches:
            cache.extend(writer, tokens)

    def told() -> Generator[GenerationResponse, None, None]:
        began, seconds, num, token, is_drafted = time.perf_counter(), 0.0, 0, -1, False
        detokenizer, logprobs, is_read = tokenizer.detokenizer, None, False
        _prepare(model, engine, kwargs)

        def response(reason: str | None) -> GenerationResponse:
            return GenerationResponse(
                text=detokenizer.last_segment,
                token=token,
                logprobs=logprobs,
                from_draft=is_drafted,
                prompt_tokens=len(read),
                prompt_tps=len(read) / seconds,
                generation_tokens=num,
                generation_tps=num / (time.perf_counter() - began),
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=reason,
            )

        progress(0, len(read))
        try:
            for event in events:
                if isinstance(event, FinishEvent) and event.reason == "error":
                    raise MlxspecError(event.error or "The engine could not go on.")
                if isinstance(event, PrefillEvent) and event.num_done < event.num_total:
                    progress(max(0, event.num_done - len(before)), len(read))
                elif isinstance(event, PrefillEvent) and not is_read:
                    is_read = True
                    extend(read)
                tokens, num_drafted = (
                    (event.tokens, event.num_drafted) if isinstance(event, TokensEvent) else ((), 0)
                )
                for i, token in enumerate(tokens):
                    if num == 0:
                        progress(len(read), len(read))
                        seconds, began = time.perf_counter() - began, time.perf_counter()
                    logprobs = recorder.take(len(before) + len(read) + num)
                    is_drafted, num = i < num_drafted, num + 1
                    extend([token])
                    if token in tokenizer.eos_token_ids:
                        detokenizer.finalize()
                        yield response("stop")
                        return
                    detokenizer.add_token(token)
                    if num != max_tokens:
                        yield response(None)
            detokenizer.finalize()
            yield response("length")  # or the context is full
        finally:
            events.close()  # type: ignore[attr-defined]

    return told()


def _params(limit: int, options: Mapping[str, Any], num_before: int) -> SamplingParams:
    """Return the sampling parameters of a request. limit: the most tokens; negative for no limit but the context. options: the keyword
    arguments of the call. num_before: tokens in the prompt cache. Raises ConfigError."""
    if limit == 0:
        raise ConfigError("max_tokens must not be 0 (use -1 for no limit).")
    processors = [_behind(p, num_before) for p in options.get("logits_processors") or ()]
    return SamplingParams(
        max_tokens=MAX_CONTEXT if limit < 0 else limit,
        ignore_eos=True,  # mlx-lm's tokenizer says what ends an answer
        loop_breaker="off",  # mlx-lm's calls have no place for the notice
        sampler=options.get("sampler"),
        logits_processors=tuple(processors),
    )


class _Recorder:
    """A logits processor that records the logits at each position and changes nothing. A position after a rejected draft is recorded
    again."""

    def __init__(self) -> None:
        self._logits: dict[int, mx.array] = {}

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self._logits[tokens.size] = logits
        return logits

    def take(self, place: int) -> mx.array | None:
        """Return the log-probabilities (V,) at a position lazily, and drop the record; None where there is none."""
        logits = self._logits.pop(place, None)
        return None if logits is None else (logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0]


def _batch_stats(prompts: Sequence[Sequence[int]], results: Sequence[Result], seconds: float) -> BatchStats:
    """Return mlx-lm's statistics of a batch, with the fields of the installed version. seconds: the time of the whole batch."""
    prompt_time = min(sum(result.stats.prefill_seconds for result in results), seconds)
    values = {
        # as mlx-lm counts: the last token of a prompt is read by the first step, and an end token is generated
        "prompt_tokens": sum(len(prompt) - 1 for prompt in prompts),
        "prompt_time": prompt_time,
        "generation_tokens": sum(len(r.tokens) + (r.finish_reason == "stop") for r in results),
        "generation_steps": max((result.stats.num_rounds for result in results), default=0),
        "decode_time": max(seconds - prompt_time, 0.0),
        "wall_time": seconds,
        "peak_memory": mx.get_peak_memory() / 1e9,
    }
    return BatchStats(**_known(BatchStats, values))


def _known(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the values for which the class `kind` of the installed mlx-lm has fields."""
    names = {f.name for f in fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _check(model: LoadedModel, stream: Any, options: Mapping[str, Any], called: str) -> None:
    """Raise ConfigError for arguments of a call that mlxspec does not support, and for those that mlx-lm does not have either. called: the
    name of the called function."""
    if not isinstance(model, LoadedModel):
        raise ConfigError("The model must come from mlxspec.compat.mlx_lm.load.")
    if stream is not generation_stream:
        raise ConfigError("stream: mlxspec computes on a stream of its own; leave it out.")
    for name, value in options.items():
        if name in _REFUSED and value is not None:
            raise ConfigError(f"{name} is not supported by mlxspec; leave it out.")
        if options.get("kv_bits") is not None and name in _ONE_VALUE and value != _ONE_VALUE[name]:
            raise ConfigError(f"{name} must be {_ONE_VALUE[name]} with mlxspec, not {value!r}.")
        if name not in _HONOURED and name not in _ONE_VALUE and name not in _REFUSED:
            meant = near(name, (*_HONOURED, *_ONE_VALUE, "max_tokens", "verbose"))
            if name in _OF_SAMPLERS:
                meant = f"sampler=make_sampler({_OF_SAMPLERS[name]}=...) gives it."
            raise ConfigError(f"{called} has no argument {name!r}" + (f"; {meant}" if meant else "."))


def _prepare(model: LoadedModel, engine: Engine, options: Mapping[str, Any]) -> None:
    """Set the bits of keys and values and the prefill chunk of the engine, which mlx-lm takes as arguments of each call. Raises
    ConfigError."""
    bits, chunk = options.get("kv_bits"), options.get("prefill_step_size")
    if chunk is not None and (type(chunk) is not int or not 16 <= chunk <= 1 << 16):
        raise ConfigError(f"prefill_step_size must be an integer between 16 and {1 << 16}, not {chunk!r}.")
    if bits is not None:
        EngineConfig(kv_bits=bits)
    engine.keep_kv_in(model.kv_bits if bits is None else int(bits))
    engine.prefill_chunk = model.prefill_chunk if chunk is None else chunk


def _behind(processor: Processor, num_before: int) -> Processor:
    """Return a processor that receives the tokens after the first `num_before`: mlx-lm's processors do not see a prompt cache."""
    if not num_before:
        return processor

    def given(tokens: mx.array, logits: mx.array) -> mx.array:
        return processor(tokens[num_before:], logits)

    given.__name__ = getattr(processor, "__name__", type(processor).__name__)
    return given


def _checked(caches: Sequence[Any]) -> list[PromptCache]:
    """Return the caches as prompt caches. Raises ConfigError for another kind of cache."""
    if not all(isinstance(cache, PromptCache) for cache in caches):
        raise ConfigError(
            "prompt_cache must come from make_prompt_cache(model) with a model of this package."
        )
    return list(caches)


def _ids(prompt: mx.array | Sequence[int]) -> list[int]:
    """Return the token ids of a prompt. Raises ConfigError where there are none, and for a text, which must be tokenized first."""
    if isinstance(prompt, str):
        raise ConfigError("The prompt must be token ids here: give tokenizer.encode(text).")
    of_kind("A prompt", prompt, mx.array, Sequence)
    found = [int(t) for t in (prompt.tolist() if isinstance(prompt, mx.array) else prompt)]
    if not found:
        raise ConfigError("The prompt is empty.")
    return found
