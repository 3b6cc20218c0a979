"""The files under .github: right for GitHub's schema and linter, and every command in them names scripts, tests and options that exist."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import compile_kernels
import lowest_version
import pytest

from mlxspec.cli import options
from mlxspec.platform import device

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which the dev extra brings")

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("[0-9]*.yml"))
OPERATORS = re.compile(r"[|&;<>()]+")
FOREIGN = {"xcodebuild", "xcrun"}  # what only a Mac has
SHELL = {".", "[", "test", "echo", "cat", "tee", "for", "do", "done", "in", "{", "}", "make_env"}
PYTHON = ".venv/bin/python"
OURS = re.compile(r"(scripts|tests|docs|metal|mlxspec|\.github|\.ci)/")


class Step(NamedTuple):
    """One `run` step. env: of workflow, job and step together; it may hold expressions. matrix: the values of the job's first run."""

    workflow: str
    job: str
    name: str
    run: str
    env: dict[str, str]
    matrix: dict[str, str]

    @property
    def id(self) -> str:
        return f"{self.workflow}-{self.job}-{re.sub(r'[^a-z0-9]+', '-', self.name.lower())}"


def parsed(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps_of(workflow: str, content: dict[str, Any]) -> Iterator[Step]:
    for job_name, job in content["jobs"].items():
        for step in job["steps"]:
            if "run" in step:
                env = {**content.get("env", {}), **job.get("env", {}), **step.get("env", {})}
                yield Step(workflow, job_name, step.get("name", "unnamed"), step["run"], env, first_run(job))


def first_run(job: dict[str, Any]) -> dict[str, str]:
    """Values of the first combination of a job's matrix."""
    matrix = dict(job.get("strategy", {}).get("matrix", {}))
    more = matrix.pop("include", [{}])[0]
    return {name: values[0] for name, values in matrix.items()} | more


STEPS = [step for path in WORKFLOWS for step in steps_of(path.stem, parsed(path))]
each_step = pytest.mark.parametrize("step", STEPS, ids=[s.id for s in STEPS])


def commands(script: str) -> list[list[str]]:
    """Simple commands of a step's script, substituted ones too, as words."""
    found: list[list[str]] = []
    for line in script.replace("\\\n", " ").splitlines():
        found += [c for inner in re.findall(r"\$\(([^()]*)\)", line) for c in commands(inner)]
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not OPERATORS.fullmatch(word):
                words.append(word)
            elif words:
                found.append(words)
                words = []
    return found


def test_there_are_workflows_and_their_steps_are_found() -> None:
    assert {p.stem for p in WORKFLOWS} == {"linux", "mac", "release"}
    assert len(FORMS) == 3
    assert len(STEPS) > 20
    assert commands('a b "c d" | e >> f\ng "$(h i)"') == [
        ["a", "b", "c d"],
        ["e"],
        ["f"],
        ["h", "i"],
        ["g", "$(h i)"],
    ]


# ---- what GitHub takes


def schema_errors(path: Path, schema: str) -> str:
    pytest.importorskip("check_jsonschema", reason="needs check-jsonschema, which the dev extra brings")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def lint_errors(*paths: Path) -> str:
    beside = Path(sys.executable).parent / "actionlint"
    linter = str(beside) if beside.is_file() else shutil.which("actionlint")
    if linter is None:
        pytest.skip("needs actionlint, which the dev extra brings on Linux x86-64")
    command = [linter, "-no-color", "-oneline", "-shellcheck=", "-pyflakes=", *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_workflows_fit_the_schema(path: Path) -> None:
    assert not schema_errors(path, "vendor.github-workflows")


@pytest.mark.parametrize("path", FORMS, ids=lambda p: p.stem)
def test_issue_forms_fit_the_schema(path: Path) -> None:
    assert not schema_errors(path, "vendor.github-issue-forms")


def test_workflows_pass_the_linter() -> None:
    assert not lint_errors(*WORKFLOWS)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("runs-on: macos-26", "runs-on: macos-99"),
        ("matrix.mlx == 'lowest'", "matrix.mxl == 'lowest'"),
        ("steps.metal.outcome", "steps.mtal.outcome"),
        ("github.event_name != 'schedule'", "github.event_name != 'schedule"),
        ("name: kernel-sources", "nam: kernel-sources"),
        ("needs.versions.outputs.mlx", "needs.version.outputs.mlx"),
        ("needs: [compile, kernels]", "needs: [compile, kernel]"),
    ],
)
def test_the_linter_sees_mistakes(right: str, wrong: str, tmp_path: Path) -> None:
    text = (GITHUB / "workflows" / "mac.yml").read_text(encoding="utf-8")
    assert right in text
    damaged = tmp_path / "mac.yml"
    damaged.write_text(text.replace(right, wrong), encoding="utf-8")
    assert lint_errors(damaged)


