"""Reading a text in one forward of mlx-lm decides what decoding it token by token decides."""

from __future__ import annotations

from dataclasses import asdict

import mlx.core as mx
import pytest
from mlx_lm.models import gemma3_text
from real_parts import mlx_lm_reader
from real_parts.mlx_lm_reader import CHUNK, Reader

LIMIT = 12
ARGS = gemma3_text.ModelArgs(
    model_type="gemma3_text",
    hidden_size=32,
    num_hidden_layers=6,
    intermediate_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    query_pre_attn_scalar=16,
    sliding_window=8,
    sliding_window_pattern=3,
    vocab_size=96,
)
PROMPTS = {"short": range(1, 6), "across windows": [(7 * i) % 90 for i in range(40)]}


@pytest.fixture(scope="module")
def model() -> gemma3_text.Model:
    mx.random.seed(3)
    made = gemma3_text.Model(ARGS)
    made.update({"model": {"embed_tokens": {"weight": 0.3 * mx.random.normal((96, 32))}}})
    mx.eval(made.parameters())
    return made


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("chunk", [4, CHUNK])
def test_what_is_decoded_is_read(
    model: gemma3_text.Model, name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlx_lm_reader, "CHUNK", chunk)
    reader, prompt = Reader(model, ends=[95], limit=LIMIT), list(PROMPTS[name])
    answer = reader.decode(prompt)
    assert len(set(answer)) > 1, asdict(ARGS)
    found = reader.read(prompt, answer)
    assert found["sure"]
    assert found["margin"] >= mlx_lm_reader.MARGIN


def test_another_last_token_is_found_where_it_is(model: gemma3_text.Model) -> None:
    reader, prompt = Reader(model, ends=[95], limit=LIMIT), list(PROMPTS["short"])
    answer = reader.decode(prompt)
    found = reader.read(prompt, [*answer[:-1], (answer[-1] + 1) % 90])
    assert (found["sure"], found["place"]) == (False, len(answer) - 1)
    assert found["margin"] < 0


def test_a_short_answer_has_an_end_behind_it(model: gemma3_text.Model) -> None:
    prompt = list(PROMPTS["short"])
    whole = Reader(model, ends=[95], limit=LIMIT).decode(prompt)
    place = next(i for i in range(1, len(whole)) if whole[i] not in whole[:i])
    reader = Reader(model, ends=[94, whole[place]], limit=LIMIT)
    assert reader.decode(prompt) == whole[:place]
    assert reader.read(prompt, whole[:place])["sure"]
    assert not reader.read(prompt, whole[: place - 1])["sure"]  # ended too early
    assert not Reader(model, ends=[95], limit=LIMIT).read(prompt, whole[:place])["sure"]  # nothing ends it


def test_a_near_tie_decides_nothing(model: gemma3_text.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, prompt = Reader(model, ends=[95], limit=LIMIT), list(PROMPTS["short"])
    answer = reader.decode(prompt)
    monkeypatch.setattr(mlx_lm_reader, "MARGIN", reader.read(prompt, answer)["margin"] + 0.01)
    assert not reader.read(prompt, answer)["sure"]


def test_a_prompt_goes_on_from_what_was_read_of_another(
    model: gemma3_text.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read of later prompts is the rest only, and says the same; reading a text does not change what is kept of it."""
    monkeypatch.setattr(mlx_lm_reader, "KEPT", 10)
    text = [(11 * i) % 90 for i in range(60)]
    reader, fresh = (Reader(model, ends=[95], limit=LIMIT) for _ in range(2))
    lengths = []
    whole = gemma3_text.Model.__call__

    def counted(self, inputs, **more):  # type: ignore[no-untyped-def]
        lengths.append(inputs.shape[1])
        return whole(self, inputs, **more)

    for num in (20, 40, 30, 60, 60):
        prompt = text[:num]
        answer = fresh.decode(prompt)
        expected = Reader(model, ends=[95], limit=LIMIT).read(prompt, answer)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gemma3_text.Model, "__call__", counted)
            found = reader.read(prompt, answer)
        assert found["sure"] == expected["sure"]
        assert found["margin"] == pytest.approx(expected["margin"], abs=1e-4)
    # behind each prompt but its last token come the last token and the answer
    assert lengths == [19, 1 + LIMIT, 20, 1 + LIMIT, 10, 1 + LIMIT, 20, 1 + LIMIT, 1 + LIMIT]
