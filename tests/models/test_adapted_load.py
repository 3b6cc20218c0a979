"""Checkpoints that run by mlx-lm's code: loaded, refused, inspected, compared with our own code of the same architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from adapted_zoo import BY_ROWS, adapted, module_of, theirs, write
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_adapters, load_model, quantize_model, save_model
from mlx_lm_families import FAMILIES
from mlx_lm_families import write as write_family
from planting import catches

import mlxspec
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine
from mlxspec.errors import ConfigError, ModelError
from mlxspec.models.adapted.check import check_model
from mlxspec.models.adapted.classes import classes_of
from mlxspec.models.adapted.loading import load_module
from mlxspec.models.assemble import assemble_folder
from mlxspec.models.fill import evaluate
from mlxspec.models.folder import ModelFolder
from mlxspec.models.sizes import bytes_of
from tests.drafters import eagle3_checkpoints

GREEDY = SamplingParams(max_tokens=40, temperature=0.0)
TEXT = "def add(a, b):\n    return a + b\n\ndef add(a, b):\n"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted")
    for name in ("smollm3", "lfm2", "gpt_oss"):
        write(name, folder / name)
    return folder


@pytest.mark.parametrize("name", ["smollm3", "lfm2", "gpt_oss"])
def test_a_folder_without_code_of_ours_runs_by_mlx_lms(name: str, folders: Path) -> None:
    engine = mlxspec.load(str(folders / name))
    prompt = engine.tokenizer.encode(TEXT)
    module, _ = load_model(folders / name)
    wanted = theirs(module, prompt, GREEDY.max_tokens)
    drafted = engine.generate(prompt, GREEDY)
    assert list(drafted.tokens) == wanted
    assert list(engine.generate(prompt, GREEDY, spec=SpecConfig(drafters=())).tokens) == wanted
    assert any("mlx-lm" in notice and "runs this model" in notice for notice in engine.notices)
    engine.close()


def test_a_draft_model_of_mlx_lms_code_drafts(folders: Path) -> None:
    """For a target of mlx-lm's and for one of ours; itself as draft model is always right."""
    for target, small in (("lfm2", "lfm2"), ("smollm3", "lfm2")):
        engine = mlxspec.load(
            str(folders / target),
            draft="draft-model",
            draft_model=str(folders / small),
            spec=SpecConfig(policy="fixed"),
        )
        prompt = engine.tokenizer.encode(TEXT)
        found = engine.generate(prompt, GREEDY)
        assert list(found.tokens) == theirs(load_model(folders / target)[0], prompt, GREEDY.max_tokens)
        assert found.stats.num_drafted
        if target == small:
            assert found.stats.drafters["draft-model"].num_accepted == found.stats.num_drafted
        engine.close()


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_both_codes_give_the_same_text(family: str, tmp_path: Path) -> None:
    name = next(f for f in FAMILIES if f.startswith(family))
    folder = ModelFolder(write_family(tmp_path / "folder", name))
    prompt = [5, 9, 200, 7, 9, 200, 7, 9, 11, 5, 9]
    made = [assemble_folder(folder), assemble_folder(folder, engine="mlx-lm")]
    assert not made[0].made_by
    assert made[1].made_by.startswith("mlx-lm")
    evaluate([m.model for m in made])
    texts = [Engine(m.model, None).generate(prompt, GREEDY).tokens for m in made]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"model_file": "own.py"}, "never run"),
        ({"model_type": "no_such_model"}, "not supported"),
        ({"model_type": "cache"}, "not supported"),
        ({"model_type": "../own"}, "not supported"),
        ({"model_type": "smollm3.own"}, "not supported"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"num_hidden_layers": 5}, "cannot load this model"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(
    more: dict[str, Any], what: str, folders: Path, tmp_path: Path
) -> None:
    """And nothing of the folder is run."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in (folders / "smollm3").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for name in ("own.py", "no_such_model.py"):
        (folder / name).write_text("raise SystemExit('run')")
    config = json.loads((folder / "config.json").read_text()) | more
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=what) as found:
        mlxspec.load(str(folder))
    assert str(found.value).count("\n") == 0
    assert str(found.value).endswith(".")


@pytest.mark.parametrize(
    ("options", "error", "what"),
    [
        ({"config": EngineConfig(kv_bits=8)}, ConfigError, "leave kv_bits at 16"),
        ({"adapter": {"one": "nowhere"}}, ModelError, "takes one adapter"),
        ({"config": EngineConfig(exact=True)}, ConfigError, "no exact results"),
        ({"draft": "mtp"}, ModelError, "leaves such heads out"),
        ({"engine": "other"}, ConfigError, "auto or mlx-lm"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    options: dict[str, Any], error: type[Exception], what: str, folders: Path
) -> None:
    with pytest.raises(error, match=what):
        mlxspec.load(str(folders / "lfm2"), **options)


class Lying(KVCache):
    """Says that it has trimmed, and has not."""

    def trim(self, num: int) -> int:
        return num


def with_caches(module: nn.Module, kind: type[KVCache], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(module), "make_cache", lambda self: [kind() for _ in self.layers], raising=False)


@catches("a lie is believed", "mlxspec.models.adapted.check:_near", lambda _: lambda *given: True)
def test_a_cache_that_lies_about_trimming_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of("starcoder2")
    with_caches(module, Lying, monkeypatch)
    with pytest.raises(ModelError, match="do not go back to accepted tokens"):
        check_model(adapted(module))


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "lfm2", "mamba2", "glm4_moe"])
def test_honest_caches_pass_the_check(name: str) -> None:
    notice = check_model(adapted(module_of(name)))
    assert (notice is None) == (name not in BY_ROWS)


def test_a_quantized_model_takes_the_bytes_that_mlx_lms_takes(folders: Path, tmp_path: Path) -> None:
    module, config = load_model(folders / "smollm3")
    module, config = quantize_model(module, config, group_size=32, bits=4)
    module.set_dtype(mx.bfloat16)
    out = tmp_path / "packed"
    save_model(out, module)
    (out / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((folders / "smollm3" / name).read_bytes())
    loaded = mlxspec.load(str(out), draft="off")
    mine = bytes_of(loaded.model)
    own = sum(v.nbytes for _, v in tree_flatten(load_model(out)[0].parameters()))
    assert mine <= 1.05 * own
    assert loaded.generate([5, 9, 200], GREEDY).error is None
    loaded.close()


def test_an_adapter_of_mlx_lms_training_changes_the_text_as_there(folders: Path, tmp_path: Path) -> None:
    source, adapter = folders / "smollm3", tmp_path / "adapter"
    adapter.mkdir()
    told = {
        "fine_tune_type": "lora",
        "num_layers": 4,
        "lora_parameters": {"rank": 4, "scale": 4.0, "dropout": 0.0},
    }
    (adapter / "adapter_config.json").write_text(json.dumps(told))
    module, _ = load_model(source)
    linear_to_lora_layers(module, told["num_layers"], told["lora_parameters"])
    mx.random.seed(1)
    named = tree_flatten(module.parameters())
    weights = {name: 0.1 * mx.random.normal(value.shape) for name, value in named if ".lora_" in name}
    mx.save_safetensors(str(adapter / "adapters.safetensors"), weights)
    loaded = mlxspec.load(str(source), adapter=str(adapter))
    prompt = loaded.tokenizer.encode(TEXT)
    right = theirs(load_adapters(load_model(source)[0], str(adapter)), prompt, GREEDY.max_tokens)
    assert list(loaded.generate(prompt, GREEDY).tokens) == right
    assert right != theirs(load_model(source)[0], prompt, GREEDY.max_tokens)
    loaded.close()
    with pytest.raises(ModelError, match="no folder"):
        mlxspec.load(str(source), adapter=str(tmp_path / "nowhere"))


def write_peft(folder: Path, module: nn.Module, seed: int) -> dict[str, mx.array]:
    """A random adapter of PEFT for all projections of attention; returns what it adds, by module."""
    folder.mkdir()
    told = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(told))
    mx.random.seed(seed)
    tensors, added = {}, {}
    for path, part in module.named_modules():
        if path.endswith(tuple(told["target_modules"])):
            out, size = part.weight.shape
            a, b = 0.5 * mx.random.normal((4, size)), 0.5 * mx.random.normal((out, 4))
            tensors[f"base_model.model.{path}.lora_A.weight"] = a
            tensors[f"base_model.model.{path}.lora_B.weight"] = b
            added[path] = 8 / 4 * b @ a
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
    return added


def merged(folder: Path, added: dict[str, mx.array]) -> nn.Module:
    """mlx-lm's module with an adapter added to its weights, which are unpacked where they are quantized."""
    module = load_model(folder)[0]
    for path, part in module.named_modules():
        if path in added:
            weight = part.weight
            if "scales" in part:
                weight = mx.dequantize(weight, part.scales, part.biases, part.group_size, part.bits)
            whole = nn.Linear(*weight.shape[::-1], bias="bias" in part)
            whole.update({"weight": weight + added[path]} | ({"bias": part.bias} if "bias" in part else {}))
            module.update_modules(tree_unflatten([(path, whole)]))
    return module


