"""Reads an expected prompt while an engine is idle, so that the request with this prompt finds its beginning in the prefix cache.

While an agent runs a tool, or a person reads an answer, most of the next prompt is known: the conversation, the answer as the chat template
writes it, and the beginning of the next message.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.engine.engine import Engine
from mlxspec.engine.uncounted import uncounted


def read_ahead(
    engine: Engine, prompt: Sequence[int], spec: SpecConfig, adapters: Mapping[str, float]
) -> Generator[None]:
    """Read a prompt into the prefix cache, one piece in each step. Closing the generator ends the reading and keeps what has been read.

    spec, adapters: of the request that is expected, so that its owner, its drafters and its weights find what they need. The engine's
    statistics do not change. Nothing is read where there is no prefix cache, among ranks, or where fewer tokens are unknown than the
    prefix cache keeps apart. Raises what `Engine.submit` raises.
    """
    if not engine.prefix.is_on or engine.ranks.size > 1:
        return
    names = tuple(n for n in spec.drafters if isinstance(engine.drafts.drafters.get(n), ModelDrafter))
    spec = replace(spec, drafters=names, predicted=())
    params = SamplingParams(max_tokens=1, adapters=adapters)
    with uncounted(engine, prompt, params, spec=spec, marks=(len(prompt),)) as request:
        is_worth_it = engine.prefix.num_unknown(request, engine.drafts) >= engine.prefix.near
        while is_worth_it and request.finish_reason is None:
            engine.step()
            yield
