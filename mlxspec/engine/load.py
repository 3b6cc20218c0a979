"""`load`: makes an engine from a model's name. Connects folders, weights, tokenizer and drafters."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxspec.cache.quantized import check_kv_bits
from mlxspec.checkpoints.pairing import paired
from mlxspec.checkpoints.pull import check_fits
from mlxspec.config import ALWAYS_THERE, EngineConfig, SpecConfig
from mlxspec.drafter_kinds import KINDS
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.drafter_health import DrafterHealth
from mlxspec.engine.engine import Engine
from mlxspec.engine.head_check import TEXT, TRIAL_TOKENS, check_head
from mlxspec.engine.load_drafters import (
    DrafterBuilder,
    asked_drafters,
    drafters_that_draft,
    own_drafters,
    towers_of,
)
from mlxspec.engine.measure import kept_costs
from mlxspec.engine.memory import check_weights
from mlxspec.engine.ranks import Ranks, files_of, versions
from mlxspec.engine.rehearsal import known_widths, unraced_notice
from mlxspec.errors import ConfigError, ModelError
from mlxspec.kernels import launch, races
from mlxspec.loading import hub
from mlxspec.loading.pooling import Pooling, pooling_of
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.models import tune
from mlxspec.models.adapters import ADAPTER_FILES
from mlxspec.models.assemble import (
    HOW_TO_GET_A_HEAD,
    Assembled,
    assemble_by_mlx_lm,
    assemble_lazily,
)
from mlxspec.models.drafter_module import DrafterModule
from mlxspec.models.fill import check_finite, evaluate
from mlxspec.models.float16 import Float16Trial, prompt_beyond, reason, weight_beyond
from mlxspec.models.folder import ModelFolder
from mlxspec.models.gemma4_assistant import NO_ASSISTANT
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.models.runnable import Engine as ModelEngine
from mlxspec.models.runnable import judge
from mlxspec.models.sizes import bytes_of
from mlxspec.option import by_name, of_kind, shown
from mlxspec.platform import device
from mlxspec.policy.cost_file import CostFile, models_of
from mlxspec.policy.costs import CostModel

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@by_name
def load(
    model: str | os.PathLike[str] = hub.DEMO,
    *,
    revision: str | None = None,
    draft: str | Sequence[str] = "auto",
    draft_model: str | os.PathLike[str] | None = None,
    drafters: Sequence[Drafter] = (),
    spec: SpecConfig | None = None,
    config: EngineConfig | None = None,
    max_context: int | None = None,
    dtype: str | None = None,
    adapter: str | Mapping[str, str] | None = None,
    chat_template: str | os.PathLike[str] | None = None,
    images: bool = True,
    ranks: Ranks | None = None,
    engine: ModelEngine = "auto",
) -> Engine:
    """Load a model and its drafters, and return the engine.

    model: `demo`, `demo-gemma`, `demo-vision`, a folder, or a Hugging Face id; a path object is a folder. revision: a branch, tag or
    commit of an id. draft: "off", "auto" (everything that this model has: n-gram lookup, then an MTP head, else the draft model), or
    names in the order of preference. draft_model: folder or id of a small model of the same vocabulary, of a separate MTP head, of a
    Gemma 4 assistant (these two are the drafter `mtp`), of an EAGLE-3 drafter (`eagle3`), or of a block drafter (`dflash`). "auto" uses
    it in place of the model's own head; a list in `draft` that leaves it out raises ConfigError. The demo has a draft model of its own.
    `mlxspec pull` may have paired a drafter with the model, which "auto" uses in addition to the head. drafters: Drafter objects of your
    own (docs/adding-a-drafter.md); "auto" puts them first, a list in `draft` names them at the place where they are to draft. spec:
    limits of the drafts; `draft` replaces its `drafters`, unless `draft` is "auto" and spec names some. max_context: most tokens of a
    row, as in EngineConfig. dtype: "float32", "float16", "bfloat16" or None, which on a GPU keeps the stored dtype (float16 instead of
    bfloat16 where the GPU emulates bfloat16, see models/float16.py) and elsewhere is float32. adapter: a folder of LoRA layers in the
    format of mlx-lm's training or of PEFT; or a mapping of names to such folders, which stay separate from the weights:
    `SamplingParams.adapters` chooses among them for each request. chat_template: a file with a chat template that replaces the model's
    own. images: whether to load the vision tower of a model that has one. ranks: the processes among which the model is divided
    (engine/ranks.py); all of them load it together. engine: "mlx-lm" runs the model by mlx-lm's code; "auto" does so only for a model
    that mlxspec has no code for.

    Raises MlxspecError subclasses with one sentence; nothing stays half-loaded. The files' headers, the tokenizer, the template and the
    options are checked before any weight is read.
    """
    of_kind("spec", spec, SpecConfig)
    of_kind("config", config, EngineConfig)
    of_kind("chat_template", chat_template, str, os.PathLike)
    of_kind("images", images, bool)
    of_kind("ranks", ranks, Ranks)
    spec = spec or SpecConfig()
    config = _with_context(config or EngineConfig(), max_context)
    own = own_drafters(drafters)
    wanted = _Wanted(
        draft=draft,
        drafters=own,
        draft_model=draft_model,
        names=asked_drafters(draft, spec, own),
        spec=spec,
        config=config,
        dtype=_dtype(dtype),
        adapter=adapter,
        chat_template=chat_template,
        images=images and ranks is None,
        ranks=ranks,
        engine=engine,
    )
    folders = _find(model, revision, wanted)
    with device.private_kernels():
        races.prepare()
        if ranks is not None:
            launch.adopt(ranks.first(launch.speedups()))
        parts = _load_parts(wanted, folders)
    return _start(wanted, folders, parts)


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """The arguments of `load` except the model, checked and with defaults in place. drafters: the caller's own Drafter objects, by name.
    names: the drafters that the caller named; (): none, None: mlxspec chooses. dtype: None keeps the stored dtype on a GPU."""

    draft: str | Sequence[str]
    drafters: Mapping[str, Drafter]
    draft_model: str | os.PathLike[str] | None
    names: tuple[str, ...] | None
    spec: SpecConfig
    config: EngineConfig
    dtype: mx.Dtype | None
    adapter: str | Mapping[str, str] | None
    chat_template: str | os.PathLike[str] | None
    images: bool
    ranks: Ranks | None
    engine: ModelEngine

    def __post_init__(self) -> None:
        if self.engine not in ("auto", "mlx-lm"):
            raise ConfigError(f"engine must be auto or mlx-lm, not {shown(self.engine)}.")
        if isinstance(self.adapter, Mapping) and self.config.exact:
            raise ConfigError("Several adapters cannot be had with exact.")
        if self.ranks is not None and self.drafters:
            raise ConfigError("Drafters of your own cannot draft for a model that is divided among ranks.")


@dataclass(frozen=True, kw_only=True)
class _Folders:
    """The folders that are loaded. model: the target's; config: its config.json; by_mlx_lm: whether mlx-lm's code runs it. beside: the
    folder of the draft model or of the head, None where there is none; is_named: whether the caller named it, rather than a pairing
    with the model. files: the files that hold weights. notices: sentences on the pairing."""

    model: ModelFolder
    config: Mapping[str, Any]
    by_mlx_lm: bool
    beside: ModelFolder | None
    is_named: bool
    files: Sequence[Path]
    notices: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """The parts of an engine. names: the drafters that draft, including those without an object, such as `suffix`. modules: the modules
    with weights, the target first. notices: sentences for the user. dtype_reason: as in Engine."""

    target: Assembled
    tokenizer: Tokenizer
    drafters: Sequence[Drafter]
    names: tuple[str, ...]
    modules: Sequence[nn.Module]
    notices: Sequence[str]
    dtype_reason: str = ""


def _find(model: str | os.PathLike[str], revision: str | None, wanted: _Wanted) -> _Folders:
    """Return the folders of the model and of its draft model. revision: as in `load`. Files that are not on the disk are fetched. Raises
    the errors that `load` raises."""
    name, ranks, draft_model = hub.named(model), wanted.ranks, wanted.draft_model
    if draft_model is None and name in hub.DEMO_TARGETS:
        draft_model = hub.DEMO_DRAFT
    judged = partial(check_fits, engine=wanted.engine)
    folder = ModelFolder(hub.resolve(name, revision=revision, judge=judged), name)
    config, files = folder.config(), folder.files()
    by_mlx_lm = judge(config, wanted.engine, kind="model").by_mlx_lm
    beside: ModelFolder | None = None
    notices: list[str] = []
    if draft_model is not None and wanted.names != ():
        beside = ModelFolder(hub.resolve(hub.named(draft_model), judge=check_fits))
    elif wanted.names is None and (wanted.engine == "auto" or not by_mlx_lm):
        pair, notices = paired(folder.path)
        beside = None if pair is None else ModelFolder(pair)
        if beside is not None and ranks is not None and beside.kind() == "assistant":
            beside, notices = None, [NO_ASSISTANT]
    if ranks is not None:
        same = replace(wanted.config, memory_budget=None)
        options = wanted.draft, wanted.spec, same, wanted.dtype, wanted.engine
        facts = versions() | files_of([f.path for f in (folder, beside) if f is not None])
        ranks.agree(facts | {"set of options": options})
    return _Folders(
        model=folder,
        config=config,
        by_mlx_lm=by_mlx_lm,
        beside=beside,
        is_named=wanted.draft_model is not None,
        files=[*files, *(() if beside is None else beside.files())],
        notices=notices,
    )


def _load_parts(wanted: _Wanted, folders: _Folders) -> _Parts:
    """Return the parts of an engine with their weights. Where bfloat16 is emulated they are loaded in float16, if float16 holds all
    numbers and no dtype was requested."""
    # ranks may have GPUs of several generations, and must compute alike
    may_try = wanted.dtype is None and wanted.ranks is None and device.emulates_bfloat16()
    trial = Float16Trial(_read_files(folders, wanted.adapter)) if may_try else None
    parts = _assemble(wanted, folders, is_narrowed=trial is not None and not trial.found)
    parts = _read_weights(wanted, folders, parts)
    if trial is not None and trial.found is None:
        trial.keep(_beyond_float16(parts))
        if trial.found:
            del parts
            device.give_back()
            parts = _read_weights(wanted, folders, _assemble(wanted, folders, is_narrowed=False))
    beyond = None if trial is None else trial.found
    dtype, is_asked = parts.target.model.dtype, wanted.dtype is not None
    why = reason(dtype, is_asked=is_asked, is_tried=trial is not None, beyond=beyond)
    notices = [f"The model is computed in {why}"] if beyond else []
    return replace(parts, dtype_reason=why, notices=[*parts.notices, *notices])


def _read_files(folders: _Folders, adapter: str | Mapping[str, str] | None) -> list[Path]:
    """Return the weight files of target and drafter, and those files of the adapter that exist where `adapter` is one folder, which is
    folded into the weights. A mapping of several adapters adds no files: they stay separate from the weights."""
    lora = [Path(adapter).expanduser() / n for n in ADAPTER_FILES] if isinstance(adapter, str) else []
    return [*folders.files, *(path for path in lora if path.is_file())]


def _beyond_float16(parts: _Parts) -> str | None:
    """Return a description of a weight, or of an output for a trial prompt, that float16 cannot hold; None where it holds all."""
    head = next((d.model for d in parts.drafters if isinstance(d, Mtp)), None)
    drafting = (d.model for d in parts.drafters if isinstance(d, DraftModel))
    runs = [(parts.target.model, head), *((model, None) for model in drafting)]
    num_ids = min(model.vocab_size for model, _ in runs)
    tokens = [i for i in parts.tokenizer.encode(TEXT)[:TRIAL_TOKENS] if i < num_ids] or [0, 0]
    beyond = weight_beyond(parts.modules)
    for model, head in runs:
        beyond = beyond or prompt_beyond(model, tokens, head)
    return beyond


def _assemble(wanted: _Wanted, folders: _Folders, *, is_narrowed: bool) -> _Parts:
    """Return the model, its tokenizer and its drafters, without their weights. is_narrowed: whether bfloat16 is read as float16 (see
    ModelFolder); block drafters are not narrowed. Raises the errors that `load` raises."""
    folders.model.is_narrowed = is_narrowed
    if folders.beside is not None:
        folders.beside.is_narrowed = is_narrowed and folders.beside.kind() != "dflash"
    given, group = wanted.chat_template, None if wanted.ranks is None else wanted.ranks.group
    template = None if given is None else Path(given).expanduser()
    tokenizer = Tokenizer.from_folder(folders.model.path, chat_template=template)
    if folders.by_mlx_lm:
        target = assemble_by_mlx_lm(
            folders.model,
            wanted.dtype,
            adapter=wanted.adapter,
            group=group,
            max_context=wanted.config.max_context,
        )
    else:
        target = assemble_lazily(
            folders.config,
            folders.model.read,
            wanted.dtype,
            adapter=wanted.adapter,
            draft_bits=wanted.spec.draft_bits,
            images=folders.model.image_settings if wanted.images else None,
            group=group,
        )
    if target.made_by and wanted.config.exact:
        raise ConfigError(
            "Models that run by mlx-lm's code give no exact results: verifies may round otherwise than plain steps. Leave exact out."
        )
    check_kv_bits(target.model.make_cache(0).layers, wanted.config.kv_bits, "This model", "kv_bits")
    tokenizer.check_rows(target.model.vocab_size)
    if tokenizer.template is not None:
        tokenizer.template.prepare()
    own = wanted.drafters
    names = drafters_that_draft(wanted.names, target, folders.beside, tuple(own), is_named=folders.is_named)
    builder = DrafterBuilder(
        spec=wanted.spec,
        target=target,
        tokenizer=tokenizer,
        beside=folders.beside,
        dtype=wanted.dtype,
        modules=[target.model, *towers_of(target)],
        notices=[*target.notices, *folders.notices],
    )
    drafters = [
        own[name] if name in own else builder.drafter(name) for name in names if name not in ALWAYS_THERE
    ]
    return _Parts(
        target=target,
        tokenizer=tokenizer,
        drafters=drafters,
        names=names,
        modules=builder.modules,
        notices=builder.notices,
    )


def _read_weights(wanted: _Wanted, folders: _Folders, parts: _Parts) -> _Parts:
    """Read the weights of these parts, check them, and return the parts without a useless MTP head and with the notices on what was
    found. Raises the errors that `load` raises."""
    modules, target, ranks = parts.modules, parts.target, wanted.ranks
    own_bytes = sum(d.weight_bytes for d in wanted.drafters.values())
    check_weights(bytes_of(*modules) + own_bytes, wanted.config.memory_budget)
    evaluate(modules)
    tune.check_kernels(modules)
    notices = [*parts.notices, *_notices_of_mlx_lms_models(modules)]
    if not target.model.num_layers and any(drafter.needs.layers for drafter in parts.drafters):
        raise ModelError(
            "The drafter reads layers, which this model does not show: its rows do not share all of a forward."
        )
    for module in modules:
        if isinstance(module, DrafterModule) and not isinstance(module, Qwen35Mtp):  # whose values are tried
            check_finite(module, f"The {module.title}")
    files = _read_files(folders, wanted.adapter)
    drafters, useless = _without_useless_head(parts.drafters, parts.tokenizer, files, ranks)
    if ranks is not None:
        arrays = tree_flatten([m.parameters() for m in modules])
        ranks.agree({"form of the weights": [(name, str(array.dtype)) for name, array in arrays]})
    names = tuple(name for name in parts.names if not (useless and name == "mtp"))
    return replace(parts, drafters=drafters, names=names, notices=[*notices, *useless])


def _start(wanted: _Wanted, folders: _Folders, parts: _Parts) -> Engine:
    """Return an engine made of these parts, with the costs and bit-exact widths that earlier processes have measured for them."""
    target, ranks, adapter = parts.target, wanted.ranks, wanted.adapter
    loaded = Engine(
        target.model,
        parts.tokenizer,
        drafters=parts.drafters,
        spec=replace(wanted.spec, drafters=parts.names, policy=wanted.spec.policy or "auto"),
        config=wanted.config,
        name=folders.model.name,
        notices=[
            *parts.notices,
            *_unused(wanted.names, parts.names, target, wanted.spec, parts.drafters),
            *_without_chat(parts.tokenizer, wanted.chat_template),
        ],
        vision=target.vision,
        no_images=target.no_images
        if ranks is None
        else "A model that is divided among ranks reads no images.",
        ranks=ranks,
    )
    loaded.dtype_reason = parts.dtype_reason
    loaded.notices += unraced_notice(loaded)
    loaded.health = DrafterHealth(models_of(loaded.drafts.drafters))
    if (folders.model.path / "modules.json").is_file():
        loaded.pooling = pooling_of(folders.model.path)
    if isinstance(loaded.pooling, Pooling):
        loaded.memory.hold(loaded.pooling.nbytes)
    if isinstance(adapter, Mapping):
        gate = target.model.gate
        loaded.factory.adapters, loaded.refused_adapters = gate.names, gate.refused
        loaded.notices += tuple(f"{name} cannot be asked for. {why}" for name, why in gate.refused.items())
    device.claim(loaded.memory, loaded.memory.budget, loaded.memory.scratch)
    loaded.stats.probe = loaded.stats.probe or known_widths(loaded)
    if parts.names and loaded.spec.policy == "auto":
        loaded.follow(_costs(loaded, ranks))
    return loaded


def _notices_of_mlx_lms_models(modules: Sequence[Any]) -> list[str]:
    """Test the models that run by mlx-lm's code, and return notices on them: whether rows can share a forward, and whether rejected
    tokens can be rolled back. Models of mlxspec's own code are not tested."""
    adapted = [m for m in modules if not isinstance(m, nn.Module)]
    if not adapted:
        return []
    from mlxspec.models.adapted.check import check_model  # slow to import

    return [notice for notice in map(check_model, adapted) if notice is not None]


