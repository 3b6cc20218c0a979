"""What clients of llama.cpp, Ollama and vLLM send and ask: samplers, limits, biases in pairs, mixed prompts, token ids, /props, /slots and
/api/ps; and defaults for thinking that a server is started with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import QUESTION, Served

BODY: dict[str, Any] = {"prompt": "def main():", "max_tokens": 8, "ignore_eos": True}


def complete(demo: Served, **more: Any) -> dict[str, Any]:
    status, answer = demo.post("/v1/completions", {**BODY, **more})
    assert status == 200, answer
    return answer


def text(demo: Served, **more: Any) -> str:
    return str(complete(demo, **more)["choices"][0]["text"])


def ids(demo: Served, content: str) -> list[int]:
    return list(demo.post("/tokenize", {"content": content})[1]["tokens"])


SAMPLERS: list[dict[str, Any]] = [
    {"top_n_sigma": 0.5, "temperature": 1.0, "seed": 2},
    {"typical_p": 0.3, "temperature": 1.0, "seed": 2},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05, "temperature": 1.0, "seed": 2},
    {"dry_multiplier": 5.0, "dry_allowed_length": 1, "dry_base": 2, "dry_penalty_last_n": 64, "dry_sequence_breakers": ["("],
     "max_tokens": 32},
    {"repetition_penalty": 1.8, "repeat_last_n": 6, "max_tokens": 24},
]  # fmt: skip


@pytest.mark.parametrize("asked", SAMPLERS, ids=lambda a: next(iter(a)))
def test_samplers_are_honoured_drafted_and_plain(demo: Served, asked: dict[str, Any]) -> None:
    drafted = complete(demo, **asked, policy="fixed")
    assert drafted["choices"][0]["text"] == text(demo, **asked, draft="off")
    assert drafted["mlxspec"]["notices"] == []
    off = {k: v for k, v in asked.items() if k in ("temperature", "seed", "max_tokens", "repetition_penalty")}
    assert drafted["choices"][0]["text"] != text(demo, **off)


def test_llama_cpps_and_ollamas_forms_have_them_too(demo: Served) -> None:
    asked = {"temperature": 1.0, "seed": 2, "xtc_probability": 1.0, "xtc_threshold": 0.05}
    status, answer = demo.post("/completion", {**BODY, **asked})
    assert (status, answer["content"]) == (200, text(demo, **asked))
    ollama = {
        "prompt": BODY["prompt"],
        "raw": True,
        "stream": False,
        "options": {**asked, "num_predict": 8, "ignore_eos": True},
    }
    status, answer = demo.post("/api/generate", ollama)
    assert (status, answer["response"]) == (200, text(demo, **asked))


def test_what_ends_an_answer(demo: Served) -> None:
    whole = text(demo, max_tokens=24)
    (stop, *_) = [whole[i : i + 2] for i in range(6, 12)]
    end = whole.index(stop)
    assert text(demo, max_tokens=24, stop=stop) == whole[:end]
    assert text(demo, max_tokens=24, stop=stop, include_stop_str_in_output=True) == whole[: end + len(stop)]
    tokens = complete(demo, max_tokens=24, return_token_ids=True)["choices"][0]["token_ids"]
    place = tokens.index(tokens[5])
    cut = complete(demo, max_tokens=24, stop_token_ids=[tokens[5]], return_token_ids=True)["choices"][0]
    assert (cut["token_ids"], cut["finish_reason"]) == (tokens[:place], "stop")
    late = complete(demo, max_tokens=24, stop_token_ids=[tokens[5]], min_tokens=20)
    assert late["usage"]["completion_tokens"] >= 20
    status, answer = demo.post("/v1/completions", {**BODY, "min_tokens": 9})
    assert (status, "min_tokens" in answer["error"]["message"]) == (400, True)


def test_token_ids_and_probabilities(demo: Served) -> None:
    prompt = ids(demo, BODY["prompt"])
    choice = complete(demo, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == prompt
    assert demo.post("/detokenize", {"tokens": choice["token_ids"]})[1]["content"] == choice["text"]
    _, _, data = demo.ask("POST", "/v1/completions", {**BODY, "return_token_ids": True, "stream": True})
    chunks = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    streamed = [t for chunk in chunks for c in chunk["choices"] for t in c.get("token_ids", [])]
    assert streamed == choice["token_ids"]
    chat = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4, "return_token_ids": True}
    assert len(demo.post("/v1/chat/completions", chat)[1]["choices"][0]["token_ids"]) == 4
    answer = demo.post("/completion", {**BODY, "n_probs": 2})[1]
    told = answer["completion_probabilities"]
    assert "".join(p["token"] for p in told) == answer["content"]
    assert [len(p["top_logprobs"]) for p in told] == [2] * 8
    assert all(p["logprob"] <= 0 and p["top_logprobs"][0]["id"] == p["id"] for p in told)


def test_allowed_tokens_and_pairs_of_biases(demo: Served) -> None:
    token = ids(demo, "x")[-1]
    assert text(demo, allowed_token_ids=[token], max_tokens=3) == "xxx"
    first = complete(demo, return_token_ids=True)["choices"][0]["token_ids"][0]
    without = text(demo, logit_bias={str(first): -100})
    assert without != text(demo)
    assert text(demo, logit_bias=[[first, -100]]) == text(demo, logit_bias=[[first, False]]) == without
    assert (
        text(demo, logit_bias=[["x", 100]], max_tokens=3)
        == text(demo, logit_bias={"x": 100}, max_tokens=3)
        == "xxx"
    )
    for wrong in ([[first]], [[first, True]], [[-1, 1]], [["x", 1000]], [[1.5, 1]], [5]):
        status, answer = demo.post("/v1/completions", {**BODY, "logit_bias": wrong})
        assert (status, answer["error"]["param"].startswith("logit_bias")) == (400, True), (wrong, answer)


def test_mixed_prompts(demo: Served) -> None:
    start, end = "def main", "():"
    whole = [*ids(demo, start), *ids(demo, end)]
    wanted = text(demo, prompt=whole)
    assert (
        text(demo, prompt=[*ids(demo, start), end]) == text(demo, prompt=[start, *ids(demo, end)]) == wanted
    )
    several = complete(demo, prompt=[start + end, whole, [*ids(demo, start), end]])["choices"]
    assert [c["text"] for c in several] == [text(demo), wanted, wanted]
    told = complete(demo, prompt=[{"prompt_string": start + end}, whole])["choices"]
    assert [c["text"] for c in told] == [text(demo, prompt={"prompt_string": start + end}), wanted]
    for wrong in (
        [],
        [[]],
        ["", 1],
        [1, [2]],
        [True],
        {},
        {"prompt_string": "a", "multimodal_data": ["x"]},
        [{}],
    ):
        assert demo.post("/v1/completions", {**BODY, "prompt": wrong})[0] == 400, wrong


def test_speculative_in_an_object(demo: Served) -> None:
    asked = {"policy": "fixed", "draft": "mtp", "max_tokens": 24}
    flat = complete(demo, **asked, **{"speculative.n_max": 1})
    nested = complete(demo, **asked, speculative={"n_max": 1, "n_min": 0})
    assert nested["mlxspec"]["drafters"] == flat["mlxspec"]["drafters"]
    assert nested["mlxspec"]["notices"] == []
    assert nested["mlxspec"]["drafters"] != complete(demo, **asked)["mlxspec"]["drafters"]
    for wrong, path in (({"type": "x"}, "speculative.type"), ({"n_max": 257}, "speculative.n_max")):
        status, answer = demo.post("/v1/completions", {**BODY, "speculative": wrong})
        assert (status, answer["error"]["param"]) == (400, path)
    both = {**BODY, "speculative": {"n_max": 1}, "speculative.n_max": 2}
    assert demo.post("/v1/completions", both)[0] == 400


def test_what_a_server_tells_of_itself(demo: Served) -> None:
    text(demo)  # the model is in memory
    props = json.loads(demo.ask("GET", "/props")[2])
    assert props["total_slots"] == 4
    assert props["exact_width"] is None or props["exact_width"] > 1
    assert props["default_generation_settings"]["n_ctx"] == props["default_generation_settings"]["n_ctx"] > 0
    assert "im_start" in props["chat_template"]
    slots = json.loads(demo.ask("GET", "/slots")[2])
    assert [s["id"] for s in slots] == [0, 1, 2, 3]
    assert all(s["speculative"] and s["n_ctx"] > 0 for s in slots)
    (running,) = json.loads(demo.ask("GET", "/api/ps")[2])["models"]
    assert running["context_length"] == props["default_generation_settings"]["n_ctx"]
    assert running["size_vram"] > 0


TEMPLATE = "{{ enable_thinking }} {{ preserve_thinking }} {{ reasoning_effort }} {{ messages[0].content }}"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose template writes what it is told, and which closes thinking after 7 tokens."""
    template: Path = tmp_path_factory.mktemp("template") / "told.jinja"
    template.write_text(TEMPLATE)
    words = ["--chat-template", str(template), "--reasoning", "off", "--reasoning-preserve", "--draft", "off"]
    with Served(*words, "--chat-template-kwargs", '{"reasoning_effort": "low", "other": 1}') as served:
        yield served


