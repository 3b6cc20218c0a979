"""Every quantized product of few rows in a round, the target's and its drafters', goes through `product` with a weight that is raced: on
the built-in models as rounds go, and on drafters of published shapes, whose weights are never made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from planting import catches

from mlxspec.platform import device

# isort: split
import adapted_zoo
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from published_shapes import CONFIGS

import mlxspec
from mlxspec.checkpoints.convert import Wish, convert
from mlxspec.checkpoints.quantize import Format
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.base import Ask
from mlxspec.drafters.dflash import DFlashDrafter
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.eagle3 import Eagle3
from mlxspec.drafters.gemma_assistant import GemmaAssistant
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.rehearsal import modules_of
from mlxspec.kernels import products
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.quantized_weight import QuantizedWeight
from mlxspec.models import tune
from mlxspec.models.dflash import DFlash
from mlxspec.models.dflash_config import DFlashConfig
from mlxspec.models.eagle3 import Eagle3Config, Eagle3Head
from mlxspec.models.gemma4_assistant import AssistantConfig, Gemma4Assistant
from mlxspec.models.registry import architecture
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler
from tests.models.metal_graph import as_on_metal

PROMPT = "<|im_start|>user\nwhat does len do?<|im_end|>\n<|im_start|>assistant\n"
SIZE = SamplingParams(max_tokens=12)
CONTEXT = 4096
Key = tuple[tuple[int, ...], int, int, str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The built-in models and one that runs by mlx-lm's code, in 4 bits. The demo's head is a matrix of its own, that of demo-gemma is its
    embedding."""
    root = tmp_path_factory.mktemp("packed")
    convert("demo", root / "demo", Wish(trunk=Format(bits=4), head_bits=4))
    convert("demo-gemma", root / "demo-gemma", Wish(trunk=Format(bits=4)))
    of_mlx_lm = adapted_zoo.write("qwen2", root / "floats", tie_word_embeddings=False)
    convert(str(of_mlx_lm), root / "qwen2", Wish(trunk=Format(bits=4, group_size=32)))
    return {name: str(root / name) for name in ("demo", "demo-gemma", "qwen2")}


def watched(monkeypatch: pytest.MonkeyPatch) -> dict[Key, bool]:
    """Quantized products of few rows from here on, and whether all of a weight's came through `product`."""
    multiply, through = mx.quantized_matmul, products.product_ops
    seen: dict[Key, bool] = {}
    inside: list[bool] = []

    def noted(x: mx.array, codes: mx.array, *rest: Any, **form: Any) -> mx.array:
        if x.ndim == 2 and x.shape[0] <= products.RACED_ROWS[-1]:
            key = codes.shape, form["group_size"], form["bits"], form.get("mode", "affine")
            seen[key] = seen.get(key, True) and bool(inside)
        return multiply(x, codes, *rest, **form)

    def passed(x: mx.array, weight: QuantizedWeight) -> mx.array:
        inside.append(True)
        try:
            return through(x, weight)
        finally:
            inside.pop()

    monkeypatch.setattr(mx, "quantized_matmul", noted)
    monkeypatch.setattr(products, "product_ops", passed)
    return seen


def check_raced(seen: dict[Key, bool], modules: Sequence[nn.Module]) -> None:
    assert len(seen) > 3
    assert all(seen.values())
    assert set(seen) <= {(w.codes.shape, w.group_size, w.bits, w.mode) for w in tune.raced_weights(*modules)}


def only_linear(right: Any) -> Any:
    def found(*modules: nn.Module) -> Any:
        return [w for w in right(*modules) if w.shape[0] < 1000]

    return found


