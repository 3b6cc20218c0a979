"""The engine on its kernels: what launchers hand over meets the kernels in whole rounds, and the text is the twins'.

Without a GPU every launch is run by the emulator, which checks each access; all that is not a kernel of ours runs on the CPU. The engine
takes the paths that it takes on Metal, or on CUDA.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import emulator
import mlx.core as mx
import numpy as np
import pytest
from cuda_stand_in import as_cuda

from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine, Result
from mlxspec.engine.load import load
from mlxspec.kernels import launch, products, quantized_weight
from mlxspec.models import tune
from mlxspec.models.qwen3_5 import Qwen35
from mlxspec.platform import device
from tests import tiny_models
from tests.engine.equality import PLAIN, Oracle, spec, top_gap
from tests.models import tiny

Metal = Callable[..., AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request: its prompt's length, what it wants, the step before which it comes, and the one before which it is cancelled."""

    length: int
    num_tokens: int
    spec: SpecConfig
    joins: int = 0
    leaves: int | None = None
    sampled: dict[str, Any] | None = None

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.num_tokens, ignore_eos=True, seed=self.length, **(self.sampled or {})
        )

    @property
    def prompt(self) -> list[int]:
        return np.random.default_rng(self.length).integers(0, tiny_models.EOS, self.length).tolist()


MTP, ORACLE, BOTH = spec("mtp", n_max=2), spec("ngram-simple", n_max=3), spec("ngram-simple", "mtp", n_max=3)
# A prompt of a few tokens and one of several pieces; rows that come while others run, end at their own time, or are cancelled.
FEW = (
    Asked(length=5, num_tokens=12, spec=ORACLE),
    Asked(length=21, num_tokens=8, spec=MTP, joins=2),
    Asked(length=3, num_tokens=10, spec=PLAIN, joins=3, leaves=6),
    Asked(length=4, num_tokens=16, spec=PLAIN, joins=4),
)
MANY = (
    Asked(length=40, num_tokens=14, spec=BOTH),
    Asked(length=1, num_tokens=12, spec=MTP, sampled={"temperature": 0.8}),
    Asked(length=17, num_tokens=40, spec=MTP, joins=2, leaves=7),
    Asked(length=70, num_tokens=10, spec=ORACLE, joins=3, sampled={"repetition_penalty": 1.15}),
    Asked(length=2, num_tokens=12, spec=PLAIN, joins=5),
    Asked(length=33, num_tokens=10, spec=BOTH, joins=9, sampled={"temperature": 1.0}),
    Asked(length=9, num_tokens=9, spec=MTP, joins=11),
)


@functools.cache
def model(form: str) -> tuple[Qwen35, Mtp]:
    """Quantized forms are wide enough for `qmv_rows`, whose rows are a multiple of 512; of their MLPs one half is not."""
    c = tiny_models.config()
    if tiny_models.FORMS[form].bits:
        c = replace(tiny_models.config(hidden=512), intermediate_size=64)
    target = tiny_models.make(c, form=form)
    return target, Mtp(tiny_models.make_mtp(c, target, form=form), target.max_context)


launches: list[tuple[str, dict[str, Any]]] = []  # names of kernels and template arguments, newest last


@pytest.fixture
def like_gpu(metal: Metal, monkeypatch: pytest.MonkeyPatch) -> Iterator[Metal]:
    """The engine takes the paths of this machine's GPU, or of Metal where the emulator stands in. Nothing is compiled: a kernel that is
    emulated is evaluated at once."""
    was_enabled = device.compile_enabled()
    if not device.has_gpu():
        monkeypatch.setattr(device, "backend", lambda: "metal")
    monkeypatch.setattr(device, "compile_enabled", lambda: False)
    real = launch.MetalKernel.__call__

    def call(self: launch.MetalKernel, inputs: Sequence[mx.array], **how: Any) -> list[mx.array]:
        launches.append((self.name, dict(how["template"])))
        return real(self, inputs, **how)

    monkeypatch.setattr(launch.MetalKernel, "__call__", call)
    launch.forget()
    mx.disable_compile()
    yield metal
    if was_enabled:
        mx.enable_compile()
    launch.forget()


