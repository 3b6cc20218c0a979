"""`mlxspec generate --prompts FILE`: each line of a file answered once, as JSON lines, also over several runs that were ended.

A result is a whole line in the file of results, or nothing: what an ended run left half written is cut off. Knows files and requests; knows
no options.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mlxspec.cli import stats_line, terminal
from mlxspec.cli.interrupt import Interrupt
from mlxspec.cli.progress_bar import Waiting
from mlxspec.config import shown
from mlxspec.errors import CacheError, ConfigError, MlxspecError
from mlxspec.events import FinishEvent

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine
    from mlxspec.engine.request import Request

_AHEAD = 2  # requests for each row that the engine decodes: one runs, one waits


def answer_all(
    engine: Engine, prompts: Sequence[Any], submit: Callable[[Any], Request], results: Path | None
) -> tuple[int, bool]:
    """Answer the prompts that `results` has no answer to; None prints all answers. submit: queues one prompt. Returns how many lines of the
    results are errors, and whether Ctrl-C ended it. Raises ConfigError for results of other prompts."""
    with _opened(results) as file, Interrupt() as interrupt:
        known = _known(file, prompts) if results is not None else {}
        num_failed = sum("error" in r for r in known.values())
        left = [i for i in range(len(prompts)) if i not in known]
        with Waiting("answering", len(prompts), "prompts") as wait:
            for done, (i, found) in enumerate(
                _answers(engine, prompts, left, submit, interrupt), len(known) + 1
            ):
                num_failed += "error" in found
                key = "prompt" if isinstance(prompts[i], str) else "messages"
                file.write(json.dumps({"line": i + 1, key: prompts[i], **found}) + "\n")
                file.flush()
                wait.tell(done)
        return num_failed, interrupt.asked


def _answers(
    engine: Engine,
    prompts: Sequence[Any],
    left: Sequence[int],
    submit: Callable[[Any], Request],
    interrupt: Interrupt,
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(place, result) as answers end. A prompt that cannot be answered has an error and ends nothing."""
    todo, running = iter(left), dict[int, tuple[int, "Request"]]()
    is_over = False
    while not interrupt.asked:
        while not is_over and len(running) < _AHEAD * engine.config.max_rows:
            i = next(todo, None)
            is_over = i is None
            if i is None:
                break
            try:
                request = submit(prompts[i])
            except CacheError:
                raise
            except MlxspecError as error:
                yield i, {"error": str(error)}
            else:
                running[request.number] = i, request
        if not running:
            return
        for event in engine.step():
            if isinstance(event, FinishEvent) and event.request in running:
                i, request = running.pop(event.request)
                if event.reason == "error":
                    yield i, {"error": event.error or "The answer could not be finished."}
                else:
                    stats = stats_line.as_data(request.stats)
                    yield i, {"text": request.answer.text, "finish_reason": event.reason, "stats": stats}


@contextmanager
def _opened(results: Path | None) -> Iterator[TextIO]:
    """The file of results for reading and writing, held by this process alone; or stdout. Raises ConfigError."""
    if results is None:
        yield sys.stdout
        return
    try:
        handle = os.open(results, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"--output: {results} cannot be written: {error.strerror}.") from error
    with open(handle, "r+", encoding="utf-8", newline="\n") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"--output: another run writes to {results} now.") from error
        yield file


def _known(file: TextIO, prompts: Sequence[Any]) -> dict[int, Mapping[str, Any]]:
    """Results of earlier runs by place. What follows the last whole line is cut off. Raises ConfigError for what is none of these
    prompts' results."""
    found: dict[int, Mapping[str, Any]] = {}
    try:
        text = file.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--output: {file.name} is no file of results.") from error
    whole = text[: text.rfind("\n") + 1]
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            result = json.loads(line)
            i = int(result["line"]) - 1
            asked = result["messages"] if "messages" in result else result["prompt"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"--output: line {number} of the file is no result; name another file."
            ) from error
        if not 0 <= i < len(prompts) or prompts[i] != asked:
            raise ConfigError(
                f"--output: line {number} of the file answers {shown(str(asked))}, which is not prompt {i + 1} of --prompts; "
                "name another file for other prompts."
            )
        found[i] = result
    file.seek(len(whole.encode()))
    file.truncate()
    if found:
        terminal.note(f"{len(found):,} of {len(prompts):,} prompts have their result already.")
    return found
