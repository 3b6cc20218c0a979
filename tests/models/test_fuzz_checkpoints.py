"""Headers and configs nobody has thought of: read as they are, or refused in one sentence; never a crash, never a second of computing.

The fast tier draws some hundreds; `--all` draws some thousands.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny
import tiny_assistant
import tiny_gemma
import tiny_qwen3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_bad_checkpoints import one_sentence
from tiny_gemma import Gemmas
from zoo import Zoo

from mlxspec.errors import ModelError
from mlxspec.loading.weights import read_folder
from mlxspec.models.assemble import assemble
from mlxspec.models.assemble_drafter import assemble_drafter


def fuzz(num_examples: int) -> settings:
    """No deadline: wall time depends on the machine's load; see `within_seconds`."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(deadline=None, max_examples=num_examples, suppress_health_check=checks, derandomize=True)


SOME, MANY = fuzz(80), fuzz(700)


@contextmanager
def within_seconds() -> Iterator[None]:
    """Of this process's own computing: loops over a size that a config claims take minutes, a busy machine's collection of garbage less."""
    started = time.process_time()
    yield
    assert time.process_time() - started < 10.0


NUMBERS = st.one_of(
    st.integers(-2, 70), st.sampled_from([2**31 - 1, 2**31, 2**32, 2**47, 2**48, 2**63, 2**64, -(2**63)])
)
JUNK = st.recursive(
    st.one_of(
        st.none(), st.booleans(), NUMBERS, st.floats(), st.text(max_size=5), st.integers(-(10**30), 10**30)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(
            st.sampled_from(["F32", "BF16", "F8_E4M3", "F4", "U8", "BOOL", "F64", "C64", "I4"]), JUNK
        ),
        "shape": st.one_of(st.lists(NUMBERS, max_size=10), JUNK),
        "data_offsets": st.one_of(st.lists(NUMBERS, min_size=2, max_size=2), JUNK),
        "extra": JUNK,
    },
)
GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "U8", "shape": [0, 5], "data_offsets": [32, 32]},
}
DATA = bytes(range(32))


def pack(header: bytes, data: bytes = DATA) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def read_or_refuse(folder: Path, data: bytes) -> dict[str, mx.array] | None:
    """All arrays, evaluated; None where the file was refused in one sentence."""
    for path in folder.glob("*.safetensors"):
        path.unlink()  # never write over a file that may still be mapped
    (folder / "model.safetensors").write_bytes(data)
    with within_seconds():
        try:
            found = read_folder(folder)
        except ModelError as error:
            one_sentence(error)
            return None
        mx.eval(found)
    return found


def test_a_good_header(tmp_path: Path) -> None:
    found = read_or_refuse(tmp_path, pack(json.dumps(GOOD).encode()))
    assert found is not None
    assert {k: v.shape for k, v in found.items()} == {"a": (2, 3), "b": (4,), "c": (0, 5)}
    assert bytes(np.array(found["a"])) == DATA[:24]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"b": {"dtype": "BF16", "shape": [4], "data_offsets": [20, 28]}}, "overlap"),
        ({"b": {"dtype": "BF16", "shape": [4], "data_offsets": [25, 33]}}, "behind the end"),
        ({"b": {"dtype": "BF16", "shape": [4], "data_offsets": [32, 24]}}, "makes no sense"),
        ({"b": {"dtype": "BF16", "shape": [4], "data_offsets": [-8, 0]}}, "makes no sense"),
        ({"b": {"dtype": "BF16", "shape": [5], "data_offsets": [24, 32]}}, "do not match"),
        ({"c": {"dtype": "U8", "shape": [0, 1 << 31], "data_offsets": [32, 32]}}, "makes no sense"),
        ({"c": {"dtype": "U8", "shape": [0] * 9, "data_offsets": [32, 32]}}, "makes no sense"),
        ({"c": []}, "makes no sense"),
    ],
)
def test_headers_that_lie(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(pack(json.dumps(GOOD | change).encode()))
    with pytest.raises(ModelError, match=says) as caught:
        read_folder(tmp_path)
    one_sentence(caught.value)


def test_a_name_that_stands_twice(tmp_path: Path) -> None:
    header = json.dumps(GOOD).encode()
    assert read_or_refuse(tmp_path, pack(header.replace(b'"b"', b'"a"'))) is None


CHANGES = st.dictionaries(
    st.sampled_from(["a", "b", "c", "__metadata__", "\ud800", "x\n"]), st.one_of(ENTRY, JUNK), min_size=1
)
HURTS = st.tuples(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4),
    st.none() | st.integers(0, 10**6),
)  # bytes written over, and where the file ends


def check_entries(folder: Path, changes: dict[str, Any]) -> None:
    read_or_refuse(folder, pack(json.dumps(GOOD | changes).encode()))