@pytest.fixture
def on_gpu(like_gpu: Metal, monkeypatch: pytest.MonkeyPatch) -> Metal:
    """Kernels that compete with MLX's own operations have won every race, and give the bits of MLX's own on a GPU. Where both run,
    `qmm_few` is the faster one."""
    monkeypatch.setattr(launch, "wins", lambda name, width: True)
    monkeypatch.setattr(launch, "speedup", lambda name, width: 2.0 if name.startswith("qmm_few") else 1.5)
    monkeypatch.setattr(launch, "may_mix", lambda name: launch.in_use(name))
    return like_gpu


def kernels_of(form: str) -> set[str]:
    """Names of the kernels that a hybrid model in this form runs, as they are checked."""
    bits, mode = tiny_models.FORMS[form].bits, tiny_models.FORMS[form].mode
    ends = "" if mode == "affine" else "_fp"
    projections = {f"qmv_rows{ends}", f"qmm_few{ends}"} if bits else set()
    return {"conv_qkv", "gdn_round", "gdn_prefill"} | projections


def played(
    form: str, script: Sequence[Asked], texts: Sequence[list[int]] = (), **config: Any
) -> list[Result]:
    """What the requests of `script` get. texts: what the oracle knows, three quarters of the time; without it nobody drafts."""
    target, mtp = model(form)
    drafters = [Oracle(texts, sure=0.75), mtp] if texts else []
    engine = Engine(
        target, tiny_models.tokenizer(), drafters=drafters, config=EngineConfig(prefill_chunk=24, **config)
    )
    requests: dict[int, Any] = {}
    step = 0
    while len(requests) < len(script) or not engine.is_idle:
        for i, asked in enumerate(script):
            if asked.joins == step:
                how = asked.spec if texts else PLAIN
                requests[i] = engine.submit(asked.prompt, asked.params, spec=how)
            if asked.leaves == step:
                engine.cancel(requests[i].number)
        engine.step()
        step += 1
    assert engine.nbytes == 0
    return [Result.of(request) for _, request in sorted(requests.items())]


@contextmanager
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The twins do all the work."""
    with monkeypatch.context() as patch:
        patch.setenv(launch.VARIABLE, "off")
        launch.forget()
        yield
    launch.forget()


def by_twins(
    monkeypatch: pytest.MonkeyPatch, form: str, script: Sequence[Asked], **config: Any
) -> list[Result]:
    """The same without kernels, without drafts and one by one: plain decoding, whoever else is there."""
    alone = [replace(asked, joins=0, leaves=None) for asked in script]
    with without_kernels(monkeypatch):
        return [played(form, [asked], **config)[0] for asked in alone]


def check_text(form: str, asked: Asked, wanted: list[int], got: list[int], kv_bits: int) -> None:
    """Equal ids; or, at the first difference, a token that is as good as the twins' own but for rounding: operations that are a kernel of
    their own round to 16 bits in between."""
    place = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=True)) if a != b), None)
    if place is not None:
        gap, limit = top_gap(
            model(form)[0], asked.prompt, wanted[:place], asked.params, got[place], kv_bits=kv_bits
        )
        print(
            f"{form}, {asked.length} tokens: another token at {place}, behind the best by {gap:.2g} (limit {limit:.2g})"
        )
        assert gap < limit, (wanted, got)


def check(
    on_gpu: Metal,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    script: Sequence[Asked],
    settings: Mapping[str, Any] | None = None,
    **config: Any,
) -> Counter[tuple[str, tuple[tuple[str, Any], ...]]]:
    """Texts are the twins', drafts were accepted and rejected; returns how often each kernel ran, by its template arguments."""
    wanted = by_twins(monkeypatch, form, script, **config)
    texts = [asked.prompt + list(plain.tokens) for asked, plain in zip(script, wanted, strict=True)]
    with on_gpu(**(settings or {})):
        for name in kernels_of(form):
            assert launch.in_use(name), name
        launches.clear()  # of self-checks
        got = played(form, script, texts, **config)
    ran = Counter((name, tuple(template.items())) for name, template in launches)
    for asked, plain, found in zip(script, wanted, got, strict=True):
        if asked.leaves is not None:
            assert found.finish_reason == "cancelled"
            plain = replace(found, tokens=plain.tokens[: len(found.tokens)])
        assert found.error is None, found.error
        assert not found.stats.notices
        with without_kernels(monkeypatch):
            check_text(form, asked, list(plain.tokens), list(found.tokens), config.get("kv_bits", 16))
    drafted, accepted = (sum(getattr(r.stats, name) for r in got) for name in ("num_drafted", "num_accepted"))
    assert 0 < accepted < drafted
    return ran


