"""An NVIDIA GPU beside MLX's wheel for CPUs, and MLX's wheel for CUDA without a driver, are said with what to do."""

from __future__ import annotations

import ctypes
import importlib.metadata
from types import SimpleNamespace

import pytest

from mlxspec.cli import checkup, main
from mlxspec.platform import device, nvidia

NO_DRIVER = ImportError("libcuda.so.1: cannot open shared object file: No such file or directory")


def driver(*, count: int, code: int = 0) -> object:
    def counted(place) -> int:  # what ctypes.byref gives
        place._obj.value = count
        return 0

    return SimpleNamespace(cuInit=lambda _: code, cuDeviceGetCount=counted)


@pytest.mark.parametrize(
    ("library", "found"),
    [(driver(count=1), True), (driver(count=0), False), (driver(count=1, code=100), False), (None, False)],
)
def test_the_driver_is_asked(monkeypatch, library, found):
    def opened(name: str) -> object:
        assert name == "libcuda.so.1"
        if library is None:
            raise OSError(str(NO_DRIVER))
        return library

    monkeypatch.setattr(nvidia.sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", opened)
    nvidia.has_gpu.cache_clear()
    try:
        assert nvidia.has_gpu() is found
    finally:
        nvidia.has_gpu.cache_clear()


@pytest.mark.skipif(device.backend() != "cpu", reason="MLX computes on a GPU")
@pytest.mark.parametrize("installed", ["", "mlx-cuda-12", "mlx-cuda-13"])
def test_doctor_names_a_gpu_that_is_not_used(monkeypatch, installed):
    def version(package: str) -> str:
        if package != installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return "0.32.4"

    monkeypatch.setattr(nvidia, "has_gpu", lambda: True)
    monkeypatch.setattr(importlib.metadata, "version", version)
    (found,) = (finding for finding in checkup._backend() if finding.name == "device")
    assert (found.status, "NVIDIA GPU" in found.found) == ("note", True)
    assert ("pip install '.[cuda]'" in found.advice) == (not installed)
    wanted = f"{installed}==0.32.4" if installed else "mlx-cuda-12`"
    assert f"pip install --force-reinstall --no-deps {wanted}" in found.advice


def test_a_wheel_for_cuda_without_a_driver_is_one_sentence(monkeypatch, capsys):
    def failing(arguments) -> int:
        raise NO_DRIVER

    monkeypatch.setattr(main, "_run", failing)
    assert main.main(["demo"]) == 2
    said = capsys.readouterr().err
    assert "there is no NVIDIA driver here" in said
    assert "pip uninstall -y mlx-cuda-13 mlx-cuda-12" in said
    assert nvidia.explained(ImportError("No module named 'mlx'")) is None
