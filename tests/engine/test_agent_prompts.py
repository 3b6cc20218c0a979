"""Sessions as agents hold them, an eighth of their length: what is read of their prompts, and what of that is new.

A text is new from where it leaves all earlier prompts and answers. An answer's message is written into later prompts without the thinking
that the prompt before it opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from planting import catches

from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine
from mlxspec.engine.prefix.rows import NEAR, STRIDE
from mlxspec.engine.read_ahead import read_ahead
from mlxspec.events import PrefillEvent
from tests import tiny_models

PART = 8  # of what agents send
PARAMS = SamplingParams(max_tokens=64 // PART, ignore_eos=True)
OPEN, THINK, ANSWER = [1, 2], [5, 6], [3, 4]  # of a message, of thinking, of an answer
RESULTS = (150, 900, 3000)  # tokens of results of tools
CHUNK = 512 // PART


class Session:
    """Conversations of one client with an engine, with counts over all of their requests. history: messages of the one that goes on.
    left: by request, tokens that were left to read when it arrived."""

    def __init__(self, seed: int, *, reads_ahead: bool = False, num_answer: int = 64) -> None:
        """reads_ahead: after each answer the beginning of the next prompt is read. num_answer: tokens of an answer."""
        self._reads_ahead, self.left = reads_ahead, list[int]()
        self._params = replace(PARAMS, max_tokens=num_answer // PART)
        self._random = np.random.default_rng(seed)
        model = tiny_models.small(max_context=1 << 16)
        config = EngineConfig(prefix_budget=1 << 28, memory_budget=1 << 30, prefill_chunk=CHUNK)
        self._engine = Engine(model, config=config)
        self._engine.prefix.space(STRIDE // PART)
        self._engine.prefix.near = NEAR // PART
        self._seen: list[list[int]] = []
        self.num_new = self.num_read = 0
        self.beyond: list[int] = []  # tokens that each request read and that were not new
        self.history: list[list[int]] = []

    def text(self, num: int) -> list[int]:
        return self._random.integers(10, tiny_models.EOS, num // PART).tolist()

    def ask(self, *, cancel_after: int = 0) -> None:
        """Send the history. cancel_after: tokens of the answer, -1 after the first piece of the prompt, 0 not at all."""
        prompt = [*self._written(), *ANSWER, *THINK]
        marks = [i + 1 for i, token in enumerate(prompt) if token == tiny_models.EOS]
        new = len(prompt) - max((_shared(prompt, text) for text in self._seen), default=0)
        request = self._engine.submit(prompt, self._params, marks=marks)
        while not self._engine.is_idle:
            events = self._engine.step()
            was_read = any(isinstance(event, PrefillEvent) for event in events)
            if (cancel_after < 0 and was_read) or 0 < cancel_after <= request.stats.num_generated:
                self._engine.cancel(request.number)
        read = request.stats.num_read
        self.num_read += read
        if cancel_after < 0:
            self._seen.append(prompt[: request.stats.num_cached + read])
            self.num_new += min(new, read)
            return
        self._seen.append(list(request.history))
        self.num_new += new
        self.beyond.append(read - new)
        self.left.append(read)
        self.history.append([*ANSWER, *list(request.history)[len(prompt) :]])
        if self._reads_ahead:
            for _ in read_ahead(self._engine, [*self._written(), *OPEN], SpecConfig(), {}):
                pass

    def _written(self) -> list[int]:
        """Return the history as prompts have it."""
        return [t for m in self.history for t in (*OPEN, *m, tiny_models.EOS, 9)]

    def turn(self, number: int) -> None:
        """The user asks or a tool has run. Some turns are cancelled first, one is followed by a compaction."""
        self.history.append(self.text(40 if number % 4 == 0 else RESULTS[number % 3]))
        if number == 5:
            self.ask(cancel_after=-1)
        self.ask(cancel_after=5 if number == 7 else 0)
        if number == 9:
            self.history.append(self.text(60))
            self.ask()
            self.history = [self.history[0], self.text(400)]
            self.ask()

    @property
    def ratio(self) -> float:
        return self.num_read / self.num_new


def _shared(a: list[int], b: list[int]) -> int:
    num = min(len(a), len(b))
    differ = np.flatnonzero(np.array(a[:num]) != np.array(b[:num]))
    return int(differ[0]) if len(differ) else num


def claude_code(session: Session) -> None:
    session.history = [session.text(9000)]
    for number in range(12):
        session.turn(number)


def codex(session: Session) -> None:
    """Its tools and instructions, and a message about the folder."""
    session.history = [session.text(5000), session.text(1100)]
    for number in range(12):
        session.turn(number)


def opencode(session: Session) -> None:
    """It asks for a title first."""
    session.history = [session.text(300), session.text(60)]
    session.ask()
    session.history = [session.text(4000)]
    for number in range(12):
        session.turn(number)


def qwen_code(session: Session) -> None:
    """A line of its system prompt changes with each request."""
    whole = session.text(7300)
    for number in range(12):
        session.history[:1] = [[*whole[: 7000 // PART], *session.text(2 * PART), *whole[7000 // PART :]]]
        session.turn(number)


def in_turns(session: Session) -> None:
    """Two conversations, with one system prompt."""
    system = session.text(6000)
    held = [[system], [system]]
    for number in range(10):
        for i in range(2):
            session.history = held[i]
            session.turn(number)
            held[i] = session.history


def chat(session: Session) -> None:
    """Twelve questions of 40 tokens."""
    session.history = [session.text(300)]
    for _ in range(12):
        session.history.append(session.text(40))
        session.ask()


AGENTS = (claude_code, codex, opencode, qwen_code, in_turns)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
@catches(
    "the line that changes is not found",
    "mlxspec.engine.prefix.rows:Prefix.branch",
    lambda right: lambda self, request: 0,
    case="qwen_code",
)
@catches(
    "only a few messages' ends are kept",
    "mlxspec.engine.prefix.rows:Prefix.stops",
    lambda right: (
        lambda self, marks, num_prompt, branch=0: tuple(range(self.stride, num_prompt, self.stride))
    ),
)
def test_nothing_is_read_twice(agent: Callable[[Session], None]) -> None:
    session = Session(1)
    agent(session)
    print(
        f"\n{agent.__name__}: {session.num_read} read, {session.num_new} new, {session.ratio:.4f}; {session.beyond}"
    )
    assert session.ratio <= 1.05
    late = [beyond for beyond in session.beyond if beyond > CHUNK]
    assert len(late) <= 1  # the first time that a line has changed


@pytest.mark.parametrize(("talk", "num_answer"), [(claude_code, 240), (chat, 480)], ids=["agent", "chat"])
@catches("nothing is read ahead", "mlxspec.engine.read_ahead:read_ahead", lambda right: lambda *_: iter(()))
def test_read_ahead_only_the_new_message_is_left(talk: Callable[[Session], None], num_answer: int) -> None:
    """When the next message arrives, its own tokens and those that open the answer are left to read, not the answer before it."""
    without, ahead = Session(1, num_answer=num_answer), Session(1, num_answer=num_answer, reads_ahead=True)
    talk(without)
    talk(ahead)
    saved = [a - b for a, b in zip(without.left, ahead.left, strict=True)]
    print(
        f"\n{talk.__name__}: {sum(without.left)} left to read, {sum(ahead.left)} where it is read ahead; {saved}"
    )
    assert without.history == ahead.history
    assert sorted(saved[1:])[len(saved) // 2] >= num_answer // PART
