"""/completion: writes answers as objects of llama.cpp's own protocol, streamed or whole.

Fields about slots are left out, because this server has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mlxspec.parsers.pieces import Content
from mlxspec.server.job_run import Delta, End, Progress, Update
from mlxspec.server.protocol import DATA_WITHOUT_DONE, AnswerProtocol
from mlxspec.server.request_parsing import Job
from mlxspec.server.usage import Extras, drafting, progress, timings

if TYPE_CHECKING:
    from mlxspec.engine.stats import RequestStats

_STOP_TYPES = {"end": "eos", "stop_string": "word", "limit": "limit", "context": "limit"}
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "stop", "ignore_eos")


class LlamaProtocol(AnswerProtocol):
    """One response. prompts: the text of each. returns_tokens: token ids beside text. Several answers are
    a list of objects, told apart by `index`."""

    wire = DATA_WITHOUT_DONE  # the object with `stop` is the last

    def __init__(
        self,
        model: str,
        job: Job,
        *,
        prompts: Sequence[str],
        returns_tokens: bool = False,
        extras: Extras | None = None,
        notices: Sequence[str] = (),
    ) -> None:
        self._model, self._job, self._prompts = model, job, list(prompts)
        self._returns_tokens, self._wanted, self._notices = returns_tokens, extras or Extras(), tuple(notices)
        self._texts = [""] * len(job.asks)
        self._tokens: list[list[int]] = [[] for _ in job.asks]
        self._ends: dict[int, End] = {}

    def chunks(self, update: Update) -> Iterator[dict[str, Any]]:
        if isinstance(update, Delta):
            self.take(update)
            tokens = list(update.tokens) if self._returns_tokens else []
            yield {
                **self._counted(update.choice, update.stats),
                "content": _text(update),
                "tokens": tokens,
                "stop": False,
                **self._wanted.beside(update),
            }
        elif isinstance(update, Progress):
            if self._wanted.progress:
                head = {"index": update.choice, "content": "", "tokens": [], "stop": False}
                yield {**head, "prompt_progress": progress(update)}
        else:
            self.take(update)
            yield {**self._whole(update), "content": "", "tokens": []}

    def take(self, update: Update) -> None:
        if isinstance(update, Delta):
            self._texts[update.choice] += _text(update)
            self._tokens[update.choice] += update.tokens
        elif isinstance(update, End):
            self._ends[update.choice] = update

    def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        found = [self._whole(self._ends[i]) for i in sorted(self._ends)]
        return found[0] if len(found) == 1 else found

    def _counted(self, choice: int, stats: RequestStats) -> dict[str, Any]:
        return {
            "index": choice,
            "tokens_predicted": stats.num_generated,
            "tokens_evaluated": stats.num_prompt,
        }

    def _whole(self, end: End) -> dict[str, Any]:
        stats, ask, text = end.stats, self._job.asks[end.choice], self._texts[end.choice]
        settings = {name: getattr(ask.params, name) for name in _SETTINGS}
        return {
            **self._counted(end.choice, stats),
            "content": text,
            "tokens": self._tokens[end.choice] if self._returns_tokens else [],
            "stop": True,
            "model": self._model,
            "generation_settings": {**settings, "n_predict": ask.params.max_tokens, "seed": stats.seed},
            "prompt": self._prompts[end.choice],
            "has_new_line": "\n" in text,
            "truncated": end.cause == "context",
            "stop_type": _STOP_TYPES[end.cause],
            "tokens_cached": stats.num_cached,
            "timings": timings([stats]),
            "mlxspec": drafting([stats], self._notices),
        }


def _text(update: Delta) -> str:
    return "".join(p.text for p in update.pieces if isinstance(p, Content))
