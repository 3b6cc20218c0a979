"""The training network: chunks against steps, the recursive MTP head against its one-step form, restartable batches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the training network needs PyTorch")

import train_demo  # noqa: E402
from demo_family import export, network, train  # noqa: E402
from demo_family.evaluate import DEPTHS  # noqa: E402

from mlxspec import demo  # noqa: E402
from mlxspec.kernels.flat import FlatRows  # noqa: E402
from mlxspec.loading.weights import read_folder  # noqa: E402
from mlxspec.models.assemble import assemble  # noqa: E402

pytestmark = pytest.mark.torch


def untrained_but_mixing(model: train.Network) -> train.Network:
    """Outputs start at zero, which would hide every mixer."""
    torch.manual_seed(0)
    model.requires_grad_(False)
    for p in model.parameters():
        if p.ndim == 2 and not p.any():
            p.normal_(std=0.05)
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


@pytest.mark.parametrize("member", ["target", "draft", "gemma"])
def test_exported_weights_are_the_network_for_the_engine(member: str, tmp_path: Path) -> None:
    """150 tokens cross Gemma's windows of 64."""
    model = untrained_but_mixing(export.untrained(member))
    for p in model.parameters():
        p.copy_(p.bfloat16())  # as the folder stores it
    export.write_member(tmp_path / member, member, model.state_dict(), demo.TARGET / "tokenizer.json")
    ids = torch.randint(0, 2048, (1, 160))
    whole = model.lm_head(model.model(ids))[0].numpy()
    config = json.loads((tmp_path / member / "config.json").read_text())
    ours = assemble(config, lambda: read_folder(tmp_path / member), mx.float32).model
    cache, tokens = ours.make_cache(1), mx.array(ids[0].tolist(), mx.int32)
    out = ours.forward(tokens, FlatRows((160,)), cache, certain=True)
    np.testing.assert_allclose(np.array(out.logits), whole, atol=2e-4, rtol=1e-4)
    read = export.read_member(tmp_path / member, member)
    torch.testing.assert_close(read.lm_head(read.model(ids))[0].numpy(), whole, atol=1e-6, rtol=1e-6)


def test_a_plan_is_one_of_steps() -> None:
    plan = replace(train.MAIN, steps=1000, curriculum=100)
    names = [train.phase(plan, s)[0] for s in (0, 99, 100, 899, 900)]
    assert names == ["curriculum"] * 2 + ["mix"] * 2 + ["long"]
    factors = [plan.factor(s) for s in range(1000)]
    assert factors[59] == 1.0
    assert factors[-1] == pytest.approx(0.02)
    assert all(a >= b for a, b in zip(factors[60:], factors[61:], strict=False))


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Six steps at once, and two and then four, give the same weights."""

    inputs = torch.arange(96.0).view(6, 4, 4) / 96

    def run(path: Path, steps: int) -> torch.Tensor:
        torch.manual_seed(0)
        module = torch.nn.Linear(4, 4)
        plan = train.Plan(steps=steps, rate=1e-2, warmup=1, constant=1.0)
        train.optimise(path, module, lambda i: [(module(inputs[i]).pow(2).mean(), "")], plan, [module.weight])
        return torch.cat([module.weight.flatten(), module.bias]).detach()

    once = run(tmp_path / "a.pt", 6)
    run(tmp_path / "b.pt", 2)
    torch.testing.assert_close(run(tmp_path / "b.pt", 6), once)


@pytest.mark.slow
def test_every_phase_runs_in_small(tmp_path: Path) -> None:
    """From the data to the cards, two small steps each."""
    out = tmp_path / "family"
    assert train_demo.main(["all", "--smoke", "--work", str(tmp_path / "work"), "--out", str(out)]) == 0
    figures = json.loads((out / "figures.json").read_text())
    assert set(figures) == {"target", "gemma", "vision"}
    assert set(DEPTHS) <= set(figures["target"])
    assert all((out / member / "README.md").exists() for member in figures)
