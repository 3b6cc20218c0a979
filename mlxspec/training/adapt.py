"""`adapt`: reads texts with a model, teaches its drafter the model's distributions on them, and keeps the drafter if it is better.

What is kept is judged as it will draft, in the dtype and quantization that `load` gives it, on texts that were held out. Half of what is
trained on are texts of the model's own: they keep the drafter from losing what it could, and one that loses more than a point there is not
kept. The model writes them out of nothing, behind one random token or where a user's first turn would stand (as Magpie does: Xu et al.
2024, arXiv 2406.08464). Nothing leaves the machine.
"""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from mlxspec.checkpoints import adapted_head
from mlxspec.checkpoints.adapted_head import Card
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine
from mlxspec.engine.load import load
from mlxspec.errors import ConfigError, MemoryBudgetError, ModelError
from mlxspec.loading.progress import amount
from mlxspec.models.registry import Trunk
from mlxspec.models.sizes import bytes_of
from mlxspec.training.adapt_head import BYTES_A_PARAMETER, BYTES_A_WORD, ROWS, Judgement, accepted, train
from mlxspec.training.export import check_folder, export
from mlxspec.training.network import Head
from mlxspec.training.pupil import Pupil
from mlxspec.training.states import HELD_OUT, LENGTH, States, pieces_of

Named = tuple[
    str, str | Sequence[Mapping[str, Any]]
]  # a file's name, and its text or its conversation's messages
_SHARES = 0.2, 0.2  # of the time: reading texts, and writing texts of the model's own
_HELD_OUT = 64  # pieces at most
_STATES = 1 << 30  # bytes on the disk, of the texts and of the model's own each
_OWN = 8  # texts at a time


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """What came of a run. general: depth 1 on texts of the model's own, before and after. is_kept: whether it is better."""

    card: Card
    general: tuple[float, float]
    is_kept: bool


