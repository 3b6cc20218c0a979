"""`adapt`: reads texts with a model, teaches its drafter the model's distributions on them, and keeps the drafter if it is better.

Texts are held out twice: pieces that the best head is chosen by, and others that it is reported on. What is kept is judged as it will
draft, in the dtype and quantization that `load` gives it, and must gain more than chance does. Half of what is trained on are texts of the
model's own: they keep the drafter from losing what it could, and one that loses more than a point there is not kept. The model writes them
out of nothing, behind one random token or where a user's first turn would stand (as Magpie does: Xu et al. 2024, arXiv 2406.08464).
Nothing leaves the machine.
"""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from mlxspec.checkpoints.adapted_head import Card
from mlxspec.checkpoints.writing import check_target
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine
from mlxspec.engine.load import load
from mlxspec.errors import ConfigError, MemoryBudgetError, ModelError
from mlxspec.loading.progress import amount
from mlxspec.models.registry import Trunk
from mlxspec.models.sizes import bytes_of
from mlxspec.platform import device
from training.export import check_folder, export
from training.kept import only_one
from training.network import Head, Network
from training.new_drafter import NewDrafter
from training.pupil import Pupil
from training.states import HELD_OUT, LENGTH, Batch, States, Use, cut, pieces_of
from training.teach import (
    BYTES_A_PARAMETER,
    BYTES_A_WORD,
    ROWS,
    DepthShares,
    Judgement,
    accepted,
    is_better,
    mean,
    train,
)

Named = tuple[
    str, str | Sequence[Mapping[str, Any]]
]  # a file's name, and its text or its conversation's messages
_SHARES = 0.2, 0.2  # of the time: reading texts, and writing texts of the model's own
_HELD_OUT, _LEAST = 32, 4  # pieces for choosing, and for reporting, at most and at least
_STATES = 4 << 30  # bytes on the disk, of the texts and of the model's own each
_OWN, _OWN_BY_GPU = 8, 32  # texts at a time
_OWN_USES: Mapping[int, Use] = {0: "choosing", 1: "reporting"}  # of eight texts of the model's own


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
    new: Path | None = None,
    is_fresh: bool = False,
    told: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> Adapted:
    """Adapt the drafter of a model. texts: name and text, or conversation, of each file. drafter: folder or id of one; None: the model's
    own head, else the one that is paired with it. new: make one in this folder, which is absent or empty. is_fresh: begin with the drafter
    itself, not with what was adapted of it before. told: lines on how far it is. KeyboardInterrupt while training ends it early, with the
    best so far.

    Raises MlxspecError subclasses; what was kept before is there then.
    """
    began, seconds = clock(), 60 * minutes
    if new is not None:
        check_target(new)
    engine = _loaded(model, drafter, draft="auto" if new is None else "off")
    pupil = Pupil.of(engine, drafter) if new is None else NewDrafter(engine, new)
    with only_one(pupil.lock):
        try:
            return _Run(engine, pupil, began + seconds, told, clock).run(texts, seconds, is_fresh=is_fresh)
        finally:
            if new is not None:
                with suppress(OSError):  # it holds a drafter
                    new.rmdir()


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
        pupil = Pupil.of(engine, drafter)
        judged = pupil.network, pupil.base
    except ModelError:  # it has no drafter yet
        judged = None
    pieces = cut([token for text in _encoded(engine, texts) for token in text])
    return LENGTH * export(folder, engine.model, takewhile(lambda _: clock() < until, pieces), judged)


def _loaded(model: str, drafter: str | None, draft: str = "auto") -> Engine:
    spec, config = SpecConfig(policy="fixed"), EngineConfig(max_rows=_OWN_BY_GPU)
    return load(model, draft=draft, draft_model=drafter, spec=spec, config=config, images=False, head="base")


def _encoded(engine: Engine, texts: Sequence[Named]) -> list[list[int]]:
    if engine.tokenizer is None:
        raise ModelError("This model has no tokenizer, so it reads no texts.")
    return [
        engine.tokenizer.encode(text, special=False)
        if isinstance(text, str)
        else engine.chat_prompt(list(text), {"add_generation_prompt": False})
        for _, text in texts
    ]


def _each(network: Network, head: Head, pieces: Sequence[Batch]) -> list[DepthShares]:
    return [accepted(network, head, [piece]) for piece in pieces]


