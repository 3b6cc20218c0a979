"""Keys and values in 8 and 4 bits: bounds of what a last bit changes, what is kept on disk, switching, refusals and memory.

That drafted text is plain text with them is shown by random requests (tests/cache/test_random_kv_bits.py).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.cache.quantized import QuantizedLayerCache
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.dflash import DFlashDrafter
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.eagle3 import Eagle3
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine, Result
from mlxspec.engine.prefix.signature import of_drafter, of_target
from mlxspec.errors import ConfigError, EngineBusyError
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import Model
from tests import rounding, tiny_models
from tests.engine import equality
from tests.engine.equality import NEAR_TIE, PLAIN, asked, prompts, same, spec

FORMS = ("float32", "bfloat16")
BITS = (8, 4)
NUM_ROWS = 5


def drafters(form: str, draft_kv_bits: int) -> list:
    """One of each kind."""
    made = tiny_models.wide(form)
    context = made.target.max_context
    return [
        ngram_lookup("ngram-simple", 3, 12),
        Mtp(made.mtp, context, kv_bits=draft_kv_bits),
        Eagle3(made.eagle3, context, kv_bits=draft_kv_bits),
        DraftModel(made.echo, made.target.vocab_size, kv_bits=draft_kv_bits),
        DFlashDrafter(made.dflash, context, kv_bits=draft_kv_bits),
    ]


def engine(form: str, kv_bits: int, draft_kv_bits: int = 8, *, alone: bool = False, **config) -> Engine:
    """alone: with no drafter."""
    given = [] if alone else drafters(form, draft_kv_bits)
    return equality.engine(given, model=tiny_models.wide(form).target, kv_bits=kv_bits, **config)


@cache
def plainly(form: str, kv_bits: int) -> Engine:
    return engine(form, kv_bits, alone=True, prefix_budget=0)


@cache
def batch(form: str, kv_bits: int, number: int) -> tuple[list, list, list[Result]]:
    """Prompts, parameters, and what plain decoding says to each alone."""
    some, params = prompts(NUM_ROWS, number), asked(number * NUM_ROWS, NUM_ROWS)
    plain = plainly(form, kv_bits)
    return some, params, [plain.generate(p, s, spec=PLAIN) for p, s in zip(some, params, strict=True)]


def test_fewer_bits_are_another_text() -> None:
    """So the tests above compare with what they say they do: 4 bits change what a model sees."""
    texts = {bits: [r.tokens for r in batch("float32", bits, 1)[2]] for bits in (16, 8, 4)}
    assert texts[16] != texts[4] != texts[8]


@pytest.mark.parametrize("bits", BITS)
def test_a_last_bit_moves_logits_by_no_more_than_a_code_does(bits: int) -> None:
    """A verify of eight tokens beside single steps over the same text. Few bits multiply last bits, so the bound must know them."""
    model, rng, start, width = tiny_models.wide().target, np.random.default_rng(0), 20, 8

    def logits(text: list[int], width: int) -> np.ndarray:
        cache_, found = model.make_cache(1, kv_bits=bits), []
        model.forward(mx.array(text[:start], mx.int32), FlatRows((start,)), cache_, certain=True)
        cache_.commit()
        for at in range(start, len(text), width):
            part = mx.array(text[at : at + width], mx.int32)
            out = model.forward(part, FlatRows((width,)), cache_, certain=width == 1)
            cache_.commit(None if width == 1 else [width])
            found.append(np.asarray(out.logits))
        return np.concatenate(found)

    for _ in range(3):
        text = rng.integers(0, tiny_models.EOS, start + 15 * width).tolist()
        one, several = logits(text, 1), logits(text, width)
        for place, (right, found) in enumerate(zip(one, several, strict=True)):
            limit = NEAR_TIE + rounding.of_code(bits, start + place + 1) * np.abs(right).max()
            assert np.abs(found - right).max() < limit


# ---- behind the prefix cache


def turns(seed: int) -> tuple[list[int], list[list[int]]]:
    """A beginning, and prompts that share it."""
    rng = np.random.default_rng(seed)
    begin = rng.integers(0, tiny_models.EOS, 90).tolist()
    return begin, [[*begin, *rng.integers(0, tiny_models.EOS, n).tolist()] for n in (7, 40, 1)]


def test_edges_hold_the_quantized_bytes() -> None:
    """The bytes of a token in the store are those of the cache, so quantized ones."""
    sizes = {}
    for bits in (16, 8, 4):
        made = engine("float32", bits, alone=True)
        made.generate(turns(1)[0], SamplingParams(max_tokens=1), spec=PLAIN)
        (node, *_) = sorted(made.prefix.tree.states, key=lambda n: n.length)
        (piece,) = node.pieces.values()
        sizes[bits] = piece.kv_bytes / node.length
    heads, dim = 2, 64
    assert sizes == {16: 2 * heads * dim * 4, 8: 2 * heads * (dim + 8), 4: 2 * heads * (dim // 2 + 8)}


@pytest.mark.parametrize("form", FORMS)
def test_text_behind_what_is_on_disk(form: str, tmp_path: Path) -> None:
    """Another engine with the same kv_bits goes on from the files; one with other bits finds nothing there."""
    begin, asks = turns(3)
    params = SamplingParams(max_tokens=12, ignore_eos=True)

    def made(bits: int) -> Engine:
        return engine(form, bits, prefix_disk=1 << 28, prefix_dir=tmp_path)

    first = made(8)
    first.generate(begin, params, spec=spec("mtp"))
    first.prefix.flush(30)
    first.close()
    model = tiny_models.wide(form).target
    for bits, num_cached in ((8, 90), (4, 0), (16, 0)):
        other = made(bits)
        got = other.generate(asks[0], params, spec=spec("mtp"))
        assert got.stats.num_cached >= num_cached if num_cached else got.stats.num_cached == 0
        wanted = plainly(form, bits).generate(asks[0], params, spec=PLAIN)
        same(wanted, got, asks[0], params, f"{form}, {bits}, disk", model, is_alone=False, kv_bits=bits)
        other.close()


def test_signatures_tell_kv_types_apart() -> None:
    model = tiny_models.wide().target
    targets = {bits: of_target(model, EngineConfig(kv_bits=bits)) for bits in (16, 8, 4)}
    assert len(set(targets.values())) == 3
    made = {bits: drafters("float32", bits)[1] for bits in (16, 8, 4)}
    assert len({of_drafter(targets[16], d) for d in made.values()}) == 3


# ---- switching, refusals, memory


def test_an_idle_engine_changes_its_bits_and_forgets_what_it_kept() -> None:
    made, params = engine("float32", 16, alone=True), SamplingParams(max_tokens=10, ignore_eos=True)
    prompt = turns(4)[1][0]
    for bits in (16, 4, 8, 16):
        made.keep_kv_in(bits)
        got = made.generate(prompt, params, spec=PLAIN)
        assert got.stats.num_cached == 0
        assert got.tokens == plainly("float32", bits).generate(prompt, params, spec=PLAIN).tokens
        assert made.memory.config.kv_bits == bits
    made.submit(prompt, params)
    with pytest.raises(EngineBusyError, match="kv_bits cannot become 8"):
        made.keep_kv_in(8)
    assert made.config.kv_bits == 16


def test_what_cannot_be_quantized_is_refused_in_one_sentence() -> None:
    with pytest.raises(
        ConfigError, match="heads of 32 numbers, which groups of 64 do not divide, so kv_bits 8"
    ):
        Engine(tiny_models.target(), config=EngineConfig(kv_bits=8))
    with pytest.raises(
        ConfigError, match="no layer that attends to the whole context, so kv_bits 4 would quantize nothing"
    ):
        Engine(tiny_models.stack("recurrent"), config=EngineConfig(kv_bits=4))
    with pytest.raises(
        ConfigError, match=r"The drafter mtp has attention heads of 32 numbers.*draft_kv_bits 8"
    ):
        Mtp(tiny_models.mtp_head(), 100, kv_bits=8)
    for wrong in (2, 5, 32, True, "8"):
        with pytest.raises(ConfigError, match=r"^kv_bits must be"):
            EngineConfig(kv_bits=wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"^draft_kv_bits must be"):
            SpecConfig(draft_kv_bits=wrong)  # type: ignore[arg-type]


def test_rows_take_what_was_estimated() -> None:
    """By drafter and target: the estimate is a bound, and falls with the bits."""
    prompt, params = turns(6)[1][1], SamplingParams(max_tokens=300, ignore_eos=True)
    estimates = []
    for bits in (16, 8, 4):
        made = engine("float32", bits, bits, prefix_budget=0)
        request = made.submit(prompt, params, spec=spec("mtp", "draft-model"))
        most = made.memory.needed(request)
        taken = 0
        while made.step():
            taken = max(taken, made.nbytes)
        assert 0 < taken <= most
        estimates.append(most)
    assert estimates[0] > estimates[1] > estimates[2]


def quantized_layers(model: Model, bits: int) -> int:
    return sum(isinstance(x, QuantizedLayerCache) for x in model.make_cache(1, kv_bits=bits).layers)


def test_recurrent_layers_and_windows_stay_as_they_are() -> None:
    assert quantized_layers(tiny_models.wide().target, 8) == 1
    assert [type(x).__name__ for x in tiny_models.wide().dflash.make_cache(1, kv_bits=8).layers] == [
        "QuantizedLayerCache",
        "WindowedLayerCache",
    ]