def check_bytes(folder: Path, hurts: tuple[list[tuple[int, int]], int | None]) -> None:
    whole = bytearray(pack(json.dumps(GOOD).encode()))
    for place, value in hurts[0]:
        whole[place % len(whole)] = value
    end = len(whole) if hurts[1] is None else hurts[1] % (len(whole) + 1)
    read_or_refuse(folder, bytes(whole[:end]))


@SOME
@given(changes=CHANGES)
def test_any_entry_is_read_or_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_entries(tmp_path, changes)


@pytest.mark.slow
@MANY
@given(changes=CHANGES)
def test_many_entries_are_read_or_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_entries(tmp_path, changes)


@SOME
@given(hurts=HURTS)
def test_any_bytes_are_read_or_refused(tmp_path: Path, hurts: Any) -> None:
    check_bytes(tmp_path, hurts)


@pytest.mark.slow
@MANY
@given(hurts=HURTS)
def test_many_bytes_are_read_or_refused(tmp_path: Path, hurts: Any) -> None:
    check_bytes(tmp_path, hurts)


@SOME
@given(
    index=st.one_of(JUNK, st.fixed_dictionaries({"weight_map": st.dictionaries(st.text(max_size=3), JUNK)}))
)
def test_any_index_is_read_or_refused(tmp_path: Path, index: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    read_or_refuse(tmp_path, pack(json.dumps(GOOD).encode()))


# --- configs: one or two values changed; the weights are those of the unchanged config

NAMES = ["tied", "moe", *tiny_gemma.CONFIGS, "assistant", "qwen3-moe", "qwen3-next"]
TOPS = [
    "quantization",
    "quantization_config",
    "text_config",
    "per_layer_config",
    "rope_scaling",
    "layer_types",
]
DRAWN = st.tuples(
    st.sampled_from(NAMES),
    st.lists(st.tuples(st.booleans(), st.integers(0, 99), JUNK), min_size=1, max_size=2),
)


@pytest.fixture(scope="module")
def gemmas(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Gemmas:
    zoo.ours("moe", "hub")  # what experts are made of takes seconds to import, once
    return Gemmas(tmp_path_factory.mktemp("gemmas"))


def check_config(zoo: Zoo, gemmas: Gemmas, drawn: tuple[str, list[tuple[bool, int, Any]]]) -> None:
    name, changes = drawn
    target = tiny_gemma.CONFIGS["gemma4-dense"]
    if name in tiny.SHAPES:
        values, folder = tiny.hub_config(tiny.SHAPES[name]), zoo.folder(name, "hub")
    elif name in tiny_qwen3.CONFIGS:
        values, folder = tiny_qwen3.CONFIGS[name], gemmas.folder("gemma3", "text").parent / name
        if not folder.is_dir():
            tiny_qwen3.write(folder, values)
    elif name == "assistant":
        values, folder = (
            tiny_assistant.config(target),
            gemmas.folder("gemma4-dense", "text").parent / "assistant",
        )
        if not folder.is_dir():
            tiny_assistant.write(folder, values)
    else:
        values, folder = (
            {"model_type": name.split("-")[0], "text_config": tiny_gemma.CONFIGS[name]},
            gemmas.folder(name, "text"),
        )
    values = json.loads(json.dumps(values))
    for in_text, key, value in changes:
        inner = values.get("text_config")
        part = inner if in_text and isinstance(inner, dict) else values
        keys = sorted({*part, *TOPS})
        part[keys[key % len(keys)]] = value
    config = json.loads(json.dumps(values))
    model = load_target(gemmas) if name == "assistant" else None
    with within_seconds():
        try:
            if model is not None:
                assemble_drafter("assistant", config, lambda: read_folder(folder), model)
            else:
                assemble(config, lambda: read_folder(folder))
        except ModelError as error:
            one_sentence(error)


def load_target(gemmas: Gemmas) -> Any:
    """Of the assistant, loaded once."""
    if not hasattr(gemmas, "target"):
        folder = gemmas.folder("gemma4-dense", "text")
        gemmas.target = assemble(
            json.loads((folder / "config.json").read_text()), lambda: read_folder(folder)
        ).model  # type: ignore[attr-defined]
    return gemmas.target  # type: ignore[attr-defined]


@SOME
@given(drawn=DRAWN)
def test_any_config_is_run_or_refused(zoo: Zoo, gemmas: Gemmas, drawn: Any) -> None:
    check_config(zoo, gemmas, drawn)


@pytest.mark.slow
@MANY
@given(drawn=DRAWN)
def test_many_configs_are_run_or_refused(zoo: Zoo, gemmas: Gemmas, drawn: Any) -> None:
    check_config(zoo, gemmas, drawn)
