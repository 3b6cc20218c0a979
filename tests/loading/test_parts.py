"""Parts of tensors read from files are slices of the whole tensors, and no other byte of the files is read."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxspec.errors import ModelError
from mlxspec.loading import parts
from mlxspec.loading.parts import Cut, read_parts, sliced

DTYPES = (mx.bfloat16, mx.float16, mx.float32, mx.uint32, mx.uint8)


class Counted:
    """How many bytes `parts` reads, and in how many calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes = self.calls = 0
        given = parts._read

        def counted(file, at: int, into: np.ndarray) -> None:
            self.nbytes += into.nbytes
            self.calls += 1
            given(file, at, into)

        monkeypatch.setattr(parts, "_read", counted)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], mx.Dtype, Cut]:
    """A shape, a dtype, and ranges of one of its axes that may touch, be empty, or have gaps."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)))
    axis = draw(st.integers(-len(shape), -1))
    unit = draw(st.sampled_from((1, 2)))  # the axis is packed: `total` is so many times as long
    ends = sorted(
        draw(st.lists(st.integers(0, shape[axis]), min_size=2, max_size=6).filter(lambda x: len(x) % 2 == 0))
    )
    ranges = tuple((unit * a, unit * b) for a, b in zip(ends[::2], ends[1::2], strict=True))
    return shape, draw(st.sampled_from(DTYPES)), Cut(axis, ranges, unit * shape[axis])


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(found=cases(), gap=st.sampled_from((0, 8, 64, 2048)), block=st.sampled_from((16, 1 << 20)))
def test_parts_are_slices(
    found: tuple[tuple[int, ...], mx.Dtype, Cut], gap: int, block: int, tmp_path: Path
) -> None:
    shape, dtype, cut = found
    values = mx.random.randint(0, 250, shape, key=mx.random.key(sum(shape))).astype(dtype)
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), {"before": mx.ones((3,)), "a": values, "behind": mx.ones((5,))})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "GAP", gap)
        patch.setattr(parts, "_BLOCK", block)
        counted = Counted(patch)
        kept = read_parts(path, {"a": cut}, {"a": dtype})["a"]
    expected = sliced("a", values, cut)
    assert (kept.shape, kept.dtype) == (expected.shape, dtype)
    assert mx.array_equal(kept, expected).item()
    assert expected.nbytes <= counted.nbytes <= values.nbytes
    if gap == 0:
        assert counted.nbytes == expected.nbytes


def test_narrow_gaps_are_read_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for a megabyte of narrow rows; one for each row where a call costs less than the gap."""
    path, counted = tmp_path / "model.safetensors", Counted(monkeypatch)
    mx.save_safetensors(str(path), {"narrow": mx.zeros((512, 64)), "wide": mx.zeros((16, 2048))})
    read_parts(path, {"narrow": Cut(-1, ((0, 32),), 64)}, {"narrow": mx.float32})
    assert (counted.calls, counted.nbytes) == (1, 511 * 256 + 128)
    counted.calls = counted.nbytes = 0
    read_parts(path, {"wide": Cut(-1, ((1024, 2048),), 2048)}, {"wide": mx.float32})
    assert (counted.calls, counted.nbytes) == (16, 16 * 4096)
    monkeypatch.setattr(parts, "MANY_ROWS", 15)  # as in a stack of experts
    counted.calls = counted.nbytes = 0
    read_parts(path, {"wide": Cut(-1, ((1024, 2048),), 2048)}, {"wide": mx.float32})
    assert (counted.calls, counted.nbytes) == (1, 15 * 8192 + 4096)


def test_a_file_that_was_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is checked again when it is opened; what goes missing later is an error as well."""
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), {"a": mx.zeros((64, 64))})
    cuts = {"a": Cut(-2, ((32, 64),), 64)}
    whole = parts.read_entries(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cut short"):
        read_parts(path, cuts, {"a": mx.float32})
    monkeypatch.setattr(parts, "read_entries", lambda _: whole)
    with pytest.raises(ModelError, match=r"model\.safetensors changed while it was read"):
        read_parts(path, cuts, {"a": mx.float32})


def test_what_cannot_be_cut(tmp_path: Path) -> None:
    values = mx.zeros((4,))
    with pytest.raises(ModelError, match=r"a has shape \(4,\), which cannot be divided"):
        sliced("a", values, Cut(-2, ((0, 2),), 4))
    with pytest.raises(ModelError, match="groups of the quantized tensor a cannot be divided"):
        sliced("a", values, Cut(-1, ((0, 3),), 8))
