"""Forwards divided among ranks are the forwards of one process: in this process with threads for ranks, and over MLX's ring."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from mlxspec.loading import parts
from mlxspec.loading.parts import Cut, sliced
from mlxspec.loading.weights import parts_of, read_folder
from mlxspec.models.assemble import assemble, assemble_lazily
from mlxspec.models.assemble_drafter import assemble_assistant_lazily
from mlxspec.models.proposal_rows import rows_of
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.models.ranks import (
    Ranks,
    head_ranges,
    share,
    vocabulary_ranges,
    width_ranges,
)
from mlxspec.models.registry import architecture
from mlxspec.models.sizes import bytes_of
from mlxspec.platform import device

AT_MOST = (
    1e-5  # largest difference of two numbers, as a part of the largest: sums are added up in another order
)
SECONDS = 200  # for all checkpoints on four processes that share two cores


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
    "odd": qwen("grouped", num_heads=6, num_kv_heads=3, num_k_heads=3, num_v_heads=6),
    "repeated": qwen("grouped", num_heads=4, num_kv_heads=1, num_k_heads=1, num_v_heads=4),
    "quantized": quantized(4),
    **{name: qwen3(name) for name in tiny_qwen3.CONFIGS},
    **{name: gemma(name) for name in tiny_gemma.CONFIGS},
}
_EIGHT = {"num_attention_heads": 8}
ON_FOUR = {
    "tied": qwen("tied", num_v_heads=4),
    "untied": qwen("untied", num_heads=5, num_k_heads=1, num_v_heads=5),
    "grouped": qwen("grouped", num_heads=10, num_kv_heads=5, num_k_heads=5, num_v_heads=10),
    "moe": qwen("moe", num_v_heads=8),
    "qwen3": qwen3("qwen3", **_EIGHT),
    "qwen3-moe": qwen3("qwen3-moe"),
    "qwen3-next": qwen3("qwen3-next"),
    "gemma3": gemma("gemma3"),
    "gemma4-dense": gemma("gemma4-dense", **_EIGHT),
    "gemma4-e": gemma("gemma4-e", **_EIGHT),
    "gemma4-moe": gemma("gemma4-moe"),
}


# -- in one process ----------------------------------------------------------------------------------------------------------------------


class Meeting:
    """Exchanges numbers between threads that stand for ranks. A thread cannot evaluate another's arrays."""

    def __init__(self, size: int) -> None:
        self._barrier, self._parts = threading.Barrier(size, timeout=SECONDS), [None] * size

    def all_of(self, rank: int, x: mx.array) -> list[np.ndarray]:
        own = np.array(x)
        self._barrier.wait()
        self._parts[rank] = own
        self._barrier.wait()
        return list(self._parts)


class ThreadRanks(Ranks):
    """group: a Meeting."""

    def sum(self, x: mx.array) -> mx.array:
        return mx.array(sum(self.group.all_of(self.rank, x)))

    def gather(self, x: mx.array) -> mx.array:
        return mx.array(np.concatenate(self.group.all_of(self.rank, x), axis=1))


