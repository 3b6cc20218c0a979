"""A generator of repositories: edits that put one fault into a good one, with words of its refusal, and edits that leave it good."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
from hub_machine import Machine

from mlxspec.loading.folder import INDEX
from mlxspec.platform.resources import demo_folder
from tests.models import adapted_zoo

Edit = Callable[[Path], object]
Faults = dict[str, tuple[Edit, str]]
Change = Callable[[str, mx.array], Iterable[tuple[str, mx.array]]]
WHOLE = "model.safetensors"
TWO = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def made(folder: Path, edit: Edit, source: str) -> Path:
    """The folder. source: one of the built-in models, or an architecture of mlx-lm's."""
    if source in adapted_zoo.ARCHITECTURES:
        adapted_zoo.write(source, folder)
    else:
        shutil.copytree(demo_folder(source), folder)
    edit(folder)
    return folder


def repository(machine: Machine, folder: Path, edit: Edit, source: str = "draft") -> str:
    """Its id: one of its own, for the hub's library remembers which files a commit of an id has."""
    made(folder, edit, source)
    repo = f"owner/{folder.parent.name[-60:]}"
    machine.hub.repos[repo] = folder
    return repo


def nothing(_: Path) -> None:
    pass


def both(*edits: Edit) -> Edit:
    return lambda folder: [edit(folder) for edit in edits]


def text(name: str, content: str | bytes) -> Edit:
    return lambda folder: (folder / name).write_bytes(
        content.encode() if isinstance(content, str) else content
    )


def json_file(name: str, **changes: Any) -> Edit:
    """Other values in a JSON file, which is made where there is none; None takes a key out."""

    def edit(folder: Path) -> None:
        path = folder / name
        found = json.loads(path.read_text()) if path.is_file() else {}
        kept = {key: value for key, value in (found | changes).items() if value is not None}
        path.write_text(json.dumps(kept))

    return edit


def setting(**changes: Any) -> Edit:
    """Other values in config.json than its tensors are of."""
    return json_file("config.json", **changes)


def without(*names: str) -> Edit:
    return lambda folder: [(folder / name).unlink(missing_ok=True) for name in names]


def read(folder: Path) -> dict[str, mx.array]:
    found = dict(mx.load(str(folder / WHOLE)))
    mx.eval(found)
    return found


def written(folder: Path, tensors: dict[str, mx.array], name: str = WHOLE) -> None:
    mx.eval(tensors)
    mx.save_safetensors(str(folder / name), tensors, {"format": "mlx"})


def tensors(change: Change) -> Edit:
    """Other tensors than config.json tells. change: returns the tensors that take a tensor's place."""

    def edit(folder: Path) -> None:
        changed = dict(pair for item in read(folder).items() for pair in change(*item))
        (folder / WHOLE).unlink()
        written(folder, changed)

    return edit


def values(end: str, change: Callable[[mx.array], mx.array]) -> Edit:
    """Other values of the tensors whose names end so."""
    return tensors(lambda name, value: [(name, change(value) if name.endswith(end) else value)])


def absent(end: str) -> Edit:
    return tensors(lambda name, value: [] if name.endswith(end) else [(name, value)])


def shards(*, index: bool = True, twice: bool = False, lost: bool = False) -> Edit:
    """Two shards. index: whether a file names them; twice: whether both hold one tensor; lost: whether one that the index names is in
    neither."""

    def edit(folder: Path) -> None:
        found = read(folder)
        (folder / WHOLE).unlink()
        names = sorted(found)
        halves = [names[::2], names[1::2] + names[:1] * twice]
        places = {name: file for file, half in zip(TWO, halves, strict=True) for name in half}
        for file, half in zip(TWO, halves, strict=True):
            written(folder, {name: found[name] for name in half if not (lost and name == names[1])}, file)
        if index:
            (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))

    return edit


def index(*names: str, keep: bool = True) -> Edit:
    """An index that names these files, in turn; keep: beside model.safetensors, else it is the first of them."""

    def edit(folder: Path) -> None:
        places = {tensor: names[i % len(names)] for i, tensor in enumerate(sorted(read(folder)))}
        if not keep:
            (folder / WHOLE).rename(folder / names[0])
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))

    return edit


def header(change: Callable[[dict[str, Any], str, str], object]) -> Edit:
    """Another header before the same data. change: of the header and two names of tensors of one shape and dtype."""

    def edit(folder: Path) -> None:
        path = folder / WHOLE
        raw = path.read_bytes()
        size = 8 + int.from_bytes(raw[:8], "little")
        found = json.loads(raw[8:size])
        pair = sorted(name for name in found if name.endswith(".mlp.up_proj.weight"))[:2]
        change(found, *pair)
        said = json.dumps(found).encode()
        path.write_bytes(len(said).to_bytes(8, "little") + said + raw[size:])

    return edit


