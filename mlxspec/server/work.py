"""Prepares a request before the engine gets it: checks its sizes, then compiles its grammar once for all its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxspec.config import SamplingParams
from mlxspec.errors import GrammarError
from mlxspec.sampling.grammar import source_bytes
from mlxspec.server.errors import BadField
from mlxspec.server.forms.shared import has_several
from mlxspec.server.http.limits import ServerLimits
from mlxspec.server.request_parsing import Job

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine


def check_number_of_answers(body: Mapping[str, Any], limits: ServerLimits) -> None:
    """Raises BadField."""
    prompt = body.get("prompt")
    asked = int(body.get("n") or 1) * (len(prompt) if has_several(prompt) else 1)  # type: ignore[arg-type]
    if asked > limits.max_answers:
        raise BadField("n", f"A request may ask for {limits.max_answers} answers at most, not {asked}.")


def compiled(job: Job, engine: Engine, limits: ServerLimits) -> Job:
    """The job with what its answers' parameters are compiled to, which is the same for all of them. Calls that a model may write are held
    to no grammar where that is too large or cannot be compiled, with a notice, or those of the tools whose schemas are to blame. Raises
    BadField, GrammarError."""
    params = job.asks[0].params
    try:
        check_constraints(params, limits)
        return replace(job, compiled=engine.compile(params, len(job.asks), job.spec.owner))
    except (BadField, GrammarError) as error:
        found = None if job.loosening is None else job.loosening.loosened(partial(_trouble, job, engine))
        if found is not None:
            lark, notices = found
            asks = [replace(ask, params=replace(ask.params, lark=lark)) for ask in job.asks]
            job = replace(job, asks=tuple(asks), notices=(*job.notices, *notices), loosening=None)
            return compiled(job, engine, limits)
        if not params.lark_at:
            raise
        asks = [
            replace(ask, params=replace(ask.params, lark=None, lark_at="", lark_once=False))
            for ask in job.asks
        ]
        notice = f"calls may have any arguments: {error}"
        job = replace(job, asks=tuple(asks), notices=(*job.notices, notice), loosening=None)
        return compiled(job, engine, limits)


def _trouble(job: Job, engine: Engine, lark: str) -> str | None:
    """Return why a grammar cannot be compiled, None where it can."""
    try:
        engine.compile(SamplingParams(lark=lark), 1, job.spec.owner)
    except GrammarError as error:
        return str(error)
    return None


def check_constraints(params: SamplingParams, limits: ServerLimits) -> None:
    """Raises BadField."""
    num_bytes = sum(len(w.encode()) for w in params.bad_words)
    if num_bytes > limits.max_bad_words:
        raise BadField(
            "bad_words",
            f"bad_words may have {limits.max_bad_words} bytes at most, all together, not {num_bytes}.",
        )
    num_bytes = source_bytes(params)
    if num_bytes > limits.max_grammar:
        kinds = [kind for kind in ("json_schema", "regex", "lark") if getattr(params, kind) is not None]
        raise BadField(
            kinds[0],
            f"The schema or grammar of an answer, made from tools or given, may have {limits.max_grammar} bytes at most, "
            f"not {num_bytes}.",
        )
