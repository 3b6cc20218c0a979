"""/v1/completions and /completion: writes answers as objects of OpenAI's older protocol and of llama.cpp's own, streamed or whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from mlxspec.events import TokenLogprob
from mlxspec.parsers.pieces import Content
from mlxspec.server.answer_writer import DATA_WITHOUT_DONE, AnswerWriter, ChoicesWriter
from mlxspec.server.blocks import Answer
from mlxspec.server.chat import finite
from mlxspec.server.job_run import Delta, End, Progress
from mlxspec.server.request_parsing import Job
from mlxspec.server.usage import drafting, progress, timings

if TYPE_CHECKING:
    from mlxspec.engine.stats import RequestStats

_STOP_TYPES = {"end": "eos", "stop_string": "word", "limit": "limit", "context": "limit"}
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "stop", "ignore_eos")


class CompletionWriter(ChoicesWriter):
    """Where the body asks for `echo`, each choice's text begins with its prompt."""

    id_prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"
    nothing: Mapping[str, Any] = {"text": ""}

    def __init__(self, model: str, body: Mapping[str, Any], job: Job) -> None:
        super().__init__(model, body, job)
        self._echo = job.prompts if body.get("echo") else ("",) * len(job.asks)
        self._offsets = [len(text) for text in self._echo]  # of the next token

    def begin(self) -> Iterator[dict[str, Any]]:
        for number, text in enumerate(self._echo):
            if text:
                yield self._chunk(number, {"text": text})

    def _grown(self, answer: Answer, update: Delta) -> Iterator[dict[str, Any]]:
        text = _text(update)
        if text or update.logprobs or self._ids(answer.number, update.tokens):
            logprobs = _logprobs(update.logprobs, self._offsets[answer.number])
            self._offsets[answer.number] += sum(len(_shown(t.data)) for t in update.logprobs)
            chunk = self._chunk(answer.number, {"text": text}, logprobs=logprobs, tokens=update.tokens)
            yield chunk | self._wanted.beside(update)

    def _said(self, answer: Answer) -> dict[str, Any]:
        echo, is_wanted = self._echo[answer.number], self._body.get("max_tokens") != 0
        text, own = (answer.text("text"), answer.logprobs) if is_wanted else ("", [])
        if not self._job.first_tokens:
            return {"text": echo + text, "logprobs": _logprobs(own, len(echo))}
        told = () if answer.end is None else answer.end.prompt_logprobs
        first = self._job.first_tokens[answer.number]
        return {"text": echo + text, "logprobs": _with_first(first, _logprobs([*told, *own], len(first)))}

    def _used(self) -> dict[str, Any]:
        used = super()._used()
        if self._body.get("max_tokens") == 0:
            used["usage"] |= {"completion_tokens": 0, "total_tokens": used["usage"]["prompt_tokens"]}
        return used

    def _reason(self, end: End | None) -> str | None:
        return "stop" if end is not None and end.reason == "tool_calls" else super()._reason(end)


def _text(update: Delta) -> str:
    return "".join(p.text for p in update.pieces if isinstance(p, Content))


def _logprobs(found: Sequence[TokenLogprob], offset: int) -> dict[str, list[Any]] | None:
    """The older form of log-probabilities: parallel lists, offsets in characters of the answer's text."""
    if not found:
        return None
    texts = [_shown(entry.data) for entry in found]
    return {
        "tokens": texts,
        "token_logprobs": [finite(entry.logprob) for entry in found],
        "top_logprobs": [{_shown(o.data): finite(o.logprob) for o in reversed(e.top)} for e in found],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)),
    }


def _with_first(first: str, found: dict[str, list[Any]] | None) -> dict[str, list[Any]]:
    """Log-probabilities with a prompt's first token in front, which has none."""
    lead = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {name: [own, *(found or {}).get(name, [])] for name, own in lead.items()}


def _shown(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


class LlamaWriter(AnswerWriter):
    """Several answers are a list of objects, told apart by `index`. Fields about slots are left out, because this server has none."""

    wire = DATA_WITHOUT_DONE  # the object with `stop` is the last

    def __init__(self, model: str, body: Mapping[str, Any], job: Job) -> None:
        super().__init__(model, body, job)
        self._is_wanted = body.get("max_tokens") != 0  # else the prompt was to be read, and no more

    def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        found = [self._whole(answer, answer.end) for answer in self._answers if answer.end is not None]
        return found[0] if len(found) == 1 else found

    def _progressed(self, update: Progress) -> dict[str, Any]:
        head = {"index": update.choice, "content": "", "tokens": [], "stop": False}
        return {**head, "prompt_progress": progress(update)}

    def _grown(self, answer: Answer, update: Delta) -> Iterator[dict[str, Any]]:
        answer.take(update)
        if not self._is_wanted:
            return
        said = {"content": _text(update), "tokens": list(update.tokens), "stop": False}
        said |= _probabilities(update.logprobs)
        yield {**_counted(answer, update.stats), **said, **self._wanted.beside(update)}

    def _ended(self, answer: Answer, end: End) -> Iterator[dict[str, Any]]:
        last = self._whole(answer, end)
        last.pop("completion_probabilities", None)  # each chunk had its own
        yield {**last, "content": "", "tokens": []}

    def _tokens(self, tokens: Sequence[int]) -> list[int]:
        return list(tokens) if self._is_wanted and self._body.get("return_tokens") else []

    def _whole(self, answer: Answer, end: End) -> dict[str, Any]:
        stats, params = end.stats, self._job.asks[answer.number].params
        text = answer.text("text") if self._is_wanted else ""
        settings = {name: getattr(params, name) for name in _SETTINGS}
        return {
            **_counted(answer, stats),
            "content": text,
            **(_probabilities(answer.logprobs) if self._is_wanted else {"tokens_predicted": 0}),
            "tokens": self._tokens(answer.tokens),
            "stop": True,
            "model": self._model,
            "generation_settings": {**settings, "n_predict": params.max_tokens, "seed": stats.seed},
            "prompt": self._job.prompts[answer.number],
            "has_new_line": "\n" in text,
            "truncated": end.cause == "context",
            "stop_type": _STOP_TYPES[end.cause],
            "tokens_cached": stats.num_cached,
            "timings": timings([stats]),
            "mlxspec": drafting([stats], self._job.notices),
        }


def _probabilities(found: Sequence[TokenLogprob]) -> dict[str, Any]:
    """llama.cpp's form of log-probabilities."""

    def entry(token: int, data: bytes, logprob: float) -> dict[str, Any]:
        return {"id": token, "token": _shown(data), "bytes": list(data), "logprob": finite(logprob)}

    told = [
        {
            **entry(t.token, t.data, t.logprob),
            "top_logprobs": [entry(o.token, o.data, o.logprob) for o in t.top],
        }
        for t in found
    ]
    return {"completion_probabilities": told} if told else {}


def _counted(answer: Answer, stats: RequestStats) -> dict[str, Any]:
    return {
        "index": answer.number,
        "tokens_predicted": stats.num_generated,
        "tokens_evaluated": stats.num_prompt,
    }
