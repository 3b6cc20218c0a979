"""The exactness probe: finds layers whose numbers depend on the width of a forward, and `exact` then still gives plain text."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlxspec.cache.unread import UnreadCommit
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.engine.engine import Engine
from mlxspec.engine.probe import ProbeReport, WidthVerdict, probe
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import Output
from mlxspec.platform import device
from tests import tiny_models

DRAFTING = SpecConfig(drafters=("ngram-simple",), ngram_n=1, ngram_m=4)


class Planted:
    """The tiny target with a last layer whose output depends on how many tokens come in together, from `width` on."""

    attention_heads = ()

    def __init__(self, width: int, size: float = 0.5, form: str = "float32") -> None:
        self._inner, self._width, self._size = tiny_models.stack("attention", form=form), width, size
        self.dtype = self._inner.dtype
        self.vocab_size, self.hidden_size, self.max_context = (
            self._inner.vocab_size,
            self._inner.hidden_size,
            self._inner.max_context,
        )

    def make_cache(self, num_rows: int, *rest, **_):
        return self._inner.make_cache(num_rows, *rest)

    def forward(self, tokens, rows, cache, **options):
        out = self._inner.forward(tokens, rows, cache, **options)
        if self._width <= rows.num_tokens < 16 and out.logits is not None:
            wave = mx.sin(mx.arange(self.vocab_size) * 1.7) * (self._size * rows.num_tokens)
            return Output(logits=out.logits + wave, hidden=out.hidden)
        return out


class PlantedBeside(Planted):
    """As `Planted`, but only in forwards of two rows, or behind a commit that nobody has read."""

    def __init__(self, form: str, *, unread: bool) -> None:
        super().__init__(1, form=form)
        self._unread = unread

    def forward(self, tokens, rows, cache, **options):
        is_meant = cache.exact is not None if self._unread else rows.num_rows == 2
        return (super() if is_meant else self._inner).forward(tokens, rows, cache, **options)


def keeps_bits(form: str) -> bool:
    """Whether two tokens behind an unread round have the bits of plain steps on this machine. Attention multiplies with more keys there:
    OpenBLAS's kernels for AVX-512 give a float32 product other bits then."""
    model, text = tiny_models.stack("attention", form=form), mx.arange(1, 52)

    def logits(commits: dict[tuple[int, int], mx.array | None]) -> mx.array:
        cache, found = model.make_cache(1), []
        for (start, end), kept in commits.items():
            rows = FlatRows((end - start,))
            found.append(model.forward(text[start:end], rows, cache, certain=kept is None).logits)
            if cache.exact is not None:
                cache.abort()
            elif isinstance(kept, mx.array):
                UnreadCommit(cache, kept)
            else:
                cache.commit(kept)
        return mx.concatenate(found)[-2:]

    plain = logits({(0, 48): None, (48, 49): None, (49, 50): None, (50, 51): None})
    return mx.array_equal(plain, logits({(0, 48): None, (48, 50): mx.array([1]), (49, 51): None})).item()


def report(*bitwise: bool) -> ProbeReport:
    return ProbeReport(
        widths=tuple(
            WidthVerdict(width=i + 2, is_bitwise=yes, same_argmax=True, largest=0.0 if yes else 1e-6)
            for i, yes in enumerate(bitwise)
        ),
        context=48,
    )


@pytest.mark.parametrize(
    ("found", "width"),
    [((), 1), ((True,), 2), ((False, True), 1), ((True, True, False, True), 3), ((True, True), 3)],
    ids=str,
)
def test_the_exact_width_ends_before_the_first_that_differs(found: tuple[bool, ...], width: int) -> None:
    assert report(*found).exact_width == width
    assert report(*found).is_exact == all(found)


def test_the_sentence_says_what_was_found() -> None:
    assert (
        report(True, True).sentence()
        == "Verifying up to 3 tokens gives the same bits as plain steps: such rounds are bit-exact."
    )
    assert (
        report(True, False).sentence().startswith("Rounds of up to 2 tokens are bit-exact. Verifying up to 3")
    )
    assert "by at most 1.0e-06 and never changed the top token" in report(True, False).sentence()
    flipped = WidthVerdict(width=3, is_bitwise=False, same_argmax=False, largest=0.5)
    assert "the top token at width 3" in ProbeReport(widths=(flipped,), context=48).sentence()


@pytest.mark.parametrize("width", [2, 3])
def test_a_planted_width_dependent_layer_is_found(width: int) -> None:
    found = probe(Planted(width), range(2, 5))
    for verdict in found.widths:
        assert verdict.width < width or not verdict.is_bitwise
        assert verdict.width < width or verdict.largest > 0.1
    assert found.exact_width < width
    flipped = any(not verdict.same_argmax for verdict in found.widths)
    assert (
        "changed the top token at width" if flipped else "never changed the top token"
    ) in found.sentence()


