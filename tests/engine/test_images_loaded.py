"""A checkpoint with a vision tower, from its folder to answers: the Python interface and what it says where images cannot be used."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from mlxspec import SamplingParams, SpecConfig, load
from mlxspec.engine.image_prompt import PromptWithImages
from mlxspec.errors import ConfigError, ImageError
from tests.engine import sighted_demo

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
WORDS = "What does this show, and how many of them are there in the upper left corner of it, as far as you can tell?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sighted_demo.write(tmp_path_factory.mktemp("models") / "sighted")


@pytest.fixture(scope="module")
def engine(folder: Path):  # type: ignore[no-untyped-def]
    with load(folder) as found:
        yield found


def asked(image, **more):  # type: ignore[no-untyped-def]
    return [
        {
            "role": "user",
            "content": [{"type": "image", "image": image, **more}, {"type": "text", "text": WORDS}],
        }
    ]


def test_an_image_is_given_in_every_form_and_means_the_same(engine, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    data = sighted_demo.picture()
    file = tmp_path / "picture.png"
    file.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    forms = [data, bytearray(data), file, str(file), Image.open(io.BytesIO(data)), url]
    answers = [engine.chat(asked(form), GREEDY) for form in forms]
    answers.append(
        engine.chat(
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": url}},
                        {"type": "text", "text": WORDS},
                    ],
                }
            ],
            GREEDY,
        )
    )
    assert len({a.text for a in answers}) == 1
    assert all(a.stats.num_cached for a in answers[1:])
    assert engine.features.num_runs == 1
    prompt = engine.chat_input(asked(data))
    assert isinstance(prompt, PromptWithImages)
    assert [len(s) for s in prompt.spans] == [6]  # 64 x 96 pixels, 32 x 32 a token
    assert engine.chat(asked(sighted_demo.picture(seed=1)), GREEDY).text != answers[0].text


def test_drafted_text_is_plain_text(engine) -> None:  # type: ignore[no-untyped-def]
    for seed in range(3):
        prompt = engine.chat_input(asked(sighted_demo.picture(160, 96, seed + 5)))
        drafted = engine.generate(prompt, GREEDY)
        plain = engine.generate(prompt, GREEDY, spec=_off(engine))
        assert drafted.text == plain.text
        assert not drafted.stats.notices


def _off(engine):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    return replace(engine.spec, drafters=())


def test_max_pixels_bounds_the_tokens(engine) -> None:  # type: ignore[no-untyped-def]
    large = sighted_demo.picture(256, 256)
    assert len(engine.chat_input(asked(large)).spans[0]) == 64
    assert len(engine.chat_input(asked(large, max_pixels=16384)).spans[0]) == 16


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        ("https://example.org/a.png", "Images are not fetched over the network; send the image itself, as a data: URL."),
        ("data:image/png;base64,####", "The image is not valid base64."),
        ("no-such-file.png", "The image no-such-file.png cannot be read: No such file or directory."),
        (b"", "The image is empty."),
        (b"hello", "The data is no image in a supported format; send the image as PNG, JPEG, WebP or GIF."),
        (7, "An image is given as a path, as bytes, as a Pillow image or as a data: URL, not as int."),
    ],
)  # fmt: skip
def test_what_is_no_image_is_refused_in_one_sentence(engine, image, sentence: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ImageError) as error:
        engine.chat(asked(image), GREEDY)
    assert str(error.value) == sentence
    assert engine.is_idle


def test_words_that_spell_an_image_token_are_text_beside_images(engine) -> None:  # type: ignore[no-untyped-def]
    messages = asked(sighted_demo.picture())
    messages[0]["content"][1]["text"] = "<|image_pad|> is a token"
    assert engine.chat(messages, GREEDY).tokens


def test_a_model_without_images_says_so(folder: Path) -> None:
    with load(folder, images=False, draft="off") as engine, pytest.raises(ImageError) as error:
        engine.chat(asked(sighted_demo.picture()), GREEDY)
    assert str(error.value) == "Images were not asked for when the model was loaded."
    with load("demo", draft="off") as engine, pytest.raises(ImageError) as error:
        engine.chat(asked(sighted_demo.picture()), GREEDY)
    assert "images" in str(error.value)
    assert str(error.value).count(".") <= 2


def test_text_alone_is_answered_as_without_a_tower(folder: Path, engine) -> None:  # type: ignore[no-untyped-def]
    with load(folder, images=False) as blind:
        for words in ("def add(a, b):", "Count from one to five."):
            assert engine.chat(words, GREEDY).text == blind.chat(words, GREEDY).text


def test_a_draft_model_with_a_tower_of_its_own_drafts(folder: Path) -> None:
    fixed = SpecConfig(policy="fixed")
    with load(folder, draft="draft-model", draft_model=folder, spec=fixed) as engine:
        prompt = engine.chat_input(asked(sighted_demo.picture(seed=3)))
        drafted = engine.generate(prompt, GREEDY)
        assert drafted.text == engine.generate(prompt, GREEDY, spec=_off(engine)).text
        work = drafted.stats.drafters["draft-model"]
        assert work.num_accepted == work.num_drafted > 0  # it is the same model, and sees the same


def test_messages_without_images_may_have_parts(engine) -> None:  # type: ignore[no-untyped-def]
    parts = [{"role": "user", "content": [{"type": "text", "text": WORDS}]}]
    assert engine.chat(parts, GREEDY).text == engine.chat(WORDS, GREEDY).text
    with pytest.raises(ConfigError):
        engine.chat([{"role": "user", "content": [{"type": "video"}]}], GREEDY)


def test_a_prompt_with_images_has_log_probabilities(engine) -> None:  # type: ignore[no-untyped-def]
    prompt = engine.chat_input(asked(sighted_demo.picture()))
    plain = engine.generate(prompt, GREEDY, spec=_off(engine))
    found = engine.generate(prompt, replace(GREEDY, prompt_logprobs=True))
    assert found.tokens == plain.tokens
    told = [t.token for t in found.prompt_logprobs]
    assert told.count(sighted_demo.IMAGE) == 6
    assert len(told) == found.stats.num_prompt - 1
