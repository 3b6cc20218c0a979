"""The package as others get it: declared data, and (slow) a wheel installed into a clean environment.

Installing needs pip and either network or a cache; where the wheel's build tools cannot be had, the slow test skips.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import mlxspec
from mlxspec.errors import ConfigError
from mlxspec.platform import resources

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_version_is_said_once() -> None:
    assert PROJECT["project"]["version"] == mlxspec.__version__


def test_extra_and_group_for_development_are_one_list() -> None:
    assert PROJECT["dependency-groups"]["dev"] == PROJECT["project"]["optional-dependencies"]["dev"]


def test_public_names_resolve() -> None:
    for name in mlxspec.__all__:
        assert getattr(mlxspec, name) is not None
    assert dir(mlxspec) == sorted(mlxspec.__all__)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        mlxspec.nothing_like_it  # noqa: B018


def test_metal_folder_in_a_checkout() -> None:
    assert resources.metal_folder() == ROOT / "metal"


def test_metal_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "add_one.metal").write_text("kernel")
    monkeypatch.setattr(resources, "metal_folder", lambda: tmp_path)
    assert resources.metal_source("add_one") == "kernel"
    for name in ("absent", "../add_one", "add_one.metal", ""):
        with pytest.raises(ConfigError, match="no Metal kernel"):
            resources.metal_source(name)


@pytest.mark.skipif(os.name != "posix", reason="the scripts are for POSIX shells")
def test_scripts_are_executable_and_parse() -> None:
    for name in ("scripts/demo", "scripts/test", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), name
    for name in ("scripts/_env.sh", "scripts/demo", "scripts/test", ".ci/run"):
        subprocess.run(["bash", "-n", str(ROOT / name)], check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        if re.search(r"No module named pip|hatchling|connection", done.stderr):
            pytest.skip("needs pip and hatchling, which could not be had here")
        pytest.fail(done.stderr)
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_wheel_holds_every_file(wheel: Path) -> None:
    """All files git knows of, metal/ below the package, and nothing beside the package."""
    listing = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "mlxspec", "metal"], capture_output=True, text=True
    ).stdout.split("\n")
    with zipfile.ZipFile(wheel) as file:
        held = set(file.namelist())
    wanted = {re.sub(r"^metal/", "mlxspec/metal/", name) for name in listing if name}
    assert wanted <= held
    assert all(name.startswith(("mlxspec/", "mlxspec-")) for name in held)


@pytest.mark.slow
def test_wheel_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """The wheel alone in a new environment, run from another folder; its dependencies are those of this environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / "bin" / "python"
    site = Path(
        subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()
    )  # fmt: skip
    target = ["--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "install", *target], check=True, stdin=subprocess.DEVNULL)
    source = """
import pathlib, sys, mlxspec
from mlxspec.platform import device, resources
assert pathlib.Path(mlxspec.__file__).is_relative_to(sys.argv[1]), mlxspec.__file__
assert resources.metal_folder() == pathlib.Path(mlxspec.__file__).parent / "metal"
assert resources.metal_folder().is_dir()
print(device.report().backend)
"""
    import mlx.core

    dependencies = Path(mlx.core.__file__).parent.parent
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": f"{site}{os.pathsep}{dependencies}",
    }
    done = subprocess.run(
        [str(python), "-c", source, str(site)], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("cpu", "metal", "cuda")

    def run(*arguments: str) -> str:
        command = [str(python), "-m", "mlxspec", *arguments]
        ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    assert "mlxspec generate" in run()
    assert "doctor" in run("--help")
    assert len(run("generate", "-p", "what does os.path.join do?", "-n", "8")) > 5
