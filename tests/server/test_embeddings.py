"""Embeddings and ranks over HTTP, beside chat in one server: OpenAI's, Ollama's and Jina's forms, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planting import catches

import mlxspec
import mlxspec.demo
from mlxspec import EngineConfig, SamplingParams
from mlxspec.engine.embedding import Found, judged, ranks, vectors
from mlxspec.engine.engine import Engine
from mlxspec.engine.worker import Worker
from mlxspec.server.embeddings import Texts
from tests.engine.test_embedding import engine as tiny_engine
from tests.engine.test_embedding import with_pooling
from tests.server.serving import QUESTION, Served

TEXTS = ["def join(a, *p):", "Return the last part of a path.", "x"]


def copied(folder: Path) -> Path:
    shutil.copytree(Path(mlxspec.demo.__file__).parent / "target", folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The demo as an embedding model, and as a reranker: with a token `yes`."""
    made = tmp_path_factory.mktemp("models")
    embedder, ranker = copied(made / "vectors"), copied(made / "ranker")
    with_pooling(embedder, "Transformer", "Pooling", "Normalize", pooling_mode_lasttoken=True)
    path = ranker / "tokenizer.json"
    state = json.loads(path.read_text())
    vocab = state["model"]["vocab"]
    last = max(vocab, key=vocab.__getitem__)
    state["model"]["merges"] = state["model"]["merges"][:-1]
    vocab["yes"] = vocab.pop(last)
    path.write_text(json.dumps(state))
    return embedder, ranker


@pytest.fixture(scope="module")
def server(folders: tuple[Path, Path]) -> Iterator[Served]:
    beside = [word for folder in folders for word in ("--embedding-model", str(folder))]
    with Served(*beside, "--max-rows", "4", "--prefill-chunk", "64") as served:
        yield served
        assert served.process.poll() is None, "the server has ended:\n" + "\n".join(served.lines[-20:])


def own(engine: Engine, texts: list[list[int]], *, ranked: bool = False) -> list[Any]:
    found: dict[int, Any] = {}
    for step in (ranks if ranked else vectors)(engine, texts):
        found |= step
    return [found[i] for i in range(len(texts))]


@pytest.fixture(scope="module")
def right(folders: tuple[Path, Path]) -> list[Any]:
    """Vectors by the Python API."""
    engine = mlxspec.load(folders[0], draft="off", config=EngineConfig(prefill_chunk=64))
    assert engine.tokenizer is not None
    return own(engine, [engine.tokenizer.encode(text) for text in TEXTS])


def post(served: Served, path: str, body: Any) -> Any:
    status, answer = served.post(path, body)
    assert status == 200, answer
    return answer


def test_all_forms_give_the_models_vectors(server: Served, right: list[Any]) -> None:
    answer = post(server, "/v1/embeddings", {"model": "vectors", "input": TEXTS})
    assert [d["index"] for d in answer["data"]] == [0, 1, 2]
    made = np.array([d["embedding"] for d in answer["data"]])
    assert np.allclose(made, right, atol=1e-5)
    assert answer["model"] == "vectors"
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 10
    encoded = post(
        server, "/v1/embeddings", {"model": "vectors", "input": TEXTS, "encoding_format": "base64"}
    )
    for one, wanted in zip(encoded["data"], right, strict=True):
        assert np.allclose(np.frombuffer(base64.b64decode(one["embedding"]), "<f4"), wanted, atol=1e-5)
    ids = [post(server, "/tokenize", {"content": text})["tokens"] for text in TEXTS]
    for given in (ids, ids[0], TEXTS[0]):
        found = post(server, "/v1/embeddings", {"model": "vectors", "input": given})["data"]
        assert np.allclose([d["embedding"] for d in found], right[: len(found)], atol=1e-5)
    start = post(server, "/tokenize", {"content": TEXTS[0][:3]})["tokens"]
    mixed = [[*start, TEXTS[0][3:]], {"prompt_string": TEXTS[1]}, ids[2]]
    for given in (mixed, mixed[0], mixed[1]):
        found = post(server, "/v1/embeddings", {"model": "vectors", "input": given})["data"]
        wanted = right[1:2] if given is mixed[1] else right[: len(found)]
        assert np.allclose([d["embedding"] for d in found], wanted, atol=1e-5)
    ollama = post(server, "/api/embed", {"model": "vectors:latest", "input": TEXTS})
    assert np.allclose(ollama["embeddings"], right, atol=1e-5)
    native = post(server, "/embedding", {"model": "vectors", "content": TEXTS})
    assert np.allclose([vector for entry in native for vector in entry["embedding"]], right, atol=1e-5)
    short = post(server, "/v1/embeddings", {"model": "vectors", "input": TEXTS[0], "dimensions": 16})
    vector = np.array(short["data"][0]["embedding"])
    assert np.allclose(vector, right[0][:16] / np.linalg.norm(right[0][:16]), atol=1e-5)


def test_openais_package(server: Served, right: list[Any]) -> None:
    openai = pytest.importorskip("openai", reason="needs openai's package")
    with openai.OpenAI(base_url=server.base, api_key="x", max_retries=0) as client:
        made = client.embeddings.create(model="vectors", input=TEXTS)
    assert np.allclose([d.embedding for d in made.data], right, atol=1e-5)