def cut(num_bytes: int) -> Edit:
    return lambda folder: (folder / WHOLE).write_bytes((folder / WHOLE).read_bytes()[:-num_bytes])


def vocabulary(change: Callable[[dict[str, Any]], object]) -> Edit:
    """Another model in tokenizer.json."""

    def edit(folder: Path) -> None:
        path = folder / "tokenizer.json"
        found = json.loads(path.read_text())
        change(found["model"])
        path.write_text(json.dumps(found))

    return edit


def added(number: str) -> Edit:
    """An added token with this id."""
    token = {"content": "<far>", "special": True}
    return json_file("tokenizer_config.json", added_tokens_decoder={number: token})


def quantized() -> Edit:
    """MLP matrices in 4 bits and groups of 32."""

    def change(name: str, value: mx.array) -> Iterable[tuple[str, mx.array]]:
        if ".mlp." not in name or value.ndim != 2:
            return [(name, value)]
        path = name.removesuffix(".weight")
        parts = mx.quantize(value.astype(mx.float32), 32, 4)
        return zip((name, f"{path}.scales", f"{path}.biases"), parts, strict=True)

    return both(tensors(change), setting(quantization={"group_size": 32, "bits": 4}))


_NO_TOKENIZER = without("tokenizer.json", "tokenizer_config.json")
TOKENIZERS: Faults = {
    "only tokenizer.model": (
        both(_NO_TOKENIZER, text("tokenizer.model", b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")),
        "tokenizer.model alone is not read",
    ),
    "only tiktoken.model": (both(_NO_TOKENIZER, text("tiktoken.model", "IQ== 0\n")), "no tokenizer.json"),
    "only vocab.json": (both(_NO_TOKENIZER, text("vocab.json", "{}")), "vocab.json alone is not read"),
    "no tokenizer": (_NO_TOKENIZER, "no tokenizer.json"),
    "a tokenizer of no kind": (text("tokenizer.json", '{"model": {"type": "None of all"}}'), "cannot be read"),
    "a tokenizer that is a list": (text("tokenizer.json", "[]"), "tokenizer.json in"),
    "an empty tokenizer": (text("tokenizer.json", ""), "tokenizer.json in"),
    "damaged settings": (text("tokenizer_config.json", "{"), "tokenizer_config.json"),
    "settings in UTF-16": (text("tokenizer_config.json", "{}".encode("utf-16")), "tokenizer_config.json"),
    "damaged special tokens": (text("special_tokens_map.json", "{"), "special_tokens_map.json"),
    "added tokens that are a list": (text("added_tokens.json", "[1]"), "added_tokens.json"),
    "an added token behind a gap": (added("5000"), "tokenizer.json in"),
    "an added token without an id": (added("first"), "no list of tokens by id"),
    "merges of unknown tokens": (vocabulary(lambda bpe: bpe.update(merges=[["qqq", "zzz"]])), "tokenizer.json in"),
    "more tokens than rows": (
        vocabulary(lambda bpe: bpe["vocab"].update({f"zz{i}": 2048 + i for i in range(900)})),
        "the model only 2048 rows",
    ),
}  # fmt: skip
_NO_TEMPLATE = both(without("chat_template.jinja"), json_file("tokenizer_config.json", chat_template=None))
TEMPLATES: Faults = {
    "a template that does not compile": (text("chat_template.jinja", "{% if %}"), "does not compile"),
    "a template in the settings": (
        both(_NO_TEMPLATE, json_file("tokenizer_config.json", chat_template="{% if %}")),
        "does not compile",
    ),
    "a template in a list": (
        both(
            _NO_TEMPLATE,
            json_file("tokenizer_config.json", chat_template=[{"name": "default", "template": "{% endfor %}"}]),
        ),
        "does not compile",
    ),
    "a template in a file of its own": (
        both(_NO_TEMPLATE, json_file("chat_template.json", chat_template="{{ ")),
        "does not compile",
    ),
    "a template with an unknown filter": (text("chat_template.jinja", "{{ messages | frob }}"), "No filter"),
    "a template that is no text": (text("chat_template.jinja", b"\xff\xfe"), "no readable text"),
    "a template that calls what is not there": (
        text("chat_template.jinja", "{{ nothing_of_all(messages) }}"),
        "'nothing_of_all' is undefined",
    ),
    "a template that writes nothing": (text("chat_template.jinja", "{% if tools %}a{% endif %}"), "no text"),
    "a template that does not end": (
        text("chat_template.jinja", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
        "more than 1.2 seconds",
    ),
}  # fmt: skip
ENDS: Faults = {
    "a damaged generation_config.json": (text("generation_config.json", '{"eos_token_id": 2,}'), "generation_config"),
    "generation_config.json that is a list": (text("generation_config.json", "[]"), "generation_config.json"),
    "an end beyond the vocabulary": (setting(eos_token_id=999_999), "config.json ends texts with token 999999"),
    "an end below the vocabulary": (setting(eos_token_id=-4), "ends texts with token -4"),
    "ends of another model": (
        json_file("generation_config.json", eos_token_id=[151_645, 151_643]),
        "generation_config.json ends texts with token 151643",
    ),
}  # fmt: skip
SHARDS: Faults = {
    "a shard is absent": (index(*TWO, keep=False), f"{TWO[1]} is missing"),
    "a head's file is absent": (index(WHOLE, "mtp/mtp.safetensors"), "mtp/mtp.safetensors is"),
    "a place that is no file's": (index(f"../{WHOLE}"), "no plain file name"),
    "a damaged index": (text(INDEX, "[]"), "is damaged"),
    "an index without places": (text(INDEX, "{}"), "is damaged"),
    "an index with a list of places": (text(INDEX, '{"weight_map": []}'), "is damaged"),
    "no file that is loaded": (
        lambda folder: (folder / WHOLE).rename(folder / "consolidated.safetensors"),
        "no model*.safetensors",
    ),
    "a tensor in two shards": (shards(twice=True), "which another file holds too"),
    "a tensor in two shards without an index": (shards(twice=True, index=False), "which another file holds too"),
    "a copy beside the model": (
        lambda folder: shutil.copy(folder / WHOLE, folder / "model_copy.safetensors"),
        "which another file holds too",
    ),
    "a tensor that its shard lacks": (shards(lost=True), "issing"),
    "a shard lost without an index": (both(shards(index=False), without(TWO[1])), "issing"),
}  # fmt: skip
HEADERS: Faults = {
    "a name that is unknown": (
        tensors(lambda name, value: [(name.replace("down_proj", "w2"), value)]),
        "mlp.w2",
    ),
    "a tensor is absent": (absent("1.mlp.up_proj.weight"), "1.mlp.up_proj.weight"),
    "no embedding": (absent("embed_tokens.weight"), "embed_tokens.weight"),
    "no last norm": (absent("model.norm.weight"), "norm.weight"),
    "a tensor too many": (
        tensors(lambda name, value: [(name.replace("mlp.up_proj.weight", "mlp.up_proj.extra"), value)]),
        "up_proj.extra",
    ),
    "a bias that the config denies": (
        tensors(lambda n, v: [(n, v), *([(n.replace("weight", "bias"), v[:, 0])] if "down_proj" in n else [])]),
        "down_proj.bias",
    ),
    "no tensor at all": (text(WHOLE, (2).to_bytes(8, "little") + b"{}"), "issing"),
    "a shape of another config": (setting(intermediate_size=96), "shape"),
    "a matrix on its side": (values("1.mlp.down_proj.weight", lambda value: value.T), "shape"),
    "a norm that is too long": (values("1.input_layernorm.weight", lambda value: mx.concatenate([value] * 2)), "shape"),
    "rows that are missing": (values("embed_tokens.weight", lambda value: value[:-7]), "shape"),
    "a format of others, by names": (
        tensors(lambda name, value: [(name.replace("up_proj.weight", "up_proj.qweight"), value)]),
        "GPTQ or AWQ",
    ),
    "a layer less": (setting(num_hidden_layers=9), "layer"),
    "whole numbers": (values("up_proj.weight", lambda value: value.astype(mx.int32)), "holds int32, expected float"),
    "a norm of truths": (values("layernorm.weight", lambda value: value.astype(mx.bool_)), "holds bool, expected float"),
    "a file that is cut short": (cut(100), "cut short"),
    "a file that lacks its last byte": (cut(1), "cut short"),
    "a file without a header": (text(WHOLE, b"{" * 100), "no safetensors file"),
    "an empty file": (text(WHOLE, b""), "no safetensors file"),
    "a pointer to the file": (text(WHOLE, "version https://git-lfs.github.com/spec/v1\nsize 3\n"), "no safetensors file"),
    "tensors that overlap": (
        header(lambda found, one, two: found[one].update(data_offsets=found[two]["data_offsets"])),
        "overlap",
    ),
    "a dtype of no kind": (header(lambda found, one, _: found[one].update(dtype="F6")), "makes no sense"),
    "a shape below zero": (header(lambda found, one, _: found[one].update(shape=[-1])), "makes no sense"),
}  # fmt: skip
QUANTIZATION: Faults = {
    "scales that are missing": (both(quantized(), absent("1.mlp.up_proj.scales")), "1.mlp.up_proj.biases"),
    "biases that are missing": (both(quantized(), absent("1.mlp.up_proj.biases")), "1.mlp.up_proj"),
    "packed words with a sign": (
        both(quantized(), tensors(lambda n, v: [(n, v.view(mx.int32) if v.dtype == mx.uint32 else v)])),
        "int32|up_proj",
    ),
    "scales that are whole": (
        both(quantized(), values("1.mlp.up_proj.scales", lambda value: value.astype(mx.int32))),
        "1.mlp.up_proj",
    ),
    "a norm with scales": (
        both(
            quantized(),
            tensors(lambda n, v: [(n, v), *([(n.replace("weight", "scales"), v)] if "layernorm" in n else [])]),
        ),
        "layernorm",
    ),
}  # fmt: skip
CONFIGS: Faults = {
    "another activation": (setting(hidden_act="relu"), "hidden_act 'relu' is not supported"),
    "an unknown activation": (setting(hidden_act="swooshy"), "hidden_act 'swooshy' is not supported"),
    "heads that do not divide": (setting(num_key_value_heads=3), "divide|multiple"),
    "no layers": (setting(num_hidden_layers=0), "num_hidden_layers is 0"),
    "fewer than no layers": (setting(num_hidden_layers=-1), "num_hidden_layers is -1"),
    "too many layers": (setting(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    "layers in words": (setting(num_hidden_layers="4"), "num_hidden_layers is '4'"),
    "a width below zero": (setting(hidden_size=-64), "hidden_size is -64"),
    "a vocabulary of no machine": (setting(vocab_size=1 << 40), "vocab_size is 1099511627776"),
    "a context of nothing": (setting(max_position_embeddings=0), "max_position_embeddings is 0"),
    "an epsilon in words": (setting(rms_norm_eps="1e-5"), "rms_norm_eps is '1e-5'"),
    "a base of nothing": (setting(rope_theta=0), "rope_theta"),
    "a base that is no number": (setting(rope_theta=float("nan")), "rope_theta"),
    "positions of no kind": (setting(rope_scaling={"rope_type": "wiggle", "factor": 2}), "wiggle"),
    "a part that is a list": (setting(text_config=[1]), "text_config in config.json is not an object"),
    "a tie in words": (setting(tie_word_embeddings="yes"), "tie_word_embeddings is 'yes'"),
    "a type of no code": (setting(model_type="gpt_of_nobody"), "gpt_of_nobody"),
    "a type that is a path": (setting(model_type="../../x"), "../../x"),
    "no type": (setting(model_type=None), "names no model_type"),
    "config.json that is damaged": (text("config.json", "{"), "config.json"),
}
DRAFTERS: Faults = {
    "another number of rows": (values("up_proj.weight", lambda value: value[1:]), "has shape"),
    "no projection of states": (absent("fc.weight"), "fc.weight"),
    "a narrower projection": (values("fc.weight", lambda value: value[:, :-8]), "fc.weight has shape"),
    "whole numbers": (values("up_proj.weight", lambda value: value.astype(mx.int32)), "holds int32"),
    "a norm that is short": (values("norm.weight", lambda value: value[:-1]), "has shape"),
    "another activation": (setting(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    "heads that do not divide": (setting(num_attention_heads=5), "divide"),
    "a tensor too many": (tensors(lambda n, v: [(n, v), *([("odd.weight", v)] if "fc." in n else [])]), "odd.weight"),
    "a file that lacks its last byte": (cut(1), "cut short"),
}  # fmt: skip
# What others write differently and is right.
GOOD: dict[str, Edit] = {
    "nothing": nothing,
    "two shards": shards(),
    "two shards without an index": shards(index=False),
    "a description that was left behind": setting(quantization_config={"quant_method": "frob"}),
    "matrices in 4 bits": quantized(),
    "wrong bits for all": both(quantized(), setting(quantization={"group_size": 64, "bits": 8})),
    "an end that is -1, for none": json_file("generation_config.json", eos_token_id=-1),
    "some ends of another model": json_file("generation_config.json", eos_token_id=[1, 999_999]),
    "no template": _NO_TEMPLATE,
    "bytes behind the last tensor": lambda folder: (folder / WHOLE).write_bytes((folder / WHOLE).read_bytes() + b"\0" * 64),
}  # fmt: skip
