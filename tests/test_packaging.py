"""The package as others get it: declared data, and (slow) a wheel installed into a clean environment.

Installing needs pip and either network or a cache; where the wheel's build tools cannot be had, the slow test skips.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
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
    """Every file of scripts/ without a suffix is a shell script."""
    scripts = [p for p in sorted((ROOT / "scripts").iterdir()) if p.is_file() and not p.suffix]
    assert len(scripts) > 10
    for path in (*scripts, ROOT / ".ci/run"):
        assert os.access(path, os.X_OK), path.name
    for path in (ROOT / "scripts/_env.sh", *scripts, ROOT / ".ci/run"):
        subprocess.run(["bash", "-n", str(path)], check=True)


# ---- what an index is told


def test_metadata_is_what_an_index_takes() -> None:
    project = PROJECT["project"]
    assert len(project["description"]) <= 512
    assert "\n" not in project["description"]
    assert project["license"] == "MIT"
    assert project["authors"]
    if importlib.util.find_spec("trove_classifiers") is not None:
        import trove_classifiers

        assert set(project["classifiers"]) <= trove_classifiers.classifiers


def test_versions_of_python_are_those_that_are_tested() -> None:
    """From requires-python to the newest classifier; the Linux workflow runs both ends."""
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which the dev extra brings")
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert PROJECT["project"]["requires-python"] == f">={named[0]}"
    workflow = yaml.safe_load((ROOT / ".github/workflows/linux.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == [named[0], named[-1]]


def test_an_mlx_that_adds_up_otherwise_is_not_allowed() -> None:
    """MLX before 0.32.4 rounds a quantized product of one row after every four terms, qmv_rows does not."""
    needed = [r for r in PROJECT["project"]["dependencies"] if re.match(r"mlx\b(?!-)", r)]
    assert len(needed) == 2
    for requirement in needed:
        lowest = re.search(r">=(\d+)\.(\d+)\.(\d+)", requirement)
        assert lowest, requirement
        assert tuple(map(int, lowest.groups())) >= (0, 32, 4)


def test_the_extra_for_cuda_brings_the_same_mlx_and_cuda_s_headers() -> None:
    """MLX compiles kernels with headers that its wheel for CUDA does not bring."""
    mlx, headers = PROJECT["project"]["optional-dependencies"]["cuda"]
    (on_cpus,) = [r for r in PROJECT["project"]["dependencies"] if r.startswith("mlx[cpu]")]
    assert mlx == on_cpus.replace("[cpu]", "[cuda]")
    assert headers.startswith("nvidia-cuda-runtime-cu12==12.")


PROMISE = re.compile(
    r"\b(?:pip3?|pipx|uv tool|uv pip) install(?:\s+-\S+)*\s+['\"]?mlxspec(?![\w/-])|\buvx mlxspec\b"
)


def test_no_text_promises_an_index() -> None:
    """The package is on no index yet: it is installed from a checkout or a wheel."""
    assert all(
        PROMISE.search(said)
        for said in ("pip install mlxspec", "pipx install 'mlxspec[plot]'", "uv tool install -U mlxspec")
    )
    assert not any(
        PROMISE.search(said) for said in ("uv tool install ./mlxspec", "pip install dist/mlxspec-0.1.0.whl")
    )
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "mlxspec").rglob("*.py")]
    for path in (*texts, *(ROOT / ".github").rglob("*.yml")):
        found = PROMISE.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.relative_to(ROOT)}: {found and found[0]}"


def test_the_release_names_its_repository(tmp_path: Path) -> None:
    """Every relative link of the README becomes an address, and URLs come into the metadata once."""
    import name_repository

    for name in ("README.md", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    assert name_repository.main(["someone/mlxspec", "v1.2.3"], tmp_path) == 0
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert all(re.match(r"\w+:|#", target) for target in re.findall(r"\]\(([^)]+)\)", readme))
    assert (
        "![A chat" not in readme or "https://github.com/someone/mlxspec/raw/v1.2.3/docs/pictures/" in readme
    )
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    assert urls == {
        "Source": "https://github.com/someone/mlxspec",
        "Issues": "https://github.com/someone/mlxspec/issues",
    }
    assert name_repository.main(["someone/mlxspec", "v1.2.3"], tmp_path) == 1
    with pytest.raises(SystemExit):
        name_repository.main(["mlxspec", "v1.2.3"], tmp_path)


# ---- wheel and sdist


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
def test_sdist_and_its_wheel(wheel: Path, tmp_path: Path) -> None:
    """The sdist holds what git knows below its folders and nothing else; the wheel that is built from it is the checkout's; both pass
    the index's own check."""
    for module in ("build", "twine"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}, which the dev extra brings")
    command = [sys.executable, "-m", "build", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and re.search(r"hatchling|connection", done.stderr + done.stdout):
        pytest.skip("needs hatchling, which could not be had here")
    assert done.returncode == 0, done.stderr
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        held = {name.partition("/")[2] for name in file.getnames()}
    folders = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    listed = ["git", "-C", str(ROOT), "ls-files", *(f.lstrip("/") for f in folders)]
    known = set(subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines())
    assert held == known | {"PKG-INFO", ".gitignore"}
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as own, zipfile.ZipFile(wheel) as other:
        assert sorted(own.namelist()) == sorted(other.namelist())
    checked = [sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(built)]
    done = subprocess.run(checked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


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


def test_a_checkout_without_metadata_loads_and_answers(tmp_path: Path) -> None:
    """Such as one that is on PYTHONPATH and not installed; the cache is empty, so the demo's head is checked."""
    source = """
import importlib.metadata as metadata
real = metadata.version
def version(name):
    if name == "mlxspec":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
import mlxspec
from mlxspec.engine import ranks
engine = mlxspec.load("demo")
print(len(engine.chat([{"role": "user", "content": "what is a list?"}], mlxspec.SamplingParams(max_tokens=4)).tokens))
assert ranks.versions()["version of mlxspec"] == mlxspec.__version__
"""
    env = {**os.environ, "MLXSPEC_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "4"


UV = """#!/usr/bin/env bash
echo "$@" >>"$CALLS"
if [ "$1" = venv ]; then
  mkdir -p "${@: -1}/bin"
  printf '#!/bin/sh\nexec "%s" "$@"\n' "$REAL_PYTHON" >"${@: -1}/bin/python"
  chmod +x "${@: -1}/bin/python"
fi
"""


@pytest.mark.skipif(os.name != "posix", reason="the scripts are for POSIX shells")
def test_an_environment_keeps_the_extras_that_it_has(tmp_path: Path) -> None:
    """What is installed by a row of scripts, with a stand-in for uv. CUDA's wheel of MLX is the last one."""
    root, calls = tmp_path / "checkout", tmp_path / "calls"
    (root / "scripts").mkdir(parents=True)
    (root / "scripts" / "_env.sh").write_bytes((ROOT / "scripts" / "_env.sh").read_bytes())
    (root / "pyproject.toml").write_text("one")
    (tmp_path / "uv").write_text(UV)
    (tmp_path / "uv").chmod(0o700)
    env = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(calls),
        "REAL_PYTHON": sys.executable,
    }

    def installed(extras: str) -> list[str]:
        calls.write_text("")
        command = ["bash", "-c", f". '{root}/scripts/_env.sh'; make_env {extras}"]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said = [line for line in calls.read_text().splitlines() if line.startswith("pip install")]
        return [line.split()[-1].replace(str(root), "ROOT") for line in said]

    cuda = f"mlx-cuda-12=={importlib.metadata.version('mlx')}"
    assert installed("") == ["ROOT"]
    assert installed("") == []
    assert installed("dev") == ["ROOT[dev]"]
    assert installed("") == []
    assert installed("dev,cuda") == ["ROOT[dev,cuda]", cuda]
    for extras in ("", "dev", "dev,cuda"):
        assert installed(extras) == []
    (root / "pyproject.toml").write_text("two")
    assert installed("dev") == ["ROOT[dev,cuda]", cuda]
