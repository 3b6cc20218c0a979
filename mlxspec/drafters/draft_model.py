"""Drafting with a smaller model of the same vocabulary. Knows how two vocabularies are compared; the rest is model_based.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.cache.quantized import PLAIN
from mlxspec.drafters.base import DrafterFailed
from mlxspec.drafters.model_based import DraftStep, ModelDrafter
from mlxspec.errors import VocabularyError
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.models.base import LogitsAt, Model, Output
from mlxspec.models.head_rows import HeadRows
from mlxspec.models.image_features import HeldFeatures, ImageFeatures
from mlxspec.models.image_rows import SeenImages
from mlxspec.models.vision.base import Vision

_SIZE_DIFFERENCE = 128  # padding of the embedding may differ that much, as llama.cpp allows
_SHOWN = 5


class DraftModel(ModelDrafter):
    """A drafter that runs a small language model over each row and drafts with its next tokens."""

    name = "draft-model"
    sees_images = True

    def __init__(
        self,
        model: Model,
        vocab_size: int,
        head_rows: HeadRows | None = None,
        vision: Vision | None = None,
        *,
        kv_bits: int = PLAIN,
    ) -> None:
        """Draft with `model`. vocab_size: the target's; logits are cut or padded to it. head_rows: rows of the model's language-model head
        whose ids the target has too, None for all. vision: the model's own tower, which reads images as they are prepared for the
        target. Raises ConfigError as ModelDrafter does."""
        super().__init__(model, model.max_context, head_rows, kv_bits=kv_bits)
        self._vision = vision
        self._features = None if vision is None else ImageFeatures(vision.tower)
        self._vocab_size = vocab_size

    @property
    def weight_bytes(self) -> int:
        return super().weight_bytes + (0 if self._vision is None else self._vision.nbytes)

    @property
    def modules(self) -> Sequence[nn.Module] | None:
        made_by = (self.model,) if self._vision is None else (self.model, self._vision.tower)
        modules = tuple(m for m in made_by if isinstance(m, nn.Module))
        return modules if len(modules) == len(made_by) else None

    def see(self, row: int, seen: SeenImages) -> None:
        if self._features is None:
            raise DrafterFailed("the draft model reads no images, and the prompt holds some")
        super().see(row, SeenImages(seen.images, HeldFeatures(self._features, seen.owner)))

    def _forward(self, step: DraftStep) -> Output:
        tokens, images = step.tokens, step.images
        missing = self._vocab_size - self.model.vocab_size
        if missing > 0:
            # ids of the target's padding mean nothing to either, but must not be looked up behind the end
            tokens = mx.minimum(tokens, self.model.vocab_size - 1)
        wanted: LogitsAt = step.logits_at if self.proposals is None else "none"
        more: dict[str, Any] = {} if images is None else {"images": images}
        out = self.model.forward(tokens, step.rows, step.cache, certain=True, logits_at=wanted, **more)
        if self.proposals is not None:
            return self._own_head(out, step)
        if out.logits is None or missing == 0:
            return out
        logits = out.logits[:, : self._vocab_size]
        if missing > 0:
            logits = mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
        return Output(logits=logits, hidden=out.hidden, is_warm=out.is_warm)


def check_vocabularies(target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int) -> None:
    """Raise VocabularyError, which names ids that differ, unless each id means the same token in both models and both end texts with the
    same tokens."""
    check_tokens(target, draft, target_size, draft_size)
    if target.eos_ids != draft.eos_ids and not target.eos_ids & draft.eos_ids:
        raise VocabularyError(
            f"Target and draft model end a text with different ids: {set(target.eos_ids)} and {set(draft.eos_ids)}."
        )


def check_tokens(target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int) -> None:
    """Raise VocabularyError, which names ids that differ, unless each id means the same token in both models."""
    if draft_size > target_size + _SIZE_DIFFERENCE or target_size > draft_size + _SIZE_DIFFERENCE:
        raise VocabularyError(
            f"The draft model has {draft_size} token ids and the target {target_size}: not the same vocabulary."
        )
    # ids beyond the rows of either model are never drafted
    common = min(max(target.vocab_size, draft.vocab_size), target_size, draft_size)
    differing = [i for i in range(common) if target.token_text(i) != draft.token_text(i)]
    if differing:
        shown = ", ".join(
            f"{i} ({target.token_text(i)!r} / {draft.token_text(i)!r})" for i in differing[:_SHOWN]
        )
        raise VocabularyError(
            f"{len(differing)} token ids mean different things to target and draft model, such as {shown}."
        )
