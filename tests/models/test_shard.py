"""Forwards that are divided among ranks, over MLX's ring, are the forwards of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import adapted_zoo
import mlx.core as mx
import numpy as np
import pytest
import rank_side
import tiny
import tiny_gemma
import tiny_qwen3
import zoo
from mlx.utils import tree_flatten

from mlxspec.errors import ModelError
from mlxspec.loading.weights import read_folder
from mlxspec.models.assemble import assemble_lazily
from mlxspec.models.assemble_drafter import assemble_drafter
from mlxspec.models.proposal_rows import rows_of
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.models.registry import architecture
from mlxspec.models.shard import own_config, own_weights
from mlxspec.models.sizes import bytes_of

AT_MOST = (
    1e-5  # largest difference of two numbers, as a part of the largest: sums are added up in another order
)
SECONDS = 900  # for all checkpoints on four processes that compile and share two cores with others


def qwen(name: str, **changes: Any) -> Callable[[Path], Path]:
    return lambda folder: tiny.write_hub(folder, replace(tiny.SHAPES[name], **changes))


def qwen3(name: str, **changes: Any) -> Callable[[Path], Path]:
    return lambda folder: tiny_qwen3.write(folder, tiny_qwen3.CONFIGS[name] | changes)


def gemma(name: str, **changes: Any) -> Callable[[Path], Path]:
    return lambda folder: tiny_gemma.write_text(folder, tiny_gemma.CONFIGS[name] | changes)


def quantized(bits: int) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        source = tiny.write_hub(folder.with_name(f"{folder.name}-source"), tiny.SHAPES["grouped"])
        return tiny.convert(source, folder, tiny.Quantization(bits=bits, group_size=32))

    return write


ON_TWO = {
    **{name: qwen(name) for name in tiny.SHAPES},
    "shared": qwen("grouped", num_heads=5, num_kv_heads=1, num_k_heads=1, num_v_heads=5),
    "repeated": qwen("grouped", num_heads=4, num_kv_heads=1, num_k_heads=1, num_v_heads=4),
    "quantized": quantized(4),
    **{name: qwen3(name) for name in tiny_qwen3.CONFIGS},
    **{name: gemma(name) for name in tiny_gemma.CONFIGS},
}
BY_MLX_LM = {name: partial(adapted_zoo.write, name) for name in ("llama", "qwen2", "gpt_oss", "deepseek_v3")}
_EIGHT = {"num_attention_heads": 8}
ON_FOUR = {
    "tied": qwen("tied", num_v_heads=4),
    "untied": qwen("untied", num_heads=5, num_k_heads=1, num_v_heads=5),
    "grouped": qwen("grouped", num_heads=12, num_kv_heads=4, num_k_heads=4, num_v_heads=12),
    "moe": qwen("moe", num_v_heads=8),
    "qwen3": qwen3("qwen3", **_EIGHT),
    "qwen3-moe": qwen3("qwen3-moe"),
    "qwen3-next": qwen3("qwen3-next", linear_num_key_heads=4),
    "gemma3": gemma("gemma3"),
    "gemma4-dense": gemma("gemma4-dense", **_EIGHT),
    "gemma4-e": gemma("gemma4-e", **_EIGHT),
    "gemma4-moe": gemma("gemma4-moe"),
}


def converted(name: str, bits: int) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        source = tiny_gemma.write_hub(folder.with_name(f"{folder.name}-source"), tiny_gemma.CONFIGS[name])
        return tiny_gemma.convert(source, folder, bits)

    return write


def quantized_as(name: str, dialect: str) -> Callable[[Path], Path]:
    return lambda folder: zoo.Zoo(folder.parent).folder(name, dialect)


PACKED = {
    "moe-4bit": quantized_as("moe", "mlx-4bit-32"),
    "moe-scaled": quantized_as("moe", "mlx-nvfp4-scaled"),
    "gemma4-dense-4bit": converted("gemma4-dense", 4),
}


# -- over the ring -----------------------------------------------------------------------------------------------------------------------


def free_ports(num: int) -> list[int]:
    sockets = [socket.socket() for _ in range(num)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def by_ring(folders: list[Path], size: int, out: Path) -> None:
    """Have `size` processes write their figures to `out`."""
    out.mkdir()
    hosts, listed = out / "hosts.json", out / "folders.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(size)]))
    listed.write_text(json.dumps([str(folder) for folder in folders]))
    command = [sys.executable, rank_side.__file__, str(listed), str(out)]
    root = str(Path(__file__).resolve().parents[2])
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | {"MLX_RANK": str(r), "MLX_HOSTFILE": str(hosts), "PYTHONPATH": root},
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(size)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * size, "\n".join(said)


def assert_same(ranks: list[dict[str, Any]], whole: dict[str, np.ndarray], what: str) -> None:
    for name, expected in whole.items():
        if name == "bytes":
            continue
        for rank, found in enumerate(ranks):
            worst = float(np.abs(found[name] - expected).max() / np.abs(expected).max())
            assert worst <= AT_MOST, f"{what}: {name} of rank {rank} differs by {worst:.1e}"
            assert (found[name] == ranks[0][name]).all(), f"{what}: {name} has other bits on rank {rank}"


@pytest.mark.parametrize(
    ("cases", "size"),
    [
        ({"gemma3": ON_TWO["gemma3"], "untied": ON_TWO["untied"], "llama": BY_MLX_LM["llama"]}, 2),
        pytest.param({**ON_TWO, **PACKED, **BY_MLX_LM}, 2, marks=pytest.mark.slow),
        pytest.param(ON_FOUR, 4, marks=pytest.mark.slow),
    ],
    ids=["some", "two", "four"],
)
def test_ranks_on_the_ring(cases: dict[str, Callable[[Path], Path]], size: int, tmp_path: Path) -> None:
    folders = [write(tmp_path / name) for name, write in cases.items()]
    by_ring(folders, size, tmp_path / "out")
    for folder in folders:
        whole = rank_side.figures(rank_side.load(folder))
        ranks = [dict(np.load(tmp_path / "out" / f"{folder.name}-{r}.npz")) for r in range(size)]
        assert_same(ranks, whole, folder.name)


# -- what a rank keeps -------------------------------------------------------------------------------------------------------------------


class OneOf(NamedTuple):
    """Stands for a group of MLX where nothing is sent."""

    at: int
    num: int

    def rank(self) -> int:
        return self.at

    def size(self) -> int:
        return self.num


_PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3_5-27b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 4,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rope_theta": 1e7,
    },
    "gemma4-26b": tiny_gemma.CONFIGS["gemma4-moe"]
    | {
        "vocab_size": 262144,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "moe_intermediate_size": 704,
    },
}


@pytest.mark.parametrize("name", _PUBLISHED)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_all_of_a_published_model(name: str, size: int) -> None:
    """Every row and column is on a rank, keys and values may be on several, and the rest is zeros."""
    config = _PUBLISHED[name]
    kind = architecture(config)
    parsed = kind.parse(config)
    own = kind.build(own_config(parsed, size))
    shapes = {path: value.shape for path, value in tree_flatten(own.parameters())}
    for path, value in tree_flatten(kind.build(parsed).parameters()):
        axis = next((i for i, num in enumerate(shapes[path]) if num != value.shape[i]), None)
        shape = [1] * value.ndim
        if axis is not None:
            shape[axis] = value.shape[axis]
        numbered = mx.broadcast_to(mx.arange(1, prod(shape) + 1).reshape(shape), value.shape)
        parts = [own_weights({path: numbered}, parsed, OneOf(r, size))[path] for r in range(size)]
        assert {part.shape for part in parts} == {shapes[path]}, path
        if axis is None:
            continue
        firsts = [np.asarray(part.moveaxis(axis, 0).reshape(part.shape[axis], -1)[:, 0]) for part in parts]
        held = np.concatenate(firsts)
        held = held[held > 0]
        assert sorted(set(held.tolist())) == list(range(1, value.shape[axis] + 1)), path
        assert len(held) == value.shape[axis] or "_proj" in path or "conv1d" in path, path


def test_a_rank_holds_its_part_and_what_is_whole() -> None:
    """The 27B over two and four ranks: the embedding and the MTP head are whole on each."""
    kind = architecture(_PUBLISHED["qwen3_5-27b"])
    c = kind.parse(_PUBLISHED["qwen3_5-27b"] | {"num_hidden_layers": 64, "mtp_num_hidden_layers": 1})
    trunk = kind.build(c)
    whole = bytes_of(trunk) + bytes_of(Qwen35Mtp(c, trunk))
    for size in (2, 4):
        part = kind.build(own_config(c, size))
        layers = bytes_of(part.language_model.model.layers), bytes_of(trunk.language_model.model.layers)
        assert layers[1] / size <= layers[0] <= 1.001 * layers[1] / size
        head = bytes_of(part.language_model.lm_head)
        held = bytes_of(part) - head + head // size + bytes_of(Qwen35Mtp(c, trunk))
        assert held <= (0.57 if size == 2 else 0.34) * whole


def test_what_a_divided_model_refuses(tmp_path: Path) -> None:
    """Adapters, assistants, rows of a divided head, and numbers of ranks that key heads cannot be divided among."""
    folder = ON_TWO["gemma4-dense"](tmp_path / "gemma")
    config = json.loads((folder / "config.json").read_text())
    group = mx.distributed.init()
    made = assemble_lazily(config, lambda: read_folder(folder), group=group)
    with pytest.raises(ModelError, match="assistant cannot draft for a model that is divided"):
        assemble_drafter("assistant", {}, dict, made.model)
    with pytest.raises(ModelError, match="adapter cannot be used with a model that is divided"):
        assemble_lazily(config, dict, adapter="adapter", group=group)
    with pytest.raises(ModelError, match="head that is divided among ranks"):
        rows_of(made.model, made.model, np.arange(4), 16)
    with pytest.raises(ModelError, match="2 key heads cannot be divided among 5 ranks"):
        assemble_lazily(config, lambda: pytest.fail("read"), group=OneOf(0, 5))


def test_packed_groups_are_not_torn_apart() -> None:
    parsed = architecture(_PUBLISHED["qwen3_5-27b"]).parse(_PUBLISHED["qwen3_5-27b"])
    scales = mx.zeros((8, 17408 // 128 // 17))
    path = "language_model.model.layers.0.mlp.down_proj.scales"
    with pytest.raises(ModelError, match="quantized in groups that are too large"):
        own_weights({path: scales}, parsed, OneOf(0, 16))
