"""Reads an expected prompt while an engine is idle, so that the request with this prompt finds its beginning in the prefix cache.

While an agent runs a tool, or a person reads an answer, most of the next prompt is known: the conversation, the answer as the chat template
writes it, and the beginning of the next message.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.engine.engine import Engine


def read_ahead(engine: Engine, prompt: Sequence[int], spec: SpecConfig) -> Generator[None]:
    """Read an expected prompt into the prefix cache, as a generator that yields after each step. Closing the generator ends the reading
    and keeps what has been read.

    spec: of the expected request; its owner and drafters determine which states are kept. The engine's statistics do not change. Nothing
    is read without a prefix cache, among ranks, and where too few tokens are missing from the cache to be worth it. Raises what
    `Engine.submit` raises.
    """
    if not engine.prefix.is_on or engine.ranks.size > 1:
        return
    stats = vars(engine.stats).copy()
    names = tuple(n for n in spec.drafters if isinstance(engine.drafts.drafters.get(n), ModelDrafter))
    spec = replace(spec, drafters=names, predicted=())
    request = engine.submit(prompt, SamplingParams(max_tokens=1), spec=spec, marks=(len(prompt),))
    try:
        is_worth_it = engine.prefix.num_unknown(request, engine.drafts) >= engine.prefix.near
        while is_worth_it and request.finish_reason is None:
            engine.step()
            yield
    finally:
        engine.cancel(request.number)
        while not engine.is_idle:
            engine.step()
        vars(engine.stats).update(stats)
