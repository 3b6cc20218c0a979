"""The command as a process: what it imports, how fast help is there, closed pipes, a wrong BLAS, a real terminal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60


def environment(**more: str) -> Mapping[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def mlxspec(*arguments: str | Path, **settings: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "mlxspec", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=SECONDS, **{"env": environment(), **settings})  # type: ignore[call-overload, no-any-return]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom mlxspec.cli.main import main\n"
        "assert main(['--help']) == main(['generate', '--help']) == main([]) == main(['--version']) == 0\n"
        "assert main(['generate', '-p', 'x', '--temp', 'hot']) == 2\n"
        "heavy = {'mlx', 'mlx_lm', 'numpy', 'rich', 'prompt_toolkit', 'tokenizers', 'transformers', 'huggingface_hub'}\n"
        "heavy |= {'jinja2', 'ctypes'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=SECONDS, env=environment()
    )
    assert done.returncode == 0, done.stderr.decode()


def test_ctrl_c_while_the_command_line_is_imported_is_no_traceback() -> None:
    code = (
        "import sys\n"
        "class Pressed:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'mlxspec.cli.main': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Pressed())\n"
        "from mlxspec.__main__ import main\n"
        "sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=SECONDS, env=environment()
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_a_blas_that_cannot_be_is_one_sentence(model: Path) -> None:
    done = mlxspec("generate", "-p", "x", "--model", model, env=environment(MLXSPEC_BLAS="frobnicate"))
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"mlxspec: error: MLXSPEC_BLAS must be ")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX pipes")
def test_a_reader_that_leaves_is_no_error(model: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mlxspec",
        "generate",
        "-p",
        "x",
        "--model",
        str(model),
        "--max-tokens",
        "100",
    ]
    reading, writing = os.pipe()
    os.close(reading)
    with subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, env=environment()) as process:
        os.close(writing)
        _, said = process.communicate(timeout=SECONDS)
    assert (process.returncode, said) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", ["completion bash", "inspect demo --json"])
def test_a_full_disk_behind_stdout_is_one_sentence(arguments: str) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "mlxspec", *arguments.split()]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, timeout=SECONDS, env=environment()
        )
    assert done.returncode == 2
    assert done.stderr == (
        b"mlxspec: error: The output cannot be written: No space left on device; free some space and run the command again.\n"
    )


@pytest.mark.parametrize("arguments", ["--help", "", "--version"])
def test_help_into_a_closed_pipe(arguments: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "mlxspec", *arguments.split()]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=SECONDS, env=environment())
    os.close(writing)
    assert done.stderr == b""
    assert done.returncode in (0, 141)  # some versions of argparse notice, some do not


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_streams_that_are_closed_from_the_start(closed: str) -> None:
    shell = f'"$0" -m mlxspec generate -p - --model nowhere {closed}'
    done = subprocess.run(
        ["sh", "-c", shell, sys.executable],
        capture_output=True,
        input=b"x",
        timeout=SECONDS,
        env=environment(),
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.count(b"\n") == (closed != "2>&-")


@pytest.mark.skipif(os.name != "posix", reason="the scripts are for POSIX shells")
def test_the_script_runs_the_command_from_anywhere(tmp_path: Path) -> None:
    """With an environment that is there; the command says its own name as it was called."""
    (tmp_path / "scripts").mkdir()
    for name in ("demo", "mlxspec"):
        (tmp_path / "scripts" / name).write_bytes((ROOT / "scripts" / name).read_bytes())
        (tmp_path / "scripts" / name).chmod(0o700)
    (tmp_path / "scripts" / "_env.sh").write_text(f"make_env() {{ PY={sys.executable}; }}\n")

    def called(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [script, *arguments]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=environment(),
            cwd=tmp_path,
            check=False,
        )

    assert "  scripts/mlxspec chat" in called("scripts/mlxspec").stdout
    done = called("./scripts/mlxspec", "generate", "two words", "more")
    assert (done.returncode, done.stdout) == (2, "")
    assert "put the whole prompt in quotes" in done.stderr
    done = called("scripts/demo", "--repeat", "0")
    assert done.returncode == 2
    assert "--repeat" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("more", [["--json"], []], ids=["json", "text"])  # the text has remarks beside it
def test_a_full_disk_behind_stderr_costs_the_remarks_only(more: list[str], model: Path) -> None:
    with open("/dev/full", "wb") as full:
        command = [
            sys.executable,
            "-m",
            "mlxspec",
            "generate",
            "x",
            "--model",
            str(model),
            "--max-tokens",
            "8",
            *more,
        ]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=full, timeout=SECONDS, env=environment()
        )
    assert done.returncode in (0, 120)  # Python's own, for what its last flush could not write
    assert json.loads(done.stdout)["text"] if more else done.stdout


SAYS_WHEN = """
import sys
from mlxspec.cli import terminal
say = terminal.say
def told(text, **more):
    print("now", file=sys.stderr, flush=True)
    say(text, **more)
terminal.say = told
from mlxspec.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_waits_for_its_reader_can_be_ended(number: int, model: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    command = [
        sys.executable,
        "-c",
        SAYS_WHEN,
        "generate",
        "-p",
        "x",
        "--model",
        str(model),
        "--max-tokens",
        "40",
    ]
    with subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"now\n"
        process.send_signal(number)
        try:
            assert process.wait(SECONDS) == (130 if number == signal.SIGINT else -number)
        finally:
            process.kill()
    os.close(reading)
    os.close(writing)


ENDED = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # so does nohup
from mlxspec.checkpoints import convert
def slow(draft, *more):
    (draft / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), {number})
    time.sleep(60)
convert.save_model = slow
from mlxspec.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_conversion_that_is_ended_leaves_nothing(number: int, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        ENDED.format(number=int(number)),
        "convert",
        "demo",
        "-o",
        str(tmp_path / "out"),
        "--bits",
        "4",
    ]
    done = subprocess.run(command, capture_output=True, timeout=SECONDS, env=environment())
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, b"", b"")
    assert not list(tmp_path.iterdir())