def test_the_schemas_see_mistakes(tmp_path: Path) -> None:
    for path, schema, right, wrong in (
        (
            GITHUB / "workflows" / "mac.yml",
            "vendor.github-workflows",
            "timeout-minutes: 45",
            "timeout-minuts: 45",
        ),
        (FORMS[0], "vendor.github-issue-forms", "type: textarea", "type: textfield"),
    ):
        text = path.read_text(encoding="utf-8")
        assert right in text
        damaged = tmp_path / path.name
        damaged.write_text(text.replace(right, wrong), encoding="utf-8")
        assert schema_errors(damaged, schema)


# ---- what the steps name


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """What each script says of its options: `--help` of Python scripts, the text of shell scripts; filled as needed."""
    return {}


def check_command(words: list[str], config: pytest.Config, texts: dict[str, str]) -> None:
    """Raises AssertionError, ConfigError or SyntaxError for a program, path or option that does not exist."""
    for word in words:
        place = word.split("::")[0]
        assert not OURS.match(place) or (ROOT / place).exists(), f"{place} does not exist"
    words = words[1:] if words[0] == "/bin/bash" else words
    head, *rest = words
    if head == ".venv/bin/mlxspec":
        options.parse(rest)
    elif head == PYTHON and rest[:2] == ["-m", "pytest"]:
        check_pytest(rest[2:], config)
    elif head == PYTHON and rest[0] == "-c":
        compile(rest[1], "step", "exec")
    elif head in (PYTHON, "python") and rest[:3] == ["-m", "pip", "install"]:
        pass
    elif head in (PYTHON, "python") and OURS.match(rest[0]):
        check_options(rest[0], rest[1:], texts)
    elif head == "scripts/test":
        check_pytest(rest[1:] if rest[:1] == ["--all"] else rest, config)
    elif head.startswith("scripts/"):
        assert os.access(ROOT / head, os.X_OK), f"{head} cannot be executed"
        check_options(head, rest, texts)
    else:
        assert head in SHELL | FOREIGN or re.fullmatch(
            r"build/[\w.-]+|\$GITHUB_(STEP_SUMMARY|OUTPUT)", head
        ), f"nobody has said what {head} is"


def check_pytest(arguments: list[str], config: pytest.Config) -> None:
    given = [word.replace("$BACKEND", "metal") for word in arguments]
    known, unknown = config._parser.parse_known_and_unknown_args(given)
    assert not unknown, f"pytest has no option {unknown[0]}"
    declared = {line.split(":")[0] for line in config.getini("markers")}
    assert set(re.findall(r"\w+", known.markexpr)) <= declared | {"not", "or", "and"}


def check_options(script: str, arguments: list[str], texts: dict[str, str]) -> None:
    path = ROOT / script
    if script not in texts:
        python = path if path.suffix == ".py" else path.with_suffix(".py")
        if python.is_file():
            command = [sys.executable, str(python), "--help"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            texts[script] = done.stdout
        else:
            texts[script] = path.read_text(encoding="utf-8")
    for word in arguments:
        if word.startswith("-"):
            option = word.split("=")[0]
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", texts[script]), (
                f"{script} has no option {option}"
            )