@pytest.mark.parametrize("form", ["float32", "bfloat16"])
@pytest.mark.parametrize("unread", [False, True])
def test_rows_side_by_side_and_rounds_behind_unread_ones_are_probed(unread: bool, form: str) -> None:
    """In float32 only where the BLAS keeps a row's bits; without a GPU 16-bit products always do."""
    assert keeps_bits(form) or form == "float32" or device.has_gpu()
    assert probe(PlantedBeside(form, unread=unread), range(2, 4)).exact_width == 1
    assert (probe(tiny_models.stack("attention", form=form), range(2, 4)).exact_width > 1) == keeps_bits(form)


@pytest.mark.parametrize("width", [2, 3])
def test_exact_gives_plain_text_where_the_layer_would_change_it(width: int) -> None:
    model, tokenizer = Planted(width, 2.0), tiny_models.tokenizer()
    prompts = [[3, 4, 5] * 6, [9, 9, 8]]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    plain = [Engine(model, tokenizer).generate(p, params).tokens for p in prompts]

    def text(*, exact: bool) -> tuple[list[tuple[int, ...]], Engine]:
        config = EngineConfig(exact=exact, max_rows=4)
        engine = Engine(
            model, tokenizer, drafters=[ngram_lookup("ngram-simple", 1, 4)], spec=DRAFTING, config=config
        )
        return [r.tokens for r in engine.generate(prompts, params)], engine

    careless, _ = text(exact=False)
    exact, engine = text(exact=True)
    assert careless != plain
    assert exact == plain
    assert engine.stats.probe is not None
    assert engine.stats.probe.exact_width < width


def test_an_engine_probes_when_asked_only() -> None:
    spec = SpecConfig(drafters=("ngram-simple",), ngram_m=2)
    config = EngineConfig(max_rows=1)
    engine = Engine(
        tiny_models.target(), drafters=[ngram_lookup("ngram-simple", 3, 2)], spec=spec, config=config
    )
    assert engine.stats.probe is None
    found = engine.probe()
    assert engine.stats.probe is found
    assert [v.width for v in found.widths] == [2, 3]
    assert found.sentence()
    assert all(v.largest < 1e-3 for v in found.widths)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="MLX's own BLAS is a Linux matter")
@pytest.mark.parametrize("blas", ["wheel", None])
def test_mlxs_own_blas_is_exact_and_another_says_what_it_changes(blas: str | None) -> None:
    code = (
        "from tests import tiny_models\n"
        "from mlxspec.platform import device\n"
        "from mlxspec.engine.probe import ProbeReport, WidthVerdict, probe\n"
        "found = probe(tiny_models.target(), (2, 4, 8))\n"
        "print(device.report().blas_kind, found.is_exact, max(v.largest for v in found.widths))"
    )
    env = {k: v for k, v in os.environ.items() if k != "MLXSPEC_BLAS"} | (
        {"MLXSPEC_BLAS": blas} if blas else {}
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kind, is_exact, largest = done.stdout.split()
    if kind == "wheel":
        assert is_exact == "True"
    assert (float(largest) == 0.0) == (is_exact == "True")
    assert float(largest) < 1e-3


def test_an_answer_says_whether_each_of_its_rounds_was_exact() -> None:
    """Which nobody knows before a probe, and of no answer with an adapter."""
    spec = SpecConfig(drafters=("ngram-simple",), policy="fixed", ngram_n=1, ngram_m=8)
    engine = Engine(
        tiny_models.wide("bfloat16").target, drafters=[ngram_lookup("ngram-simple", 1, 8)], spec=spec
    )
    prompt, params = [3, 4, 5] * 6, SamplingParams(max_tokens=30, ignore_eos=True)
    assert engine.generate(prompt, params).stats.is_bit_exact is None
    for known in (9, 8, 1):
        engine.stats.probe = report(*[True] * (known - 1), False)
        stats = engine.generate(prompt, params).stats
        assert stats.widest == 9
        assert stats.is_bit_exact == (known == 9) == stats.data()["is_bit_exact"]
    beside = [r.stats for r in engine.generate([prompt, prompt[1:]], params, spec=SpecConfig())]
    assert [(s.widest, s.is_bit_exact) for s in beside] == [(2, False), (2, False)]
    engine.factory.adapters = ("a",)
    assert engine.generate(prompt, replace(params, adapters={"a": 1.0})).stats.is_bit_exact is None
    engine.keep_kv_in(8)
    assert engine.exact_width is None


@pytest.mark.parametrize("form", ["bfloat16", "float16", "4bit", "8bit", "mxfp4", "nvfp4"])
def test_models_in_16_bits_and_quantized_ones_are_exact_to_17_tokens_without_a_gpu(form: str) -> None:
    if device.has_gpu():
        pytest.skip("a GPU's kernels are chosen by width")
    assert probe(tiny_models.target(form), (*range(2, 10), 12, 17)).is_exact
