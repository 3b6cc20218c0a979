"""Answers about models and this server."""

from __future__ import annotations

from typing import Literal

from mlxspec.server.forms import base as t
from mlxspec.server.forms.shared import Count

_Modalities = t.answer("Modalities", input_modalities=list[str], output_modalities=list[str])
ModelAnswer = t.answer(
    "Model", "context_length max_model_len",
    id=str, object=Literal["model"], created=int, owned_by=str, type=Literal["model"], display_name=str, created_at=str,
    architecture=_Modalities, capabilities=list[str] | None,
    lifecycle=Literal["active"], max_input_tokens=int | None, max_tokens=int | None,
    context_length=Count, max_model_len=Count, meta=t.answer("Meta", loaded=bool),
)  # fmt: skip
ModelsAnswer = t.answer(
    "Models", object=Literal["list"], data=t.many(ModelAnswer), has_more=bool, first_id=str, last_id=str
)
HealthAnswer = t.answer("Health", status=str, model=str)
PromptAnswer = t.answer("Prompt", prompt=str)
ContentAnswer = t.answer("Content", content=str)
