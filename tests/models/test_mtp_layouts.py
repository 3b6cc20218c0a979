"""One MTP head in every place and dialect people have it in loads to the same head; what is none, or is there twice, is one sentence."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import tiny
from compare import array, load_ours, to_numpy, tokens_of
from zoo import Zoo

from mlxspec.errors import ModelError
from mlxspec.kernels.flat import FlatRows
from mlxspec.loading.weights import read_folder
from mlxspec.models.assemble import Assembled
from mlxspec.models.assemble_drafter import assemble_head_lazily
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp

INDEX = "model.safetensors.index.json"
NORMS = ("norm", "layernorm")
Tensors = dict[str, mx.array]


def head(shape: str, stored: str, *, unfused: bool = False) -> Tensors:
    """Tensors behind `mtp.`. stored: "raw", as on the hub; "converted", as mlx-vlm splits it off; "mixed", only the last norm shifted."""
    arrays = tiny.weights(tiny.SHAPES[shape])
    arrays = tiny.unfuse_experts(arrays) if unfused else arrays
    found = {k.removeprefix("mtp."): mx.array(v) for k, v in arrays.items() if k.startswith("mtp.")}
    norms = {k for k in found if k.endswith(tuple(f"{n}.weight" for n in NORMS)) or "pre_fc_norm" in k}
    shifted = {"raw": set(), "converted": norms, "mixed": {"norm.weight"}}[stored]
    found = {k: v + 1 if k in shifted else v for k, v in found.items()}
    if stored == "converted":
        for name in [k for k in found if "experts." in k]:
            base, _, kind = name.rpartition("experts.")
            value = found.pop(name)
            if kind == "gate_up_proj":
                for part, half in zip(("gate_proj", "up_proj"), mx.split(value, 2, axis=1), strict=True):
                    found[f"{base}switch_mlp.{part}.weight"] = half
            else:
                found[f"{base}switch_mlp.down_proj.weight"] = value
    return found


def quantized(tensors: Tensors, bits: int = 4) -> Tensors:
    """As mlx-vlm's splitter and others do it: every matrix."""
    out: Tensors = {}
    for name, value in tensors.items():
        if value.ndim < 2:
            out[name] = value
            continue
        base = name.removesuffix(".weight")
        out[base + ".weight"], out[base + ".scales"], out[base + ".biases"] = mx.quantize(value, 32, bits)
    return out


def save(path: Path, tensors: Tensors, prefix: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    named = {prefix + k: v for k, v in tensors.items()}
    mx.save_safetensors(str(path), named, metadata={"format": "mlx"})


def indexed(folder: Path, file: str, names: list[str]) -> None:
    known = json.loads((folder / INDEX).read_text())
    known["weight_map"] |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps(known))


@pytest.fixture
def converted(zoo: Zoo, tmp_path: Path):  # type: ignore[no-untyped-def]
    """A copy of mlx-lm's conversion of a shape: it has no head."""

    def copy(shape: str, dialect: str = "mlx") -> Path:
        return Path(shutil.copytree(zoo.folder(shape, dialect), tmp_path / f"{shape}-{dialect}"))

    return copy


def logits(mtp: Qwen35Mtp, hidden_size: int) -> np.ndarray:
    tokens = array(tokens_of(3, 9, tiny.VOCAB))
    hidden = mx.array(np.random.default_rng(3).standard_normal((9, hidden_size), np.float32))
    return to_numpy([mtp.forward(tokens, hidden, FlatRows((9,)), mtp.make_cache(1), logits_at="all").logits])


def same_head(found: Qwen35Mtp | None, expected: Assembled, at_most: float = 1e-6) -> None:
    assert found is not None
    assert expected.mtp is not None
    size = expected.model.hidden_size
    np.testing.assert_allclose(logits(found, size), logits(expected.mtp, size), atol=at_most)


