"""mlx-lm's `load`, `generate` and `stream_generate` on our engine: change the import, and a script drafts, hybrids included.

    from mlxspec.compat.mlx_lm import load, generate, stream_generate

Signatures and responses are mlx-lm's own; the tokenizer is the very one mlx-lm would load. Greedy text is mlx-lm's up to float ties. What
cannot be honoured is an error that names itself. Knows mlx-lm's calls and our engine; knows no rounds.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse, generation_stream
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_config, load_tokenizer

from mlxspec.checkpoints.pull import check_fits
from mlxspec.config import MAX_CONTEXT, SamplingParams, SpecConfig
from mlxspec.drafters.draft_model import DraftModel, check_vocabularies
from mlxspec.engine.engine import Engine
from mlxspec.engine.load import load as _load
from mlxspec.errors import ConfigError, MlxspecError
from mlxspec.events import FinishEvent, PrefillEvent
from mlxspec.loading import hub

# What mlx-lm's generate_step and speculative_generate_step take besides, and we cannot: fine only as None.
_REFUSED = {
    "max_kv_size": "a cache that forgets the middle of a text",
    "prompt_cache": "a prompt cache of mlx-lm's: give the whole prompt each time",
    "kv_bits": "a quantized KV cache",
    "input_embeddings": "embeddings in place of a prompt",
}
_WITH_KV_BITS = ("kv_group_size", "quantized_kv_start")  # mean nothing without it, as in mlx-lm
_DRAFT_TOKENS = 2  # mlx-lm's default


class LoadedModel:
    """What `load` returns in place of mlx-lm's module. Attributes: engine, folder."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self._pairs: dict[int, tuple[LoadedModel, Engine]] = {}

    def paired(self, draft: LoadedModel) -> Engine:
        """This model with another one drafting for it. Raises VocabularyError where their token ids mean different things."""
        found = self._pairs.get(id(draft))
        if found is None:
            own, small = self.engine, draft.engine
            if own.tokenizer is None or small.tokenizer is None:
                raise ConfigError("A draft model can only be checked where both models have tokenizers.")
            sizes = own.model.vocab_size, small.model.vocab_size
            check_vocabularies(own.tokenizer, small.tokenizer, *sizes)
            drafter = DraftModel(small.model, own.model.vocab_size)
            made = Engine(own.model, own.tokenizer, drafters=[drafter], config=own.config, name=own.name)
            found = self._pairs[id(draft)] = draft, made
        return found[1]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"mlxspec.compat.mlx_lm models have no attribute {name!r}: they stand for a whole engine (`.engine`), not for a module."
        )


