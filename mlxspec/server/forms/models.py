"""Answers about models and this server."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, RootModel

from mlxspec.server.forms import base as t
from mlxspec.server.forms.shared import Adapter, Count

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
PropsAnswer = t.answer(
    "Props", default_generation_settings=dict[str, Any], total_slots=int, model_alias=str, model_path=str, modalities=dict[str, bool],
    chat_template=str, build_info=str, computed_in=str, stores_off=list[str],
)  # fmt: skip
Slot = t.answer("Slot", id=Count, n_ctx=Count, speculative=bool, is_processing=bool)


class SlotsAnswer(RootModel[list[Slot]]):  # type: ignore[valid-type]
    """The rows that the model in memory can decode at the same time, as llama.cpp's slots."""


class AdaptersAnswer(RootModel[list[t.answer("AdapterThere", id=Count, path=str, scale=float)]]):  # type: ignore[misc]
    """The adapters of a model, in llama.cpp's form."""


class AdapterScales(t.Fields):
    is_list: ClassVar = True
    body: Annotated[t.Many[Adapter], Field(max_length=64)]


Success = t.answer("Success", success=bool)


class LibraryRequest(t.Fields):
    action: Literal["serve", "cancel"] = Field(description="serve: one more model; cancel: end the download")
    model: t.Name | None = None


class PullRequest(t.Fields):
    model: t.Name | None = None
    name: t.Name | None = t.optional(same_as="model")
    stream: t.Flag = t.optional("lines on how far it is unless this is false")
    harmless = t.harmless("insecure", "the hub is asked by TLS")


_Here = t.answer(
    "ModelHere", name=str, size=Count, memory=Count | None, fits=bool, problem=str, served_as=str | None
)
_Fitting = t.answer("ModelFitting", name=str, repo=str, size=Count, drafter=str)
LibraryAnswer = t.answer(
    "Library", machine=Count, here=t.many(_Here), fitting=t.many(_Fitting), fetching=dict[str, Any] | None
)
Pulled = t.answer("Pulled", status=str)


_Speeds = Annotated[t.Many[Annotated[float, t.Range(1e-3, 1e9, also=(0,))]], Field(max_length=1000)]


class RatioRequest(t.Fields):
    drafted: _Speeds = Field(description="tokens a second of runs with drafting")
    plain: _Speeds = Field(description="of runs without, each next to one with drafting")
    rounds: Count
    drafted_rounds: Count = Field(description="those of them that verified a draft")


RatioAnswer = t.answer(
    "Ratio",
    median=float | None,
    least=float,
    most=float,
    num_pairs=Count,
    is_settled=bool,
    refusal=str,
    words=str,
)

PromptAnswer = t.answer("Prompt", prompt=str)
ContentAnswer = t.answer("Content", content=str, prompt=str)
TokenizerAnswer = t.answer(
    "TokenizerTold", bos_token=str | None, eos_token=str | None, pad_token=str | None, unk_token=str | None,
    chat_template=str | None, model_max_length=Count,
)  # fmt: skip