@pytest.mark.parametrize("stored", ["raw", "converted", "mixed"])
@pytest.mark.parametrize("place", ["model-mtp.safetensors", "mtp.safetensors", "mtp/model.safetensors"])
@pytest.mark.parametrize("shape", ["tied", "moe"])
def test_beside_a_converted_trunk(zoo: Zoo, converted, shape: str, place: str, stored: str) -> None:  # type: ignore[no-untyped-def]
    folder = converted(shape)
    assert load_ours(folder).mtp is None
    for prefix in ("mtp.", "language_model.mtp.", ""):
        (folder / place).unlink(missing_ok=True)
        save(folder / place, head(shape, stored), prefix)
        found = load_ours(folder)
        assert not found.lacks_head
        same_head(found.mtp, zoo.ours(shape, "hub"))


@pytest.mark.parametrize("shape", ["tied", "moe"])
def test_named_by_the_index(zoo: Zoo, converted, shape: str) -> None:  # type: ignore[no-untyped-def]
    folder = converted(shape)
    own = head(shape, "raw", unfused=True)  # one tensor an expert
    save(folder / "heads.safetensors", own, "mtp.")
    indexed(folder, "heads.safetensors", [f"mtp.{k}" for k in own])
    same_head(load_ours(folder).mtp, zoo.ours(shape, "hub"))


@pytest.mark.parametrize("shape", ["tied", "moe"])
def test_a_split_off_folder(zoo: Zoo, shape: str, tmp_path: Path) -> None:
    """mlx-vlm's layout: names without prefix, shifted norms. A folder of nothing but a head needs no config."""
    save(tmp_path / "model.safetensors", head(shape, "converted"))
    target = zoo.ours(shape, "mlx")
    same_head(assemble_head_lazily(lambda: read_folder(tmp_path), target), zoo.ours(shape, "hub"))


@pytest.mark.parametrize("shape", ["tied", "moe"])
def test_lent_by_the_original(zoo: Zoo, shape: str) -> None:
    found = assemble_head_lazily(
        lambda: read_folder(zoo.folder(shape, "hub")), zoo.ours(shape, "mlx-4bit-32")
    )
    for (name, a), (_, b) in zip(parameters(found), parameters(zoo.ours(shape, "hub").mtp), strict=True):
        assert mx.array_equal(a, b), name


@pytest.mark.parametrize("stored", ["raw", "converted"])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_otherwise_than_its_trunk(zoo: Zoo, converted, stored: str, bits: int) -> None:  # type: ignore[no-untyped-def]
    """config.json speaks of the trunk; fused experts may be quantized as they are."""
    own = quantized(head("moe", stored), bits)
    folder = converted("moe", "mlx-4bit-32")
    save(folder / "mtp.safetensors", own, "mtp.")
    found = load_ours(folder).mtp
    assert found is not None
    plain = converted("moe", "mlx")
    unpacked: Tensors = {}
    for name, value in own.items():
        base, _, part = name.rpartition(".")
        if f"{base}.scales" not in own:
            unpacked[name] = value
        elif part == "weight":
            scales = own[f"{base}.scales"], own[f"{base}.biases"]
            unpacked[name] = mx.dequantize(value, *scales, group_size=32, bits=bits)
    save(plain / "mtp.safetensors", unpacked, "mtp.")
    expected = load_ours(plain).mtp
    for (name, a), (_, b) in zip(parameters(found), parameters(expected), strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-6, err_msg=name)


def parameters(module: object) -> list[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    return list(tree_flatten(module.parameters()))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("stored", "before_fc"),
    # means of published heads: of Qwen3.6-35B-A3B converted, of Qwen3.6-27B raw and converted
    [("converted", (0.4937, 0.2734)), ("raw", (-0.44, -0.44)), ("converted", (0.56, 0.56))],
)
def test_norms_that_say_nothing_of_the_shift(
    zoo: Zoo,
    converted,  # type: ignore[no-untyped-def]
    stored: str,
    before_fc: tuple[float, float],
) -> None:
    """The two norms before `fc` lie below 1/2 in either form: they go with the norms of queries and keys."""
    own, folder = head("tied", stored), converted("tied")
    for name, mean in zip(
        ("pre_fc_norm_hidden.weight", "pre_fc_norm_embedding.weight"), before_fc, strict=True
    ):
        own[name] = own[name] - own[name].mean() + mean
    save(folder / "mtp.safetensors", own, "mtp.")
    found = load_ours(folder).mtp
    assert found is not None
    for name, mean in zip(("pre_fc_norm_hidden", "pre_fc_norm_embedding"), before_fc, strict=True):
        assert float(found[name].weight.mean()) == pytest.approx(mean + (stored == "raw"), abs=1e-3)