@each_step
def test_steps_name_what_exists(step: Step, pytestconfig: pytest.Config, texts: dict[str, str]) -> None:
    assert "${{" not in step.run, "an expression in a script can be used to inject commands; pass it by env"
    for words in commands(step.run):
        check_command(words, pytestconfig, texts)
    for variable in re.findall(r"\$\{?([A-Z_]+)", step.run):
        assert variable in step.env or variable.startswith("GITHUB_"), f"{variable} is not set"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("scripts/no_such_script", "does not exist"),
        ("scripts/compile_kernels --standard metal3.1", "no option --standard"),
        ("scripts/build_package --to dist", "no option --to"),
        (".venv/bin/mlxspec demo --repeats 1", "no option --repeats"),
        (".venv/bin/mlxspec domo", "domo"),
        (".venv/bin/python -m pytest tests/metal tests/gone", "does not exist"),
        (".venv/bin/python -m pytest --compile tests/metal", "no option --compile"),
        ('.venv/bin/python -m pytest -m "not slwo" tests/metal', "slwo"),
        ("scripts/test --backed metal", "no option --backed"),
        ("frobnicate build", "frobnicate"),
        ('echo "$(scripts/gone)"', "does not exist"),
    ],
)
def test_a_name_that_does_not_exist_is_found(
    line: str, says: str, pytestconfig: pytest.Config, texts: dict[str, str]
) -> None:
    def check() -> None:
        for words in commands(line):
            check_command(words, pytestconfig, texts)

    with pytest.raises(Exception, match=re.escape(says)):
        check()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_artifacts_are_what_steps_write(path: Path) -> None:
    for job in parsed(path)["jobs"].values():
        written = " ".join(step.get("run", "") for step in job["steps"])
        for step in job["steps"]:
            if "upload-artifact" in step.get("uses", ""):
                for place in step["with"]["path"].split():
                    assert place in written, f"no step writes {place}"


# ---- what the Mac workflow has to cover


def test_the_matrix_covers_every_system_version_and_architecture() -> None:
    content = parsed(GITHUB / "workflows" / "mac.yml")
    job = content["jobs"]["kernels"]
    matrix = job["strategy"]["matrix"]
    assert matrix == {
        "os": ["macos-15", "macos-26", "xcode-27"],
        "mlx": "${{ fromJSON(needs.versions.outputs.mlx) }}",
        "arch": ["", "applegpu_g13s", "applegpu_g15s"],
    }
    assert job["continue-on-error"] == "${{ matrix.os == 'xcode-27' }}"  # a preview; the others must pass
    assert job["env"]["MLX_METAL_GPU_ARCH"] == "${{ matrix.arch }}"
    assert job["env"]["METAL_DEVICE_WRAPPER_TYPE"] == "1"
    assert content["env"]["BACKEND"] == "metal"
    assert content["jobs"]["nightly"]["if"].startswith("github.event_name == 'schedule'")
    compiled = {j["os"]: j["standards"] for j in content["jobs"]["compile"]["strategy"]["matrix"]["include"]}
    assert " ".join(compiled.values()).split() == list(compile_kernels.STANDARDS)
    assert compiled["xcode-27"] == "metal4.1"  # older compilers do not know it


def test_kernels_come_first_and_no_job_is_doubled() -> None:
    jobs = parsed(GITHUB / "workflows" / "mac.yml")["jobs"]
    for name, job in jobs.items():
        if name in ("versions", "first", "own-mac", "nightly"):
            assert "needs" not in job, name
        else:
            assert "first" in job["needs"] if name in ("compile", "kernels") else "kernels" in job["needs"], (
                name
            )
        matrix = job.get("strategy", {}).get("matrix", {})
        lists = [v for v in matrix.values() if isinstance(v, list)]
        assert all(len({str(v) for v in values}) == len(values) for values in lists), name
    assert jobs["first"]["runs-on"] == "macos-26"
    assert "strategy" not in jobs["first"]
    assert "MLX_METAL_GPU_ARCH" not in jobs["first"].get("env", {})  # the machine's own
    assert jobs["own-mac"]["if"] == "github.event_name == 'workflow_dispatch' && inputs.own_mac"
    shards = jobs["rounds"]["strategy"]["matrix"]["shard"]
    assert shards == [f"{i + 1}/{len(shards)}" for i in range(len(shards))]
    needs = ["mlx>=0.32.2"]
    assert lowest_version.jobs("mlx", needs, "0.32.2") == ["newest"]
    assert lowest_version.jobs("mlx", needs, "0.32.20") == ["lowest", "newest"]


WITHDRAWN = {"macos-11", "macos-12", "macos-13", "macos-14", "ubuntu-20.04"}