def _without_useless_head(
    drafters: Sequence[Drafter],
    tokenizer: Tokenizer,
    files: Sequence[Path],
    ranks: Ranks | None,
) -> tuple[list[Drafter], list[str]]:
    """Return the drafters without an MTP head that predicts no better than chance, and notices on the heads that were left out. A head
    that stays has its norms set to the convention that predicts best. files: the weight files; the verdict on a head is kept for
    them."""
    kept: list[Drafter] = []
    notices: list[str] = []
    for drafter in drafters:
        head = drafter.model if isinstance(drafter, Mtp) else None
        notice = None
        if isinstance(head, Qwen35Mtp):
            notice = check_head(
                head, tokenizer, files, (lambda value: value) if ranks is None else ranks.first
            )
        kept += [] if notice else [drafter]
        notices += [notice] if notice else []
    return kept, notices


def _costs(engine: Engine, ranks: Ranks | None) -> CostModel:
    """Return the costs of rounds and drafts that an earlier process has kept (among ranks: on rank 0), with guesses where there are
    none. Costs that are learned from now on are written to the same file."""
    drafters, file = engine.drafts.drafters, None
    if engine.ranks.leads:
        file = CostFile.of(engine.model, drafters, engine.config, engine.name, engine.ranks.size)
    data = None if file is None else file.data()
    costs = kept_costs(engine.model, drafters, data if ranks is None else ranks.first(data))
    if file is not None:
        file.follow(costs)
    return costs


