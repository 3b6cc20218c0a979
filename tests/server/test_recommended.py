"""What a model's generation_config.json recommends is the server's default: flags and fields of requests win, each for itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import mlxspec.demo
from tests.server.serving import Served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "warm"
    shutil.copytree(Path(mlxspec.demo.__file__).parent / "target", made)
    recommended = {"do_sample": True, "temperature": 1.5, "top_k": 12, "top_p": 0.9}
    (made / "generation_config.json").write_text(json.dumps(recommended))
    return made


def settings(served: Served, **more: object) -> tuple[float, int, float]:
    """(temperature, top_k, top_p) that a request is answered with."""
    status, found = served.post("/completion", {"prompt": "def f", "n_predict": 2, **more})
    assert status == 200, found
    used = found["generation_settings"]
    return used["temperature"], used["top_k"], used["top_p"]


def test_a_server_samples_as_recommended_unless_told_otherwise(folder: Path) -> None:
    with Served("--model", str(folder), "--top-k", "7") as served:
        assert settings(served) == (1.5, 7, 0.9)
        assert settings(served, temperature=0) == (0.0, 7, 0.9)
        assert settings(served, top_k=0, top_p=1) == (1.5, 0, 1.0)
        served.wait_for("Sampling where a request says nothing: temperature 1.5, top_p 0.9, top_k 7")
        named = {"temperature": 1.5, "top_k": 7, "top_p": 0.9}
        asked = {"messages": [{"role": "user", "content": "tell me"}], "max_tokens": 16, "seed": 4}
        for path, answer in (("/v1/chat/completions", "choices"), ("/v1/messages", "content")):
            plain, same = (served.post(path, {**asked, **more})[1][answer] for more in ({}, named))
            assert [a.get("text", a.get("message")) for a in plain] == [
                a.get("text", a.get("message")) for a in same
            ]


def test_a_model_that_recommends_nothing_is_greedy(demo: Served) -> None:
    assert settings(demo) == (0.0, 0, 1.0)
