"""The training networks of drafters that read the target's layers compute what the engine computes from the folders that they write."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the training networks need PyTorch")

from demo_family import dflash, eagle3  # noqa: E402
from demo_family.export import read_member  # noqa: E402
from demo_family.heads import shifted, streams_of, write_drafter  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import mlxspec.demo  # noqa: E402
from mlxspec.kernels.flat import FlatRows  # noqa: E402
from mlxspec.loading.weights import read_folder  # noqa: E402
from mlxspec.models.assemble import assemble  # noqa: E402
from mlxspec.models.assemble_drafter import assemble_dflash_lazily, assemble_eagle3_lazily  # noqa: E402

pytestmark = pytest.mark.torch
LENGTH = 64  # the training network takes multiples of 32 tokens


@pytest.fixture(scope="module")
def target():
    return read_member(mlxspec.demo.TARGET, "target")


@pytest.fixture(scope="module")
def engine_target():
    config = json.loads((mlxspec.demo.TARGET / "config.json").read_text())
    return assemble(config, lambda: read_folder(mlxspec.demo.TARGET)).model


def config(name: str) -> dict:
    return json.loads((mlxspec.demo.ROOT / name / "config.json").read_text())


def written(module: torch.nn.Module, folder: Path, name: str) -> Path:
    """The folder of an untrained drafter whose every matrix does something."""
    torch.manual_seed(4)
    for p in module.parameters():
        if p.ndim == 2 and not p.any():
            torch.nn.init.normal_(p, std=0.5 * p.shape[1] ** -0.5)
        if p.ndim == 3:  # taps
            torch.nn.init.normal_(p, std=0.5)
    torch.save({"model": module.state_dict()}, folder / "trained.pt")
    write_drafter(folder / "trained.pt", folder / "drafter", mlxspec.demo.ROOT / name / "config.json")
    return folder / "drafter"


def read(module: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """The exported weights back in the training network."""
    state = load_file(folder / "model.safetensors")
    module.load_state_dict({n: v.float() if v.is_floating_point() else v for n, v in state.items()})
    return module.requires_grad_(False).eval()


def picked(target, drafter: dflash.DFlash, drafted: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
    """The draft of each block, from left to right, by the selector: ids (B, blocks, BLOCK - 1)."""
    before, found = firsts, []
    for j in range(dflash.BLOCK - 1):
        logits, ids = target.lm_head(drafted[:, :, j]).topk(drafter.s.top_k)
        scores = logits + drafter.candidate_selector(drafted[:, :, j], before).gather(-1, ids)
        before = ids.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
        found.append(before)
    return torch.stack(found, -1)


@torch.no_grad()
def test_blocks(target, engine_target, tmp_path: Path) -> None:
    """Hiddens of three blocks, and the tokens that the selector picks."""
    drafter = dflash.DFlash(dflash.BLOCK_SHAPE)
    ids = torch.randint(128, 2048, (1, LENGTH))
    folder = written(drafter, tmp_path, "dflash")
    streams, _ = streams_of(target, ids)
    starts = torch.tensor([[5, 17, 29]])
    trained, firsts = read(dflash.DFlash(dflash.BLOCK_SHAPE), folder), ids.gather(1, starts)
    wanted = trained(target.model.embed_tokens, streams, firsts, starts)
    chosen = picked(target, trained, wanted, firsts)[0].tolist()
    assert any(
        tokens != target.lm_head(h).argmax(-1).tolist() for tokens, h in zip(chosen, wanted[0], strict=True)
    )
    made = assemble_dflash_lazily(config("dflash"), lambda: read_folder(folder), engine_target, mx.float32)
    for start, hidden, tokens in zip(starts[0].tolist(), wanted[0], chosen, strict=True):
        cache = made.make_cache(1)
        made.remember(mx.array(streams[0, :start].numpy()), FlatRows((start,)), cache)
        cache.commit()
        block = mx.array([int(ids[0, start]), *[dflash.MASK] * (dflash.BLOCK - 1)], mx.int32)
        got = made.block(block, FlatRows((dflash.BLOCK,)), cache).hidden[1:]
        np.testing.assert_allclose(np.array(got), hidden.numpy(), atol=1e-4, rtol=1e-4)
        before, found = block[:1], []
        for j in range(dflash.BLOCK - 1):
            scores = made.follow(got[j : j + 1], made.head(got[j : j + 1]), before)
            before = mx.argmax(scores, axis=-1).astype(mx.int32)
            found.append(int(before.item()))
        assert found == tokens


@torch.no_grad()
def test_eagle3_cells(target, engine_target, tmp_path: Path) -> None:
    """The first step at every cell; and two recursive steps behind the last one."""
    rows = torch.arange(0, 2048, 2)[: eagle3.ROWS]
    rows = torch.cat([rows, torch.arange(1, 2048, 2)])[: eagle3.ROWS].sort().values
    head = eagle3.Eagle3(eagle3.EAGLE, rows)
    ids = torch.randint(0, 2048, (1, LENGTH + 32))
    folder = written(head, tmp_path, "eagle3")
    trained = read(eagle3.Eagle3(eagle3.EAGLE, rows), folder)
    streams, _ = streams_of(target, ids)
    cells = shifted(streams)[:, 1:LENGTH]
    wanted = trained.recurse(target.model.embed_tokens, cells, ids[:, 1:], 3)
    made = assemble_eagle3_lazily(config("eagle3"), lambda: read_folder(folder), engine_target, mx.float32)
    assert made.ids is not None
    assert made.ids.tolist() == rows.tolist()
    cache, num = made.make_cache(1), LENGTH - 1
    tokens = [int(i) for i in ids[0]]
    out = made.forward(
        mx.array(tokens[1:LENGTH], mx.int32),
        made.take(mx.array(cells[0].numpy())),
        FlatRows((num,)),
        cache,
        logits_at="all",
    )
    cache.commit()
    np.testing.assert_allclose(
        np.array(out.logits), trained.logits(wanted[0])[0].numpy(), atol=2e-4, rtol=1e-4
    )
    hidden = out.hidden[-1:]
    for step in (1, 2):
        out = made.forward(mx.array([tokens[LENGTH - 1 + step]], mx.int32), hidden, FlatRows((1,)), cache)
        cache.commit()
        hidden = out.hidden
        np.testing.assert_allclose(np.array(hidden), wanted[step][0, -1:].numpy(), atol=2e-4, rtol=1e-4)
