"""Filling a gap over HTTP: OpenAI's `suffix`, llama.cpp's /infill as editors send it, Ollama's `suffix`; the text of the same tokens given
as a prompt, drafted and plain; and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from planting import catches, rewritten

import mlxspec.demo
from mlxspec import SamplingParams, load
from mlxspec.engine.engine import Engine
from mlxspec.server import completions_api
from mlxspec.server.completions_api import CompletionRequest
from mlxspec.server.forms.base import review
from mlxspec.server.prompt import Context
from tests.server.serving import Served

NAMES = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
BEFORE = "import os\n\n\ndef join(a, *p):\n    '''Join two or more pathname components.'''\n    a = os.fspath(a)\n    "
BEHIND = "\n    return path\n\n\ndef split(p):\n    '''Split a pathname.'''\n    p = os.fspath(p)\n    sep = _get_sep(p)\n    return p\n"
PLAIN = {"temperature": 0, "max_tokens": 24}


def with_gap_tokens(folder: Path) -> Path:
    """The demo, whose last tokens are those of a vocabulary that can fill in."""
    shutil.copytree(Path(mlxspec.demo.__file__).parent / "target", folder)
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    model = state["model"]
    last = sorted(model["vocab"], key=model["vocab"].__getitem__)[-len(NAMES) :]
    model["merges"] = model["merges"][: -len(NAMES)]
    for old, new in zip(last, NAMES, strict=True):
        number = model["vocab"].pop(old)
        state["added_tokens"].append(
            state["added_tokens"][0] | {"id": number, "content": new, "special": False}
        )
    path.write_text(json.dumps(state))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_gap_tokens(tmp_path_factory.mktemp("models") / "filler")


@pytest.fixture(scope="module")
def filler(folder: Path) -> Iterator[Served]:
    with Served("--model", str(folder), "--max-rows", "4", "--prefill-chunk", "64") as served:
        yield served
        assert served.process.poll() is None, "the server has ended:\n" + "\n".join(served.lines[-20:])


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return load(folder, draft="off")


def expected(
    engine: Engine, before: str, behind: str, lead: str = "", *, num_tokens: int = PLAIN["max_tokens"]
) -> str:
    """What the model says behind the same tokens, by the Python API, without drafts."""
    assert engine.tokenizer is not None
    prefix, suffix, middle, *_ = (engine.tokenizer.id_of(name) for name in NAMES)
    encode = engine.tokenizer.encode
    prompt = [*encode(lead), prefix, *encode(before), suffix, *encode(behind), middle]
    ends = tuple(engine.tokenizer.id_of(n) for n in (*NAMES, "<|endoftext|>"))
    params = SamplingParams(max_tokens=num_tokens, stop_token_ids=ends)
    return engine.generate([i for i in prompt if i is not None], params).text


def post(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = served.post(path, body)
    assert status == 200, answer
    return answer


def test_the_text_of_the_same_tokens_drafted_and_plain(filler: Served, engine: Engine) -> None:
    right = expected(engine, BEFORE, BEHIND)
    assert right
    for drafting in ({"draft": "off"}, {"policy": "fixed"}, {}):
        body = {"prompt": BEFORE, "suffix": BEHIND, **PLAIN, **drafting}
        assert post(filler, "/v1/completions", body)["choices"][0]["text"] == right
        infill = {"input_prefix": BEFORE, "input_suffix": BEHIND, **PLAIN, **drafting}
        assert post(filler, "/infill", infill)["content"] == right
        head, rest = BEFORE[:40], BEFORE[40:]
        assert post(filler, "/infill", {**infill, "input_prefix": head, "prompt": rest})["content"] == right
    ollama = {
        "prompt": BEFORE,
        "suffix": BEHIND,
        "stream": False,
        "options": {"temperature": 0, "num_predict": 24},
    }
    assert post(filler, "/api/generate", ollama)["response"] == right
    chunks, _, _ = filler.stream("/v1/completions", {"prompt": BEFORE, "suffix": BEHIND, **PLAIN})
    assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == right
    several = post(filler, "/v1/completions", {"prompt": [BEFORE, BEFORE[:40]], "suffix": BEHIND, **PLAIN})
    assert [c["text"] for c in several["choices"]] == [right, expected(engine, BEFORE[:40], BEHIND)]


def test_tokens_around_a_gap_end_an_answer_unless_ends_are_ignored(engine: Engine) -> None:
    assert engine.tokenizer is not None
    ends = {engine.tokenizer.id_of(name) for name in (*NAMES, "<|endoftext|>")}
    body = {"prompt": "a", "suffix": "b", "stop_token_ids": [7]}
    for more, wanted in (({}, ends | {7}), ({"ignore_eos": True}, {7})):
        form, _ = review(CompletionRequest, {**body, **more})
        job, _ = completions_api.read(form, Context(engine=engine, defaults=SamplingParams()))
        assert set(job.asks[0].params.stop_token_ids) == wanted


@catches(
    "the longest prompt says how long all answers may be",
    "mlxspec.server.params:job_of",
    rewritten("min(map(len, prompts))", "max(map(len, prompts))"),
)
@pytest.mark.parametrize("more", [{}, {"suffix": "b"}])
def test_each_of_several_answers_may_fill_the_context(engine: Engine, more: dict[str, Any]) -> None:
    """However much longer another prompt of the request is."""
    body = {"prompt": ["a", "a b c " * 40, "a b"], "max_tokens": -1, **more}
    form, _ = review(CompletionRequest, body)
    job, _ = completions_api.read(form, Context(engine=engine, defaults=SamplingParams()))
    lengths = [len(ask.prompt) for ask in job.asks]
    assert max(lengths) > min(lengths) + 20
    for ask, length in zip(job.asks, lengths, strict=True):
        assert length + ask.params.max_tokens >= engine.max_context


def test_the_text_behind_the_gap_is_drafted_from(filler: Served) -> None:
    """A model that copies what stands behind the gap: held to it by a grammar, which leaves some tokens free."""
    line = BEHIND.splitlines()[5]
    asked = {
        "prompt": "def cut(p):\n",
        "suffix": BEHIND,
        "temperature": 0,
        "max_tokens": 40,
        "ignore_eos": True,
    }
    asked |= {"logit_bias": [[token, 100] for token in (line, BEHIND[-40:])]}
    plain = post(filler, "/v1/completions", {**asked, "draft": "off"})
    drafted = post(filler, "/v1/completions", {**asked, "draft": "ngram-simple", "policy": "fixed"})
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    assert drafted["mlxspec"]["drafters"]["ngram-simple"]["accepted"] > 0


def test_what_an_editor_sends(filler: Served, engine: Engine) -> None:
    """The two requests of llama.vim, field by field: warming what is kept of nearby files, then filling."""
    extra = [{"text": "def f():\n    pass\n", "time": 1.5, "filename": "a.py"}, {"text": "x = 1"}]
    common = {
        "input_extra": extra, "stream": False, "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 250,
    }  # fmt: skip
    warm = {
        "input_prefix": "",
        "input_suffix": "",
        "prompt": "",
        "n_predict": 0,
        "temperature": 0.0,
        "samplers": [],
        "response_fields": [""],
    }
    answer = post(filler, "/infill", {**warm, **common})
    assert (answer["content"], answer["tokens_predicted"], answer["stop"]) == ("", 0, True)
    fill = {
        "input_prefix": BEFORE[:40], "input_suffix": BEHIND, "prompt": BEFORE[40:], "n_predict": 24, "n_indent": 4, "top_k": 40,
        "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"], "response_fields": ["content", "timings/prompt_n", "truncated"],
    }  # fmt: skip
    answer = post(filler, "/infill", {**fill, **common, "temperature": 0})
    lead = "<|repo_name|>project\n<|file_sep|>a.py\ndef f():\n    pass\n<|file_sep|>file\nx = 1\n<|file_sep|>file\n"
    assert answer["content"] == expected(engine, BEFORE, BEHIND, lead)
    ignored = {notice.split(" ")[0] for notice in answer["mlxspec"]["notices"]}
    assert ignored == {"t_max_predict_ms", "n_indent", "samplers"}
    assert {"prompt_n", "predicted_n"} <= answer["timings"].keys()


def test_models_that_can_say_so(filler: Served, demo: Served) -> None:
    for served, can in ((filler, True), (demo, False)):
        post(served, "/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert ("insert" in post(served, "/api/show", {"model": ""})["capabilities"]) is can


@pytest.mark.parametrize(
    ("path", "wrong", "said"),
    [
        ("/v1/completions", {"suffix": 3}, "suffix must be text."),
        ("/v1/completions", {"echo": True}, "echo and suffix exclude each other"),
        ("/v1/completions", {"suffix": "word " * 20_000}, "tokens"),
        ("/v1/completions", {"prompt": [1 << 29]}, "no token id"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "suffix": "x"}, "use /v1/completions or /infill"),
        ("/infill", {"input_suffix": None}, "input_suffix must be text."),
        ("/infill", {"input_extra": ["x"]}, "input_extra[0] must be an object."),
        ("/infill", {"input_extra": [{"filename": "x"}]}, "input_extra[0].text is missing."),
        ("/infill", {"prompt": [1, 2]}, "prompt must be text."),
        ("/api/generate", {"raw": True}, "raw and suffix exclude each other"),
        ("/api/generate", {"system": "x"}, "system and suffix exclude each other"),
    ],
)  # fmt: skip
def test_what_cannot_be_filled_is_one_sentence(
    filler: Served, path: str, wrong: dict[str, Any], said: str
) -> None:
    body: dict[str, Any] = {"input_prefix": "a", "input_suffix": "b"}
    if path != "/infill":
        body = {} if "chat" in path else {"prompt": "a", "suffix": "b"}
    status, answer = filler.post(path, {**body, **wrong})
    message = answer["error"] if path.startswith("/api") else answer["error"]["message"]
    assert (status, said in message, "\n" in message) == (400, True, False), answer


def test_a_model_that_cannot_fill_in_says_so(demo: Served) -> None:
    bodies = {
        "/v1/completions": {"prompt": "a", "suffix": "b"},
        "/infill": {"input_prefix": "a", "input_suffix": ""},
        "/api/generate": {"prompt": "a", "suffix": "b"},
    }
    for path, body in bodies.items():
        status, answer = demo.post(path, body)
        assert (status, "its vocabulary has no tokens around a gap" in str(answer)) == (400, True), answer
    post(demo, "/v1/completions", {"prompt": "a", "suffix": "", "max_tokens": 1})
