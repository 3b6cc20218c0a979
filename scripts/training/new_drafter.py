"""A new drafter for a model that has none: an EAGLE-3 drafter of one layer in the layout that others read too, and what it begins as.

Its tokens are the most frequent ones of the texts. It begins as a guess of the target's: the last stream that it reads goes through to the
target's own final norm and to its head's rows of those tokens, and the layer adds nothing yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxspec.checkpoints.adapted_head import CARD_FILE, Card
from mlxspec.checkpoints.writing import check_target, save_model, whole_folder, write_json
from mlxspec.engine.engine import Engine
from mlxspec.errors import ModelError, StorageError
from mlxspec.loading.row_lists import by_frequency
from mlxspec.loading.weights import Weights
from mlxspec.models.eagle3 import Eagle3Config, Eagle3Head
from mlxspec.models.layers import head_rows, weight_values
from mlxspec.models.registry import Trunk
from training.network import ChainNetwork
from training.pupil import Pupil, eagle3_maker
from training.states import LENGTH, Batch

_WORDS = 16384  # tokens that it has, at most
_LOOKED_AT = 4  # pieces of text, for the size of streams
_ENDS = "o_proj.weight", "down_proj.weight", "kernel_projection.weight", "successor_codebook.weight"


class NewDrafter:
    """network: its form for gradients without weights, which says what it reads and what training takes; num_parameters: to be trained.
    lock: its folder, which is made empty."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        """Raises ModelError for a model that no EAGLE-3 drafter drafts for, ConfigError where the folder holds something, StorageError."""
        target = engine.model
        if not isinstance(target, Trunk) or target.num_layers < 2:
            raise ModelError("No new drafter can be made for this model: mlxspec's own code must run it.")
        self._engine, self._target, self.lock = engine, target, folder
        check_target(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{folder} cannot be made: {error.strerror}.") from error
        self._config = config_for(target)
        parsed, names = Eagle3Config.from_dict(self._config), {"d2t"}
        self._new: Callable[[], Eagle3Head] = lambda: Eagle3Head(parsed, target, names)
        shell = self._new()
        self.network = ChainNetwork(target, self._new, {}, shell)
        self.num_parameters = sum(x.size for _, x in tree_flatten(shell.parameters()))

    def begun(self, texts: Sequence[Sequence[int]]) -> Pupil:
        """What is to be taught, by texts as tokens."""
        made, tokenizer = self._new(), self._engine.tokenizer
        counts = np.zeros(self._target.vocab_size, np.int64)
        for text in texts:
            counts += np.bincount(text, minlength=len(counts))
        num_ordinary = 0 if tokenizer is None else tokenizer.num_ordinary
        counts[sorted(() if tokenizer is None else tokenizer.eos_ids)] = counts.max() + 1
        begin(made, by_frequency(counts, num_ordinary, len(made.d2t)), self._streams(texts))
        weights = dict(tree_flatten(made.parameters()))
        made.fuse()
        return Pupil(
            eagle3_maker(self._target, self._config, lambda: weights, made, mx.bfloat16),
            self.lock,
            lambda weights, card: write(self.lock, self._config, weights, card),
        )

    def _streams(self, texts: Sequence[Sequence[int]]) -> mx.array:
        """Residual streams (N, layers * H) of some of the texts."""
        long = [text[:LENGTH] for text in texts if len(text) >= LENGTH]
        some = long[:: math.ceil(len(long) / _LOOKED_AT)] or [text for text in texts if text][:1]
        found = [Batch.of(self._target, self.network.layers, [text]).streams for text in some]
        return mx.concatenate([x[0] for x in found if x is not None]).astype(mx.float32)


def config_for(target: Trunk) -> dict[str, Any]:
    """The config.json of a drafter for this model."""
    size, num = target.hidden_size, target.num_layers
    head_dim = 64 if size < 2048 else 128
    heads = max(1, size // head_dim)
    layers = sorted({max(1, i) for i in (1, num // 2 - 1, num - 2)})
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": min(_WORDS, target.vocab_size),
        "hidden_size": size,
        "intermediate_size": 3 * size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // math.gcd(heads, 4),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": target.max_context,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "norm_before_fc": True,
        "norm_before_residual": True,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [i + 1 for i in layers],  # counts the layers before
            "use_aux_hidden_state": True,
        },
    }


def begin(made: Eagle3Head, ids: np.ndarray, streams: mx.array | None = None) -> None:
    """Fill an EAGLE-3 drafter that is not fused. ids (R,): the target's tokens that it is to have. streams (N, layers * H): of some text,
    for one that norms them; its numbers are of one size then."""
    begin_small(made)
    ids, size, target = np.sort(ids), made.config.text.hidden_size, made.target
    made.d2t = mx.array((ids - np.arange(len(ids))).astype(np.int32))
    rows = head_rows(target.head_module, mx.array(ids.astype(np.int32)))
    made.lm_head.weight = weight_values(rows).astype(mx.float32)
    norm = target.language_model.model.norm.weight.astype(mx.float32)
    made.fc.weight = mx.pad(mx.eye(size), [(0, 0), (made.fc.weight.shape[1] - size, 0)])
    if "input_norm" in made and streams is not None:
        sizes = mx.sqrt(mx.mean(streams * streams, axis=0))
        sizes = sizes + 1e-3 * sizes.mean()
        made.input_norm.weight = mx.sqrt(mx.mean(sizes * sizes)) / sizes
        last = sizes[-size:]
        norm = norm * last / mx.sqrt(mx.mean(last * last))
    made.norm.weight = norm
    mx.eval(made.parameters())


def begin_small(module: nn.Module) -> None:
    """Initial values of matrices. Layers, convolutions and the selector begin by changing nothing."""
    mx.random.seed(23)
    begun = []
    for name, value in tree_flatten(module.parameters()):
        if name.endswith("base_kernel"):
            value = mx.zeros(value.shape)
            value[:, 0] = 1.0
        elif name.endswith(_ENDS):
            value = mx.zeros(value.shape)
        elif value.ndim == 2:
            scale = 1.0 if "predecessor" in name else 0.6 * value.shape[1] ** -0.5
            value = scale * mx.random.normal(value.shape)
        begun.append((name, value))
    module.update(tree_unflatten(begun))


def write(folder: Path, config: Mapping[str, Any], weights: Weights, card: Card) -> None:
    """The folder of a drafter, whole or not at all. Raises ConfigError where it holds something, StorageError."""
    stored = {name.replace("layers.0.", "midlayer."): value for name, value in weights.items()}
    has, offsets = mx.zeros(config["vocab_size"], mx.bool_), stored["d2t"]
    has[offsets + mx.arange(len(offsets))] = True
    stored |= {"d2t": offsets.astype(mx.int64), "t2d": has}
    with whole_folder(folder, sum(value.nbytes for value in stored.values())) as path:
        save_model(path, stored, lambda num_bytes: None)
        write_json(path / "config.json", config)
        write_json(path / CARD_FILE, asdict(card))
