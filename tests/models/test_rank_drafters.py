"""Over ranks every drafter leaves the text of one process, for every family: engines over MLX's ring, with drafters that are whole on each
rank and take embeddings, layers and logits of the divided model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import drafters_side
import pytest
import tiny_dflash
from drafters_side import PLAIN
from test_shard import ON_FOUR, ON_TWO, PACKED, free_ports

from mlxspec.models.registry import architecture
from tests.drafters import eagle3_checkpoints

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600  # on four processes that share two cores with other work
EAGLES = ("SafeAILab", "target's embedding")
MASK = 3


def case(folder: Path, turn: int) -> dict[str, Any]:
    """A target with drafters: `turn` chooses their kinds."""
    config = json.loads((folder / "config.json").read_text())
    parsed = architecture(config).parse(config)
    layers = len(getattr(parsed, "is_linear", ())) or len(parsed.layers)
    eagle, block = folder.with_name(f"{folder.name}-eagle3"), folder.with_name(f"{folder.name}-block")
    kind = eagle3_checkpoints.KINDS[EAGLES[turn % 2]]
    eagle3_checkpoints.write(eagle, kind, parsed.vocab_size, parsed.hidden_size, (1, 0, layers - 1))
    name = tiny_dflash.KINDS[turn % 3]
    given = tiny_dflash.config(
        name,
        hidden=parsed.hidden_size,
        vocab=parsed.vocab_size,
        target_layers=layers,
        layer_ids=(0, layers - 1),
        mask_id=MASK,
        block=5,
    )
    tiny_dflash.write(block, given, tiny_dflash.weights(name, given))
    return {"target": str(folder), "drafters": [str(eagle), str(block)]}


def on_ring(cases: list[dict[str, Any]], size: int, out: Path) -> list[Any]:
    """What each of `size` processes answers."""
    out.mkdir()
    hosts, listed = out / "hosts.json", out / "cases.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(size)]))
    listed.write_text(json.dumps(cases))
    processes = [
        subprocess.Popen(
            [sys.executable, drafters_side.__file__, str(listed), str(out)],
            env=os.environ | {"MLX_RANK": str(r), "MLX_HOSTFILE": str(hosts), "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(size)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * size, "\n".join(said)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(size)]


def check(folder: Path, size: int, out: Path) -> None:
    given = case(folder, sum(map(ord, folder.name)))
    ranks = on_ring([given], size, out)
    alone = drafters_side.answers(given)
    for rank, (found,) in enumerate(ranks):
        assert found.keys() == alone.keys()
        for drafter, told in found.items():
            assert told["tokens"] == alone[PLAIN]["tokens"], f"{drafter} on rank {rank} of {size}"
            assert told["drafts"] == alone[drafter]["drafts"], f"{drafter} on rank {rank} of {size}"
            assert told["drafts"] or drafter == PLAIN


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "shared" else pytest.mark.slow) for name in {**ON_TWO, **PACKED}],
)
def test_on_two(name: str, tmp_path: Path) -> None:
    check({**ON_TWO, **PACKED}[name](tmp_path / name), 2, tmp_path / "out")


# forwards of every family on four ranks are test_shard.py's; a drafter meets them as on two
@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "qwen3-moe", "gemma4-e"])
def test_on_four(name: str, tmp_path: Path) -> None:
    check(ON_FOUR[name](tmp_path / name), 4, tmp_path / "out")
