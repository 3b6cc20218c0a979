#!/usr/bin/env python3
"""llama.cpp's own server tests against our server, in their external mode: a table of what passes, what fails, and why.

    python scripts/llama_server_tests.py SOURCE [--out FILE]

SOURCE is a checkout of llama.cpp. Its tests are copied, and what would download models is taken out of the copy. They run in an
environment of their own under --work, which is made the first time. Two servers of the demo model answer them, one with an API key.

A test that fails without a reason in REASONS makes the exit code 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "pytest",
    "requests",
    "openai",
    "aiohttp",
    "wget",
    "numpy",
    "huggingface_hub",
    "prometheus-client",
)
OPEN = ("chat_completion", "tokenize", "ctx_shift", "speculative")
KEYED = ("security",)
KEY = "sk-this-is-the-secret-key"  # the tests' own

MODEL = "its model's own text or token counts"
AT_START = "sets options of the server it would start"
CORS = "other origins than this machine's get 403 instead of 200 without a CORS header"
CASE = "looks for a header by its capital letters; ours are lower case, and HTTP does not care"
REASONS = {
    "test_chat_completion": MODEL,
    "test_chat_completion_cached_tokens": MODEL,
    "test_chat_completion_stream": MODEL,
    "test_chat_completion_with_openai_library": MODEL,
    "test_chat_template": AT_START,
    "test_chat_template_assistant_prefill": AT_START,
    "test_chat_template_continue_final_message_vllm_compat": AT_START,
    "test_apply_chat_template": AT_START,
    "test_chat_completion_with_timings_per_token": "the first chunk's content is empty text, as OpenAI's is, not null",
    "test_logprobs_stream": "the first chunk's content is empty text, as OpenAI's is, not null",
    "test_context_size_exceeded": "the error's type is OpenAI's invalid_request_error, its code context_length_exceeded",
    "test_context_size_exceeded_stream": "the error's type is OpenAI's invalid_request_error, its code context_length_exceeded",
    "test_return_progress[64-4-False]": AT_START,
    "test_return_progress[64-2-True]": AT_START,
    "test_verbose_debug": "`verbose` is refused by name; /apply-template shows the prompt",
    "test_tokenize_with_bos": "the demo's tokenizer has no token that begins a text",
    "test_ctx_shift_enabled": "the context is not shifted",
    "test_ctx_shift_disabled_short_prompt[-1-248-True]": AT_START,
    "test_ctx_shift_disabled_long_prompt": AT_START,
    "test_with_ctx_shift": "the context is not shifted",
    "test_multi_requests_parallel": MODEL,
    "test_access_static_assets_without_api_key": "there is no page to protect the key from: `/` shows how to connect",
    "test_correct_api_key": "/completions is OpenAI's; llama.cpp's own form is /completion",
    "test_correct_api_key_anthropic_header": "/completions is OpenAI's; llama.cpp's own form is /completion",
    "test_cors_options": CORS,
    "test_cors_origins_localhost_reflects": CASE,
    "test_cors_origins_localhost_rejects": CORS,
    "test_cors_origins_defaults_to_localhost_with_tools_enabled": CASE,
    "test_cors_proxy_only_forwards_explicit_proxy_headers": "there is no such proxy",
    "test_local_media_file": "images are not supported yet",
}


def reason(name: str) -> str | None:
    """Of a test, by its name with its parameters or without."""
    return REASONS.get(name) or REASONS.get(name.partition("[")[0])


def copied(source: Path, folder: Path) -> Path:
    """The tests, without what downloads."""
    tests = folder / "tests"
    shutil.copytree(source / "tools" / "server" / "tests", tests)
    conftest = tests / "conftest.py"
    conftest.write_text(conftest.read_text().replace("ServerPreset.load_all()", "pass"))
    speculative = tests / "unit" / "test_speculative.py"
    speculative.write_text(re.sub(r"download_file\(MODEL_DRAFT_FILE_URL\)", "None", speculative.read_text()))
    return tests


def environment(folder: Path) -> Path:
    """Python of an environment that has the tests' packages."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


@contextmanager
def served(*args: str, key: str | None = None) -> Iterator[int]:
    """The port of a server of the demo model."""
    env = {**os.environ, **({} if key is None else {"MLXSPEC_API_KEY": key})}
    command = [sys.executable, "-m", "mlxspec", "serve", "--port", "0", *args]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr or ():
            if found := re.search(r"http://[^ ]*:(\d+)/v1", line):
                break
        else:
            raise SystemExit("The server did not start.")
        yield int(found[1])
    finally:
        process.terminate()
        process.communicate(timeout=30)


def results(python: Path, tests: Path, names: tuple[str, ...], port: int) -> dict[str, bool]:
    """Test -> whether it passed."""
    command = [python, "-m", "pytest", "-q", "-rpf", "--tb=no", *(f"unit/test_{name}.py" for name in names)]
    env = {**os.environ, "DEBUG_EXTERNAL": "1", "PORT": str(port)}
    ran = subprocess.run(command, cwd=tests, env=env, capture_output=True, text=True, timeout=900)
    found = re.findall(r"^(PASSED|FAILED) unit/(test_\w+)\.py::(.+?)(?: - .*)?$", ran.stdout, re.MULTILINE)
    if not found:
        raise SystemExit(f"The tests did not run:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    return {f"{file}::{name}": word == "PASSED" for word, file, name in found}


def table(found: dict[str, bool]) -> str:
    """Markdown: one line a test function and outcome."""
    lines: dict[tuple[str, bool], int] = {}
    for name, passed in found.items():
        key = name.partition("[")[0], passed
        lines[key] = lines.get(key, 0) + 1
    rows = ["| test | cases | result | why |", "|---|---|---|---|"]
    for (name, passed), count in sorted(lines.items()):
        file, _, test = name.partition("::")
        cases = [n.partition("::")[2] for n, p in found.items() if n.partition("[")[0] == name and not p]
        why = "" if passed else next((r for c in cases if (r := reason(c))), "**no reason known**")
        rows.append(f"| {file}: {test} | {count} | {'pass' if passed else 'fail'} | {why} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a checkout of llama.cpp")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "mlxspec-llama-tests", metavar="FOLDER"
    )
    args = parser.parse_args()
    if not (args.source / "tools" / "server" / "tests" / "unit").is_dir():
        print(
            f"{args.source} is no checkout of llama.cpp: it has no tools/server/tests/unit.", file=sys.stderr
        )
        return 2
    python = environment(args.work / "env")
    with tempfile.TemporaryDirectory() as made:
        tests = copied(args.source, Path(made))
        with served("--policy", "fixed", "--draft", "ngram-simple,mtp") as port:
            found = results(python, tests, OPEN, port)
        with served(key=KEY) as port:
            found |= results(python, tests, KEYED, port)
    text = table(found)
    print(text)
    print(f"\n{sum(found.values())} of {len(found)} pass.")
    if args.out is not None:
        args.out.write_text(text + "\n")
    names = {name: name.partition("::")[2] for name in found}
    unexplained = [n for n, passed in found.items() if not passed and reason(names[n]) is None]
    for name in unexplained:
        print(f"{name} fails without a known reason.", file=sys.stderr)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