@catches(
    "the language-model head is not raced",
    "mlxspec.models.tune:raced_weights",
    only_linear,
    case="demo-gemma-ngram-simple",
)
@pytest.mark.parametrize(
    ("model", "draft", "beside"),
    [
        pytest.param("demo", "mtp", None, id="demo-mtp"),
        pytest.param("demo", "draft-model", "demo", id="demo-draft-model"),
        pytest.param("demo", "eagle3", "demo-eagle3", id="demo-eagle3"),
        pytest.param("demo", "dflash", "demo-dflash", id="demo-dflash"),
        pytest.param("demo-gemma", "ngram-simple", None, id="demo-gemma-ngram-simple"),
        pytest.param("qwen2", "ngram-simple", None, id="qwen2-ngram-simple"),
    ],
)
def test_every_product_has_a_race_key(
    model: str, draft: str, beside: str | None, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watched(monkeypatch)
    monkeypatch.setattr(device, "has_gpu", lambda: True)  # as products go where the kernel can win
    spec = SpecConfig(drafters=(draft,), policy="fixed")
    with mlxspec.load(folders[model], draft_model=beside, spec=spec) as engine:
        answer = engine.generate(PROMPT, SIZE)
        modules = modules_of(engine)
    assert answer.stats.num_rounds > 1
    check_raced(seen, modules)


# ---- drafters that others published, by name of their target: shapes are those of their repositories, where a page tells them

ROPE = {"rope_theta": 1e7, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6}
EAGLE3 = {
    "Qwen3.5-27B": {"hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 40},
    "gemma-4-31B": {"hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32},
}
BLOCKS = {
    "Qwen3.5-4B": ("DFlash", 9216, 16, {}),
    "Qwen3.5-9B": ("DFlash", 12288, 16, {}),
    "Qwen3.5-27B": ("DFlash2", 17408, 8, {}),
    "Qwen3.5-35B-A3B": ("DSpark", 6144, 7, {"draft_vocab_size": 32000}),
    "Qwen3-8B": ("DSpark", 12288, 7, {}),
}
ASSISTANTS = {
    "gemma-4-E2B": (256, 2048, 4),
    "gemma-4-31B": (1024, 8192, 16),
}  # hidden size, that of the MLP, heads
PUBLISHED = [
    *(
        (name, "mtp")
        for name in ("Qwen3.5-0.8B", "Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-27B", "Qwen3.5-35B-A3B")
    ),
    *((name, "eagle3") for name in EAGLE3),
    *((name, "dflash") for name in BLOCKS),
    *((name, "assistant") for name in ASSISTANTS),
    ("Qwen3-0.6B", "draft-model"),
]


def packed(module: Any) -> Any:
    """In 4 bits, as conversions are; nothing is computed. Zeros stand for drawn numbers, whose graphs are long."""
    floats = {k: v for k, v in tree_flatten(module.parameters()) if mx.issubdtype(v.dtype, mx.floating)}
    module.update(tree_unflatten([(k, mx.zeros(v.shape, mx.bfloat16)) for k, v in floats.items()]))
    nn.quantize(module, group_size=64, bits=4)
    module.fuse()
    return module


def published(name: str, kind: str) -> tuple[Any, ModelDrafter]:
    """A target and a drafter of it."""
    config = CONFIGS[name][1]
    model = architecture(config)
    parsed = model.parse(config)
    target = model.build(parsed)
    if kind == "mtp":
        assert model.head is not None
        return packed(target), Mtp(packed(model.head(parsed, target)), CONTEXT)
    packed(target)
    if kind == "draft-model":
        return target, DraftModel(target, target.vocab_size)
    text = {**ROPE, "vocab_size": target.vocab_size, "head_dim": 128, "num_key_value_heads": 8}
    if kind == "eagle3":
        layer = {**text, **EAGLE3[name], "num_hidden_layers": 1}
        own = Eagle3Config.from_dict({"transformer_layer_config": layer, "draft_vocab_size": 32000})
        head = Eagle3Head(own, target, ["d2t"])
        head.d2t = mx.zeros(32000, mx.int32)
        return target, Eagle3(packed(head), CONTEXT)
    if kind == "dflash":
        return target, DFlashDrafter(packed(block_drafter(name, target, text)), CONTEXT)
    return target, GemmaAssistant(packed(assistant(name, target, config["text_config"])), CONTEXT)


def block_drafter(name: str, target: Any, text: dict[str, Any]) -> DFlash:
    """Five layers, the features of five of the target's."""
    kind, ffn, block, more = BLOCKS[name]
    inner = {
        "mask_token_id": 3,
        "target_layer_ids": list(range(1, target.num_layers - 2, target.num_layers // 5)),
    }
    tensors = [f"layers.{i}.self_attn.q_norm.weight" for i in range(5)]
    if kind == "DFlash2":
        inner |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
        tensors += ["candidate_selector.hidden_projection.weight"]
    if kind == "DSpark":
        inner |= {"markov_rank": 256}
        tensors += ["markov_head.markov_w1.weight", "confidence_head.proj.weight"]
    if more:
        tensors += ["d2t", "lm_head.weight"]
    sizes = {"hidden_size": target.hidden_size, "intermediate_size": ffn, "num_hidden_layers": 5}
    own = {**text, **sizes, "num_attention_heads": 32, "block_size": block, "dflash_config": inner, **more}
    return DFlash(DFlashConfig.from_dict(own, tensors), target)


def assistant(name: str, target: Any, text: dict[str, Any]) -> Gemma4Assistant:
    """Three layers with windows and one without."""
    hidden, ffn, heads = ASSISTANTS[name]
    of_clusters = hidden < 512
    own = {
        **text,
        "model_type": "gemma4_text",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "num_attention_heads": heads,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
    }
    outer = {
        "model_type": "gemma4_assistant",
        "text_config": own,
        "backbone_hidden_size": target.hidden_size,
        "use_ordered_embeddings": of_clusters,
    }
    made = Gemma4Assistant(AssistantConfig.from_dict(outer), target)
    if of_clusters:
        made.masked_embedding.token_ordering = mx.arange(target.vocab_size, dtype=mx.int32)
    return made


def past_its_key(right: Any) -> Any:
    return lambda part, x: part.as_linear(x) if isinstance(part, nn.QuantizedEmbedding) else right(part, x)


@catches(
    "an assistant's head is multiplied past its race",
    "mlxspec.models.gemma4_assistant:project",
    past_its_key,
    case="gemma-4-31B-assistant",
)
@pytest.mark.parametrize(("name", "kind"), PUBLISHED, ids=["-".join(p) for p in PUBLISHED])
def test_no_product_of_a_published_drafter_is_without_its_key(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = mx.get_active_memory()
    with as_on_metal(monkeypatch):
        target, drafter = published(name, kind)
        row, history = RowSampler(SamplingParams(), [1], target.vocab_size), list(range(1, 7))
        sampler = BatchSampler([row], target.vocab_size)
        hidden = mx.zeros((len(history), drafter.needs.width * target.hidden_size), mx.bfloat16)
        monkeypatch.setattr(mx, "eval", lambda *_: None)
        if isinstance(drafter, GemmaAssistant):
            cache = target.make_cache(1)
            target.forward(mx.array(history[:-1]), FlatRows((5,)), cache, certain=True, logits_at="none")
            cache.commit()
            drafter.attach(cache, [0])
        drafter.begin(0)
        drafter.hear(0, history, hidden if drafter.needs.wants_hidden else None)
        seen = watched(monkeypatch)
        (draft,) = drafter.draft([Ask(0, history, 3, row)], sampler)
        if kind == "draft-model":
            target.forward(mx.array(history), FlatRows((6,)), target.make_cache(1), certain=False)
    assert draft.length == 3
    check_raced(seen, [target, *(drafter.modules or ())])
    assert mx.get_active_memory() < before + (1 << 28)  # no weight was made
