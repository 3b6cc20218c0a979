"""Commands of llama-server, word for word, against a hub on this machine: they fetch, serve and draft."""

from __future__ import annotations

import json
import re
import signal
import urllib.request

import pytest
from hub_machine import Machine

from mlxspec.platform.resources import demo_folder

COMMANDS = {  # of llama.cpp's pull request 22787
    "-hf ggml-org/Qwen3-30B-A3B-GGUF:Q8_0 --spec-draft-hf ggml-org/Qwen3-0.6B-GGUF:Q8_0": "target",
    "-hf ggml-org/gemma-4-26B-A4B-it-GGUF:Q8_0 --spec-draft-hf ggml-org/gemma-4-E2B-it-GGUF": "gemma",
    "-hf ggml-org/Qwen3.6-27B-GGUF:Q8_0 --spec-draft-hf ggml-org/Qwen3.5-0.8B-GGUF:Q8_0": "target",
}
FOUND = {
    "ggml-org/Qwen3-30B-A3B-GGUF:Q8_0": "mlx-community/Qwen3-30B-A3B-8bit",
    "ggml-org/Qwen3-0.6B-GGUF:Q8_0": "mlx-community/Qwen3-0.6B-8bit",
    "ggml-org/gemma-4-26B-A4B-it-GGUF:Q8_0": "mlx-community/gemma-4-26B-A4B-it-8bit",
    "ggml-org/gemma-4-E2B-it-GGUF": "mlx-community/gemma-4-E2B-it-4bit",
    "ggml-org/Qwen3.6-27B-GGUF:Q8_0": "mlx-community/Qwen3.6-27B-8bit",
    "ggml-org/Qwen3.5-0.8B-GGUF:Q8_0": "mlx-community/Qwen3.5-0.8B-8bit",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_llama_server_starts_and_drafts(machine: Machine, command: str) -> None:
    words = command.split()
    model, draft = FOUND[words[1]], FOUND[words[3]]
    machine.hub.repos |= {model: demo_folder(COMMANDS[command]), draft: demo_folder("draft")}
    served = machine.begin("serve", *words, "--spec-default", "--spec-draft-n-max", "16", "--port", "0")
    try:
        assert served.stderr is not None
        said = []
        for line in served.stderr:
            said.append(line)
            if found := re.search(r"serves (\S+) at (http://\S+/v1)", line):
                break
        text = "".join(said)
        assert found, text
        assert found[1] == model
        assert "drafting: suffix, ngram-simple, draft-model" in text
        for given, loaded in ((words[1], model), (words[3], draft)):
            assert f"{given} is in GGUF, which MLX does not read: {loaded} is loaded in its place." in text
        body = {
            "model": "x",
            "prompt": "def main():",
            "max_tokens": 24,
            "policy": "fixed",
            "draft": "draft-model",
        }
        asked = urllib.request.Request(
            f"{found[2]}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=120) as answer:
            assert json.load(answer)["mlxspec"]["drafters"]["draft-model"]["drafted"] > 0
    finally:
        served.send_signal(signal.SIGINT)
        served.communicate(timeout=60)
