"""What the engine feeds to the MTP head over a whole answer. Every draft equals the one that an independent head makes from the whole text:
behind prompts read in pieces, accepted and rejected drafts, other drafters' tokens and prefix hits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import mtp_reference
import numpy as np
import pytest
import tiny
from compare import array, load_ours, tokens_of
from mtp_reference import Reference
from zoo import Zoo

import mlxspec.demo
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.base import Ask, Draft, Unread
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine
from mlxspec.sampling.sampler import BatchSampler

AT_MOST = 2e-4  # of a probability
NEAR_TIE = 1e-3  # logits closer than this: either token may come first, and what follows it is not compared
NUM = 3
DEMO = Path(mlxspec.demo.__file__).parent / "target"


class Watched(Mtp):
    """made: by row, (tokens known then, drafted tokens, their probabilities). num_behind: rounds drafted behind unread ones."""

    def __init__(self, head, max_context: int) -> None:
        super().__init__(head, max_context)
        self.made: dict[int, list[tuple[int, list[int], list[float]]]] = {}
        self.num_behind = 0

    def draft(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        lengths, drafts = [len(a.history) for a in asks], super().draft(asks, sampler)
        self._keep(asks, lengths, drafts)
        return drafts

    def draft_behind(self, asks: Sequence[Ask], sampler: BatchSampler, unread: Unread) -> list[Draft] | None:
        drafts = super().draft_behind(asks, sampler, unread)
        if drafts is not None:
            self.num_behind += 1
            lengths = [
                len(a.history) + int(n) for a, n in zip(asks, unread.num_committed.tolist(), strict=True)
            ]
            self._keep(asks, lengths, drafts)
        return drafts

    def _keep(self, asks: Sequence[Ask], lengths: list[int], drafts: Sequence[Draft]) -> None:
        for ask, length, draft in zip(asks, lengths, drafts, strict=True):
            tokens, sure = np.array(draft.tokens).tolist(), np.array(draft.confidences).tolist()
            self.made.setdefault(ask.row, []).append((length, tokens, sure))


def engine_over(folder: Path) -> tuple[Engine, Watched]:
    found = load_ours(folder)
    assert found.mtp is not None
    head = Watched(found.mtp, found.model.max_context)
    config = EngineConfig(prefill_chunk=16)
    return Engine(found.model, drafters=[ngram_lookup("ngram-simple", 2, 4), head], config=config), head


def finish(engine: Engine) -> None:
    while not engine.is_idle:
        engine.step()


def check(head: Watched, row: int, text: list[int], reference: Reference, *, at_most: int) -> int:
    """How many of the row's drafted tokens were compared, of `at_most` drafts spread over the answer."""
    made = [m for m in head.made.get(row, []) if m[0] <= len(text)]
    compared = 0
    for length, tokens, sure in made[:: max(1, len(made) // at_most)]:
        for (token, probability, margin), ours, p in zip(
            reference.draft(text[:length], len(tokens)), tokens, sure, strict=True
        ):
            assert p == pytest.approx(probability, abs=AT_MOST), f"behind {length} tokens"
            if margin < NEAR_TIE:
                break
            assert ours == token, f"behind {length} tokens"
            compared += 1
    return compared


def run(folder: Path, prompts: list[list[int]], reference: Reference, *, at_most: int) -> Watched:
    """All prompts at once, then the first one goes on behind its answer, which the prefix cache has kept."""
    engine, head = engine_over(folder)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for drafters in (("mtp",), ("ngram-simple", "mtp")):
        spec = SpecConfig(drafters=drafters, policy="fixed", n_max=NUM, ngram_m=4)
        requests = [engine.submit(p, params, spec=spec) for p in prompts]
        finish(engine)
        again = engine.submit([*requests[0].history, 5, 6], params, spec=spec)
        finish(engine)
        assert again.stats.num_cached >= 32
        compared = []
        for request in (*requests, again):
            assert request.stats.notices == []
            compared.append(check(head, request.number, list(request.history), reference, at_most=at_most))
        assert min(compared) > at_most or len(drafters) > 1  # lookup may win every round of a row
        assert sum(compared) > at_most
    return head


@pytest.mark.slow
def test_one_row(zoo: Zoo) -> None:
    """Of a random head next to nothing stands: every round cuts what it drafted. Of one row the engine drafts behind unread rounds."""
    reference = mtp_reference.of_mlx_lm(zoo.folder("tied", "text"), zoo.folder("tied", "hub"))
    head = run(zoo.folder("tied", "text"), [tokens_of(3, 37, tiny.VOCAB)], reference, at_most=4)
    assert head.num_behind > 0


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tied", "untied", "moe"])
def test_ragged_rows(zoo: Zoo, shape: str) -> None:
    folder = zoo.folder(shape, "text")
    reference = mtp_reference.of_mlx_lm(folder, zoo.folder(shape, "hub"))
    words = tokens_of(5, 3, tiny.VOCAB)
    run(folder, [tokens_of(3, 37, tiny.VOCAB), [7], words * 4], reference, at_most=6)


def test_the_demos_head() -> None:
    """Of which most stands, so that several tokens are caught up on at once."""
    head = run(DEMO, [list(range(300, 340))], mtp_reference.of_mlx_lm(DEMO), at_most=4)
    assert head.num_behind > 0


@pytest.mark.torch
@pytest.mark.parametrize("shape", ["tied", "untied", "moe"])
def test_against_modules_of_transformers(zoo: Zoo, shape: str) -> None:
    pytest.importorskip("torch", reason="needs PyTorch")
    import torch
    import transformers_side

    folder, s = zoo.folder(shape, "text"), tiny.SHAPES[shape]
    theirs, arrays = transformers_side.load(folder, s), mtp_reference.raw_arrays(folder)
    raw = {k.removeprefix("mtp."): v for k, v in arrays.items() if k.startswith("mtp.")}
    table = arrays["model.embed_tokens.weight"]

    @torch.no_grad()
    def hiddens(tokens: list[int]) -> np.ndarray:
        return theirs.model(torch.tensor([tokens])).last_hidden_state[0].numpy()

    reference = Reference(
        hiddens=hiddens,
        head=transformers_side.mtp_head(s, raw, lambda _, tokens: table[tokens]),
        lm_head=arrays.get("lm_head.weight", table),
    )
    run(folder, [tokens_of(3, 37, tiny.VOCAB), [7, 8]], reference, at_most=6)


@pytest.mark.parametrize("shape", ["tied", "untied"])
def test_against_the_prefill_of_mlx_vlm(zoo: Zoo, shape: str) -> None:
    """Its own pairing of a prompt's tokens and hiddens, and the draft behind it."""
    drafter = pytest.importorskip("mlx_vlm.speculative.drafters.qwen3_5_mtp", reason="needs mlx-vlm")
    folder = zoo.folder(shape, "text")
    reference = mtp_reference.of_mlx_lm(folder, zoo.folder(shape, "hub"))
    model = drafter.Model(
        drafter.ModelConfig.from_dict({"text_config": tiny.text_config(tiny.SHAPES[shape])})
    )
    arrays = mtp_reference.raw_arrays(folder)
    raw = {k: mx.array(v) for k, v in arrays.items() if k.startswith("mtp.")}
    model.load_weights(list(model.sanitize(raw).items()), strict=True)

    class Holder:
        def __init__(self) -> None:
            self.embed_tokens = mx.array(arrays["model.embed_tokens.weight"]).__getitem__
            lm_head = mx.array(reference.lm_head)
            self.lm_head = lambda x: x @ lm_head.T

    prompt = tokens_of(3, 37, tiny.VOCAB)
    engine, head = engine_over(folder)
    spec = SpecConfig(drafters=("mtp",), policy="fixed", n_max=NUM)
    request = engine.submit(prompt, SamplingParams(max_tokens=8, ignore_eos=True), spec=spec)
    finish(engine)
    first = request.history[len(prompt)]
    model.reset(Holder())
    hidden = mx.array(reference.hiddens(prompt))[None]
    model.prefill_from_target_hidden(array(prompt)[None], hidden, first, None, greedy=True)
    theirs = model.draft_block(first, hidden[:, -1:], None, NUM + 1, None, greedy=True)
    length, tokens, _ = head.made[request.number][0]
    assert length == len(prompt) + 1
    assert tokens == np.array(theirs[0]).tolist()
