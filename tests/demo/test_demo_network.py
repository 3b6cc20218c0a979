"""The training network: chunks against steps, the recursive MTP head against its one-step form, restartable batches."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the training network needs PyTorch")

from demo_training import gemma_network, network  # noqa: E402
from demo_training.gemma_generate import GemmaDecoder  # noqa: E402
from demo_training.generate import Decoder, complete  # noqa: E402
from demo_training.main_phase import Schedule  # noqa: E402
from demo_training.tuning import shifted  # noqa: E402

pytestmark = pytest.mark.torch


def _model(shape: network.Shape) -> network.LanguageModel:
    torch.manual_seed(0)
    model = network.LanguageModel(shape).requires_grad_(False)
    for p in model.parameters():
        if p.ndim == 2 and not p.any():
            p.normal_(std=0.05)  # outputs start at zero, which would hide every mixer
    return model


def test_chunks_equal_the_definition_of_the_delta_rule() -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 64, 3, 8), torch.randn(2, 64, 3, 8), torch.randn(2, 64, 3, 16)
    k = k / k.norm(dim=-1, keepdim=True)
    log_decay, beta = -torch.rand(2, 64, 3), torch.rand(2, 64, 3)
    state, out = torch.zeros(2, 3, 8, 16), []
    for t in range(64):
        state = state * log_decay[:, t].exp()[..., None, None]
        delta = (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * delta[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    torch.testing.assert_close(
        network.delta_rule(q, k, v, log_decay, beta), torch.stack(out, 1), atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("shape", [network.TARGET, network.DRAFT], ids=["target", "draft"])
def test_steps_with_state_equal_the_whole_sequence(shape: network.Shape) -> None:
    model = _model(shape)
    ids = torch.randint(0, shape.vocab, (3, 64))
    whole = model.lm_head(model.model(ids))
    decoder = Decoder(model, 3, 64)
    steps = torch.stack([decoder.step(ids[:, i]) for i in range(64)], 1)
    torch.testing.assert_close(steps, whole, atol=1e-4, rtol=1e-4)


def test_ragged_rows_generate_what_they_would_alone() -> None:
    model = _model(network.DRAFT)
    prompts = [[5, 9, 300, 7], [11] * 9, [400, 3]]
    together = complete(model, prompts, [6, 4, 8], stop=None)
    alone = [complete(model, [p], [b], stop=None)[0] for p, b in zip(prompts, [6, 4, 8], strict=True)]
    assert together == alone


def test_the_first_recursive_step_is_the_plain_head_and_later_ones_are_causal() -> None:
    model = _model(network.TARGET)
    ids = torch.randint(0, 2048, (2, 64))
    cells = shifted(model.model(ids))
    first, *_, last = model.mtp.recurse(model.model.embed_tokens, cells[:, :32], ids, 3)
    torch.testing.assert_close(
        first, model.mtp(model.model.embed_tokens(ids), cells)[:, :32], atol=1e-4, rtol=1e-4
    )
    changed = ids.clone()
    changed[:, 20:] = 7
    again = model.mtp.recurse(model.model.embed_tokens, shifted(model.model(changed))[:, :32], changed, 3)[-1]
    torch.testing.assert_close(last[:, :18], again[:, :18], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(last[:, 18:], again[:, 18:], atol=1e-4)


def test_the_schedule_is_one_of_steps() -> None:
    schedule = Schedule(total=1000, curriculum=100)
    assert [schedule.phase(s)[0] for s in (0, 99, 100, 899, 900)] == ["curriculum"] * 2 + ["mix"] * 2 + [
        "long"
    ]
    factors = [schedule.factor(s) for s in range(1000)]
    assert factors[59] == 1.0
    assert factors[-1] == pytest.approx(0.02)
    assert all(a >= b for a, b in zip(factors[60:], factors[61:], strict=False))


def test_windows_in_blocks_equal_the_definition_of_a_window() -> None:
    torch.manual_seed(2)
    q, k, v = torch.randn(2, 4, 150, 8), torch.randn(2, 2, 150, 8), torch.randn(2, 2, 150, 8)
    distance = torch.arange(150)[:, None] - torch.arange(150)[None]
    seen = (distance >= 0) & (distance < 32)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    torch.testing.assert_close(gemma_network.attend_windowed(q, k, v, 32), wanted, atol=1e-5, rtol=1e-5)


def test_steps_of_the_gemma_network_equal_the_whole_sequence() -> None:
    torch.manual_seed(3)
    model = gemma_network.GemmaModel(gemma_network.GEMMA).requires_grad_(False)
    ids = torch.randint(0, 2048, (3, 150))
    decoder = GemmaDecoder(model, 3, 150)
    steps = torch.stack([decoder.step(ids[:, i]) for i in range(150)], 1)
    torch.testing.assert_close(steps, model.lm_head(model.model(ids)), atol=1e-4, rtol=1e-4)