@pytest.mark.parametrize(
    ("form", "bits"), [("float32", 8), *(pytest.param("bfloat16", b, marks=pytest.mark.slow) for b in (8, 4))]
)
def test_rounds_over_quantized_keys_and_values(on_gpu, monkeypatch, form, bits):
    """Rows that come and go, drafts that stand and fall, and rounds behind unread ones, by the kernel that reads packed keys and values."""
    made = tiny_models.wide(form)
    mtp = Mtp(made.mtp, made.target.max_context, kv_bits=bits)
    monkeypatch.setitem(globals(), "model", lambda _: (made.target, mtp))
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    expected = {*kernels_of(form), "kv_attend"}
    monkeypatch.setitem(globals(), "kernels_of", lambda _: expected)
    ran = check(on_gpu, monkeypatch, form, FEW, {"order": "random"}, kv_bits=bits)
    assert {launched for launched, _ in ran} == {*expected, "kv_join"}
    assert modes(ran, "kv_attend", "BITS") == {(bits,)}


def modes(ran: Mapping[tuple[str, tuple[tuple[str, Any], ...]], int], kernel: str, *names: str) -> set[Any]:
    """Values of some template arguments that a kernel was launched with."""
    return {tuple(dict(template)[n] for n in names) for name, template in ran if name == kernel}


# The fast tier runs one form of each kind; what a launch is told differs by form in dtypes and in qmv_rows only.
FORMS = [
    pytest.param("bfloat16", FEW),
    pytest.param("nvfp4", FEW, marks=pytest.mark.slow),
    *(pytest.param(form, MANY, marks=pytest.mark.slow) for form in ("bfloat16", "float16", "float32")),
    *(
        pytest.param(form, MANY, marks=pytest.mark.slow)
        for form in ("4bit", "8bit", "mxfp4", "nvfp4", "mxfp8")
    ),
]


@pytest.mark.parametrize(("form", "script"), FORMS)
def test_the_engine_says_what_the_twins_say(on_gpu, monkeypatch, form, script):
    ran = check(on_gpu, monkeypatch, form, script, {"order": "random"})
    names = {launched for launched, _ in ran}
    assert names == {name.removesuffix("_fp") for name in kernels_of(form)}
    # certain and tokens that may be rejected, with and without tokens of the last forward to replay
    every = {(replay, certain) for replay in (0, 1) for certain in (0, 1)}
    for kernel, certain in (("conv_qkv", "FACTS"), ("gdn_round", "ADVANCES")):
        found = modes(ran, kernel, "REPLAY", certain)
        assert found == every if script is MANY else found <= every
    if "qmv_rows" in names:
        assert modes(ran, "qmv_rows", "AFFINE") == {(int("qmv_rows" in kernels_of(form)),)}
        assert len(modes(ran, "qmv_rows", "M")) >= 3
        assert max(modes(ran, "qmv_rows", "M")) <= (4,)
        assert modes(ran, "qmm_few", "AFFINE") == modes(ran, "qmv_rows", "AFFINE")