def quantized(source: Path, out: Path) -> Path:
    """A folder of 8 bits in groups of 32."""
    module, config = load_model(source)
    module, config = quantize_model(module, config, group_size=32, bits=8)
    save_model(out, module)
    (out / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((source / name).read_bytes())
    return out


@catches(
    "an adapted layer loses its bias",
    "mlxspec.models.layers:AdaptedLinear.__init__",
    lambda right: (
        lambda self, base, *more, **named: (right(self, base, *more, **named), self.pop("bias", None))[0]
    ),
    case="packed",
)
@pytest.mark.parametrize("is_packed", [False, True], ids=["floats", "packed"])
def test_adapters_of_peft_for_all_rows_and_for_each(is_packed: bool, tmp_path: Path) -> None:
    """A model with biases: one adapter, and two of which each row has its own, give what weights with the change added give."""
    source = write("qwen2", tmp_path / "qwen2")
    source = quantized(source, tmp_path / "packed") if is_packed else source
    names = {name: write_peft(tmp_path / name, module_of("qwen2", 2048), i) for i, name in enumerate("ab")}
    prompt = [5, 9, 200, 7, 9, 200, 7, 9, 11, 5, 9]
    right = {name: theirs(merged(source, added), prompt, 24) for name, added in names.items()}
    right[""] = theirs(load_model(source)[0], prompt, 24)
    assert len({tuple(text) for text in right.values()}) == 3
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    one = mlxspec.load(str(source), adapter=str(tmp_path / "a"), draft="off")
    assert list(one.generate(prompt, params).tokens) == right["a"]
    one.close()
    paths = {name: str(tmp_path / name) for name in names}
    beside = mlxspec.load(str(source), adapter=paths, spec=SpecConfig(policy="fixed"))
    each = [
        SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, adapters=a)
        for a in ({"a": 1.0}, {"b": 1.0}, {})
    ]
    assert [list(r.tokens) for r in beside.generate([prompt] * 3, each)] == list(right.values())
    beside.close()


