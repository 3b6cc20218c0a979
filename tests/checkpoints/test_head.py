"""`mlxspec pull --with-mtp` against a hub on this machine that serves a conversion without a head, and its original.

Bytes are counted where they are served. Every way to fail is one sentence and leaves the cache as it was.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
import tiny
from hub_machine import Machine
from test_pull import refused

from mlxspec.loading.folder import tensor_files
from mlxspec.loading.safetensors import check_header
from mlxspec.loading.weights import read_folder
from mlxspec.platform.resources import demo_folder

ROOT = Path(__file__).resolve().parents[2]
DEMO = demo_folder("target")
SHARD = "model-00002-of-00002.safetensors"


def converted(folder: Path, out: Path) -> Path:
    """As mlx-lm converts it: quantized, norms shifted, without the head."""
    tiny.convert(folder, out, tiny.Quantization(bits=8, group_size=64))
    for path in folder.glob("*"):
        if not (out / path.name).exists() and "safetensors" not in path.name:
            shutil.copyfile(path, out / path.name)
    return out


def with_two_shards(folder: Path, out: Path) -> Path:
    """As an original on the hub: an index, and the head in the middle of a shard with other tensors before and behind it."""
    shutil.copytree(folder, out)
    tensors = read_folder(folder)
    names = sorted(tensors)
    cut = names.index(next(n for n in names if n.startswith("mtp."))) - 4
    parts = [names[:cut], names[cut:]]
    places = {}
    for i, part in enumerate(parts):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        values = {n: tensors[n] for n in part}
        mx.eval(values)
        mx.save_safetensors(str(out / file), values)
        places |= dict.fromkeys(part, file)
    (out / "model.safetensors").unlink()
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("heads")
    return {
        "conversion": converted(DEMO, root / "conversion"),
        "original": with_two_shards(DEMO, root / "original"),
    }


@pytest.fixture
def hub(machine: Machine, folders: dict[str, Path]) -> Machine:
    """owner/demo-4bit names owner/original."""
    machine.hub.repos |= {"owner/demo-4bit": folders["conversion"], "owner/original": folders["original"]}
    machine.hub.cards["owner/demo-4bit"] = {
        "base_model": "owner/original",
        "base_model_relation": "quantized",
    }
    return machine


def head_bytes(folder: Path) -> int:
    return sum(v.nbytes for k, v in read_folder(folder).items() if k.startswith("mtp."))


def header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def left_behind(machine: Machine) -> list[str]:
    """Files of a head anywhere in the cache."""
    return sorted(p.name for p in (machine.home / "hub").rglob("*mtp*"))


def test_the_head_of_the_original_comes_along_and_drafts(hub: Machine, folders: dict[str, Path]) -> None:
    """Of the original only the config, the index, one header and the head are served; the head is quantized and found by `load`."""
    pulled = hub.run("pull", "owner/demo-4bit", "--with-mtp", "--mtp-bits", "8", "--json")
    assert pulled.code == 0, pulled
    report = json.loads(pulled.out)
    original = folders["original"]
    assert report["mtp"]["from"] == "owner/original"
    assert report["mtp"]["fetched"] == head_bytes(original)
    assert report["mtp"]["bytes"] < 0.6 * head_bytes(original)  # 8 of 16 bits, and scales
    assert hub.hub.served[SHARD] == header_bytes(original / SHARD) + head_bytes(original)
    assert hub.hub.served["model-00001-of-00002.safetensors"] == 0
    assert left_behind(hub) == ["mtp.safetensors"]
    assert not list((hub.home / "hub").glob("models--owner--original"))  # no half of a repository
    entry = json.loads(hub.run("models", "--json").out)["models"]
    assert [(e["name"], e["has_head"], e["is_complete"]) for e in entry] == [("owner/demo-4bit", True, True)]
    seen = len(hub.hub.requests)
    prompt = ("-p", "what does os.path.join do?", "--max-tokens", "32", "--json")
    drafted = hub.run(
        "generate", "--model", "owner/demo-4bit", *prompt, "--policy", "fixed", "--draft", "mtp"
    )
    plain = hub.run("generate", "--model", "owner/demo-4bit", *prompt, "--draft", "off")
    assert len(hub.hub.requests) == seen
    texts = [json.loads(ran.out) for ran in (drafted, plain)]
    assert texts[0]["text"] == texts[1]["text"]
    assert texts[0]["stats"]["num_accepted"] > 4
    again = hub.run("pull", "owner/demo-4bit", "--with-mtp")
    assert again.code == 0
    assert "has its MTP head already" in again.err
    assert hub.hub.served[SHARD] == header_bytes(original / SHARD) + head_bytes(original)
    removed = hub.run("rm", "owner/demo-4bit", "--yes")
    assert removed.code == 0
    assert not list((hub.home / "hub").glob("models--*"))


def same_head(ours: Path, original: Path, *, shifted: bool) -> bool:
    """Whether a folder holds the head of a raw original, its norms shifted or not."""
    a, b = ({k: v for k, v in read_folder(f).items() if k.startswith("mtp.")} for f in (ours, original))
    added = {k: float(shifted and v.ndim == 1) for k, v in b.items()}
    return a.keys() == b.keys() and all(
        mx.array_equal(a[k].astype(mx.float32), b[k].astype(mx.float32) + added[k]) for k in b
    )


def without_head(folder: Path, out: Path) -> Path:
    """A raw folder of one file, with the head dropped."""
    out.mkdir()
    for path in folder.glob("*"):
        if "safetensors" not in path.name:
            shutil.copyfile(path, out / path.name)
    tensors = {k: v for k, v in read_folder(folder).items() if not k.startswith("mtp.")}
    mx.eval(tensors)
    mx.save_safetensors(str(out / "model.safetensors"), tensors)
    return out


def test_the_grafted_head_is_that_of_the_original(
    hub: Machine, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Bit by bit where it is not quantized; norms are shifted, as those of the conversion are."""
    folder = Path(hub.run("pull", "owner/demo-4bit", "--with-mtp", "--mtp-bits", "16").out.splitlines()[1])
    assert same_head(folder, folders["original"], shifted=True)
    hub.hub.repos["owner/raw"] = without_head(folders["original"], tmp_path / "raw")
    hub.hub.cards["owner/raw"] = {"base_model": "owner/original"}
    folder = Path(hub.run("pull", "owner/raw", "--with-mtp", "--mtp-bits", "16").out.splitlines()[1])
    assert same_head(folder, folders["original"], shifted=False)