def load(
    path_or_hf_repo: str,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[LoadedModel, TokenizerWrapper] | tuple[LoadedModel, TokenizerWrapper, dict[str, Any]]:
    """Model and tokenizer, and the config with `return_config`. options: those of `mlxspec.load` (draft, draft_model, spec, config ...).

    lazy changes nothing but when weights are read, and they are read at once. Raises MlxspecError subclasses.
    """
    refused = {
        "model_config": model_config,
        "adapter_path": adapter_path,
        "trust_remote_code": trust_remote_code,
    }
    for name, value in refused.items():
        if value:
            raise ConfigError(f"load: {name} is not supported by mlxspec; leave it out.")
    folder = hub.resolve(path_or_hf_repo, revision=revision, judge=check_fits)
    engine = _load(path_or_hf_repo if revision is None else str(folder), **options)
    config = load_config(folder)
    tokenizer = load_tokenizer(folder, tokenizer_config, eos_token_ids=config.get("eos_token_id"))
    model = LoadedModel(engine, folder)
    return (model, tokenizer, config) if return_config else (model, tokenizer)


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
    """One response a token, as mlx-lm gives them; several come at once where drafts stood.

    kwargs: sampler, logits_processors, num_draft_tokens, prefill_step_size and prompt_progress_callback are honoured (the last is called
    at the beginning and the end of the prompt). Samplers and processors are called for drafts that may not stand, so they must depend on
    nothing but their arguments. Raises MlxspecError subclasses before the first response is asked for.
    """
    return _responses(model, tokenizer, prompt, max_tokens, draft_model, stream, keep_logprobs=True, **kwargs)


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
    if not isinstance(model, LoadedModel) or not (
        draft_model is None or isinstance(draft_model, LoadedModel)
    ):
        raise ConfigError("The model must come from mlxspec.compat.mlx_lm.load.")
    if max_tokens == 0:
        raise ConfigError("max_tokens must not be 0 (use -1 for no limit).")
    if stream is not generation_stream:
        raise ConfigError("stream: mlxspec computes on a stream of its own; leave it out.")
    _check(kwargs)
    engine = model.engine if draft_model is None else model.paired(draft_model)
    spec = _spec(engine, kwargs.get("num_draft_tokens"), draft_model is not None)
    if kwargs.get("prefill_step_size") is not None:
        engine.config = replace(engine.config, prefill_chunk=kwargs["prefill_step_size"])
        engine.memory.full_chunk = kwargs["prefill_step_size"]
    recorder = _Recorder()
    params = SamplingParams(
        max_tokens=MAX_CONTEXT if max_tokens < 0 else max_tokens,
        ignore_eos=True,  # mlx-lm's tokenizer says what ends an answer
        sampler=kwargs.get("sampler"),
        logits_processors=(*(kwargs.get("logits_processors") or ()), *([recorder] if keep_logprobs else [])),
    )
    tokens = _tokens(tokenizer, prompt)
    progress = kwargs.get("prompt_progress_callback") or (lambda done, total: None)
    events = engine.stream(tokens, params, spec=spec)
    detokenizer = tokenizer.detokenizer

    def told() -> Generator[GenerationResponse, None, None]:
        progress(0, len(tokens))
        began = time.perf_counter()
        num, seconds, token, logprobs, drafted = 0, 0.0, -1, None, False

        def response(reason: str | None) -> GenerationResponse:
            return GenerationResponse(
                text=detokenizer.last_segment,
                token=token,
                logprobs=logprobs,
                from_draft=drafted,
                prompt_tokens=len(tokens),
                prompt_tps=len(tokens) / seconds,
                generation_tokens=num,
                generation_tps=num / (time.perf_counter() - began),
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=reason,
            )

        try:
            for event in events:
                if isinstance(event, FinishEvent):
                    if event.reason == "error":
                        raise MlxspecError(event.error or "The engine could not go on.")
                    break
                if isinstance(event, PrefillEvent):
                    if event.num_done < event.num_total:
                        progress(event.num_done, event.num_total)
                    continue
                for i, token in enumerate(event.tokens):
                    if num == 0:
                        seconds = time.perf_counter() - began
                        progress(len(tokens), len(tokens))
                        began = time.perf_counter()
                    logprobs = recorder.take(len(tokens) + num)
                    num, drafted = num + 1, i < event.num_drafted
                    if token in tokenizer.eos_token_ids:
                        detokenizer.finalize()
                        yield response("stop")
                        return
                    detokenizer.add_token(token)
                    if num == max_tokens:
                        detokenizer.finalize()
                        yield response("length")
                        return
                    yield response(None)
            detokenizer.finalize()
            yield response("length")  # the context has ended
        finally:
            events.close()  # type: ignore[attr-defined]

    return told()


class _Recorder:
    """A logits processor that changes nothing and remembers what the model said at each place of the text, for `logprobs`.

    A place behind a draft that did not stand is asked about again, and remembered anew.
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


def _check(kwargs: dict[str, Any]) -> None:
    """Raises ConfigError for what we cannot honour, TypeError for what mlx-lm does not know either."""
    known = (
        "sampler",
        "logits_processors",
        "num_draft_tokens",
        "prefill_step_size",
        "prompt_progress_callback",
    )
    for name, value in kwargs.items():
        if name in _REFUSED and value is not None:
            raise ConfigError(f"{name}: mlxspec does not do {_REFUSED[name]}.")
        if name not in known and name not in _REFUSED and name not in _WITH_KV_BITS:
            raise TypeError(f"stream_generate() got an unexpected keyword argument {name!r}")


def _spec(engine: Engine, num_draft_tokens: int | None, has_draft: bool) -> SpecConfig:
    """Who names a draft model or a number of tokens gets what mlx-lm would do: drafts of that length, always."""
    if num_draft_tokens is None and not has_draft:
        return engine.spec
    n_max = _DRAFT_TOKENS if num_draft_tokens is None else num_draft_tokens
    return replace(engine.spec, policy="fixed", n_max=n_max)


def _tokens(tokenizer: TokenizerWrapper, prompt: str | mx.array | Sequence[int]) -> list[int]:
    """As mlx-lm does: special tokens are added unless the text begins with one."""
    if isinstance(prompt, str):
        begins = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=not begins)
    found = prompt.tolist() if isinstance(prompt, mx.array) else list(prompt)
    return [int(t) for t in found]
