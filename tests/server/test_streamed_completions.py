"""Continued texts without a model: what a stream says of each answer, put together, is what the whole response says."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from typing import Any

import pytest
from planting import catches, rewritten

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.stats import RequestStats
from mlxspec.events import TokenLogprob, TopToken
from mlxspec.parsers.pieces import Content
from mlxspec.server.answer_writer import ChoicesWriter
from mlxspec.server.completions_api import CompletionWriter, LlamaWriter
from mlxspec.server.job import AnswerRequest, Extras, Job
from mlxspec.server.job_run import Delta, End, Progress, Update
from mlxspec.server.ollama_api import OllamaGenerateWriter

_WORDS = ("a", " and", "é", "\n", "path.join", "…", " ")


def told(rng: random.Random, num: int, *, has_logprobs: bool) -> list[Update]:
    """What a job may tell of `num` answers that grow side by side: rounds of one to four tokens, the last with the answer's end."""
    every: list[list[Update]] = []
    for choice in range(num):
        stats = RequestStats(num_prompt=3 + choice, num_cached=choice)
        own: list[Update] = [Progress(choice=choice, num_done=3, num_total=3, num_cached=choice, seconds=0.1)]
        for _ in range(rng.randrange(1, 5)):
            words = rng.choices(_WORDS, k=rng.randrange(1, 5))
            stats.num_generated += len(words)
            tops = (TopToken(token=1, logprob=-0.5, data=b"a"), TopToken(token=2, logprob=-2.5, data=b"b"))
            own.append(
                Delta(
                    choice=choice,
                    pieces=[Content("".join(words))],
                    stats=stats,
                    tokens=[_WORDS.index(word) for word in words],
                    logprobs=[
                        TokenLogprob(
                            token=_WORDS.index(word), logprob=-float(i), data=word.encode(), top=tops
                        )
                        for i, word in enumerate(words if has_logprobs else ())
                    ],
                )
            )
        reason: Any = rng.choice(["stop", "length"])
        own.append(
            End(choice=choice, reason=reason, cause="end" if reason == "stop" else "limit", stats=stats)
        )
        every.append(own)
    merged: list[Update] = []
    while any(every):
        merged.append(rng.choice([own for own in every if own]).pop(0))
    return merged


def job(rng: random.Random, num: int) -> Job:
    prompts = tuple(f"prompt {i}" for i in range(num))
    return Job(
        asks=tuple(AnswerRequest(prompt=[1, 2, 3], params=SamplingParams()) for _ in prompts),
        spec=SpecConfig(),
        num_prompts=num,
        prompts=prompts,
        extras=Extras(usage=True, progress=rng.random() < 0.5, timings=rng.random() < 0.5),
        returns_ids=rng.random() < 0.5,
    )


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What the chunks of a stream of completions say of each choice."""
    found: dict[int, dict[str, Any]] = defaultdict(
        lambda: {"text": "", "logprobs": defaultdict(list), "token_ids": [], "finish_reason": None}
    )
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        own = found[choice["index"]]
        own["text"] += choice["text"]
        own["token_ids"] += choice.get("token_ids", [])
        own["finish_reason"] = own["finish_reason"] or choice["finish_reason"]
        for name, values in (choice["logprobs"] or {}).items():
            own["logprobs"][name] += values
    return found


_GROWN = "mlxspec.server.completions_api:CompletionWriter._grown"


@catches(
    "offsets of a stream begin again in each chunk",
    _GROWN,
    rewritten("self._offsets[answer.number] += sum", "sum"),
)
@catches(
    "a token that was not asked for is streamed",
    _GROWN,
    rewritten("if not self._is_wanted:", "if False:"),
)
@catches(
    "its id is told",
    "mlxspec.server.completions_api:CompletionWriter._ids",
    lambda right: ChoicesWriter._ids,
)
def test_a_stream_of_completions_says_what_the_whole_one_says() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        num, echo, is_wanted = rng.randrange(1, 4), rng.random() < 0.5, rng.random() < 0.7
        asked = job(rng, num)
        writer, whole = (CompletionWriter("m", asked, echo=echo, is_wanted=is_wanted) for _ in range(2))
        chunks = list(writer.begin())
        for update in told(rng, num, has_logprobs=rng.random() < 0.5):
            chunks += writer.chunks(update)
            whole.take(update)
        chunks += writer.end()
        said, found = json.loads(json.dumps(whole.whole())), joined(chunks)
        for choice in said["choices"]:
            own = found[choice["index"]]
            assert own["text"] == choice["text"], seed
            assert own["token_ids"] == choice.get("token_ids", []), seed
            assert own["finish_reason"] == choice["finish_reason"], seed
            assert own["logprobs"] == (choice["logprobs"] or {}), seed
            assert is_wanted or (choice["text"], own["token_ids"]) == (f"prompt {choice['index']}" * echo, [])
            for text, offset in zip(
                *(own["logprobs"][name] for name in ("tokens", "text_offset")), strict=True
            ):
                assert choice["text"][offset:].startswith(text), seed
        assert chunks[-1]["usage"] == said["usage"], seed


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_stream_of_llama_cpps_says_what_the_whole_one_says(is_wanted: bool) -> None:
    for seed in range(100):
        rng = random.Random(seed)
        num = rng.randrange(1, 4)
        asked = job(rng, num)
        writer, whole = (LlamaWriter("m", asked, is_wanted=is_wanted, returns_tokens=True) for _ in range(2))
        chunks: list[dict[str, Any]] = []
        for update in told(rng, num, has_logprobs=rng.random() < 0.5):
            chunks += writer.chunks(update)
            whole.take(update)
        said = json.loads(json.dumps(whole.whole()))
        for answer in said if isinstance(said, list) else [said]:
            own = [chunk for chunk in chunks if chunk["index"] == answer["index"]]
            assert "".join(chunk["content"] for chunk in own) == answer["content"], seed
            assert [t for chunk in own for t in chunk["tokens"]] == answer["tokens"], seed
            probabilities = [p for chunk in own for p in chunk.get("completion_probabilities", [])]
            assert probabilities == answer.get("completion_probabilities", []), seed
            assert [chunk["stop"] for chunk in own] == [False] * (len(own) - 1) + [True], seed
            for name in ("stop_type", "tokens_predicted", "tokens_evaluated", "truncated"):
                assert own[-1][name] == answer[name], (seed, name)


@catches(
    "tokens of the prefix cache are no part of a prompt",
    "mlxspec.server.ollama_api:OllamaChatWriter._last",
    rewritten("stats.num_prompt", "stats.num_read"),
)
def test_a_stream_of_ollamas_says_what_the_whole_one_says() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        asked = job(rng, 1)
        writer, whole = (OllamaGenerateWriter("m", asked) for _ in range(2))
        chunks: list[dict[str, Any]] = []
        for update in told(rng, 1, has_logprobs=False):
            chunks += writer.chunks(update)
            whole.take(update)
        said = whole.whole()
        assert "".join(chunk["response"] for chunk in chunks) == said["response"], seed
        assert [chunk["done"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True], seed
        for name in ("done_reason", "prompt_eval_count", "eval_count", "prompt_eval_duration"):
            assert chunks[-1][name] == said[name], (seed, name)
        assert said["prompt_eval_count"] == 3
