"""What breaks with images in other engines, one test for each kind of report. All are greedy or compare numbers: sampling hides them."""

from __future__ import annotations

import numpy as np
import pytest
from planting import catches

from mlxspec.config import SamplingParams
from mlxspec.engine.engine import Engine
from tests import tiny_models
from tests.engine import equality, images

NUM = 12
ASKED = SamplingParams(max_tokens=NUM, temperature=0.0, ignore_eos=True, logprobs=True)
MTP = equality.spec("mtp")
SHOWN = images.prompt(images.text(9, 1), images.image(5, 4, 1), images.text(7, 2))
OTHER = images.prompt(
    images.text(3, 5), images.image(2, 6, 2), images.text(9, 6), images.image(3, 3, 3), images.text(2, 7)
)
BLIND = images.prompt(images.text(31, 8))


def engine(**config) -> Engine:  # type: ignore[no-untyped-def]
    return equality.engine(["mtp"], vision=images.vision(), **config)


def check(given, result) -> None:  # type: ignore[no-untyped-def]
    """The text and its log-probabilities are those of forwards over everything, with positions written down by the rule."""
    wanted, sure = images.greedy_with_logprobs(tiny_models.target(), given, NUM, images.OneMatrix())
    assert list(result.tokens) == wanted
    assert np.abs(np.array([t.logprob for t in result.logprobs]) - sure).max() < 1e-4
    assert not result.stats.notices


def asked(e: Engine, given, **more):  # type: ignore[no-untyped-def]
    prompt = given if given.images else list(given.tokens)
    return e.generate(prompt, ASKED, **{"spec": MTP, **more})


def test_positions_of_an_earlier_request_are_gone() -> None:
    """Shifts that one request leaves behind turn the next one's text (mlx-vlm 1143)."""
    e = engine(max_rows=1, prefix_budget=0)
    for given in (SHOWN, BLIND, OTHER, BLIND, SHOWN):
        check(given, asked(e, given))


@catches(
    "text behind an image has the positions of its indices",
    "mlxspec.models.image_rows:RowImages.shift",
    lambda right: lambda self, length: 0,
)
def test_decoding_goes_on_at_the_shifted_position() -> None:
    """The shift is lost behind the prompt (mlx-vlm 1527, 1619, 1993), or one axis of three is used (omlx 689)."""
    given = images.prompt(
        images.text(4, 1), images.image(12, 12, 1), images.text(3, 2)
    )  # 144 tokens, 12 positions
    check(given, asked(engine(), given))
    check(given, asked(engine(), given, spec=equality.PLAIN))


@pytest.mark.parametrize("chunk", [16, 20])
def test_a_prompt_in_chunks_keeps_its_positions(chunk: int) -> None:
    """Each chunk is given the positions of the whole prompt, or positions from 0 on (mlx-vlm 1621, 1755; vLLM 10388)."""
    check(OTHER, asked(engine(prefill_chunk=chunk), OTHER))


def test_a_second_request_with_an_image_joins() -> None:
    """It ends the process (omlx 1800)."""
    e = engine()
    first = e.submit(SHOWN, ASKED, spec=MTP)
    while first.num_generated < 3:
        e.step()
    second = e.submit(OTHER, ASKED, spec=MTP)
    while not e.is_idle:
        e.step()
    assert first.history[len(first.prompt) :] == list(asked(engine(), SHOWN).tokens)
    assert second.history[len(second.prompt) :] == list(asked(engine(), OTHER).tokens)


@catches(
    "images are told apart by their size alone",
    "mlxspec.models.image_rows:image_keys",
    lambda right: lambda digest, num: right(b"", num),
)
def test_another_image_of_one_size_is_another_prompt() -> None:
    """Its token ids are the same, so a prefix cache serves the first image's states (omlx 3719)."""
    e = engine()
    one, two = (images.prompt(images.text(9, 1), images.image(6, 6, i), images.text(40, 2)) for i in (1, 2))
    asked(e, one)
    found = asked(e, two)
    assert found.stats.num_cached <= 9
    check(two, found)


def test_an_image_turns_no_drafter_off() -> None:
    """The MTP head is left out, silently, as soon as a model has its vision part (vllm-mlx 471)."""
    found = asked(engine(), SHOWN)
    check(SHOWN, found)
    assert found.stats.drafters["mtp"].num_drafted > 0


def test_one_row_with_an_image_and_one_without() -> None:
    """The row without is given the other's positions, or the batch is refused."""
    together = engine().generate([SHOWN, list(BLIND.tokens)], ASKED, spec=MTP)
    check(SHOWN, together[0])
    check(BLIND, together[1])