def test_a_drafter_that_reads_layers_drafts_for_it(folders: Path, tmp_path: Path) -> None:
    """An EAGLE-3 drafter with random weights, which is given what it reads; the text is mlx-lm's all the same."""
    drafter = tmp_path / "eagle3"
    eagle3_checkpoints.write(drafter, eagle3_checkpoints.KINDS["target's embedding"], 2048, 32, (1, 2, 3))
    engine = mlxspec.load(str(folders / "gpt_oss"), draft_model=str(drafter), spec=SpecConfig(policy="fixed"))
    prompt = engine.tokenizer.encode(TEXT)
    found = engine.generate(prompt, GREEDY)
    assert list(found.tokens) == theirs(load_model(folders / "gpt_oss")[0], prompt, GREEDY.max_tokens)
    assert found.stats.drafters["eagle3"].num_drafted > 0
    engine.close()
    with pytest.raises(ModelError, match="does not show"):
        mlxspec.load(str(folders / "lfm2"), draft_model=str(drafter))


def test_a_draft_model_proposes_over_the_most_frequent_tokens(folders: Path) -> None:
    """Rows of a head of mlx-lm's code, as of ours; the text stays."""
    small, spec = str(folders / "lfm2"), SpecConfig(policy="fixed", draft_vocab=512)
    engine = mlxspec.load(str(folders / "smollm3"), draft="draft-model", draft_model=small, spec=spec)
    assert any("proposes over 512 of 2048 tokens" in notice for notice in engine.notices)
    prompt = engine.tokenizer.encode(TEXT)
    found = engine.generate(prompt, GREEDY)
    assert list(found.tokens) == theirs(load_model(folders / "smollm3")[0], prompt, GREEDY.max_tokens)
    assert found.stats.num_drafted
    engine.close()


