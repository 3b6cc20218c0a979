"""mlx-lm's `load` on our engine, and what stands for mlx-lm's module. Knows folders and engines; knows no generation."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_config, load_tokenizer

from mlxspec.checkpoints.pull import check_fits
from mlxspec.compat.mlx_lm.models.cache import PromptCache
from mlxspec.drafters.draft_model import DraftModel, check_vocabularies
from mlxspec.engine.engine import Engine
from mlxspec.engine.load import load as _load
from mlxspec.errors import ConfigError
from mlxspec.loading import hub
from mlxspec.loading.folder import tensor_files


class LoadedModel:
    """What `load` returns in place of mlx-lm's module. Attributes: engine, folder, prefill_chunk (the engine's own, in tokens),
    kv_bits (what it was loaded with)."""

    def __init__(self, engine: Engine, folder: Path, adapter: Path | None = None) -> None:
        self.engine, self.folder, self._adapter = engine, folder, adapter
        self.prefill_chunk = engine.prefill_chunk
        self.kv_bits = engine.config.kv_bits
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

    def make_cache(self) -> list[PromptCache]:
        """What mlx-lm's own `make_prompt_cache` asks a model for."""
        return [PromptCache()]

    @cached_property
    def fingerprint(self) -> str:
        """Of the weights' names and sizes, of the config, of an adapter's content and of the dtype computed in: equal where states can be
        gone on from."""
        shards, beside = tensor_files(self.folder)
        told = [(self.folder / "config.json").read_bytes(), str(self.engine.model.dtype).encode()]
        told += [f"{path.name} {path.stat().st_size}".encode() for path in (*shards, *beside)]
        if self._adapter is not None:
            told += [path.read_bytes() for path in sorted(self._adapter.glob("adapter*"))]
        return hashlib.sha256(b"\n".join(told)).hexdigest()

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
) -> Any:
    """Model and tokenizer, and the config with `return_config`. options: those of `mlxspec.load` (draft, draft_model, spec, config ...).

    lazy changes nothing but when weights are read, and they are read at once. Raises MlxspecError subclasses.
    """
    refused = {
        "model_config": model_config,
        "trust_remote_code": trust_remote_code,
    }
    for name, value in refused.items():
        if value:
            raise ConfigError(f"load: {name} is not supported by mlxspec; leave it out.")
    folder = hub.resolve(path_or_hf_repo, revision=revision, judge=check_fits)
    name = path_or_hf_repo if revision is None else str(folder)
    engine = _load(name, adapter=adapter_path, images=False, **options)
    config = load_config(folder)
    with _rope_unheard():
        tokenizer: TokenizerWrapper = load_tokenizer(
            folder, tokenizer_config, eos_token_ids=config.get("eos_token_id")
        )
    model = LoadedModel(engine, folder, None if adapter_path is None else Path(adapter_path))
    return (model, tokenizer, config) if return_config else (model, tokenizer)


@contextmanager
def _rope_unheard() -> Iterator[None]:
    """Inside, transformers does not warn of keys of `rope_parameters` that it has no use for: for a tokenizer it reads the model's config
    too, whose keys the engine has used."""
    logger = logging.getLogger("transformers.modeling_rope_utils")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
