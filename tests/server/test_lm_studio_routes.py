"""LM Studio's API: models with their context and state in both of its forms, load and unload, answers; and other names of routes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from serving import QUESTION, Served

from mlxspec.platform.resources import demo_folder

CHAT = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a folder and another model, neither of them in memory at first."""
    folder = tmp_path_factory.mktemp("models") / "mlx-community" / "tiny"
    shutil.copytree(demo_folder("draft"), folder)
    with Served("--model", f"tiny={folder}", "--model", "demo", "--draft", "off") as served:
        yield served


def get(served: Served, path: str) -> dict[str, Any]:
    status, _, data = served.ask("GET", path)
    assert status == 200, data
    return dict(json.loads(data))


def test_models_tell_their_context_and_state(two: Served) -> None:
    """What is not in memory is told by its files."""
    assert two.post("/api/v1/models/load", {"model": "tiny"})[0] == 200
    tiny, demo = get(two, "/api/v0/models")["data"]
    assert tiny == get(two, "/api/v0/models/tiny")
    assert tiny["state"] == "loaded"
    assert tiny["loaded_context_length"] == tiny["max_context_length"] > 0
    assert [tiny[name] for name in ("type", "publisher", "arch")] == ["llm", "mlx-community", "qwen3_5"]
    assert demo["state"] == "not-loaded"
    assert demo["max_context_length"] > 0
    assert "loaded_context_length" not in demo
    new, other = get(two, "/api/v1/models")["models"]
    assert new["key"] == "tiny"
    assert new["loaded_instances"] == [
        {"id": "tiny", "config": {"context_length": tiny["max_context_length"]}}
    ]
    assert new["size_bytes"] == (demo_folder("draft") / "model.safetensors").stat().st_size
    assert other["loaded_instances"] == []
    assert two.ask("GET", "/api/v0/models/nobody")[0] == 404


def test_load_and_unload(two: Served) -> None:
    status, told = two.post("/api/v1/models/load", {"model": "demo", "config": {"context_length": 9}})
    assert (status, told["status"], told["instance_id"]) == (200, "loaded", "demo")
    assert told["config"]["context_length"] == told["load_config"]["context_length"] > 9
    states = {m["id"]: m["state"] for m in get(two, "/api/v0/models")["data"]}
    assert states == {"tiny": "not-loaded", "demo": "loaded"}
    assert two.post("/api/v1/models/unload", {"instance_id": "demo"}) == (200, {"instance_id": "demo"})
    assert all(m["loaded_instances"] == [] for m in get(two, "/api/v1/models")["models"])
    status, told = two.post("/api/v1/models/unload", {"instance_id": "demo"})
    assert (status, "not in memory" in told["error"]["message"]) == (404, True)
    assert two.post("/models/load", {"model": "demo"}) == (200, {"success": True})
    assert two.post("/models/unload", {"model": "demo"}) == (200, {"success": True})
    status, told = two.post("/api/v1/models/load", {"model": "owner/nowhere"})
    assert (status, "mlxspec pull" in told["error"]["message"]) == (404, True)
    assert two.post("/api/v1/models/unload", {"instance_id": "owner/nowhere"})[0] == 404


def test_answers_by_both_names(two: Served) -> None:
    status, told = two.post("/api/v0/chat/completions", {"model": "demo", **CHAT})
    assert (status, told["object"]) == (200, "chat.completion")
    assert two.post("/v1/chat/completions", {"model": "demo", **CHAT})[1]["choices"] == told["choices"]
    status, told = two.post("/api/v0/completions", {"model": "demo", "prompt": "def", "max_tokens": 4})
    assert (status, told["object"]) == (200, "text_completion")
    status, told = two.post("/api/v0/completions", {"model": "demo", "prompt": 3})
    assert (status, told["error"]["type"]) == (400, "invalid_request_error")


def test_other_names_of_routes(two: Served) -> None:
    assert get(two, "/ping") == get(two, "/health")
    assert get(two, "/version") == get(two, "/api/version")