def by_threads(folder: Path, size: int) -> list[dict[str, np.ndarray]]:
    """What `rank_side.figures` finds on each of `size` ranks."""
    meeting, found, errors = Meeting(size), [{} for _ in range(size)], []
    made = [rank_side.load(folder, ThreadRanks(rank=r, size=size, group=meeting)) for r in range(size)]

    def run(rank: int) -> None:
        try:
            found[rank] = rank_side.figures(made[rank])
        except BaseException as error:
            errors.append(error)
            meeting._barrier.abort()

    threads = [threading.Thread(target=run, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def assert_same(ranks: list[dict[str, Any]], whole: dict[str, np.ndarray], what: str) -> None:
    for name, expected in whole.items():
        if name == "bytes":
            continue
        for rank, found in enumerate(ranks):
            worst = float(np.abs(found[name] - expected).max() / np.abs(expected).max())
            assert worst <= AT_MOST, f"{what}: {name} of rank {rank} differs by {worst:.1e}"
            assert (found[name] == ranks[0][name]).all(), f"{what}: {name} has other bits on rank {rank}"


@pytest.mark.parametrize(
    ("name", "size"), [("odd", 2), pytest.param("gemma4-moe", 2, marks=pytest.mark.slow)]
)
def test_threads_for_ranks(name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "compile_enabled", lambda: False)  # a traced function cannot wait for another
    folder = ON_TWO[name](tmp_path / name)
    whole = rank_side.figures(rank_side.load(folder))
    assert_same(by_threads(folder, size), whole, name)


# -- what a rank reads ---------------------------------------------------------------------------------------------------------------------


def converted(name: str, bits: int) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        source = tiny_gemma.write_hub(folder.with_name(f"{folder.name}-source"), tiny_gemma.CONFIGS[name])
        return tiny_gemma.convert(source, folder, bits)

    return write


def quantized_as(name: str, dialect: str) -> Callable[[Path], Path]:
    return lambda folder: zoo.Zoo(folder.parent).folder(name, dialect)


LAYOUTS = {
    **ON_TWO,
    "text-unfused": lambda folder: tiny.write_text_only(folder, tiny.SHAPES["moe"], unfused=True),
    "text-bfloat16": lambda folder: tiny.write_text_only(folder, tiny.SHAPES["tied"], dtype=mx.bfloat16),
    "moe-mlx": quantized_as("moe", "mlx"),
    "moe-4bit": quantized_as("moe", "mlx-4bit-32"),
    "moe-scaled": quantized_as("moe", "mlx-nvfp4-scaled"),
    "grouped-mxfp8": quantized_as("grouped", "mlx-mxfp8"),
    "gemma3-hub": lambda folder: tiny_gemma.write_hub(folder, tiny_gemma.CONFIGS["gemma3"]),
    "gemma4-moe-hub": lambda folder: tiny_gemma.write_hub(folder, tiny_gemma.CONFIGS["gemma4-moe"]),
    "gemma4-dense-4bit": converted("gemma4-dense", 4),
}
_FAST = ("odd", "quantized", "gemma4-moe", "text-unfused", "gemma4-dense-4bit")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _FAST else pytest.mark.slow) for name in LAYOUTS]
)
def test_a_rank_reads_its_share(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters have the bits of slices of whole tensors, cut behind renaming as before, and of the files only the bytes are read that
    are kept."""
    folder = LAYOUTS[name](tmp_path / name)
    config, num_read = json.loads((folder / "config.json").read_text()), 0
    given = parts._read

    def counted(file: Any, at: int, into: np.ndarray) -> None:
        nonlocal num_read
        num_read += into.nbytes
        given(file, at, into)

    monkeypatch.setattr(parts, "_read", counted)
    monkeypatch.setattr(parts, "GAP", 0)
    for ranks in (Ranks(rank=0, size=2), Ranks(rank=1, size=2)):
        weights, num_read = read_folder(folder), 0
        own = share(architecture(config).parse(config), ranks)
        made = assemble_lazily(config, lambda weights=weights: weights, ranks=ranks)
        sliced_ones = dict(tree_flatten(made.model.parameters()))
        assert num_read == 0
        made.model.read_parts()
        read_ones = dict(tree_flatten(made.model.parameters()))
        assert sliced_ones.keys() == read_ones.keys()
        for path, value in read_ones.items():
            assert mx.array_equal(value, sliced_ones[path], equal_nan=True).item(), path
        kept = parts_of(weights, own.cut_of)
        kind = architecture(config)
        trunk, _ = kind.sanitize(weights, kind.parse(config))
        for place, value in kind.sanitize(kept, kind.parse(config))[0].items():
            cut = own.cuts.get(place, own.cuts.get(place.rpartition(".")[0]))
            is_whole = cut is None or place.endswith("global_scale")
            expected = trunk[place] if is_whole else sliced(place, trunk[place], cut)
            assert mx.array_equal(value, expected, equal_nan=True).item(), place
        divided = {k: v for k, v in weights.items() if own.cut_of(k) is not None}
        assert num_read == sum(kept[k].nbytes for k in divided)
        whole = sum(v.nbytes for v in divided.values())
        assert (
            0.35 * whole <= num_read <= 0.65 * whole
        )  # three heads are divided 1 to 2, and keys that both read are read by both
        left = sum(v.nbytes for k, v in weights.items() if k not in divided and not k.startswith("mtp."))
        assert left <= 0.2 * whole  # norms and routers, which are large beside matrices as small as these


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


@pytest.mark.slow
@pytest.mark.parametrize(("cases", "size"), [(ON_TWO, 2), (ON_FOUR, 4)], ids=["two", "four"])
def test_ranks_on_the_ring(cases: dict[str, Callable[[Path], Path]], size: int, tmp_path: Path) -> None:
    folders = [write(tmp_path / name) for name, write in cases.items()]
    by_ring(folders, size, tmp_path / "out")
    for folder in folders:
        whole = rank_side.figures(rank_side.load(folder))
        ranks = [dict(np.load(tmp_path / "out" / f"{folder.name}-{r}.npz")) for r in range(size)]
        assert_same(ranks, whole, folder.name)
        shares = [int(found["bytes"]) / int(whole["bytes"]) for found in ranks]
        print(f"{folder.name}: bytes a rank {', '.join(f'{s:.2f}' for s in shares)} of one process")


# -- what a rank keeps -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_heads", range(1, 13))
@pytest.mark.parametrize("size", range(1, 6))
def test_head_ranges(num_heads: int, size: int) -> None:
    """Every head is on one rank; ranks that share a key and value head have no other."""
    for num_keys in (n for n in range(1, num_heads + 1) if num_heads % n == 0):
        group = num_heads // num_keys
        try:
            found = head_ranges(num_heads, {group}, size)
        except ModelError:
            assert size > num_keys  # as many as there are key and value heads can always be divided
            continue
        assert [head for span in found for head in range(*span)] == list(range(num_heads))
        for first, end in found:
            keys = {head // group for head in range(first, end)}
            assert first < end
            assert (end - first) % len(keys) == 0
            assert len(keys) == 1 or {
                h // group for h in range(num_heads) if not first <= h < end
            }.isdisjoint(keys)


def test_widths_and_vocabularies() -> None:
    assert width_ranges(17408, 3) == [(0, 5760), (5760, 11520), (11520, 17408)]
    assert width_ranges(96, 2) == [(0, 32), (32, 96)]
    assert width_ranges(7, 2) == [(0, 3), (3, 7)]
    assert vocabulary_ranges(197, 4) == [(0, 50), (50, 100), (100, 150), (150, 197)]
    for divide in (width_ranges, vocabulary_ranges):
        with pytest.raises(ModelError, match="cannot be divided among 8 ranks"):
            divide(7, 8)


@pytest.mark.parametrize("name", ["qwen3_5-27b", "gemma4-26b"])
def test_ranks_hold_all_of_a_published_model(name: str) -> None:
    """Each tensor's ranges of all ranks cover it, and only keys and values, and what reads them, are held twice."""
    config = _PUBLISHED[name]
    parsed = architecture(config).parse(config)
    shares = [share(parsed, Ranks(rank=r, size=4)) for r in range(4)]
    for path, whole in shares[0].cuts.items():
        held = sorted(span for own in shares for span in own.cuts[path].ranges)
        total, end = sum(end - first for first, end in held), 0
        for first, last in held:
            assert first <= end, path
            end = max(end, last)
        assert end == whole.total, path
        is_repeated = path.endswith(("k_proj", "v_proj"))
        assert total == whole.total or (is_repeated and total > whole.total), path


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


def test_a_rank_holds_its_share_and_a_tenth() -> None:
    """Of the 27B, with the whole MTP head on each of two and of four ranks."""
    kind = architecture(_PUBLISHED["qwen3_5-27b"])
    c = kind.parse(_PUBLISHED["qwen3_5-27b"] | {"num_hidden_layers": 64, "mtp_num_hidden_layers": 1})
    trunk = kind.build(c)
    head = bytes_of(Qwen35Mtp(c, trunk))
    whole = bytes_of(trunk) + head
    for size in (2, 4):
        for r in range(size):
            held = bytes_of(kind.build(share(c, Ranks(rank=r, size=size)).config)) + head
            assert whole / size <= held <= 1.1 * whole / size


def test_what_a_divided_model_refuses(tmp_path: Path) -> None:
    """Adapters, assistants, and rows of the head."""
    folder = ON_TWO["gemma4-dense"](tmp_path / "gemma")
    config = json.loads((folder / "config.json").read_text())
    ranks = Ranks(rank=1, size=2)
    made = assemble_lazily(config, lambda: read_folder(folder), ranks=ranks)
    with pytest.raises(ModelError, match="assistant cannot draft for a model that is divided"):
        assemble_assistant_lazily({}, dict, made.model)
    with pytest.raises(ModelError, match="adapter cannot be used with a model that is divided"):
        assemble_lazily(config, dict, adapter="adapter", ranks=ranks)
    with pytest.raises(ModelError, match="head that is divided among ranks"):
        rows_of(made.model, made.model, np.arange(4), 16)


def test_cut_packed_tensors() -> None:
    """Words and scales of a packed matrix are cut where its numbers are, or refused."""
    values = mx.random.normal((8, 128), key=mx.random.key(0))
    packed, scales, biases = mx.quantize(values, group_size=32, bits=4)
    kept = (sliced("a", value, Cut(-1, ((32, 128),), 128)) for value in (packed, scales, biases))
    found = mx.dequantize(*kept, group_size=32, bits=4)
    assert mx.array_equal(found, mx.dequantize(packed, scales, biases, group_size=32, bits=4)[:, 32:]).item()
    with pytest.raises(ModelError, match=r"groups of the quantized tensor a\.scales cannot be divided"):
        sliced("a.scales", scales, Cut(-1, ((16, 128),), 128))


@pytest.mark.parametrize(("name", "says"), [("tied", "4 heads cannot be divided among 5 ranks")])
def test_too_many_ranks(name: str, says: str, tmp_path: Path) -> None:
    """No weight is read for it."""
    folder = qwen(name)(tmp_path / name)
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(ModelError, match=says):
        assemble(config, lambda: pytest.fail("read"), ranks=Ranks(rank=0, size=5))