@pytest.mark.parametrize(
    "form", ["bfloat16", *(pytest.param(form, marks=pytest.mark.slow) for form in ("4bit", "mxfp4"))]
)
def test_the_engine_says_it_on_cuda(emulated, on_gpu, monkeypatch, form):
    """Every launch goes through MLX's `cuda_kernel`, in whose place the stand-in checks it."""
    with as_cuda(monkeypatch, computes=True) as stand_in:
        ran = check(emulator.settings, monkeypatch, form, FEW)
    assert {name for name, _ in ran} == {name.removesuffix("_fp") for name in kernels_of(form)}
    assert {name for name, _ in ran} <= {told.name for told in stand_in.told}


# ---- from a folder on


def written(folder: Path, mode: str) -> Path:
    """A quantized model as mlx-lm writes it, wide enough for `qmv_rows`, with a tokenizer."""
    shape = tiny.Shape(name="wide", hidden=512, num_layers=2, interval=2, num_v_heads=2)
    group, bits = quantized_weight.MICROSCALING.get(mode, (64, 4))
    tiny.convert(
        tiny.write_hub(folder / "raw", shape),
        folder,
        tiny.Quantization(bits=bits, group_size=group, mode=mode),
    )
    tiny_models.tokenizer()._inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[-1].content }}"}')
    return folder


def launched_by(engine: Engine) -> Counter[str]:
    """How often kernels ran for an answer with drafts, a projection's by their format."""
    launches.clear()
    engine.generate([1, 2, 3, 4, 1, 2, 3, 4, 1, 2], SamplingParams(max_tokens=4, ignore_eos=True))
    formats = ("qmv_rows_fp", "qmv_rows")
    return Counter(formats[template["AFFINE"]] if name == "qmv_rows" else name for name, template in launches)


@pytest.mark.parametrize(
    ("mode", "matches"),
    [
        pytest.param("affine", True, marks=pytest.mark.slow),
        ("mxfp4", True),
        pytest.param("mxfp4", False, marks=pytest.mark.slow),
    ],
)
def test_loading_takes_the_kernel_where_it_won_its_race(like_gpu, monkeypatch, tmp_path, mode, matches):
    """Without a race MLX's own operation is used. A race won on this device, on record, and a self-check passed at
    loading make the model's projections run through the kernel. `matches`: what the self-check finds of MLX's bits; it compares with MLX's
    CPU operation here, which adds up in another order. Without them a won race changes nothing, and a notice says so."""
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        launch, "race", lambda name, key, *_, **__: launch.set_speedup(name, key, 1.5) or 1.5
    )  # times of an emulator say nothing
    folder, name = written(tmp_path / "model", mode), "qmv_rows" if mode == "affine" else "qmv_rows_fp"
    monkeypatch.setattr(quantized_weight, "has_bits_of_single_rows", lambda *_: matches)
    monkeypatch.setattr(products, "has_bits_of_single_rows", lambda *_: matches)
    loads = functools.partial(
        load, str(folder), draft=["ngram-simple"], spec=SpecConfig(policy="fixed", n_max=3)
    )
    with like_gpu():
        engine = loads()
        (report,) = (r for r in engine.kernels if r.name == name)
        assert not report.failed
        assert not report.speedups
        assert name not in launched_by(engine)
        raced = tune.tune(engine.model)[name]
        assert any(mode in key or "group 64" in key for key in raced)
        launch.forget()
        engine = loads()
        (report,) = (r for r in engine.kernels if r.name == name)
        assert (report.in_use, report.failed) == (True, False)
        assert report.reason.startswith("agrees")
        assert report.speedups == raced
        assert (report.notice is None) == matches
        ran = launched_by(engine)
    if not matches:
        assert "is used with --exact only" in report.notice
        assert name not in ran
        return
    assert ran[name] >= 2 * ran["gdn_round"]  # what goes into the mixer, and what goes into the MLP
    assert not {"qmv_rows", "qmv_rows_fp"} - {name} & set(ran)


