"""Prompts with images: positions, chunks, rows beside each other, the prefix cache, and text that depends on no drafter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planting import catches

from mlxspec.config import SamplingParams
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.eagle3 import Eagle3
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine
from mlxspec.engine.image_prompt import NO_IMAGES
from mlxspec.errors import ImageError
from mlxspec.models.image_rows import ImageSpan, RowImages, image_keys
from tests import tiny_models
from tests.engine import equality, images

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
WITH_LOGPROBS = replace(
    GREEDY, logprobs=True
)  # the tiny model is led by its last token: its text may stand while its numbers are wrong
PLAIN = equality.PLAIN


def engine(drafters=(), form: str = "float32", vision=None, **config) -> Engine:
    return equality.engine(drafters, form, vision=vision or images.vision(), **config)


def all_drafters(form: str = "float32"):
    model = tiny_models.target(form)
    return [
        ngram_lookup("ngram-simple", 2, 12),
        Mtp(tiny_models.mtp_head(form), model.max_context),
        Eagle3(tiny_models.eagle3(form), model.max_context),
        DraftModel(tiny_models.echo(form=form), model.vocab_size, vision=images.vision()),
    ]


def row_images(given) -> RowImages:
    spans = [ImageSpan(s, p) for s, p in zip(given.spans, given.images, strict=True)]
    return RowImages(spans, len(given.tokens), images.vision().prompt)


@pytest.mark.parametrize("seed", range(20))
def test_positions_of_any_piece_are_those_of_the_whole_prompt(seed: int) -> None:
    given, rng = images.random_prompt(seed), np.random.default_rng(seed)
    found, wanted = row_images(given), images.positions(given, 9)
    for _ in range(20):
        start, end = sorted(int(n) for n in rng.integers(0, len(wanted) + 1, 2))
        assert (found.positions(start, end) == wanted[start:end]).all()
    last = len(given.tokens) + 4
    assert found.shift(last) == wanted[last, 0] - last


def test_keys_tell_images_apart_and_do_not_depend_on_the_number() -> None:
    one, other = images.image(2, 3, 1), images.image(2, 3, 2)
    assert image_keys(one.digest, 4) == image_keys(one.digest, 6)[:4]
    assert not set(image_keys(one.digest, 6)) & set(image_keys(other.digest, 6))
    assert all(-(2**63) <= key < 0 for key in image_keys(one.digest, 1000))
    assert len(set(image_keys(one.digest, 1000))) == 1000


@pytest.mark.parametrize("chunk", [16, 17, 24, 61, 512])
def test_chunks_of_any_size_give_the_text_of_one_forward(chunk: int) -> None:
    given = images.prompt(
        images.text(9, 1), images.image(5, 4, 1), images.text(7, 2), images.image(3, 6, 2), images.text(5, 3)
    )
    wanted, sure = images.greedy_with_logprobs(tiny_models.target(), given, 20, images.OneMatrix())
    result = engine(prefill_chunk=chunk).generate(given, WITH_LOGPROBS, spec=PLAIN)
    assert list(result.tokens) == wanted
    assert np.abs(np.array([t.logprob for t in result.logprobs]) - sure).max() < 1e-4
    assert result.stats.num_prompt == len(given.tokens)


@pytest.mark.slow
def test_every_chunk_from_16_to_the_whole_gives_the_text_of_one_forward() -> None:
    given = images.prompt(
        images.text(9, 4), images.image(4, 3, 1), images.text(11, 5), images.image(2, 7, 2), images.text(6, 6)
    )
    wanted, sure = images.greedy_with_logprobs(tiny_models.target(), given, 20, images.OneMatrix())
    for chunk in range(16, len(given.tokens) + 1):
        result = engine(prefill_chunk=chunk).generate(given, WITH_LOGPROBS, spec=PLAIN)
        assert list(result.tokens) == wanted, chunk
        assert np.abs(np.array([t.logprob for t in result.logprobs]) - sure).max() < 1e-4, chunk


def test_rows_with_and_without_images_decode_together_as_alone() -> None:
    asked = [
        images.random_prompt(3),
        images.text(23, 4),
        images.random_prompt(5),
        images.text(3, 6),
    ]
    alone = [engine().generate(p, GREEDY, spec=PLAIN).tokens for p in asked]
    drafting = engine(all_drafters())
    together = drafting.generate(asked, GREEDY, spec=PLAIN)
    drafted = drafting.generate(asked, GREEDY, spec=equality.spec(*equality.ALL))
    assert [r.tokens for r in together] == alone
    assert [r.tokens for r in drafted] == alone
    for given, tokens in zip(asked, alone, strict=True):
        if not isinstance(given, list):
            assert list(tokens) == images.greedy(tiny_models.target(), given, 20, images.OneMatrix())


def test_a_second_turn_reads_no_image_again() -> None:
    vision = images.vision()
    first = images.prompt(images.text(40, 1), images.image(5, 6, 1), images.text(20, 2))
    e = engine(all_drafters(), vision=vision)
    spec = equality.spec("ngram-simple", "mtp", "draft-model")
    answer = e.generate(first, GREEDY, spec=spec)
    assert vision.tower.runs == [first.images[0].digest]
    later = images.prompt(
        images.text(40, 1), first.images[0], images.text(20, 2), list(answer.tokens), images.text(6, 3)
    )
    again = e.generate(later, GREEDY, spec=spec)
    assert again.stats.num_cached >= len(first.tokens)
    assert len(vision.tower.runs) == 1
    assert list(again.tokens) == images.greedy(tiny_models.target(), later, 20, images.OneMatrix())
    # a second image later lowers the positions behind it further
    more = images.prompt(
        *[images.text(40, 1), first.images[0], images.text(20, 2), list(answer.tokens), images.text(6, 3)],
        *[list(again.tokens), images.image(4, 4, 7), images.text(3, 4)],
    )
    third = e.generate(more, GREEDY, spec=spec)
    assert third.stats.num_cached >= len(later.tokens)
    assert len(vision.tower.runs) == 2
    assert list(third.tokens) == images.greedy(tiny_models.target(), more, 20, images.OneMatrix())


def test_another_image_of_the_same_size_misses_and_the_same_one_hits() -> None:
    e = engine()
    parts = images.text(40, 1), images.text(30, 2)
    one, other = images.image(6, 6, 1), images.image(6, 6, 2)
    first = e.generate(images.prompt(parts[0], one, parts[1]), GREEDY, spec=PLAIN)
    unlike = e.generate(images.prompt(parts[0], other, parts[1]), GREEDY, spec=PLAIN)
    same = e.generate(images.prompt(parts[0], one, parts[1]), GREEDY, spec=PLAIN)
    assert unlike.stats.num_cached <= 40
    assert unlike.tokens != first.tokens
    assert same.stats.num_cached > 40
    assert same.tokens == first.tokens


def test_the_tower_runs_once_an_image_and_step() -> None:
    vision = images.vision()
    e = engine(vision=vision)
    one, other = images.image(3, 3, 1), images.image(3, 3, 2)
    request = e.submit(images.prompt(one, other, one, images.text(4, 2)), GREEDY)
    runs = []
    while request.finish_reason is None:
        e.step()
        runs.append(len(vision.tower.runs))
    assert max(b - a for a, b in zip([0, *runs], runs, strict=False)) == 1
    assert runs[-1] == 2  # the first image stands in the prompt twice


def test_rows_that_decode_wait_for_one_image_at_most() -> None:
    """Three images that arrive at once: between two of them every row that decodes gets its tokens."""
    vision = images.vision()
    e = engine(vision=vision)
    decoding = e.submit(images.text(20, 1), replace(GREEDY, max_tokens=60), spec=PLAIN, client="a")
    while decoding.num_generated == 0:
        e.step()
    given = images.prompt(*(images.image(3, 3, i) for i in range(3)), images.text(4, 2))
    asked = e.submit(given, GREEDY, spec=PLAIN, client="b")
    runs, tokens = [0], [decoding.num_generated]
    while asked.num_generated == 0:
        e.step()
        runs.append(len(vision.tower.runs))
        tokens.append(decoding.num_generated)
    assert runs[-1] == 3
    at = [i for i in range(1, len(runs)) if runs[i] > runs[i - 1]]
    assert len(at) == 3
    assert all(tokens[later] > tokens[earlier] for earlier, later in zip(at, at[1:], strict=False))


def _uncounted(right):
    def read_image(self, end: int) -> bool:
        was_read = right(self, end)
        self.num_pieces -= was_read
        return was_read

    return read_image


@catches("an image counts as no piece", "mlxspec.engine.prefill:Prefill.read_image", _uncounted)
def test_a_prompt_of_many_images_does_not_hold_up_another_client() -> None:
    e = engine()
    e.submit(
        images.prompt(*(images.image(3, 3, i) for i in range(12)), images.text(4, 2)), GREEDY, client="a"
    )
    e.step()
    short = e.submit(images.text(5, 3), GREEDY, spec=PLAIN, client="b")
    for _ in range(2):  # one image, and its own piece
        e.step()
    assert short.num_generated
    while not e.is_idle:
        e.step()


def test_a_model_without_vision_says_so() -> None:
    e = Engine(tiny_models.target(), tiny_models.tokenizer())
    with pytest.raises(ImageError) as error:
        e.generate(images.random_prompt(1), GREEDY)
    assert str(error.value) == NO_IMAGES


def test_a_draft_model_without_a_tower_ends_and_says_so() -> None:
    model = tiny_models.target()
    e = engine([DraftModel(tiny_models.echo(), model.vocab_size)])
    given = images.random_prompt(2)
    result = e.generate(given, GREEDY, spec=equality.spec("draft-model"))
    assert result.tokens == engine().generate(given, GREEDY, spec=PLAIN).tokens
    assert result.stats.notices == [
        "draft-model drafting ended: the draft model reads no images, and the prompt holds some"
    ]


def test_parked_rows_keep_their_positions() -> None:
    e = engine(max_rows=2)
    asked = [images.random_prompt(8), images.random_prompt(9)]
    found = [images.greedy_with_logprobs(tiny_models.target(), p, 20, images.OneMatrix()) for p in asked]
    wanted, sure = zip(*found, strict=True)
    requests = [e.submit(asked[0], WITH_LOGPROBS, client="a") for _ in range(2)]
    for _ in range(4):
        e.step()
    requests.append(e.submit(asked[1], WITH_LOGPROBS, client="b"))
    was_parked = False
    while not e.is_idle:
        e.step()
        was_parked = was_parked or (e.num_waiting > 0 and requests[2].num_generated > 0)
    answers = [r.history[len(r.prompt) :] for r in requests]
    assert was_parked
    assert answers == [wanted[0], wanted[0], wanted[1]]
    for request, chances in zip(requests, (sure[0], sure[0], sure[1]), strict=True):
        assert np.abs(np.array([t.logprob for t in request.logprobs]) - chances).max() < 1e-4