def test_documents_are_ranked(server: Served, folders: tuple[Path, Path]) -> None:
    engine = mlxspec.load(folders[1], draft="off")
    assert engine.tokenizer is not None
    asked = [judged(engine.tokenizer, "joins paths", text) for text in TEXTS]
    wanted = [float(score[0]) for score in own(engine, asked, ranked=True)]
    body = {"model": "ranker", "query": "joins paths", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
    answer = post(server, "/v1/rerank", {**body, "return_documents": True})
    scores = [r["relevance_score"] for r in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert {r["index"]: r["document"]["text"] for r in answer["results"]} == dict(enumerate(TEXTS))
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(wanted[result["index"]], rel=1e-3)
    assert len(post(server, "/v1/rerank", {**body, "top_n": 1})["results"]) == 1
    assert (
        post(server, "/reranking", body)
        == post(server, "/v1/reranking", body)
        == post(server, "/v1/rerank", body)
    )
    other = post(server, "/v1/rerank", {**body, "instruction": "Find tests"})["results"]
    assert [r["relevance_score"] for r in other] != scores


def test_a_chat_goes_on_meanwhile(server: Served) -> None:
    """Many texts, and chats meanwhile: all vectors come, and the chats' texts are what they are alone."""
    asked = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 60,
        "ignore_eos": True,
        "temperature": 0,
    }
    alone = post(server, "/v1/chat/completions", asked)["choices"][0]["message"]["content"]
    found: dict[str, Any] = {}

    def many() -> None:
        texts = [f"text number {i} {'word ' * (i % 20)}" for i in range(300)]
        found["vectors"] = post(server, "/v1/embeddings", {"model": "vectors", "input": texts})
        found["ended"] = time.monotonic()

    thread = threading.Thread(target=many)
    thread.start()
    texts = []
    while thread.is_alive():
        texts.append(post(server, "/v1/chat/completions", asked)["choices"][0]["message"]["content"])
    thread.join()
    assert len(found["vectors"]["data"]) == 300
    assert len(texts) > 1  # it did not wait for all the vectors
    assert set(texts) == {alone}


def _as_commands(right: Any) -> Any:
    return lambda self, work, *, is_piece=False: right(self, work)


@catches("rows wait for as many pieces as were asked for", "mlxspec.engine.worker:Worker.call", _as_commands)
def test_one_piece_comes_between_two_rounds() -> None:
    """Whoever reads texts, and however many do: a row that decodes waits for one forward over them."""
    happened: list[str] = []
    rests = threading.Event()  # the row goes on for ever

    def make() -> Engine:
        engine = tiny_engine("float32", "last")
        step = engine.step

        def noted() -> Any:
            happened.append("round")
            return [] if rests.is_set() else step()

        engine.step = noted  # type: ignore[method-assign]
        return engine

    def texts(name: str) -> Texts:
        def begin(_: Any) -> Iterator[Found]:
            for i in range(20):
                happened.append(name)
                yield {i: np.zeros(1, np.float32)}

        return Texts(ids=[], begin=begin, answer=lambda *_: {})

    async def all_of_them(worker: Worker) -> None:
        await asyncio.gather(*(texts(f"text {i}").run(worker) for i in range(4)))

    with Worker(make) as worker:
        worker.wait_ready()
        stream = worker.submit([5, 6, 7, 8], SamplingParams(max_tokens=1000, ignore_eos=True))
        next(iter(stream))
        rests.set()
        asyncio.run(all_of_them(worker))
        assert not worker.call(lambda engine: engine.is_idle).result()
    pieces = [i for i, what in enumerate(happened) if what != "round"]
    assert len(pieces) == 80
    assert all(later - earlier > 1 for earlier, later in pairwise(pieces))


def test_models_are_listed(server: Served) -> None:
    listed = {m["id"]: m for m in json.loads(server.ask("GET", "/v1/models")[2])["data"]}
    assert set(listed) == {"demo", "vectors", "ranker"}
    assert "embedding" in post(server, "/api/show", {"model": "vectors"})["capabilities"]
    assert server.chat(max_tokens=3)["model"] == "demo"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/embeddings", {"model": "demo", "input": "a"}, "demo makes no embeddings: its folder has no modules.json"),
        ("/v1/embeddings", {"model": "nobody", "input": "a"}, "There is no model 'nobody'"),
        ("/v1/embeddings", {"model": "vectors", "input": ""}, "input must not be empty."),
        ("/v1/embeddings", {"model": "vectors", "input": []}, "input must have at least 1 item."),
        ("/v1/embeddings", {"model": "vectors", "input": ["a", None]}, "input[1] must be"),
        ("/v1/embeddings", {"model": "vectors", "input": [1 << 29]}, "input[0] holds an id that is not there"),
        ("/v1/embeddings", {"model": "vectors", "input": "a", "dimensions": 1000}, "dimensions must be at most 192"),
        ("/v1/embeddings", {"model": "vectors", "input": "word " * 9000}, "tokens"),
        ("/api/embed", {"model": "vectors", "input": "word " * 9000, "truncate": False}, "tokens"),
        ("/v1/rerank", {"model": "ranker", "query": "a", "documents": []}, "documents must have at least 1 item."),
        ("/v1/rerank", {"model": "ranker", "documents": ["a"]}, "query is missing."),
        ("/v1/rerank", {"model": "ranker", "query": "a", "documents": ["a", "word " * 9000]}, "tokens"),
        ("/v1/rerank", {"model": "vectors", "query": "a", "documents": ["a"]}, "ranks nothing; load a reranker"),
        ("/v1/completions", {"model": "vectors", "prompt": "a"}, "vectors is there for embeddings and ranks alone."),
        ("/v1/rerank", {"model": "demo", "query": "a", "documents": ["a"]}, "ranks nothing; load a reranker"),
    ],
)  # fmt: skip
def test_what_is_refused(server: Served, path: str, body: dict[str, Any], said: str) -> None:
    status, answer = server.post(path, body)
    message = answer["error"] if path.startswith("/api") else answer["error"]["message"]
    assert (status in (400, 404), said in message, "\n" in message) == (True, True, False), answer
    assert (
        post(server, "/api/embed", {"model": "vectors", "input": "word " * 9000})["prompt_eval_count"] == 2048
    )