def test_a_converted_trunk_with_its_head_is_not_shifted_twice(zoo: Zoo, converted) -> None:  # type: ignore[no-untyped-def]
    """MTP tensors beside it are no sign of a raw trunk."""
    folder = converted("tied")
    save(folder / "mtp.safetensors", head("tied", "raw"), "mtp.")
    found, expected = load_ours(folder).model, zoo.ours("tied", "mlx").model
    for (name, a), (_, b) in zip(parameters(found), parameters(expected), strict=True):
        assert mx.array_equal(a, b), name


def test_what_is_no_head(zoo: Zoo, converted, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    target, own = zoo.ours("tied", "mlx"), head("tied", "raw")
    assert target.lacks_head
    damages = {
        "two MTP heads": {f"mtp.{k}": v for k, v in own.items()}
        | {f"model.mtp.{k}": v for k, v in own.items()},
        "missing .*fc.weight": {f"mtp.{k}": v for k, v in own.items() if k != "fc.weight"},
        "unknown .*what": {f"mtp.{k}": v for k, v in (own | {"what": own["fc.weight"]}).items()},
        "fc.weight has shape": {f"mtp.{k}": v.T if k == "fc.weight" else v for k, v in own.items()},
        "holds no MTP head": {"model.norm.weight": own["norm.weight"]},
    }
    for n, (says, tensors) in enumerate(damages.items()):
        folder = tmp_path / str(n)
        save(folder / "model.safetensors", tensors)
        with pytest.raises(ModelError, match=says):
            assemble_head_lazily(lambda folder=folder: read_folder(folder), target)
    moe = zoo.ours("moe", "mlx")
    save(tmp_path / "other" / "model.safetensors", own)
    with pytest.raises(ModelError, match="MTP head cannot be loaded"):
        assemble_head_lazily(lambda: read_folder(tmp_path / "other"), moe)
    folder = converted("tied")
    save(folder / "mtp.safetensors", own, "mtp.")
    save(folder / "mtp" / "model.safetensors", own)
    again = load_ours(folder)  # the second one is passed over
    assert again.mtp is not None
    assert re.search(r"safetensors was passed over: .* another file holds too", " ".join(again.notices))


def test_towers_are_passed_over_with_a_notice(zoo: Zoo) -> None:
    assert zoo.ours("tied", "hub").notices == (
        "Only text is read: 1 tensors for images, video and sound were passed over.",
    )
    assert zoo.ours("tied", "text").notices == ()


def test_mlx_vlms_own_splitter(zoo: Zoo, tmp_path: Path) -> None:
    split = pytest.importorskip(
        "mlx_vlm.speculative.drafters.qwen3_5_mtp.split", reason="needs mlx-vlm"
    ).Qwen3_5MTPSplitter()
    for shape in ("tied", "moe"):
        hub, out = zoo.folder(shape, "hub"), tmp_path / shape
        split.split(str(hub), str(out))
        same_head(
            assemble_head_lazily(lambda out=out: read_folder(out), zoo.ours(shape, "mlx")), zoo.ours(shape)
        )
        small = tmp_path / f"{shape}-4bit"
        split.split(str(hub), str(small), q_bits=4, q_group_size=32)
        found = assemble_head_lazily(lambda small=small: read_folder(small), zoo.ours(shape, "mlx"))
        assert np.isfinite(logits(found, tiny.SHAPES[shape].hidden)).all()