class _Run:
    """One run on one model."""

    def __init__(
        self,
        engine: Engine,
        beginner: Pupil | NewDrafter,
        ends: float,
        told: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        if engine.tokenizer is None:
            raise ModelError("This model has no tokenizer, so it reads no texts.")
        self._tokenizer, self._engine, self._beginner = engine.tokenizer, engine, beginner
        self._ends, self._told, self._clock = ends, told, clock

    def run(self, texts: Sequence[Named], seconds: float, *, is_fresh: bool) -> Adapted:
        network = self._beginner.network
        head = (
            self._adapted_before(self._beginner)
            if isinstance(self._beginner, Pupil) and not is_fresh
            else None
        )
        self._check_memory(network)
        order = random.Random(0).sample(range(len(texts)), len(texts))
        encoded = _encoded(self._engine, [texts[i] for i in order])
        about = network.target, network.layers, _STATES
        with States(*about) as states, States(*about) as own:
            tokens = self._read(encoded, states, seconds * _SHARES[0])
            said = self._write_own(own, seconds * _SHARES[1])
            pupil = self._beginner.begun([*encoded, *said])
            network, base = pupil.network, pupil.base
            held, general_held = states.batches("reporting", 1), own.batches("reporting", 1)
            guard = own.batches("choosing", ROWS)
            judging = self._clock()
            first = _each(network, base, held)
            start = first if head is None else _each(network, head, held)
            self._told(f"accepted at depths 1 to {len(network.depths)} on held-out text: {mean(start)}")
            general_first = accepted(network, base, general_held).depths[0]
            judging = self._clock() - judging  # what judging the result will take again
            left = max(0.0, self._ends - self._clock() - judging)
            start_head = base if head is None else head
            # a new drafter has nothing to lose: what it begins as may guess texts of the model's own that go round in circles
            kept_from = [] if isinstance(self._beginner, NewDrafter) else guard
            best = train(
                network,
                start_head,
                states,
                left,
                own=own,
                guard=kept_from,
                told=self._tell,
                clock=self._clock,
            )
            as_it_drafts = pupil.as_drafting(pupil.stored(best))
            after = _each(network, as_it_drafts, held)
            general = general_first, accepted(network, as_it_drafts, general_held).depths[0]
        is_kept = is_better(start, after) and (not kept_from or general[1] > general[0] - 0.01)
        card = Card(
            model=self._engine.name,
            made=datetime.date.today().isoformat(),
            before=mean(first).depths,
            after=mean(after).depths,
            tokens=tokens,
            texts=tuple(name for name, _ in texts),
        )
        if is_kept:
            pupil.keep(pupil.stored(best), card)
        return Adapted(card=card, general=general, is_kept=is_kept)

    def _adapted_before(self, pupil: Pupil) -> Head | None:
        found = pupil.adapted()
        try:
            return None if found is None else pupil.as_drafting(found.weights())
        except ModelError as error:
            self._told(f"what was adapted before is damaged, so this begins with the drafter itself: {error}")
            return None

    def _check_memory(self, network: Network) -> None:
        own = self._beginner.num_parameters * BYTES_A_PARAMETER + network.layer_bytes
        own += network.num_words * network.head_copies * BYTES_A_WORD
        own += network.target.vocab_size * 2 * LENGTH  # logits of a quarter of a piece, while it is read
        needed = bytes_of(network.target) + own
        self._told(f"training takes about {amount(own)} of memory beside the model")
        if needed > self._engine.memory.budget:
            raise MemoryBudgetError(
                f"Adapting this drafter needs {amount(needed)}, and the memory budget is {amount(self._engine.memory.budget)}."
            )

    def _read(self, encoded: Sequence[Sequence[int]], states: States, seconds: float) -> int:
        """Hidden states of the texts, as far as the time and the disk allow. Returns how many tokens were read."""
        until, pieces, num = self._clock() + seconds, pieces_of(encoded), 0
        held_out = [[piece for piece in pieces if piece.use == use] for use in ("choosing", "reporting")]
        if min(map(len, held_out)) < _LEAST:
            raise ConfigError(
                f"The texts are too short, or repeat one another: {sum(map(len, encoded))} tokens; "
                f"about {_LEAST * HELD_OUT * LENGTH} are needed that do not repeat."
            )
        shuffled = random.Random(1).sample(pieces, len(pieces))
        shuffled.sort(key=lambda piece: piece.use == "training")  # held-out pieces are read first
        for piece in shuffled:
            if piece.use != "training" and len(states.files(piece.use)) == _HELD_OUT:
                continue
            is_held_out = piece.use != "training"
            if (self._clock() > until and not is_held_out) or not states.add(piece.tokens, piece.use):
                break
            num += LENGTH
        if not states.training:
            raise ConfigError("The minutes or the disk were not enough to read any text to learn from.")
        held = len(states.choosing) + len(states.reporting)
        self._told(f"read {num:,} tokens of {len(encoded)} texts, {held * LENGTH:,} of them held out")
        return num

    def _write_own(self, own: States, seconds: float) -> list[list[int]]:
        """Hidden states of texts of the model's own, sampled; two of eight pieces are held out. Returns the texts."""
        until, said, rng = self._clock() + seconds, list[list[int]](), random.Random(0)
        first_turn, num = self._first_turn(), _OWN_BY_GPU if device.has_gpu() else _OWN
        while not said or self._clock() < until:
            begun = [
                first_turn or self._any_token(rng) if i % 2 else self._any_token(rng) for i in range(num)
            ]
            params = [
                SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=len(said) + i, ignore_eos=True)
                for i in range(num)
            ]
            results = self._engine.generate(begun, params)
            said += [[*prompt, *result.tokens] for prompt, result in zip(begun, results, strict=True)]
        for i, tokens in enumerate(text[:LENGTH] for text in said if len(text) >= LENGTH):
            own.add(tokens, _OWN_USES.get(i % 8, "training"))
        return said

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
