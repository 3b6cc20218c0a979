"""What a forward reads of published sizes: matrices once, of experts those that its tokens go to, of the embedding nothing but the head."""

from __future__ import annotations

import adapted_zoo
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from test_published_sizes import SIZES

from mlxspec.models.reads import Reads, reads
from mlxspec.models.registry import architecture


def built(size: str) -> tuple[Reads, Reads, int]:
    """What the target and its MTP head read, and all bytes of the target; nothing is allocated."""
    kind = architecture(SIZES[size][0])
    parsed = kind.parse(SIZES[size][0])
    model = kind.build(parsed)
    target = reads(model)
    head = reads(kind.head(parsed, model), head=target.head) if kind.head is not None else Reads(dense=0)
    whole = sum(x.nbytes for x in _leaves(model.parameters()))
    return target, head, whole


def _leaves(tree: object) -> list[mx.array]:
    if isinstance(tree, mx.array):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [leaf for part in parts for leaf in _leaves(part)]


def test_a_tied_model_reads_every_weight_once() -> None:
    target, head, whole = built("Qwen3.5-0.8B")
    assert target.bytes() == target.bytes(17) == whole
    assert target.head == head.head == 248320 * 1024 * 4
    assert target.layers == 24
    assert head.layers == 1
    assert 0.35 < head.bytes() / target.bytes() < 0.40  # most of a drafted token is the head


def test_an_untied_model_reads_a_row_of_its_embedding() -> None:
    target, _, whole = built("Qwen3.5-27B")
    assert whole - target.bytes() == target.head == 248320 * 5120 * 4


def test_experts_are_read_as_far_as_tokens_go_to_them() -> None:
    target, head, whole = built("Qwen3.5-35B-A3B")
    assert 2.5e9 < target.bytes() / 4 < 3.5e9  # what A3B stands for
    assert target.bytes(2) - target.bytes(1) == pytest.approx(target.stacks * (8 / 256) * (248 / 256))
    assert target.bytes(100_000) == pytest.approx(whole - target.head)
    assert 0 < head.bytes() < 0.25 * target.bytes()


def test_layers_own_embeddings_are_read_a_row_at_a_time() -> None:
    target, _, _ = built("gemma-4-E2B")
    assert target.head == 262144 * 1536 * 4
    assert target.bytes() / 4 < 2.4e9  # the effective size, and not five billions


@pytest.mark.parametrize(("name", "each"), [("gpt_oss", 0.5), ("mixtral", 0.5), ("llama", 1.0)])
def test_models_by_mlx_lms_code_are_read_by_their_parts(name: str, each: float) -> None:
    """Whatever its code calls them: experts by their share, the head once, the embedding not at all beside a head of its own."""
    from mlxspec.models.adapted.loading import blank

    config = adapted_zoo.config_of(name)
    model = blank(config)
    found, sizes = reads(model), {n: x.nbytes for n, x in tree_flatten(model.parameters())}
    experts = sum(size for n, size in sizes.items() if "experts" in n or "switch_mlp" in n)
    assert (found.each, found.stacks > 0) == (each, each < 1)
    assert found.stacks <= experts
    head, table = (
        sum(size for n, size in sizes.items() if part in n) for part in ("lm_head", "embed_tokens")
    )
    assert found.head == (head or table)
    assert found.layers == config["num_hidden_layers"]
    assert found.dense + found.stacks == sum(sizes.values()) - head - table
