"""A model of the 0.8B's shape with random weights, and a head that is right as often as recorded answers say: drafting costs what it costs,
and acceptance is that of a trained head. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import write_checkpoint
from simulation.traces import read_traces

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.base import Ask, Draft, Unread
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine
from mlxspec.models.qwen3_5 import Qwen35
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.sampling.sampler import BatchSampler

from .base import ROOT, Sizes

SHAPE = "qwen3.5-0.8b"
_TRACES = ROOT / "tests" / "policy" / "traces.npz"
PLAIN = SpecConfig(policy="fixed")


class Recorded(Mtp):
    """The head with its tokens replaced. text: what plain decoding says behind the prompt of `num_prompt` tokens. accepted: at each of its
    places, how many tokens of a draft are right."""

    def __init__(self, head: Qwen35Mtp, max_context: int, vocab_size: int) -> None:
        super().__init__(head, max_context)
        self._vocab_size = vocab_size
        self.text: Sequence[int] = ()
        self.num_prompt = 0
        self.accepted: Sequence[int] = (0,)

    def draft(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        drafts = super().draft(asks, sampler)
        return [self._replaced(ask, draft) for ask, draft in zip(asks, drafts, strict=True)]

    def draft_behind(self, asks: Sequence[Ask], sampler: BatchSampler, unread: Unread) -> None:
        """Rounds wait: the record goes by the place, which is unknown before."""

    def _replaced(self, ask: Ask, draft: Draft) -> Draft:
        place = len(ask.history) - self.num_prompt
        true = list(self.text[place : place + draft.length])
        right = self.accepted[place % len(self.accepted)]
        said = [t if i < right else (t + 1) % self._vocab_size for i, t in enumerate(true)]
        said += [0] * (draft.length - len(said))
        own = mx.array(draft.tokens).astype(mx.int32)  # computed all the same
        return draft._replace(tokens=mx.array(said, mx.int32) + 0 * own)


class RecordedModel:
    """engine: with the recorded head. prompt: the same for all answers."""

    def __init__(self, sizes: Sizes, dtype: mx.Dtype) -> None:
        config = write_checkpoint.cut(write_checkpoint.SIZES[SHAPE], sizes.num_layers, sizes.vocab_size)
        if sizes.hidden_size is not None:
            narrow = {"hidden_size": sizes.hidden_size, "intermediate_size": 2 * sizes.hidden_size}
            config["text_config"] = config["text_config"] | narrow
        parsed = Qwen35Config.from_dict(config["text_config"])
        mx.random.seed(0)
        model = _drawn(Qwen35(parsed), dtype)
        self.drafter = Recorded(_drawn(Qwen35Mtp(parsed, model), dtype), model.max_context, model.vocab_size)
        self.engine = Engine(model, drafters=[self.drafter], spec=PLAIN)
        self.prompt = [5 + i % 400 for i in range(sizes.prompt)]

    def accepts_as(self, recorded: Sequence[int], params: SamplingParams) -> None:
        """Drafts are right so often, of the answer that plain decoding gives now."""
        self.drafter.accepted = recorded
        plain = self.engine.generate(self.prompt, params, spec=PLAIN)
        self.drafter.text, self.drafter.num_prompt = plain.tokens, len(self.prompt)


def records() -> Mapping[str, list[int]]:
    """By workload, how many tokens of the demo's MTP head were right at each place."""
    return {
        name: [int(n) for answer in work.answers if "mtp" in answer for n in answer["mtp"].stood]
        for name, work in read_traces(_TRACES, of="demo").items()
    }


def _drawn(module: Any, dtype: mx.Dtype) -> Any:
    """With random floats of this dtype, and projections joined."""
    module.set_dtype(dtype)
    mx.eval(module.parameters())
    module.fuse()
    mx.eval(module.parameters())
    return module