# ---- faults of launchers


def _later(places: mx.array) -> mx.array:
    return mx.minimum(places + 1, places[-1:])


# kernel, what is wrong, and what is done to a launch: its inputs by name, template and grid
LAUNCH_FAULTS: list[tuple[str, str, Callable[[dict[str, Any]], Any]]] = [
    (
        "conv_qkv",
        "rows begin a token late",
        lambda c: c["inputs"].update(starts=_later(c["inputs"]["starts"])),
    ),
    ("conv_qkv", "nothing kept", lambda c: c["inputs"].update(kept=mx.zeros_like(c["inputs"]["kept"]))),
    ("conv_qkv", "no replay", lambda c: c["template"].update(REPLAY=0)),
    ("conv_qkv", "a layer's own heads exchanged", lambda c: c["template"].update(Hk=4, Hv=2)),
    (
        "conv_qkv",
        "the last row left out",
        lambda c: c.update(grid=(*c["grid"][:2], max(1, c["grid"][2] - 1))),
    ),
    ("gdn_round", "nothing kept", lambda c: c["inputs"].update(kept=mx.zeros_like(c["inputs"]["kept"]))),
    ("gdn_round", "no replay", lambda c: c["template"].update(REPLAY=0)),
    ("gdn_round", "keys for queries", lambda c: c["inputs"].update(q=c["inputs"]["k"])),
    (
        "gdn_prefill",
        "rows begin a token late",
        lambda c: c["inputs"].update(starts=_later(c["inputs"]["starts"])),
    ),
    ("qmv_rows", "scales taken for an affine format's", lambda c: c["template"].update(AFFINE=1)),
    ("qmv_rows", "another group size", lambda c: c["template"].update(GROUP=32)),
    ("qmv_rows", "rows in float32", lambda c: c["inputs"].update(x=c["inputs"]["x"].astype(mx.float32))),
    ("qmv_rows", "a row too few", lambda c: c["template"].update(M=max(1, c["template"]["M"] - 1))),
    ("qmv_rows", "outputs too few", lambda c: c.update(grid=(32, c["grid"][1] - 1, 1))),
    ("qmm_few", "another group size", lambda c: c["template"].update(GROUP=32)),
    ("qmm_few", "outputs too few", lambda c: c.update(grid=(32, c["grid"][1] - 8, 1))),
    (
        "qmm_few",
        "fewer simdgroups",
        lambda c: c.update(grid=(32, c["grid"][1] // 2, 1), threadgroup=(32, 4, 1)),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "change"), [(k, c) for k, _, c in LAUNCH_FAULTS], ids=[f"{k}-{w}" for k, w, _ in LAUNCH_FAULTS]
)
def test_a_fault_of_a_launcher_is_caught(emulated, on_gpu, monkeypatch, kernel, change):
    """By whole rounds alone: self-checks count as passed."""
    real = launch.MetalKernel.__call__

    def call(self: launch.MetalKernel, inputs: Sequence[mx.array], **how: Any) -> list[mx.array]:
        if self.name != kernel:
            return real(self, inputs, **how)
        told = {
            **how,
            "inputs": dict(zip(self._inputs, inputs, strict=True)),
            "template": dict(how["template"]),
        }
        change(told)
        return real(self, list(told.pop("inputs").values()), **told)

    monkeypatch.setattr(launch.MetalKernel, "__call__", call)
    monkeypatch.setattr(launch, "in_use", lambda name: os.environ.get(launch.VARIABLE) != "off")
    form = "nvfp4" if kernel in ("qmv_rows", "qmm_few") else "bfloat16"
    with pytest.raises((AssertionError, emulator.EmulationError)) as caught:
        check(on_gpu, monkeypatch, form, MANY if kernel == "gdn_round" else FEW)
    print(f"{kernel}: {str(caught.value).splitlines()[0]}")