def test_no_job_waits_for_a_machine_that_github_has_withdrawn() -> None:
    for path in WORKFLOWS:
        for name, job in parsed(path)["jobs"].items():
            matrix = job.get("strategy", {}).get("matrix", {})
            runs_on = job["runs-on"] if isinstance(job["runs-on"], list) else [job["runs-on"]]
            named = {*runs_on, *matrix.get("os", []), *(j["os"] for j in matrix.get("include", []))}
            assert not named & WITHDRAWN, (path.name, name)


def test_steps_that_need_a_gpu_fail_without_one() -> None:
    """Every pytest run and every report of the Mac workflow says which backend it must find."""
    found = 0
    for step in STEPS:
        if step.workflow == "mac":
            for words in commands(step.run):
                if (
                    "pytest" in words
                    or words[0] in ("scripts/mac_check", "scripts/test")
                    or "scripts/test" in words
                ):
                    assert "--backend=$BACKEND" in words, step.name
                    found += 1
    assert found >= 6


def test_pytest_refuses_another_backend() -> None:
    """Also where no path is given, as in scripts/test; `--backend NAME` in two words would be unknown there."""
    other = "metal" if device.backend() != "metal" else "cpu"
    command = [sys.executable, "-m", "pytest", "--co", "-p", "no:cacheprovider", "-k", "no_such_test"]
    refused = subprocess.run(
        [*command, f"--backend={other}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 4
    assert f"--backend {other} was asked for" in refused.stderr
    assert "collected" not in refused.stdout
    path = "tests/test_layers.py"
    command = [*command[:-2], f"--backend={device.backend()}", path]
    taken = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert taken.returncode == 0, taken.stdout + taken.stderr


def test_the_lowest_version_is_the_one_that_pyproject_names() -> None:
    needs = ["mlx>=0.1; sys_platform == 'no such system'", "mlx[cpu]>=0.32.2", "numpy>=2.0", "rich"]
    assert lowest_version.lowest("mlx", needs) == "mlx[cpu]==0.32.2"
    assert lowest_version.lowest("numpy", needs) == "numpy==2.0"
    for name in ("rich", "absent"):
        with pytest.raises(ValueError, match=f"no lowest version of {name}"):
            lowest_version.lowest(name, needs)


def test_the_example_of_the_lowest_version_is_true() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = (n for n in project["dependencies"] if n.startswith("mlx>=") and "darwin" in n)
    version = needed.removeprefix("mlx>=").split(";")[0]
    assert f"# on a Mac: mlx=={version}\n" in (lowest_version.__doc__ or "")


# ---- steps that Linux can run


def runs_on_linux(step: Step) -> bool:
    """Neither Apple's compiler nor a network, nor what such a step has left."""
    words = {word for command in commands(step.run) for word in command}
    compiles = "scripts/compile_kernels" in words and "--write-only" not in words
    fetched = "build/qwen" in words or "pip" in words or "GITHUB_STEP_SUMMARY" in step.run
    return step.workflow == "mac" and not (words & FOREIGN or compiles or fetched)


ON_LINUX = {step.run: step for step in STEPS if runs_on_linux(step)}


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the workflow itself runs them on a Mac")
@pytest.mark.skipif(not (ROOT / PYTHON).exists(), reason="needs .venv, which scripts/test makes")
@pytest.mark.parametrize("step", ON_LINUX.values(), ids=[s.id for s in ON_LINUX.values()])
def test_steps_run_on_linux(step: Step, tmp_path: Path) -> None:
    """As the workflow runs them, but with this machine's backend as the one to find; test runs only collect their tests."""
    script = step.run.replace("build/", f"{tmp_path}/")
    if re.search(r"pytest|scripts/test", step.run):
        script = script.replace("/bin/bash scripts/test", f"{PYTHON} -m pytest").rstrip() + " --collect-only"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "MLX_DISABLE"))}
    for name, value in step.env.items():
        if found := re.fullmatch(r"\$\{\{ matrix\.(\w+) \}\}", value):
            env[name] = step.matrix[found[1]]
    env |= {"BACKEND": device.backend(), "MLXSPEC_CACHE": str(tmp_path / "cache")}
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("given", [["nothing"], []])
def test_a_room_that_is_not_there_is_named(given: list[str]) -> None:
    ran = subprocess.run(
        [ROOT / "scripts" / "test", "--room", *given], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("--room takes one of: bench cache ")
