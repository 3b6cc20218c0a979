"""The exception tree of mlxspec, and nothing else.

    MlxspecError              anything we raise on purpose; its text is one sentence for a person
      ConfigError             an option, parameter or config value that cannot be honoured
      ModelError              a model folder that cannot be used as it is
        TokenizerError        its tokenizer or chat template cannot be used
        VocabularyError       draft and target disagree on what the token ids mean
        NotANumberError       its logits are not numbers
      ContextOverflowError    the prompt (or what was asked for) does not fit the context
      MemoryBudgetError       it would not fit into memory
      StorageError            it would not fit on the disk, or the disk refused it
      CacheError              a cache transaction was used out of order: a bug, not bad input
      ImageError              an image that cannot be decoded, or not be used with this model
      GrammarError            a grammar or schema that cannot be compiled
      HookError               a logits processor or a sampler of the caller's failed
      CancelledError          the request was cancelled
      EngineStoppedError      the engine that should have answered has been stopped, or broke
      EngineBusyError         the engine was called while it ran a step
      QueueFullError          too many requests wait already; try again later
      HelperError             work on a stranger's data was ended at its limit of time or memory, or failed
      RankError               processes that run one model together cannot begin, or cannot go on
      RivalError              another server that is measured does not answer as it should

Front ends map these to exit codes and HTTP statuses in one table; no layer below them knows of either.
"""

from __future__ import annotations


class MlxspecError(Exception):
    """The base class of all errors that mlxspec raises on purpose."""


class ConfigError(MlxspecError):
    """An error of options: one is out of its range, unknown, or contradicts another."""


class ModelError(MlxspecError):
    """An error of a model's folder: it is missing, incomplete, corrupt, or of a kind that mlxspec does not run."""


class TokenizerError(ModelError):
    """An error of the tokenizer or the chat template: it is missing or broken."""


class VocabularyError(ModelError):
    """An error of pairing: the draft model's token ids do not mean what the target's mean."""


class NotANumberError(ModelError):
    """An error of the model: it computes logits that are not numbers, because its values overflow or a weight is damaged."""


class ContextOverflowError(MlxspecError):
    """An error of length: a prompt is longer than the model's context.

    Attributes: num_prompt, limit (both in tokens).
    """

    def __init__(self, num_prompt: int, limit: int, *, at_least: bool = False) -> None:
        """Write the sentence. at_least: the prompt has more than num_prompt tokens, which were not all counted."""
        number = f"at least {num_prompt}" if at_least else str(num_prompt)
        super().__init__(
            f"This model's maximum context length is {limit} tokens, and the prompt has {number}; one more is needed to answer."
        )
        self.num_prompt = num_prompt
        self.limit = limit


class MemoryBudgetError(MlxspecError):
    """An error of planning: a request or a model would not fit into the memory budget."""


class StorageError(MlxspecError):
    """An error of the disk: a file could not be written, or would not fit."""


class CacheError(MlxspecError):
    """An error of order: append, commit, abort or fork of a cache was called when it may not be."""


class ImageError(MlxspecError):
    """An error of an image: it cannot be decoded, is too large, or cannot be used with this model."""


class GrammarError(MlxspecError):
    """An error of a grammar, regex or JSON schema: it cannot be compiled."""


class HookError(MlxspecError):
    """An error of the caller's own code: a logits processor or a sampler failed. Attributes: result, the answer up to there."""

    def __init__(self, message: str, result: object = None) -> None:
        super().__init__(message)
        self.result = result


class CancelledError(MlxspecError):
    """An error that a request was cancelled before it finished."""


class EngineStoppedError(MlxspecError):
    """An error that the engine which should have answered has been stopped, or broke."""


class EngineBusyError(MlxspecError):
    """An error that the engine was called while it ran a step: by a drafter, a logits processor or a sampler within the step, or by
    another thread."""


class HelperError(MlxspecError):
    """An error of a helper process: it was ended at its limit of time or memory, or failed."""


class RankError(MlxspecError):
    """An error of ranks (processes that run one model together): they differ in what must be the same, or one of them ended, hung or
    lost its link."""


class RivalError(MlxspecError):
    """An error of another server that is measured next to this engine: it cannot be reached, or does not answer as OpenAI's API does."""


class QueueFullError(MlxspecError):
    """An error of the queue: too many requests wait, so this one was not queued. Attributes: num_waiting."""

    def __init__(self, num_waiting: int) -> None:
        super().__init__(f"{num_waiting} requests are waiting already; try again in a little while.")
        self.num_waiting = num_waiting