def test_a_head_is_fetched_unasked_and_can_be_left_out(hub: Machine, folders: dict[str, Path]) -> None:
    """It is told of, with its size."""
    plain = hub.run("pull", "owner/demo-4bit", "--drafter", "none")
    assert plain.code == 0
    assert hub.hub.served[SHARD] == 0
    assert left_behind(hub) == []
    models = json.loads(hub.run("models", "--json").out)["models"]
    assert [(e["name"], e["has_head"], e["is_complete"]) for e in models] == [
        ("owner/demo-4bit", False, True)
    ]
    ran = hub.run("pull", "owner/demo-4bit")
    assert ran.code == 0
    assert "Its MTP head is fetched from owner/original: 1.09 MB." in ran.err
    original = folders["original"]
    assert hub.hub.served[SHARD] == header_bytes(original / SHARD) + head_bytes(original)
    assert left_behind(hub) == ["mtp.safetensors"]


def _card(hub: Machine, **card: object) -> None:
    hub.hub.cards["owner/demo-4bit"] = dict(card)


def refusals(hub: Machine, folders: dict[str, Path], tmp_path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each way to fail, set up, and what is said."""
    _card(hub)
    yield "no base_model", ("names no base_model", "--mtp-from")
    _card(hub, base_model=["owner/original", "owner/demo"])
    yield "two", ("2 base models", "--mtp-from")
    _card(hub, base_model="./models/qwen")
    yield "a path", ("is no Hugging Face id", "--mtp-from")
    _card(hub, base_model="owner/none")
    yield "absent", ("owner/none", "HF_TOKEN")
    _card(hub, base_model="owner/original")
    hub.hub.gated.add("owner/original")
    yield "gated", ("owner/original is gated", "HF_TOKEN")
    hub.hub.gated.discard("owner/original")
    _card(hub, base_model="owner/headless")
    hub.hub.repos["owner/headless"] = folders["conversion"]
    yield "without a head", ("owner/headless holds no MTP head", "--mtp-from")
    hub.hub.cards["owner/headless"] = {"base_model": "owner/demo-4bit"}
    yield "a circle", ("holds no MTP head",)
    _card(hub, base_model="owner/tiny")
    hub.hub.repos["owner/tiny"] = tiny.write_hub(tmp_path / "tiny", tiny.SHAPES["grouped"])
    yield "another model", ("owner/tiny is no original", "hidden_size is 128, not 192")
    _card(hub, base_model="owner/other")
    yield "of another kind", ("owner/other",)
    shapes = tmp_path / "shapes"
    shutil.copytree(DEMO, shapes)
    tensors = dict(mx.load(str(DEMO / "model.safetensors")))
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, :-64]
    mx.eval(tensors)
    mx.save_safetensors(str(shapes / "model.safetensors"), tensors)
    hub.hub.repos["owner/shapes"] = shapes
    _card(hub, base_model="owner/shapes")
    yield "other shapes", ("owner/shapes does not fit", "fc.weight")
    _card(hub, base_model="owner/original")
    hub.hub.ignores_ranges.add(SHARD)
    yield "no ranges", ("does not send the bytes that it was asked for",)
    hub.hub.ignores_ranges.clear()


def test_what_cannot_be_had_is_one_sentence(hub: Machine, folders: dict[str, Path], tmp_path: Path) -> None:
    """Said before any of the model's weights is fetched; nothing is left behind but what `pull` keeps anyway."""
    for what, words in refusals(hub, folders, tmp_path):
        refused(hub.run("pull", "owner/demo-4bit", "--with-mtp"), *words)
        assert hub.hub.served["model.safetensors"] < 1 << 16, what  # headers at most
        assert left_behind(hub) == [], what
        hub.hub.served.clear()
    _card(hub)
    plain = hub.run("pull", "owner/demo-4bit")  # who asks for no head gets the model, and the reason
    assert plain.code == 0
    assert "names no base_model" in plain.err
    named = hub.run("pull", "owner/demo-4bit", "--mtp-from", "owner/original")
    assert named.code == 0, named
    assert left_behind(hub) == ["mtp.safetensors"]


def test_a_hub_that_sends_no_parts_sends_the_model(
    hub: Machine, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Whether one without an index holds a head cannot be told then."""
    single = tmp_path / "single"
    shutil.copytree(folders["conversion"], single)
    (single / "model.safetensors.index.json").unlink()
    hub.hub.repos["owner/demo-4bit"] = single
    hub.hub.ignores_ranges.add("model.safetensors")
    words = "does not send the bytes that it was asked for"
    refused(hub.run("pull", "owner/demo-4bit", "--with-mtp"), words)
    refused(hub.run("pull", "owner/demo-4bit"), words)
    ran = hub.run("pull", "owner/demo-4bit", "--force")
    assert ran.code == 0, ran
    assert words in ran.err
    assert left_behind(hub) == []
    assert hub.run("pull", "owner/demo-4bit", "--mtp-from", "owner/original").code == 0
    assert left_behind(hub) == ["mtp.safetensors"]


def test_a_conversion_of_a_conversion(hub: Machine, folders: dict[str, Path]) -> None:
    """Cards are followed up to the repository that holds a head."""
    hub.hub.repos["owner/demo-bf16"] = folders["conversion"]
    _card(hub, base_model=["owner/demo-bf16"])
    hub.hub.cards["owner/demo-bf16"] = {"base_model": "owner/original"}
    ran = hub.run("pull", "owner/demo-4bit", "--with-mtp", "--json")
    assert ran.code == 0, ran
    assert json.loads(ran.out)["mtp"]["from"] == "owner/original"


def test_a_gemma_has_no_head(machine: Machine) -> None:
    machine.hub.repos["owner/gemma"] = demo_folder("gemma")
    refused(machine.run("pull", "owner/gemma", "--with-mtp"), "no MTP head", "--with-mtp")
    ran = machine.run("pull", "owner/gemma")
    assert ran.code == 0
    assert "MTP" not in ran.err
    refused(machine.run("pull", "owner/gemma", "--mtp-bits", "5"), "--mtp-bits must be one of")


@pytest.mark.slow
def test_an_interrupted_fetch_leaves_no_head(hub: Machine, folders: dict[str, Path]) -> None:
    """Broken off half way through the head: the model is whole and has no head; the next pull fetches the head."""
    original = folders["original"]
    hub.hub.break_after[SHARD] = head_bytes(original) // 2
    broken = hub.run("pull", "owner/demo-4bit", "--with-mtp")
    refused(broken, "owner/original could not be downloaded", "pull it again")
    listed = json.loads(hub.run("models", "--json").out)["models"][0]
    assert (listed["is_complete"], listed["has_head"]) == (True, False)
    assert left_behind(hub) == []
    hub.hub.break_after.clear()
    second = hub.run("pull", "owner/demo-4bit", "--with-mtp", "--mtp-bits", "16")
    assert second.code == 0, second
    assert hub.hub.served["model.safetensors"] < 1 << 23
    assert left_behind(hub) == ["mtp.safetensors"]
    assert same_head(Path(second.out.splitlines()[1]), original, shifted=True)


def test_search(hub: Machine) -> None:
    listed = json.loads(hub.run("models", "DEMO", "--json").out)["models"]
    assert [m["name"] for m in listed] == ["owner/demo", "owner/demo-4bit"]
    assert listed[1]["base_models"] == ["owner/original"]
    assert listed[1]["size"] == sum(v.nbytes for v in read_folder(hub.hub.repos["owner/demo-4bit"]).values())
    table = hub.run("models", "4bit").out
    assert "owner/demo-4bit" in table
    assert "made from" in table
    everything = json.loads(hub.run("models", "owner", "--all", "--json").out)["models"]
    runs = json.loads(hub.run("models", "owner", "--json").out)["models"]
    assert {m["name"] for m in everything} - {m["name"] for m in runs} == {"owner/other"}
    assert next(m for m in runs if m["name"] == "owner/gated")["gated"]
    assert "no model that mlxspec runs" in hub.run("models", "nothing-of-this").out
    fitting = json.loads(hub.run("models", "demo", "--fits", "--json").out)["models"]
    assert [m["name"] for m in fitting] == [m["name"] for m in listed]
    refused(hub.run("models", "x", "--limit", "0"), "--limit")


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_given_up(machine: Machine) -> None:
    """A port whose queue of connections is full answers nothing, as a network that drops packets."""
    with socket.socket() as quiet:
        quiet.bind(("127.0.0.1", 0))
        quiet.listen(0)
        port = quiet.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
        nowhere = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_ETAG_TIMEOUT": "2"}
        alone = Machine(machine.hub, machine.home, **nowhere)
        try:
            refused(alone.run("pull", "owner/demo"), "cannot be reached")
        finally:
            alone.close()
            for each in waiting:
                each.close()


def test_the_head_shares_its_shard(folders: dict[str, Path]) -> None:
    """Else counting bytes would prove nothing."""
    shards, beside = tensor_files(folders["original"])
    assert not beside
    assert {name.startswith("mtp.") for name in check_header(shards[1])} == {True, False}
    assert not any(name.startswith("mtp.") for name in check_header(shards[0]))
