"""Builds prompts that fill a gap in a text (fill-in-the-middle): `suffix` of OpenAI's completions and of Ollama's /api/generate, and
llama.cpp's /infill, as prompts of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlxspec.loading.fill_in import FillIn
from mlxspec.server.errors import BadField
from mlxspec.server.forms.completions import has_several
from mlxspec.server.http.fairness import check_wanted

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine


def form_of(engine: Engine) -> FillIn | None:
    """How the model's vocabulary writes a gap, None where it cannot."""
    return None if engine.tokenizer is None else FillIn.of(engine.tokenizer, engine.model.vocab_size)


def with_gap(
    body: Mapping[str, Any], engine: Engine, files: Sequence[tuple[str, str]] = ()
) -> dict[str, Any]:
    """A checked body whose `prompt` stands before a gap and whose `suffix` behind it, as one that is continued. files: (name, text).
    Raises BadField, ContextOverflowError, ConfigError."""
    form = form_of(engine)
    if form is None:
        raise BadField(
            "suffix", f"{engine.name} cannot fill in: its vocabulary has no tokens around a gap in a text."
        )
    if body.get("echo"):
        raise BadField(
            "echo", "echo and suffix exclude each other: the text before an answer is not all of its prompt."
        )
    given, behind = body["prompt"], body["suffix"]
    made = []
    for before in given if has_several(given) else [given]:
        check_wanted()
        made.append(form.prompt(before, behind, files, most=engine.max_context))
    ends = () if body.get("ignore_eos") else form.ends
    return {
        **{name: value for name, value in body.items() if name != "suffix"},
        "prompt": made if len(made) > 1 else made[0],
        "stop_token_ids": [*(body.get("stop_token_ids") or ()), *ends],
    }


def infill_body(body: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    """A checked body of /infill as one that is continued. Raises as `with_gap` does."""
    before = body["input_prefix"] + (body.get("prompt") or "")
    files = [(f.get("filename") or "file", f["text"]) for f in body.get("input_extra") or ()]
    return with_gap({**body, "prompt": before, "suffix": body["input_suffix"]}, engine, files)
