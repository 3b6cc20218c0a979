"""Which attention MLX fuses: the tables in mlxspec/kernels/attention.py against the kernels in MLX's macOS wheels, which
scripts/read_wheel.py has written down. A kernel that is there is not always used: a size that the tables leave out has its reason here."""

from __future__ import annotations

import importlib.metadata
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import read_wheel
from planting import catches

from mlxspec.kernels import attention

FEW_LEFT_OUT = {
    "96 and 64": "values of another size: no model here",
    "192 and 128": "values of another size: no model here",
    "192": "MLX prefers plain operations",
    "512": "single queries of 8 heads a key only: a plain step would go another way than a verify",
}
MANY_LEFT_OUT = {
    "96 and 64": "values of another size: no model here",
    "192": "MLX prefers plain operations",
    "256": "used for some pieces of a prompt only: attention._fuses_piece",
    "512": "with matrix units, for some pieces of a prompt only: attention._fuses_piece",
}
SIZES = {
    "macosx_14_0": {"few": set(FEW_LEFT_OUT), "many": set(MANY_LEFT_OUT) - {"512"}},
    "macosx_26_0": {"few": set(FEW_LEFT_OUT), "many": set(MANY_LEFT_OUT)},
}


def record() -> dict[str, Any]:
    return json.loads(read_wheel.RECORD.read_text(encoding="utf-8"))


@catches("MLX is newer than the record", "importlib.metadata:version", lambda _: lambda name: "99.0")
def test_the_installed_mlx_has_been_read() -> None:
    version = importlib.metadata.version("mlx")
    assert version in record(), (
        f"MLX {version} may fuse other attention than {', '.join(record())} does: run scripts/read_wheel.py with this "
        "environment's Python, and follow what it says."
    )


@pytest.mark.parametrize("system", SIZES)
@pytest.mark.parametrize("version", record())
@catches("a kernel is taken for absent", "mlxspec.kernels.attention:FUSED_MANY", lambda sizes: sizes[1:])
@catches(
    "a kernel that is not there is counted on", "mlxspec.kernels.attention:FUSED_FEW", lambda s: (*s, 80)
)
def test_the_tables_name_the_kernels_of_the_wheel(version: str, system: str) -> None:
    found = record()[version][system]
    fused = {"few": attention.FUSED_FEW, "many": attention.FUSED_MANY}
    for kind, sizes in fused.items():
        assert set(found[kind]) == {*map(str, sizes)} | SIZES[system][kind], kind


@pytest.mark.parametrize("version", record())
@catches("a limit is another", "mlxspec.kernels.attention:_FEW_HEADS", lambda most: most * 2)
def test_the_limits_are_those_that_mlx_names(version: str) -> None:
    said = " ".join(record()[version]["says"])
    assert f"the GQA factor to be at most {attention._FEW_HEADS};" in said
    for words in (
        "head dim 512 defaults to single-token queries",
        "defaults to GQA factor 8",
        "512 on NAX GPUs",
    ):
        assert words in said
    assert "MLX_SDPA_D512_MIN_KL" in record()[version]["switches"]


def test_a_wheel_is_read(tmp_path: Path) -> None:
    names = b"\0sdpa_vector_float16_t_64_64\0sdpa_vector_float_192_128\0sdpa_vector_2pass_2_float_7\0"
    names += (
        b"\0steel_attention_float16_bq32_bk16_bd80_bv80_wm4\0steel_attention_bfloat16_bq64_bk32_bd72_wm4\0"
    )
    says = b"\0the fused kernels require a GPU.\0{64, 96} \0MLX_SDPA_NEW\0sdpa_vector_2pass_1\0sdpa_vector_of_old\0"
    wheel = tmp_path / "mlx.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("mlx/lib/mlx.metallib", names)
        archive.writestr("mlx/lib/libmlx.dylib", says)
    assert read_wheel.read({"14_0": wheel}) == {
        "macosx_14_0": {"few": ["64", "192 and 128"], "many": ["72", "80"]},
        "says": ["the fused kernels require a GPU.", "{64, 96}", "MLX_SDPA_NEW"],
        "switches": ["MLX_SDPA_NEW"],
    }
    with pytest.raises(ValueError, match="holds no sentence"):
        read_wheel.dispatch(names)
