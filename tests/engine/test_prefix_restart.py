"""Engines that end and begin again on one folder: prompts continue from what the disk has kept. Answers and drafts are those of an engine
that never ended, in every dtype, for recurrent states and for windows."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from planting import catches

from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.base import Needs
from mlxspec.drafters.dflash import DFlashDrafter
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.lookup import Lookup, NgramRow, ngram_lookup
from mlxspec.engine.engine import Engine, Result
from mlxspec.engine.prefix.signature import fingerprint, of_target
from mlxspec.engine.prefix.tree import TARGET
from mlxspec.engine.worker import Worker
from mlxspec.errors import ConfigError
from tests import families, tiny_models
from tests.engine import equality, images
from tests.engine.equality import ALL, spec
from tests.engine.test_prefix import words

PLENTY = 1 << 30
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, seed=5, repetition_penalty=1.1)


def engine(folder: Path | None, form: str = "float32", drafters=None, **config) -> Engine:
    more = {} if folder is None else {"prefix_disk": PLENTY, "prefix_dir": folder}
    return equality.engine(drafters, form, **{"prefix_budget": 1 << 28, **more, **config})


def ask(made: Engine, text: list[int], params: SamplingParams, wish: SpecConfig) -> Result:
    found = made.generate(text, params, spec=wish)
    made.prefix.flush(10.0)
    return found


def figures(result: Result) -> tuple:
    """All that must not tell a restart."""
    stats = result.stats
    work = {name: (d.num_drafted, d.num_accepted) for name, d in stats.drafters.items()}
    return result.tokens, stats.num_cached, stats.num_read, stats.num_rounds, work, stats.notices


@pytest.mark.parametrize(
    ("form", "wish", "params"),
    [
        ("float32", spec(*ALL), GREEDY),
        ("bfloat16", spec("mtp"), SAMPLED),
        *(
            pytest.param(form, wish, params, marks=pytest.mark.slow)
            for form in ("float32", "float16", "bfloat16", "4bit", "8bit", "mxfp4")
            for wish in (spec(*ALL), spec(), spec("draft-model"), spec("mtp"), spec("eagle3"), spec("dflash"))
            for params in (GREEDY, SAMPLED)
        ),
    ],
)
def test_a_conversation_goes_on_behind_restarts(tmp_path: Path, form: str, wish, params) -> None:
    """An engine for each turn does what one engine does for all: the same tokens, the same drafts, the same prompt tokens read."""
    own = None
    if "dflash" in wish.drafters:
        own = [DFlashDrafter(tiny_models.dflash(form=form), tiny_models.target(form).max_context)]
    one, text = engine(None, form, own), words(200, 3)
    for turn in range(3):
        own = None if own is None else [DFlashDrafter(tiny_models.make_dflash(one.model, form=form), 2048)]
        again = engine(tmp_path, form, own)
        wanted, got = ask(one, text, params, wish), ask(again, text, params, wish)
        assert figures(got) == figures(wanted), f"turn {turn}"
        assert got.stats.num_read <= (200 if turn == 0 else 32)
        disk = again.prefix.disk
        assert disk is not None
        assert disk.stats.num_failed == disk.stats.num_lost == disk.stats.num_missed == 0
        again.close()
        text = [*text, *got.tokens, *words(20, turn + 10)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", ["gemma3", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gemma4-dense", "gemma4-e"))]
)
def test_windows_are_written_as_states(tmp_path: Path, form: str) -> None:
    def gemma(folder: Path | None) -> Engine:
        model = families.target(form)
        drafters = [
            ngram_lookup("ngram-simple", 3, 12),
            DraftModel(families.draft_model(form), model.vocab_size),
        ]
        more = {} if folder is None else {"prefix_disk": PLENTY, "prefix_dir": folder}
        config = EngineConfig(prefix_budget=1 << 28, **more)
        return Engine(model, tiny_models.tokenizer(), drafters=drafters, config=config)

    one, text, wish = gemma(None), words(300, 51), spec("ngram-simple", "draft-model")
    for turn in range(3):
        again = gemma(tmp_path)
        wanted, got = ask(one, text, SAMPLED, wish), ask(again, text, SAMPLED, wish)
        assert figures(got) == figures(wanted), f"turn {turn}"
        assert (got.stats.num_cached > 0) == (turn > 0)
        again.close()
        text = [*text, *got.tokens, *words(5, turn)]


def test_a_drafter_that_was_not_there_catches_up(tmp_path: Path) -> None:
    """Rows without the MTP head leave the hiddens that it begins with; behind a restart it drafts as if it had been there."""
    text = words(600, 7)
    one, first = engine(None), engine(tmp_path)
    for made in (one, first):
        answer = ask(made, text, GREEDY, spec("ngram-simple"))
    first.close()
    longer = [*text, *answer.tokens, *words(20, 8)]
    for turn in range(2):
        again = engine(tmp_path)
        wanted, got = (ask(e, longer, GREEDY, spec("mtp")) for e in (one, again))
        assert got.tokens == wanted.tokens
        assert got.stats.num_read <= 32
        assert got.stats.notices == []
        assert got.stats.drafters["mtp"].num_drafted == wanted.stats.drafters["mtp"].num_drafted
        again.close()
        longer = [*longer, *got.tokens, *words(20, 9 + turn)]


def test_states_of_every_drafter_that_has_some_are_written(tmp_path: Path) -> None:
    made = engine(tmp_path)
    ask(made, words(200, 3), GREEDY, spec(*ALL))
    disk = made.prefix.disk
    parts = [json.loads(disk.files.metadata(name)["parts"]) for name in disk.files.found]
    assert {part["name"] for part in parts[0]} >= {TARGET, "mtp", "draft-model"}
    made.close()


@pytest.mark.parametrize("form", ["float32", "bfloat16", "4bit"])
def test_every_bit_of_the_weights_counts(form: str) -> None:
    model = tiny_models.make(tiny_models.config(), form=form)
    before = fingerprint(model)
    assert before == fingerprint(tiny_models.make(tiny_models.config(), form=form))
    matrices = [(n, w) for n, w in tree_flatten(model.parameters()) if w.ndim == 2 and min(w.shape) > 5]
    name, weight = matrices[0]
    flipped = np.array(weight.view(mx.uint8))
    flipped[3, 5] ^= 0x80
    swapped = np.array(weight.view(mx.uint8))[::-1].copy()
    for changed in (flipped, swapped):
        model.update(tree_unflatten([(name, mx.array(changed).view(weight.dtype))]))
        assert fingerprint(model) != before


@catches(
    "settings are not part of a signature",
    "mlxspec.engine.prefix.signature:_settings",
    lambda right: lambda module: [],
)
def test_settings_of_the_same_weights_count() -> None:
    """Rotary positions and the layers that a drafter reads change states, not weights."""
    c = tiny_models.config()
    one, other = (tiny_models.make(x) for x in (c, replace(c, rope_theta=2 * c.rope_theta)))
    assert fingerprint(one) != fingerprint(other)
    blocks = tiny_models.make_dflash(one), tiny_models.make_dflash(one)
    assert fingerprint(blocks[0]) == fingerprint(blocks[1])
    blocks[1].config = replace(blocks[1].config, layer_ids=(0, 1))
    assert fingerprint(blocks[0]) != fingerprint(blocks[1])


def test_exact_rows_continue_from_exact_rows_only() -> None:
    """States behind answers were computed in rounds, whose bits are not those of prompts."""
    model = tiny_models.target()
    assert of_target(model, EngineConfig()) != of_target(model, EngineConfig(exact=True))
    assert of_target(model, EngineConfig()) == of_target(model, EngineConfig(max_rows=2))


def test_images_continue_behind_a_restart_with_the_same_tower_only(tmp_path: Path) -> None:
    """Image tokens are known by their image. Another tower makes other rows of it, and so other states."""

    def made(tower: int, drafting: int, folder: Path | None = tmp_path) -> Engine:
        model = tiny_models.target()
        drafter = DraftModel(tiny_models.echo(), model.vocab_size, vision=images.vision(seed=drafting))
        more = {} if folder is None else {"prefix_disk": PLENTY, "prefix_dir": folder}
        vision = images.vision(seed=tower)
        return equality.engine([drafter], model=model, vision=vision, prefix_budget=1 << 28, **more)

    wish = spec("draft-model")
    given = images.prompt(words(40, 1), images.image(6, 6, 1), words(80, 2))
    other = images.prompt(words(40, 1), images.image(6, 6, 2), words(80, 2))
    first = made(11, 11)
    ask(first, given, GREEDY, wish)
    first.close()
    found = {}
    for name, tower, drafting, asked in (
        ("same", 11, 11, given),
        ("other tower", 12, 11, given),
        ("other tower of the draft model", 11, 12, given),
        ("other image", 11, 11, other),
    ):
        again = made(tower, drafting)
        got = ask(again, asked, GREEDY, wish)
        wanted = made(tower, drafting, None).generate(asked, GREEDY, spec=wish)
        assert got.tokens == wanted.tokens, name
        found[name] = got.stats.num_cached
        drafter = again.drafts.drafters["draft-model"]
        if name == "same":
            assert again.vision.tower.runs == drafter._vision.tower.runs == []
        elif name == "other tower of the draft model":
            assert len(drafter._vision.tower.runs) == 1
        again.close()
    assert found["same"] >= 144
    assert found["other tower"] == 0
    assert found["other tower of the draft model"] >= 144
    assert found["other image"] <= 40


def test_a_tower_without_known_weights_has_no_prefix_cache_on_disk(tmp_path: Path, caplog) -> None:  # type: ignore[no-untyped-def]
    vision = replace(images.vision(), tower=lambda prepared: mx.zeros((prepared.tokens, 64)))
    config = EngineConfig(prefix_disk=PLENTY, prefix_dir=tmp_path)
    made = Engine(tiny_models.target(), tiny_models.tokenizer(), config=config, vision=vision)
    assert made.prefix.disk is None
    assert "There is no prefix cache on disk" in caplog.text


class _Held:
    """Reading waits until it is let go, for a minute at most, so that a test that fails ends."""

    def __init__(self, made: Engine) -> None:
        self.go = threading.Event()
        files = made.prefix.disk.files
        read = files.read

        def held(*args: object) -> object:
            self.go.wait(60)
            return read(*args)

        files.read = held


def kept(folder: Path, num: int = 300) -> list[int]:
    """A text that is on disk."""
    text, first = words(num, 1), engine(folder)
    ask(first, text, GREEDY, spec("mtp"))
    first.close()
    return text


def test_rows_go_on_while_a_prompt_waits_for_the_disk(tmp_path: Path) -> None:
    text = kept(tmp_path)
    made = engine(tmp_path)
    held = _Held(made)
    decoding = made.submit(words(9, 2), SamplingParams(max_tokens=60, ignore_eos=True), spec=spec("mtp"))
    while not decoding.num_generated:
        made.step()
    waiting = made.submit(text, GREEDY, spec=spec("mtp"))
    while decoding.finish_reason is None:
        made.step()
    assert waiting.num_generated == 0
    assert waiting.stats.num_read == 0
    assert made.prefix.coming > 0
    held.go.set()
    while waiting.finish_reason is None:
        made.step()
    assert waiting.stats.num_cached == 300
    assert made.prefix.coming == 0
    made.close()


@pytest.mark.parametrize(
    "how", ["cancel", *(pytest.param(how, marks=pytest.mark.slow) for how in ("deadline", "close"))]
)
def test_a_request_may_end_while_it_waits_for_the_disk(tmp_path: Path, how: str) -> None:
    text = kept(tmp_path)
    made = engine(tmp_path)
    held = _Held(made)
    waiting = made.submit(text, GREEDY, deadline=0.05 if how == "deadline" else None)
    made.step()
    assert made.prefix.coming > 0
    if how == "close":
        held.go.set()
        made.close()
    elif how == "cancel":
        assert made.cancel(waiting.number)
    else:
        time.sleep(0.06)
    made.step() if how != "close" else None
    assert made.is_idle
    assert made.prefix.coming == 0
    held.go.set()
    if how != "close":
        assert ask(made, text, GREEDY, spec("mtp")).stats.num_cached == 300
        made.close()


def test_what_lacks_a_drafters_part_is_passed_over_for_a_shorter_beginning(tmp_path: Path) -> None:
    text = kept(tmp_path)
    made = engine(tmp_path)
    longer = [*text, *words(60, 7)]
    ask(made, longer, GREEDY, spec())
    made.close()
    for wish, cached in ((spec(), 360), (spec("mtp"), 300), (spec("mtp", "eagle3"), 0)):
        made = engine(tmp_path, prefix_disk=PLENTY)
        request = made.submit(longer, GREEDY, spec=wish)
        while not made.is_idle:
            made.step()
        assert (request.stats.num_cached, request.stats.notices) == (cached, [])
        assert made.prefix.coming == 0
        made.write_out(0.0)  # nothing of this answer
    made.close()


def test_what_is_read_has_room_in_the_budget(tmp_path: Path) -> None:
    """Memory that reading takes is the prefix cache's: it has that much less, and what does not fit is not read."""
    text = kept(tmp_path)
    made = engine(tmp_path)
    held = _Held(made)
    made.submit(text, GREEDY)
    made.step()
    coming = made.prefix.coming
    assert coming > 10000
    assert made.prefix.tree.budget == (1 << 28) - coming
    held.go.set()
    while not made.is_idle:
        made.step()
    assert made.prefix.tree.budget == 1 << 28
    made.close()
    tight = engine(tmp_path, prefix_budget=coming // 4)
    got = ask(tight, text, GREEDY, spec("mtp"))
    assert got.stats.num_cached == 0
    tight.close()


def test_an_idle_worker_writes(tmp_path: Path) -> None:
    with Worker(lambda: engine(tmp_path)) as worker:
        made = worker.wait_ready(60)
        for _ in worker.submit(words(600, 2), GREEDY, spec=spec("mtp")):
            pass
        until = time.monotonic() + 30
        # the answer's state is offered behind its last event
        while made.prefix.disk.stats.num_written < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert made.prefix.disk.stats.num_written == 2
    again = engine(tmp_path)
    assert ask(again, words(600, 2), GREEDY, spec("mtp")).stats.num_cached == 600
    again.close()


def test_a_state_that_is_found_again_is_written(tmp_path: Path) -> None:
    """A waypoint inside a long prompt is written once a text goes on from it."""
    first = engine(tmp_path, max_context=2048, prefill_chunk=64)
    first.prefix.stride = 512
    text = words(900, 5)
    ask(first, text, GREEDY, spec())

    def lengths() -> set[int]:
        return {int(name.split("-")[1]) for name in first.prefix.disk.files.found}

    assert lengths() == {900, 939}
    ask(first, [*text[:600], 1, 2, 3], GREEDY, spec())
    assert 512 in lengths()
    first.close()


def test_a_drafter_of_ones_own_that_hears_hiddens_keeps_it_off(tmp_path: Path, caplog) -> None:
    class Own(Lookup):
        needs = Needs(hidden=True)

    made = engine(tmp_path, drafters=[Own("own", lambda: NgramRow("ngram-simple", 3, 4))])
    assert made.prefix.disk is None
    assert "the drafter own does not say by which `modules`" in caplog.text
    assert not list(tmp_path.glob("*.safetensors"))


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="prefix_disk needs a prefix_budget"):
        EngineConfig(prefix_disk=1, prefix_budget=0)
    with pytest.raises(ConfigError, match="prefix_dir needs prefix_disk"):
        EngineConfig(prefix_dir="x")
