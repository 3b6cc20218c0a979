"""What a piece of a prompt costs a Mac, by counting in its graph: launches, bytes, and multiplications of products and attention; ours, and
mlx-lm's as its `generate` reads prompts. Nothing is evaluated, so the shapes of large models cost nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mlxspec.platform import device  # noqa: F401  (before mlx)

# isort: split
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

from mlxspec.kernels.flat import FlatRows
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.models.registry import architecture
from tests.models.metal_graph import VIEWS, bytes_moved, one_primitive

PIECE = 2048  # tokens
PERIOD = 4  # layers after which the kinds of layers repeat


class Counts(NamedTuple):
    """Of one piece. multiplied: pairs of numbers in products and attention."""

    launches: int
    moved: int
    multiplied: int

    def __add__(self, other: Any) -> Counts:
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))

    def __mul__(self, by: Any) -> Counts:
        return Counts(*(round(a * by) for a in self))


def counted(work: Callable[..., Any], *given: mx.array) -> Counts:
    """Of the graph that `work` gives."""
    steps: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.array, "__invert__", lambda x: x ^ mx.array(-1, x.dtype))  # ~ cannot be exported
        patch.setattr(
            mx, "contiguous", lambda x: one_primitive([x], [(x.shape, x.dtype)])[0]
        )  # neither can this
        mx.disable_compile()
        mx.export_function(steps.append, work, *given)
        moved = bytes_moved(work, *given)
    steps = [step for step in steps if step["type"] == "primitive"]
    launches = sum(step["name"] not in VIEWS for step in steps)
    return Counts(launches, moved, sum(map(_multiplied, steps)))


def _multiplied(step: Any) -> int:
    shapes = [shape for _, shape, _ in step["inputs"]]
    if step["name"] in ("QuantizedMatmul", "Matmul", "GatherQMM"):
        return math.prod(step["outputs"][0][1]) * int(shapes[0][-1])
    if step["name"] == "Depends" and [len(shape) for shape in shapes[:3]] == [
        4,
        4,
        4,
    ]:  # queries, keys, values
        return 2 * math.prod(shapes[0]) * int(shapes[1][2])
    return 0


def _config(shape: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    text = {**shape["text_config"], "num_hidden_layers": num_layers, "max_position_embeddings": 1 << 18}
    kinds = ["full_attention" if (i + 1) % PERIOD == 0 else "linear_attention" for i in range(num_layers)]
    text |= {"layer_types": kinds, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "norm_topk_prob": True}
    return {**shape, "text_config": text}


def _packed(model: nn.Module) -> nn.Module:
    nn.quantize(model, 64, 4, class_predicate=lambda path, m: hasattr(m, "to_quantized"))
    model.set_dtype(mx.bfloat16)
    return model


def _piece(module: nn.Module, run: Callable[[mx.array], Sequence[mx.array]]) -> Counts:
    """Of what `run` gives for the tokens, with the module's weights as inputs of the graph."""
    names, values = zip(*tree_flatten(module.parameters()), strict=True)

    def work(tokens: mx.array, *weights: mx.array) -> Sequence[mx.array]:
        module.update(tree_unflatten(list(zip(names, weights, strict=True))))
        return run(tokens)

    return counted(work, mx.zeros((PIECE,), mx.int32), *values)


def _ours(shape: Mapping[str, Any], num_layers: int, *, head: bool) -> Counts:
    """A piece that does not end the prompt, as Prefill reads it, and what the MTP head reads of it."""
    config = _config(shape, num_layers)
    kind = architecture(config)
    parsed = kind.parse(config)
    model: Any = _packed(kind.build(parsed))
    mtp: Any = _packed(Qwen35Mtp(parsed, model)) if head else None
    for module in (model, mtp) if head else (model,):
        module.fuse()
    rows = FlatRows((PIECE,), is_prompt=True)
    both = nn.Module()
    both.model, both.mtp = model, mtp if head else nn.Module()

    def run(tokens: mx.array) -> list[mx.array]:
        cache = model.make_cache(1)
        out = model.forward(tokens, rows, cache, certain=True, logits_at="none" if head else "end")
        cache.commit()
        read = [*cache.arrays, out.hidden]
        if head:
            own = mtp.make_cache(1)
            mtp.forward(tokens, out.hidden, rows, own, logits_at="none")
            own.commit()
            read += own.arrays
        return read

    return _piece(both, run)


def _theirs(shape: Mapping[str, Any], num_layers: int) -> Counts:
    """As generate_step has it: what the caches hold is evaluated, and nothing else."""
    config = _config(shape, num_layers)
    model_class, arguments = _get_classes(config)
    model: Any = _packed(model_class(arguments.from_dict(config)))

    def run(tokens: mx.array) -> list[mx.array]:
        caches = model.make_cache()
        model(tokens[None], cache=caches)
        return [x for _, x in tree_flatten([c.state for c in caches]) if isinstance(x, mx.array)]

    return _piece(model, run)


def _of(count: Callable[[int], Counts], num_layers: int) -> Counts:
    """Of all layers, by what a period of them adds."""
    one, two = count(PERIOD), count(2 * PERIOD)
    return one + (two + one * -1) * (num_layers // PERIOD - 1)


def table(shape: Mapping[str, Any]) -> dict[str, Counts]:
    """Counts of a piece of this shape, by who reads it."""
    num = shape["text_config"]["num_hidden_layers"]
    return {
        "ours": _of(lambda n: _ours(shape, n, head=False), num),
        "ours with a head": _of(lambda n: _ours(shape, n, head=True), num),
        "mlx-lm": _of(lambda n: _theirs(shape, n), num),
    }


def gated_delta_stub(q: mx.array, k: mx.array, v: mx.array, *more: Any, state: Any = None, **_: Any) -> Any:
    """mlx-lm's recurrence as the one kernel that it is on a Mac, with its small products beside it. Its queries do not come first, so that
    it is not counted as attention: the recurrence is counted of neither engine."""
    heads, dim = v.shape[2:]
    state_shape = (q.shape[0], heads, dim, q.shape[3])
    return one_primitive(
        [*(x for x in more if isinstance(x, mx.array)), q, k, v],
        [(v.shape, v.dtype), (state_shape, mx.float32)],
    )