def test_thinking_of_a_server(told: Served) -> None:
    told.wait_for("The chat template of demo does not read other.")
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    for more, wanted in (
        ({}, "False True low x"),
        ({"enable_thinking": True}, "True True low x"),
        ({"chat_template_kwargs": {"preserve_thinking": False}}, "False False low x"),
        ({"reasoning_effort": "high"}, " True high x"),
        ({"reasoning_effort": "none"}, "False True none x"),
    ):
        assert told.post("/apply-template", {**asked, **more}) == (200, {"prompt": wanted})
    counted = told.post("/v1/chat/completions/input_tokens", asked)[1]["input_tokens"]
    assert counted == len(ids(told, "False True low x"))


def test_vllms_forms_of_tokens(demo: Served) -> None:
    """What lm-evaluation-harness's remote tokenizer sends and reads."""
    status, _, told = demo.ask("GET", "/tokenizer_info")
    info = json.loads(told)
    assert status == 200
    assert info["eos_token"] == "<|im_end|>"
    assert "im_start" in info["chat_template"]
    assert info["model_max_length"] == 2048
    text = "def main():"
    _, plain = demo.post(
        "/tokenize", {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    )
    assert plain["tokens"] == demo.post("/tokenize", {"content": text})[1]["tokens"]
    assert (plain["count"], plain["max_model_len"]) == (len(plain["tokens"]), 2048)
    assert "".join(plain["token_strs"]).replace("Ġ", " ") == text  # as the vocabulary spells them
    assert demo.post("/detokenize", {"tokens": plain["tokens"]})[1]["prompt"] == text
    for wrong in ({"prompt": "x", "content": "x"}, {}):
        assert demo.post("/tokenize", wrong)[0] == 400
