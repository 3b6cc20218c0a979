"""Damaged, incomplete and hostile model folders: always one ModelError (or TokenizerError) of one sentence, never anything else."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny
import tiny_qwen3
from compare import load_ours
from mlx.utils import tree_flatten
from planting import catches
from tokenizers import Tokenizer, models
from zoo import Zoo

import mlxspec
from mlxspec.config import SamplingParams
from mlxspec.errors import MlxspecError, ModelError, TokenizerError
from mlxspec.loading.folder import tensor_files
from mlxspec.platform import memory

Hurt = Callable[[Path], object]


def one_sentence(error: ModelError) -> None:
    text = str(error)
    assert text.endswith(".")
    assert text.isprintable()
    assert len(text) < 500


def refused(folder: Path, says: str, kind: type[ModelError] = ModelError) -> None:
    with pytest.raises(kind, match=says) as caught:
        mlxspec.load(str(folder), draft="off")
    one_sentence(caught.value)


@pytest.fixture
def copied(zoo: Zoo, tmp_path: Path) -> Callable[[str, str], Path]:
    """A copy of one of the zoo's folders, with a tokenizer, to be hurt."""

    def copy(shape: str, dialect: str) -> Path:
        folder = tmp_path / f"{shape}-{dialect}"
        shutil.copytree(zoo.folder(shape, dialect), folder)
        Tokenizer(models.WordLevel({f"w{i}": i for i in range(tiny.VOCAB)}, "w0")).save(
            str(folder / "tokenizer.json")
        )
        return folder

    return copy


def config(change: Callable[[dict[str, Any]], object]) -> Hurt:
    def hurt(folder: Path) -> None:
        path = folder / "config.json"
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))

    return hurt


def text_config(**values: Any) -> Hurt:
    return config(lambda c: c["text_config"].update(values))


def tensors(change: Callable[[dict[str, mx.array]], object]) -> Hurt:
    """Of every file: a change may find its tensor in one of them only."""

    def hurt(folder: Path) -> None:
        for path in sorted(folder.glob("*.safetensors")):
            arrays = dict(mx.load(str(path)))
            mx.eval(arrays)
            change(arrays)
            path.unlink()
            mx.save_safetensors(str(path), arrays)

    return hurt


def replace(ending: str, by: Callable[[mx.array], mx.array | None]) -> Hurt:
    def change(arrays: dict[str, mx.array]) -> None:
        for name in [k for k in arrays if k.endswith(ending)]:
            value = by(arrays.pop(name))
            if value is not None:
                arrays[name] = value

    return tensors(change)


def add(name: str, *shape: int) -> Hurt:
    """To the first file only."""

    def hurt(folder: Path) -> None:
        first = min(folder.glob("*.safetensors"))
        arrays = dict(mx.load(str(first)))
        mx.eval(arrays)
        first.unlink()
        mx.save_safetensors(str(first), arrays | {name: mx.zeros(shape)})

    return hurt


def cut(file: str, keep: Callable[[int], int]) -> Hurt:
    def hurt(folder: Path) -> None:
        path = folder / file
        data = path.read_bytes()
        path.write_bytes(data[: keep(len(data))])

    return hurt


def write(file: str, data: str | bytes) -> Hurt:
    return lambda folder: (folder / file).write_bytes(data.encode() if isinstance(data, str) else data)


def remove(pattern: str) -> Hurt:
    return lambda folder: [p.unlink() for p in folder.glob(pattern)]