def adapt(
    model: str,
    texts: Sequence[Named],
    *,
    minutes: float,
    drafter: str | None = None,
    is_fresh: bool = False,
    told: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> Adapted:
    """Adapt the drafter of a model. texts: name and text, or conversation, of each file. drafter: folder or id of one; None: the model's
    own head, else the one that is paired with it. is_fresh: begin with the drafter itself, not with what was adapted of it before. told:
    lines on how far it is. KeyboardInterrupt while training ends it early, with the best so far.

    Raises MlxspecError subclasses; what was kept before is there then.
    """
    began, seconds = clock(), 60 * minutes
    engine = _loaded(model, drafter)
    pupil = Pupil(engine, drafter)
    with adapted_head.only_one(pupil.folder, pupil.beside):
        return _Run(engine, pupil, began + seconds, told, clock).run(texts, seconds, is_fresh=is_fresh)


def export_states(
    model: str,
    texts: Sequence[Named],
    folder: Path,
    *,
    minutes: float,
    drafter: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Write what a drafter learns from into a new folder, as export.py has it: as much of the texts as the minutes allow. Others as in
    `adapt`. Returns how many tokens were written. Raises MlxspecError subclasses."""
    until = clock() + 60 * minutes
    check_folder(folder)
    engine = _loaded(model, drafter)
    if not isinstance(engine.model, Trunk):
        raise ModelError("A model that runs by mlx-lm's code shows no hidden states.")
    try:
        pupil = Pupil(engine, drafter)
        judged = pupil.network, pupil.base
    except ModelError:  # it has no drafter yet
        judged = None
    pieces = (tokens for tokens, _ in pieces_of(_encoded(engine, texts)))
    return LENGTH * export(folder, engine.model, takewhile(lambda _: clock() < until, pieces), judged)


def _loaded(model: str, drafter: str | None) -> Engine:
    return load(model, draft_model=drafter, spec=SpecConfig(policy="fixed"), images=False, head="base")


def _encoded(engine: Engine, texts: Sequence[Named]) -> list[list[int]]:
    if engine.tokenizer is None:
        raise ModelError("This model has no tokenizer, so it reads no texts.")
    return [
        engine.tokenizer.encode(text, special=False)
        if isinstance(text, str)
        else engine.chat_prompt(list(text), add_generation_prompt=False)
        for _, text in texts
    ]


class _Run:
    """One run on one model."""

    def __init__(
        self,
        engine: Engine,
        pupil: Pupil,
        ends: float,
        told: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        if engine.tokenizer is None:
            raise ModelError("This model has no tokenizer, so it reads no texts.")
        self._tokenizer, self._engine, self._pupil = engine.tokenizer, engine, pupil
        self._network = pupil.network
        self._ends, self._told, self._clock = ends, told, clock

    def run(self, texts: Sequence[Named], seconds: float, *, is_fresh: bool) -> Adapted:
        pupil, base = self._pupil, self._pupil.base
        head = None if is_fresh else self._adapted_before()
        self._check_memory(base)
        about = self._network.target, self._network.layers, _STATES
        with States(*about) as states, States(*about) as own:
            tokens = self._read(texts, states, seconds * _SHARES[0])
            self._write_own(own, seconds * _SHARES[1])
            held, guard = states.batches_held_out(ROWS), own.batches_held_out(ROWS)
            judging = self._clock()
            first = accepted(self._network, base, held)
            start = first if head is None else accepted(self._network, head, held)
            self._told(f"accepted at depths 1 to {len(start.depths)} on held-out text: {start}")
            general_first = accepted(self._network, base, guard).depths[0]
            judging = self._clock() - judging  # what judging the result will take again
            left = max(0.0, self._ends - self._clock() - judging)
            start_head = base if head is None else head
            best = train(self._network, start_head, states, left, own=own, told=self._tell, clock=self._clock)
            as_it_drafts = pupil.as_drafting(pupil.stored(best))
            after = accepted(self._network, as_it_drafts, held)
            general = general_first, accepted(self._network, as_it_drafts, guard).depths[0]
        is_kept = after.length > start.length and general[1] > general[0] - 0.01
        card = Card(
            model=self._engine.name,
            made=datetime.date.today().isoformat(),
            before=first.depths,
            after=after.depths,
            tokens=tokens,
            texts=tuple(name for name, _ in texts),
        )
        if is_kept:
            adapted_head.keep(pupil.folder, pupil.stored(best), card, pupil.beside)
        return Adapted(card=card, general=general, is_kept=is_kept)

    def _adapted_before(self) -> Head | None:
        found = adapted_head.find(self._pupil.folder, self._pupil.beside)
        try:
            return None if found is None else self._pupil.as_drafting(found.weights())
        except ModelError as error:
            self._told(f"what was adapted before is damaged, so this begins with the drafter itself: {error}")
            return None

    def _check_memory(self, base: Head) -> None:
        words = self._network.target.vocab_size * self._network.head_copies
        own = sum(w.size for w in base.values()) * BYTES_A_PARAMETER + words * BYTES_A_WORD
        own += self._network.layer_bytes
        needed = bytes_of(self._network.target) + own
        self._told(f"training takes about {amount(own)} of memory beside the model")
        if needed > self._engine.memory.budget:
            raise MemoryBudgetError(
                f"Adapting this drafter needs {amount(needed)}, and the memory budget is {amount(self._engine.memory.budget)}."
            )

    def _read(self, texts: Sequence[Named], states: States, seconds: float) -> int:
        """Hidden states of the texts, as far as the time and the disk allow. Returns how many tokens were read."""
        until, order = self._clock() + seconds, random.Random(0).sample(range(len(texts)), len(texts))
        encoded = _encoded(self._engine, [texts[i] for i in order])
        pieces = list(pieces_of(encoded))
        num = 0
        for tokens, is_held_out in random.Random(1).sample(pieces, len(pieces)):
            if is_held_out and len(states.held_out) == _HELD_OUT:
                continue
            if self._clock() > until or not states.add(tokens, held_out=is_held_out):
                break
            num += len(tokens)
        if not states.training or not states.held_out:
            raise ConfigError(
                f"The texts are too short: {sum(map(len, encoded))} tokens; about {HELD_OUT * LENGTH} are needed, or more minutes."
            )
        self._told(
            f"read {num:,} tokens of {len(texts)} texts, {len(states.held_out) * LENGTH:,} of them held out"
        )
        return num

    def _write_own(self, own: States, seconds: float) -> None:
        """Hidden states of texts of the model's own, sampled; one of four pieces is held out."""
        until, said, rng = self._clock() + seconds, list[list[int]](), random.Random(0)
        first_turn = self._first_turn()
        while not said or self._clock() < until:
            begun = [
                first_turn or self._any_token(rng) if i % 2 else self._any_token(rng) for i in range(_OWN)
            ]
            params = [
                SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=len(said) + i, ignore_eos=True)
                for i in range(_OWN)
            ]
            results = self._engine.generate(begun, params)
            said += [[*prompt, *result.tokens] for prompt, result in zip(begun, results, strict=True)]
        for i, tokens in enumerate(text[:LENGTH] for text in said if len(text) >= LENGTH):
            own.add(tokens, held_out=i % 4 == 0)

    def _first_turn(self) -> list[int]:
        """The tokens before what a user says first; none without a chat template."""
        if self._tokenizer.template is None:
            return []
        one, other = (self._engine.chat_prompt([{"role": "user", "content": text}]) for text in ("a", "1"))
        return [a for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]

    def _any_token(self, rng: random.Random) -> list[int]:
        return [rng.randrange(self._tokenizer.num_ordinary)]

    def _tell(self, progress: Judgement) -> None:
        self._told(f"{progress.seconds:5.0f} s, step {progress.step}: {progress.held_out}")