def _with_context(config: EngineConfig, max_context: int | None) -> EngineConfig:
    """Return the config with this `max_context`; None leaves the config as it is. Raises ConfigError where config has another value."""
    if max_context is None:
        return config
    if config.max_context not in (None, max_context):
        raise ConfigError(f"max_context is {max_context}, and config says {config.max_context}; give one.")
    return replace(config, max_context=max_context)


def _dtype(name: str | None) -> mx.Dtype | None:
    if name is not None and name not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, not {name!r}.")
    return _DTYPES.get(name or "")


def _without_chat(tokenizer: Tokenizer, given: str | os.PathLike[str] | None) -> Iterator[str]:
    """Yield a notice where the model's chat template cannot be used. given: the user's own template file; raises ConfigError where that
    cannot be used."""
    fault = None if tokenizer.template is None else tokenizer.template.check()
    if fault and given is not None:
        raise ConfigError(f"{given} cannot be used. {fault}")
    if fault:
        yield f"There is no chat with this model. {fault}"


def _unused(
    asked: tuple[str, ...] | None,
    names: tuple[str, ...],
    target: Assembled,
    spec: SpecConfig,
    drafters: Sequence[Drafter],
) -> Iterator[str]:
    """Yield notices on heads and options that are not used. asked: drafters that the caller named; None: mlxspec has chosen. names: the
    drafters that draft."""
    beside = next((k.name for k in KINDS if k.folders and k.name != "mtp" and k.name in names), None)
    if asked is None and "mtp" not in names:
        if target.lacks_head:
            yield f"There is no drafting with this model's MTP head, which its folder lacks: {HOW_TO_GET_A_HEAD}."
        if beside is not None and target.mtp is not None:
            yield f"The draft model that was named drafts, this model's MTP head does not: --draft mtp,{beside} uses both."
    bits = spec.draft_kv_bits
    if bits != SpecConfig.draft_kv_bits and all(getattr(d, "kv_bits", None) != bits for d in drafters):
        yield f"--draft-kv-bits {bits} (draft_kv_bits) is not used: no drafter here keeps keys and values of its own."
