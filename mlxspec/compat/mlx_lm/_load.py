"""mlx-lm's `load` on our engine, and what stands for mlx-lm's module and its prompt caches. Knows engines; knows no generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_config, load_tokenizer

from mlxspec.checkpoints.pull import check_fits
from mlxspec.drafters.draft_model import DraftModel, check_vocabularies
from mlxspec.engine.engine import Engine
from mlxspec.engine.load import load as _load
from mlxspec.errors import ConfigError
from mlxspec.loading import hub
from mlxspec.option import by_name

_ENGINE = "it stands for a whole engine (`.engine`), and functions that compute with a module need what mlx_lm.load returns"


class PromptCache:
    """The tokens of a conversation, in place of mlx-lm's caches of all layers. Keys, values and states for these tokens are in the engine's
    prefix cache, or are computed again. tokens: of prompts and answers, in order."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)
        self._writer: object | None = None  # the call that extends it

    @property
    def offset(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    def size(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    def empty(self) -> bool:
        """Return whether the cache has no tokens."""
        return not self.tokens

    def is_trimmable(self) -> bool:
        """Return True: the cache can be cut, also with recurrent layers."""
        return True

    def trim(self, num_tokens: int) -> int:
        """Remove the last `num_tokens` tokens, at most all of them. Return how many were removed."""
        num = min(max(num_tokens, 0), len(self.tokens))
        self._writer = None if num else self._writer
        del self.tokens[len(self.tokens) - num :]
        return num

    def lend(self, writer: object) -> None:
        """Give one call the sole right to `extend` this cache. The right ends when tokens are trimmed from the cache, or when it is lent to
        another call. writer: any object that identifies the call."""
        self._writer = writer

    def extend(self, writer: object, tokens: Sequence[int]) -> None:
        """Append tokens that a call has read or generated. Nothing is appended where the cache is no longer lent to this call. writer: the
        object that identifies the call."""
        if self._writer is writer:
            self.tokens += tokens

    @property
    def state(self) -> Any:
        """Raise ConfigError: mlx-lm reads this property to write a cache to a file, which is not supported."""
        raise ConfigError(
            "A prompt cache of mlxspec cannot be saved: keep its `tokens`; load(config=EngineConfig(prefix_disk=...)) keeps states."
        )


class LoadedModel:
    """The result of `load`, in place of mlx-lm's module. engine: generates the answers. prefill_chunk: the engine's own chunk of a prompt,
    in tokens. kv_bits: the bits of keys and values with which the model was loaded."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.prefill_chunk, self.kv_bits = engine, engine.prefill_chunk, engine.config.kv_bits
        self._pairs: dict[int, tuple[LoadedModel, Engine]] = {}

    def paired(self, draft: LoadedModel) -> Engine:
        """Return an engine of this model for which the model `draft` drafts. Raises VocabularyError where their token ids have different
        meanings."""
        if id(draft) not in self._pairs:
            own, small = self.engine, draft.engine
            if own.tokenizer is None or small.tokenizer is None:
                raise ConfigError("A draft model can only be checked where both models have tokenizers.")
            sizes = own.model.vocab_size, small.model.vocab_size
            check_vocabularies(own.tokenizer, small.tokenizer, *sizes)
            drafter = DraftModel(small.model, own.model.vocab_size)
            made = Engine(own.model, own.tokenizer, drafters=[drafter], config=own.config, name=own.name)
            self._pairs[id(draft)] = draft, made
        return self._pairs[id(draft)][1]

    def make_cache(self) -> list[PromptCache]:
        """Return a list of one empty PromptCache, which replaces the caches of all layers. mlx-lm's `make_prompt_cache` calls this
        method."""
        return [PromptCache()]

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(f"A model of mlxspec.compat.mlx_lm cannot be called: {_ENGINE}.")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"mlxspec.compat.mlx_lm models have no attribute {name!r}: {_ENGINE}.")


@by_name
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
) -> Any:
    """Load a model, and return the model and its tokenizer; with `return_config` its config too. options: those of `mlxspec.load` (draft,
    draft_model, spec, config ...). lazy has no effect: weights are read at once. Raises subclasses of MlxspecError."""
    for name, value in {"model_config": model_config, "trust_remote_code": trust_remote_code}.items():
        if value:
            raise ConfigError(f"load: {name} is not supported by mlxspec; leave it out.")
    folder = hub.resolve(path_or_hf_repo, revision=revision, judge=check_fits)
    name = path_or_hf_repo if revision is None else str(folder)
    model = LoadedModel(_load(name, adapter=adapter_path, images=False, **options))
    config = load_config(folder)
    tokenizer: TokenizerWrapper = load_tokenizer(
        folder, tokenizer_config, eos_token_ids=config.get("eos_token_id")
    )
    return (model, tokenizer, config) if return_config else (model, tokenizer)