SHARD = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
FILES: dict[str, tuple[Hurt, str]] = {
    "no config": (remove("config.json"), "no config.json"),
    "cut config": (cut("config.json", lambda n: n // 2), "no valid JSON"),
    "binary config": (write("config.json", b"\xff\xfe\x00\x81"), "no valid JSON"),
    "deep config": (write("config.json", "[" * 100_000), "no valid JSON"),
    "config is a list": (write("config.json", "[1, 2]"), "no JSON object"),
    "config with a number of 5000 digits": (write("config.json", '{"a": ' + "9" * 5000 + "}"), "no valid JSON"),
    "no weights": (remove("model*"), "no model.*safetensors"),
    "a missing shard": (remove(SHARD), f"{SHARD} is missing"),
    "a shard without its data": (cut(SHARD, lambda n: n - 1), "cut short"),
    "a shard cut in its header": (cut(SHARD, lambda n: 100), "cut short"),
    "a shard cut in its first number": (cut(SHARD, lambda n: 5), "cut short"),
    "an empty shard": (cut(SHARD, lambda n: 0), "cut short"),
    "a shard of zeros": (write(SHARD, bytes(4096)), "no safetensors"),
    "a shard that is HTML": (write(SHARD, "<!doctype html><html>" * 9), "no safetensors"),
    "a shard that is a Git LFS pointer": (write(SHARD, "version https://git-lfs.github.com/spec/v1\n"), "no safetensors"),
    "a damaged index": (cut(INDEX, lambda n: n // 2), "index.json is damaged"),
    "a deep index": (write(INDEX, "[" * 100_000), "index.json is damaged"),
    "an index without a map": (write(INDEX, "{}"), "index.json is damaged"),
    "an index of nothing": (write(INDEX, '{"weight_map": {}}'), "names no shard"),
    "an index that leaves the folder": (write(INDEX, '{"weight_map": {"a": "../x.safetensors"}}'), "no plain file name"),
    "an index of numbers": (write(INDEX, '{"weight_map": {"a": 1}}'), "no plain file name"),
    "an index of lists": (write(INDEX, '{"weight_map": {"a": []}}'), "index.json is damaged"),
    "one shard twice": (
        lambda f: write(INDEX, json.dumps({"weight_map": {"a": SHARD, "b": "copy.safetensors"}}))(f)
        and shutil.copy(f / SHARD, f / "copy.safetensors"),
        "which another file holds too",
    ),
}  # fmt: skip

CONFIGS: dict[str, tuple[Hurt, str]] = {
    "no model_type": (config(lambda c: c.pop("model_type")), "names no model_type"),
    "model_type is a list": (config(lambda c: c.update(model_type=["qwen3_5"])), "names no model_type"),
    "another model_type": (config(lambda c: c.update(model_type="nobodys")), "'nobodys' are not supported"),
    "a long model_type": (config(lambda c: c.update(model_type="x\n" * 9999)), "are not supported"),
    "text_config is a list": (config(lambda c: c.update(text_config=[])), "text_config"),
    "no hidden size": (config(lambda c: c["text_config"].pop("hidden_size")), "hidden_size is None"),
    "no layers": (text_config(num_hidden_layers=0), "num_hidden_layers is 0"),
    "negative layers": (text_config(num_hidden_layers=-4), "num_hidden_layers is -4"),
    "layers as text": (text_config(num_hidden_layers="4"), "num_hidden_layers is '4'"),
    "a fraction of a head": (text_config(num_attention_heads=1.5), "num_attention_heads is 1.5"),
    "true heads": (text_config(num_attention_heads=True), "num_attention_heads is True"),
    "a trillion layers": (text_config(num_hidden_layers=10**12), "num_hidden_layers"),
    "a number without end": (text_config(hidden_size=int("9" * 4000)), "hidden_size"),
    "too many layers": (text_config(num_hidden_layers=1024, layer_types=None), "missing"),
    "a large vocabulary": (text_config(vocab_size=1 << 22), "has shape"),
    "wide layers": (text_config(hidden_size=1 << 16, intermediate_size=1 << 24), "has shape"),
    "wide heads": (text_config(num_attention_heads=1 << 20, head_dim=1 << 20), "make a projection"),
    "wide linear heads": (text_config(linear_key_head_dim=1 << 24), "make a projection"),
    "heads that do not divide": (text_config(num_key_value_heads=3), "cannot divide"),
    "linear heads that do not divide": (text_config(linear_num_value_heads=3), "cannot divide"),
    "layer kinds of another length": (text_config(layer_types=["full_attention"]), "layer_types"),
    "unknown layer kinds": (text_config(layer_types=["mamba"] * 4), "layer_types"),
    "layer kinds that are lists": (text_config(layer_types=[[]] * 4), "layer_types"),
    "other layer kinds": (text_config(layer_types=["full_attention"] * 4), "missing"),
    "stretched positions": (text_config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e7}), "kind 'dynamic' are not supported"),
    "yarn without a factor": (text_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e7}), "factor is None"),
    "positions without a theta": (text_config(rope_parameters={"rope_type": "default"}), "names no rope_theta"),
    "no positions at all": (text_config(rope_parameters=None), "names no rope_theta"),
    "two thetas": (text_config(rope_theta=1e4), "two values of rope_theta"),
    "two parts of heads": (text_config(partial_rotary_factor=0.5), "two values of partial_rotary_factor"),
    "two kinds of positions": (
        text_config(
            rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e7},
            rope_scaling={"type": "yarn", "factor": 4.0},
        ),
        "two values of rope_type",
    ),
    "attention with biases": (text_config(attention_bias=True), "attention_bias True is not supported"),
    "attention without gates": (text_config(attn_output_gate=False), "attn_output_gate False is not supported"),
    "layers without experts": (text_config(mlp_only_layers=[1]), "mlp_only_layers"),
    "windows": (text_config(use_sliding_window=True), "use_sliding_window"),
    "positions as text": (text_config(rope_parameters="default" * 999), "rope_parameters in config.json is not an object"),
    "too many rotary dims": (config(lambda c: c["text_config"]["rope_parameters"].update(partial_rotary_factor=2)), "rotary"),
    "no number": (text_config(rms_norm_eps=float("nan")), "rms_norm_eps"),
    "another activation": (text_config(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    "untied without a head": (text_config(tie_word_embeddings=False), "lm_head.weight"),
    "experts without a size": (text_config(num_experts=4, num_experts_per_tok=2), "moe_intermediate_size"),
    "more experts a token than there are": (text_config(num_experts=4, num_experts_per_tok=5), "num_experts_per_tok"),
    "experts the file lacks": (
        text_config(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64),
        "missing",
    ),
}  # fmt: skip

TENSORS: dict[str, tuple[Hurt, str]] = {
    "a missing tensor": (replace("layers.0.linear_attn.A_log", lambda x: None), "missing .*layers.0.linear_attn.A_log"),
    "a missing layer": (tensors(lambda a: [a.pop(k) for k in list(a) if ".layers.2." in k]), "missing .* and 11 more"),
    "an extra tensor": (add("model.language_model.layers.9.what.weight", 2), "unknown .*layers.9.what.weight"),
    "a tensor with an odd name": (add("a\nb" + "c" * 9999, 2), "unknown"),
    "two names for one place": (add("language_model.model.norm.weight", 64), "two tensors for one place"),
    "a wrong shape": (replace("0.mlp.down_proj.weight", lambda x: x[:, :-1]), "down_proj.weight has shape"),
    "a norm of another size": (replace("language_model.norm.weight", lambda x: x[:-1]), "norm.weight has shape"),
    "a transposed matrix": (replace("0.mlp.up_proj.weight", lambda x: x.T), "up_proj.weight has shape"),
    "bytes for numbers": (replace("0.mlp.up_proj.weight", lambda x: x.astype(mx.uint8)), "holds uint8, expected float32"),
    "integer norms": (replace("0.linear_attn.dt_bias", lambda x: x.astype(mx.int32)), "holds int32"),
    "flat convolutions": (replace("conv1d.weight", lambda x: x.reshape(-1)), "conv1d.weight has shape"),
    "scalar convolutions": (replace("conv1d.weight", lambda x: x[0, 0, 0]), "conv1d.weight has shape"),
}  # fmt: skip

HEADS: dict[str, tuple[Hurt, str]] = {  # which cost the head, not the model
    "a missing tensor": (replace("mtp.fc.weight", lambda x: None), "MTP head: .*fc.weight"),
    "a wrong shape": (replace("mtp.fc.weight", lambda x: x.T), "MTP head: fc.weight has shape"),
    "norms only": (
        tensors(lambda a: [a.pop(k) for k in list(a) if k.startswith("mtp.") and "norm" not in k]),
        "MTP head: tensors are missing",
    ),
}  # fmt: skip

EXPERTS: dict[str, tuple[Hurt, str]] = {
    "odd gates": (replace("experts.gate_up_proj", lambda x: x[:, :-1]), "gate_up_proj"),
    "flat gates": (replace("experts.gate_up_proj", lambda x: x.reshape(-1)), "gate_up_proj"),
    "too few experts": (replace("experts.down_proj", lambda x: x[:-1]), "has shape"),
}
SINGLE_EXPERTS: dict[str, tuple[Hurt, str]] = {
    "a missing expert": (replace("0.mlp.experts.3.up_proj.weight", lambda x: None), "Experts are missing"),
    "an expert of another shape": (
        replace("0.mlp.experts.3.up_proj.weight", lambda x: x[:-1]),
        "Experts differ",
    ),
}
QUANTIZED: dict[str, tuple[Hurt, str]] = {
    "no scales": (replace("0.mlp.up_proj.scales", lambda x: None), "up_proj"),
    "no biases": (replace("0.mlp.up_proj.biases", lambda x: None), "up_proj"),
    "scales alone": (replace("0.mlp.up_proj.weight", lambda x: None), "scales but no weights .*up_proj"),
    "packed as floats": (replace("0.mlp.up_proj.weight", lambda x: x.astype(mx.float32)), "no way that fits"),
    "half a row": (replace("0.mlp.up_proj.weight", lambda x: x[:, :-1]), "no way that fits"),
    "too few rows": (replace("0.mlp.up_proj.weight", lambda x: x[:-1]), "no way that fits"),
    "too few scales": (replace("0.mlp.up_proj.scales", lambda x: x[:, :-1]), "no way that fits"),
    "no scale at all": (replace("0.mlp.up_proj.scales", lambda x: x[:, :0]), "no way that fits"),
    "scales as bytes": (replace("0.mlp.up_proj.scales", lambda x: x.astype(mx.uint8)), "no way that fits"),
    "a scalar for scales": (replace("0.mlp.up_proj.scales", lambda x: x[0, 0]), "no way that fits"),
    "groups of one": (
        tensors(lambda a: a.update({k: mx.repeat(v, 32, axis=1) for k, v in a.items() if "up_proj.scales" in k or "up_proj.biases" in k})),
        "no way that fits",
    ),
    "unquantized but scaled": (replace("A_log", lambda x: None), "A_log"),
}  # fmt: skip
SAYINGS: dict[str, Hurt] = {
    "nothing": config(lambda c: [c.pop("quantization"), c.pop("quantization_config")]),
    "another width": config(lambda c: c["quantization"].update(bits=4)),
    "another group": config(lambda c: c["quantization"].update(group_size=64)),
    "a width as text": config(lambda c: c["quantization"].update(bits="8")),
    "an unknown mode": config(lambda c: c["quantization"].update(mode="fp3")),
    "a list": config(lambda c: c.update(quantization=[4], quantization_config=[4])),
}


@pytest.mark.parametrize("damage", FILES | CONFIGS | TENSORS)
def test_hub_folders(copied: Callable[[str, str], Path], damage: str) -> None:
    hurt, says = (FILES | CONFIGS | TENSORS)[damage]
    folder = copied("tied", "hub")
    hurt(folder)
    refused(folder, says)


@pytest.mark.parametrize("damage", HEADS)
def test_a_damaged_head_costs_the_head(copied: Callable[[str, str], Path], damage: str) -> None:
    hurt, says = HEADS[damage]
    folder = copied("tied", "hub")
    hurt(folder)
    with mlxspec.load(str(folder), draft="off") as engine:
        (notice,) = [n for n in engine.notices if re.search(says, n)]
        assert notice.isprintable()
        assert len(engine.generate([1, 2, 3], SamplingParams(max_tokens=4)).tokens) > 0


@pytest.mark.parametrize(
    ("dialect", "damage"), [("text", d) for d in EXPERTS] + [("text-unfused", d) for d in SINGLE_EXPERTS]
)
def test_experts(copied: Callable[[str, str], Path], dialect: str, damage: str) -> None:
    hurt, says = (EXPERTS | SINGLE_EXPERTS)[damage]
    folder = copied("moe", dialect)
    hurt(folder)
    refused(folder, says)


QWEN3: dict[str, tuple[str, Hurt, str]] = {
    "layers with windows": ("qwen3", config(lambda c: c.update(layer_types=["sliding_attention"] * 3)), "must name full_attention"),
    "windows": ("qwen3", config(lambda c: c.update(use_sliding_window=True)), "use_sliding_window True is not supported"),
    "no size of heads": ("qwen3", config(lambda c: c.pop("head_dim")), "head_dim is None"),
    "no context": ("qwen3", config(lambda c: c.pop("max_position_embeddings")), "max_position_embeddings is None"),
    "no positions": ("qwen3", config(lambda c: c.pop("rope_theta")), "names no rope_theta"),
    "layers without experts": ("qwen3-moe", config(lambda c: c.update(mlp_only_layers=[0])), "mlp_only_layers"),
    "experts without a size": ("qwen3-moe", config(lambda c: c.pop("moe_intermediate_size")), "experts need a moe_intermediate_size"),
    "a missing expert": ("qwen3-moe", replace("0.mlp.experts.3.up_proj.weight", lambda x: None), "Experts are missing"),
    "no norm of queries": ("qwen3", replace("layers.1.self_attn.q_norm.weight", lambda x: None), "missing .*1.self_attn.q_norm.weight"),
    "queries with gates": ("qwen3", replace("0.self_attn.q_proj.weight", lambda x: mx.concatenate([x, x])), "q_proj.weight has shape"),
    "an MTP head": ("qwen3", add("mtp.fc.weight", 64, 128), "unknown .*mtp.fc.weight"),
    "no shared expert": ("qwen3-next", config(lambda c: c.pop("shared_expert_intermediate_size")), "need a shared_expert"),
    "projections of Qwen3.5": ("qwen3-next", config(lambda c: c.update(model_type="qwen3_5_moe")), "missing .*in_proj_a.weight"),
    "a head of two layers": ("qwen3-next", config(lambda c: c.update(num_nextn_predict_layers="2")), "num_nextn_predict_layers is '2'"),
}  # fmt: skip


@pytest.mark.parametrize("damage", QWEN3)
def test_qwen3(tmp_path: Path, damage: str) -> None:
    name, hurt, says = QWEN3[damage]
    folder = tiny_qwen3.write(tmp_path, tiny_qwen3.CONFIGS[name])
    hurt(folder)
    with pytest.raises(ModelError, match=says) as caught:
        load_ours(folder)
    one_sentence(caught.value)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("damage", QUANTIZED)
def test_quantized_folders(
    copied: Callable[[str, str], Path], damage: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if packed:
        monkeypatch.setattr(memory, "UNPACKED_AT_MOST", 0)
    hurt, says = QUANTIZED[damage]
    folder = copied("tied", "mlx-8bit-32")
    hurt(folder)
    refused(folder, says)


@pytest.mark.parametrize("saying", SAYINGS)
def test_the_tensors_tell_how_they_are_quantized(
    zoo: Zoo, copied: Callable[[str, str], Path], saying: str
) -> None:
    folder = copied("tied", "mlx-8bit-32")
    SAYINGS[saying](folder)
    found = mlxspec.load(str(folder), draft="off").model
    expected = zoo.ours("tied", "mlx-8bit-32").model
    for (name, a), (_, b) in zip(*(tree_flatten(m.parameters()) for m in (found, expected)), strict=True):
        assert mx.array_equal(a, b), name


def test_formats_of_others_are_named(copied: Callable[[str, str], Path]) -> None:
    folder = copied("tied", "hub")
    config(lambda c: c.update(quantization_config={"quant_method": "hqq"}))(folder)
    assert mlxspec.load(str(folder), draft="off").model.vocab_size == tiny.VOCAB  # the tensors are plain
    replace("0.mlp.up_proj.weight", lambda x: None)(folder)
    add("model.language_model.layers.0.mlp.up_proj.W_q", 2)(folder)
    refused(folder, "quantized in the way of hqq, which is not supported")


@pytest.mark.parametrize("dialect", ["hub", "text", "mlx", "mlx-8bit-32"])
def test_unhurt_folders_load(copied: Callable[[str, str], Path], dialect: str) -> None:
    """The copies are refused for their damage, not for being copies; tensors nobody needs are no damage."""
    folder = copied("tied", dialect)
    add("lm_head.weight", 1)(folder)  # tied: not looked at
    if dialect == "hub":
        add("model.visual.blocks.0.weight", 3)(folder)
    assert mlxspec.load(str(folder), draft="off").model.vocab_size == tiny.VOCAB


@pytest.mark.parametrize(
    ("hurt", "says"),
    [
        (remove("tokenizer.json"), "no tokenizer.json"),
        (cut("tokenizer.json", lambda n: n // 2), "cannot be read"),
        (write("tokenizer.json", "[]"), "cannot be read"),
        (write("tokenizer_config.json", "{"), "no valid JSON"),
        (write("tokenizer_config.json", "3"), "no JSON object"),
        (write("chat_template.jinja", b"\xff\x81"), "no readable text"),
        (
            write(
                "tokenizer_config.json", '{"chat_template": [{"name": [], "template": 1}], "eos_token": [1]}'
            ),
            None,
        ),
    ],
)
def test_tokenizers(copied: Callable[[str, str], Path], hurt: Hurt, says: str | None) -> None:
    folder = copied("tied", "hub")
    hurt(folder)
    if says is None:
        assert mlxspec.load(str(folder), draft="off").tokenizer.template is None
    else:
        refused(folder, says, TokenizerError)


def test_a_stale_index_beside_a_whole_set_of_shards_is_not_used(copied: Callable[[str, str], Path]) -> None:
    """As in published conversions: the index names five shards, the folder holds another set, all of it."""
    folder = copied("tied", "hub")
    stored: dict[str, mx.array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= dict(mx.load(str(path)))
        mx.eval(stored)
        path.unlink()
    names = sorted(stored)
    for i, part in enumerate((names[::2], names[1::2])):
        mx.save_safetensors(
            str(folder / f"model-0000{i + 1}-of-00002.safetensors"), {k: stored[k] for k in part}
        )
    places = {k: f"model-0000{1 + i % 5}-of-00005.safetensors" for i, k in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    engine = mlxspec.load(str(folder), draft="off")
    assert any("it is stale, and the 2 shards that are here were read" in notice for notice in engine.notices)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "is missing")


@catches(
    "hidden files are tensors",
    "mlxspec.loading.folder:is_hidden",
    lambda right: lambda path: False,
    errors=(MlxspecError,),
)
def test_files_that_macos_writes_beside_others_are_no_tensors(copied: Callable[[str, str], Path]) -> None:
    folder = copied("tied", "hub")
    wanted = (
        mlxspec.load(str(folder), draft="off").generate([1, 2], mlxspec.SamplingParams(max_tokens=4)).tokens
    )
    for path in list(folder.iterdir()):
        (folder / f"._{path.name}").write_bytes(b"\0\5\26\7Mac OS X        ")
    (folder / "._mtp.safetensors").write_bytes(b"\0\5\26\7Mac OS X        ")
    assert not [p for group in tensor_files(folder) for p in group if p.name.startswith(".")]
    found = (
        mlxspec.load(str(folder), draft="off").generate([1, 2], mlxspec.SamplingParams(max_tokens=4)).tokens
    )
    assert found == wanted