PHI3SMALL = {
    "model_type": "phi3small",
    "hidden_size": 32,
    "dense_attention_every_n_layers": 2,
    "ff_intermediate_size": 64,
    "gegelu_limit": 1.0,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": 384,
    "mup_attn_multiplier": 1.0,
    "mup_use_scaling": True,
    "mup_embedding_multiplier": 1.0,
    "mup_width_multiplier": 1.0,
    "rope_embedding_base": 10000,
    "rope_position_scale": 1.0,
    "blocksparse_block_size": 64,
    "blocksparse_num_local_blocks": 2,
    "blocksparse_vert_stride": 2,
}


@pytest.mark.parametrize(
    ("vocab", "said"), [(384, "names token 100351"), (100351, "has 100351"), (100352, "")]
)
def test_tokens_that_mlx_lms_code_names_are_of_the_vocabulary(tmp_path: Path, vocab: int, said: str) -> None:
    """MLX checks no index: with a smaller vocabulary the process would end."""
    config = PHI3SMALL | {"vocab_size": vocab}
    model, arguments = classes_of(config)
    module = model(arguments.from_dict(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(module.parameters())))
    (tmp_path / "config.json").write_text(json.dumps(config))
    if said:
        with pytest.raises(ModelError, match=said):
            load_module(ModelFolder(tmp_path))
    else:
        load_module(ModelFolder(tmp_path))


@pytest.mark.parametrize(
    ("rope", "older"),
    [
        ({"rope_theta": 500.0}, {"rope_theta": 500.0}),
        ({"rope_type": "default", "rope_theta": 70.0}, {"rope_theta": 70.0}),
        (
            {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
            {"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        ),
    ],
    ids=["theta", "default", "linear"],
)
def test_rotary_positions_in_the_words_of_transformers_5(
    tmp_path: Path, rope: dict[str, Any], older: dict[str, Any]
) -> None:
    """mlx-lm's class of Llama knows no rope_parameters and would take its default."""
    tokens, logits = mx.array([[1, 5, 9, 2, 7, 7, 3, 4] * 4]), []
    for number, said in enumerate(({"rope_parameters": rope}, older, {})):
        folder = write("llama", tmp_path / str(number))
        config = json.loads((folder / "config.json").read_text())
        for name in ("rope_theta", "rope_scaling"):
            config.pop(name, None)
        (folder / "config.json").write_text(json.dumps(config | said))
        module, read, _ = load_module(ModelFolder(folder))
        logits.append(module(tokens))
        assert read["model_type"] == "llama"
    assert mx.array_equal(logits[0], logits[1])
    assert not mx.allclose(logits[0], logits[2], atol=1e-3)


PLAMO2 = {
    "model_type": "plamo2",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size_per_head": 16,
    "attention_window_size": 16,
    "mamba_d_state": 16,
    "mamba_num_heads": 4,
    "mamba_step": 2,
    "intermediate_size": 64,
    "vocab_size": 320,
}


def test_a_name_is_a_mark_only_where_no_module_has_it(tmp_path: Path) -> None:
    """PLaMo 2 calls the weight of a norm q_weight, as EXL2 calls integers."""
    model, arguments = classes_of(PLAMO2)
    weights = dict(tree_flatten(model(arguments.from_dict(PLAMO2)).parameters()))
    assert any(name.endswith(".q_weight") for name in weights)
    (tmp_path / "config.json").write_text(json.dumps(PLAMO2))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    load_module(ModelFolder(tmp_path))
    folder = write("llama", tmp_path / "llama")
    marked = dict(mx.load(str(folder / "model.safetensors"))) | {"model.layers.0.q_weight": mx.zeros((1,))}
    mx.save_safetensors(str(folder / "model.safetensors"), marked)
    with pytest.raises(ModelError, match="EXL2"):
        load_module(ModelFolder(folder))


def test_code_that_would_end_the_process_is_one_sentence(tmp_path: Path) -> None:
    """mlx-lm's file for OLMo 1 exits while it is imported, where a package is missing."""
    config = {"model_type": "olmo", "d_model": 64, "n_layers": 2, "vocab_size": 320, "n_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"model.transformer.wte.weight": mx.zeros((2,))})
    with pytest.raises(ModelError, match="its code ended with status 1"):
        load_module(ModelFolder(tmp_path))
