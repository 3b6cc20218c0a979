"""What `inspect` and `pull` reckon for the state of a row, against what MLX has allocated for it: by our code and by mlx-lm's, in caches
that grow, windows, latents and states."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import pytest
from planting import catches

from mlxspec.checkpoints.memory import chunk_of, state_bytes
from mlxspec.config import EngineConfig
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.adapted.loading import blank
from mlxspec.models.registry import ARCHITECTURES, architecture
from tests import tiny_models
from tests.models import adapted_zoo

LENGTH = 2500  # tokens: no multiple of the steps in which buffers grow
_STATES: dict[str, Any] = {"state_size": 128, "num_heads": 8, "head_dim": 64, "hidden_size": 256}
# The zoo's forms, with windows and states of the size that published models have beside their activations.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt_oss": {"sliding_window": 512},
    "gemma2": {},
    "deepseek_v3": {},
    "lfm2": {},
    "falcon_h1": {"mamba_d_state": 128},
    "granitemoehybrid": {"mamba_d_state": 128},
    "mamba": {"state_size": 128, "intermediate_size": 256},
    "mamba2": {**_STATES, "intermediate_size": 512},
    "kimi_linear": {},
    "recurrent_gemma": {"attention_window_size": 512},
    "gemma3_text": {"sliding_window": 512},
    "hybrid": {},
}
FAST = ("lfm2", "mamba2")


def active() -> int:
    gc.collect()
    return mx.get_active_memory()


def model_of(name: str) -> Any:
    """Return a model that is evaluated; Gemma 3 in bfloat16, as on a Mac."""
    if name == "hybrid":
        return tiny_models.stack(name)
    config = adapted_zoo.config_of(name) | FAMILIES[name]
    if name in ARCHITECTURES:
        kind = architecture(config)
        model = kind.build(kind.parse(config))
        model.set_dtype(mx.bfloat16)
    else:
        model = blank(config)
    mx.eval(model.parameters())
    return model


def forward(model: Any, cache: Any, num: int, *, certain: bool) -> None:
    """Run a forward that is left open. The vocabulary is small, so that logits are."""
    out = model.forward(mx.ones((num,), mx.int32), FlatRows((num,)), cache, certain=certain, logits_at="last")
    mx.eval(out.logits, cache.arrays)


def views(_: Any) -> Any:
    return lambda self: None


def no_room(_: Any) -> Any:
    return lambda leaf, num: None


@catches(
    "the last inputs of a convolution keep those of the chunk",
    "mlxspec.models.adapted.cache:LeafLayerCache.release_inputs",
    views,
    case="mamba2",
)
@catches(
    "a state has one copy",
    "mlxspec.models.adapted.cache:LeafLayerCache.bytes_for",
    lambda _: lambda self, length, width: self.form.bytes_for(length, width),
    case="mamba2",
)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in FAMILIES]
)
def test_what_a_row_holds_is_what_is_reckoned(name: str) -> None:
    """Behind a prompt in chunks, and in a verify of which a part is rejected, where states from before it are held as well."""
    model, chunk = model_of(name), chunk_of(EngineConfig())
    cache, length, held = model.make_cache(1), 0, []
    while length < LENGTH:
        num = min(chunk, LENGTH - length)
        forward(model, cache, num, certain=True)
        cache.commit()
        mx.eval(cache.arrays)
        length += num
    held.append(active())
    for kept in (1, 3):
        forward(model, cache, 9, certain=False)
        held.append(active())
        cache.commit([kept])
    del cache
    most, told = max(held) - active(), state_bytes(model, LENGTH + 4, 1)
    assert 0.9 <= told / most <= 1.25, (told, most)


@catches("all layers grow at once", "mlxspec.models.adapted.leaves:reserve", no_room)
def test_buffers_of_layers_grow_one_after_the_other() -> None:
    """In a row over mlx-lm's caches no layer's copy waits for another's."""
    layers = 8
    model = blank(adapted_zoo.config_of("gemma2") | {"num_hidden_layers": layers})
    mx.eval(model.parameters())
    cache: Any = model.make_cache(1)
    forward(model, cache, 1024, certain=True)
    cache.commit()
    before = active()
    (first,) = {layer.current[0].keys.shape[2] for layer in cache.layers}
    mx.reset_peak_memory()
    forward(model, cache, 1, certain=True)
    cache.commit()
    (grown,) = {layer.current[0].keys.shape[2] for layer in cache.layers}
    assert grown > first
    assert mx.get_peak_memory() - before < 0.5 * sum(x.nbytes for x in cache.arrays)
