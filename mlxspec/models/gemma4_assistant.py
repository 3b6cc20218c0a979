"""The Gemma 4 assistant: four small layers that draft with the target's keys and values, and have none of their own.

One step takes the newest token and the hidden it was sampled from (the target's, after its final norm; later the step's own output):
    z = pre_projection([embed(token) ; hidden]);  h = norm(layers(z));  logits = head(h);  hidden' = post_projection(h)
Queries of all steps of a draft stand at one position, that of the newest known token; windowed layers see the target's last windowed
layer of its own, full ones its last full one. Embedding is the target's, the head is the assistant's. Where the folder has centroids,
only tokens of the clusters that fit best are scored. Follows transformers' Gemma4AssistantForCausalLM; knows no rows' histories.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxspec.cache.model_cache import ModelCache
from mlxspec.errors import ModelError
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.quantized_kv import unpacked
from mlxspec.loading.weights import Weights
from mlxspec.models.base import Output
from mlxspec.models.config_values import Keys, Values
from mlxspec.models.cut_layers import piece_before, piece_behind
from mlxspec.models.drafter_module import DrafterFolder
from mlxspec.models.gemma import Gemma
from mlxspec.models.gemma_config import OUTER_KEYS, GemmaConfig, gemma4_config
from mlxspec.models.layers import FusedLinear, Parts, project, rms_norm
from mlxspec.models.row_attention import attend_rows
from mlxspec.models.seams import attending_by_row
from mlxspec.models.segments import Segments
from mlxspec.models.shard import is_divided
from mlxspec.models.text_model import text_stack
from mlxspec.platform.host import numbers

ASSISTANT_TYPES = frozenset({"gemma4_assistant", "gemma4_unified_assistant"})
_OWN = "backbone_hidden_size", "centroid_intermediate_top_k", "num_centroids", "use_ordered_embeddings"
OWN_KEYS = Keys(idle=OUTER_KEYS.idle.union(_OWN))  # its config.json is a Gemma 4's with these around it
View = tuple[mx.array, mx.array]


@dataclass(frozen=True, kw_only=True)
class AssistantConfig:
    """The shape of a Gemma 4 assistant. text: its own layers. target_size: the target's hidden size. num_centroids: clusters of tokens, of
    which only the tokens of the num_chosen best are scored; 0: every token is scored."""

    text: GemmaConfig
    target_size: int
    num_centroids: int
    num_chosen: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> AssistantConfig:
        """Return the shape from a config.json. Raises ModelError naming the first key that is missing, out of range or not supported."""
        get, text = Values(config), gemma4_config(config, borrows=True, own=OWN_KEYS)
        if not text.tied or text.num_experts or text.per_layer_size:
            raise ModelError(
                "config.json: an assistant has a tied head, no experts and no per-layer embeddings."
            )
        centroids = get.size("num_centroids", 2048) if get.flag("use_ordered_embeddings") else 0
        chosen = get.size("centroid_intermediate_top_k", 32) if centroids else 0
        if centroids and (text.vocab_size % centroids or chosen > centroids):
            raise ModelError(
                "config.json: num_centroids must divide vocab_size and be at least centroid_intermediate_top_k."
            )
        return cls(
            text=text,
            target_size=get.size("backbone_hidden_size"),
            num_centroids=centroids,
            num_chosen=chosen,
        )

    def check_fits(self, target: GemmaConfig) -> None:
        """Check that the assistant fits a target of this shape. Raises ModelError where it does not."""
        if (self.target_size, self.text.vocab_size) != (target.hidden_size, target.vocab_size):
            raise ModelError("The assistant is for a model of another hidden size or vocabulary.")
        for layer in self.text.layers:
            found = [
                x for x in target.layers if x.source is None and (x.window is None) == (layer.window is None)
            ]
            if not found or (found[-1].head_dim, found[-1].num_kv_heads) != (
                layer.head_dim,
                layer.num_kv_heads,
            ):
                raise ModelError("The assistant is for a model whose keys and values have another shape.")
            if layer.window is not None and (layer.window != found[-1].window or layer.window < 2):
                raise ModelError("The assistant is for a model with other windows.")


class Gemma4Assistant(nn.Module):
    """The module of a Gemma 4 assistant, which drafts with the target's keys and values. Parameter names are the checkpoint's. title: its
    name in messages."""

    title = "assistant"

    def __init__(self, config: AssistantConfig, target: Gemma) -> None:
        from mlxspec.models.gemma_layers import call_layer, decoder_layer  # slow to import

        super().__init__()
        config.check_fits(target.config)
        c = config.text
        self.config, self._target = config, (target,)  # in a tuple: the target's parameters are not ours
        self.pre_projection = nn.Linear(2 * config.target_size, c.hidden_size, bias=False)
        self.post_projection = nn.Linear(c.hidden_size, config.target_size, bias=False)
        self.model = text_stack(c, [decoder_layer(c, shape) for shape in c.layers])
        if config.num_centroids:  # clusters of tokens; token_ordering: all tokens, cluster by cluster
            self.masked_embedding = Parts(
                centroids=nn.Linear(c.hidden_size, config.num_centroids, bias=False),
                token_ordering=mx.zeros(c.vocab_size, mx.int32),
            )
        self._segments = Segments(self.model.layers)
        self._before, self._behind = piece_before(call_layer), piece_behind(call_layer)

    @property
    def dtype(self) -> mx.Dtype:
        """Return the dtype in which the assistant computes, which is the target's."""
        return self._target[0].dtype

    def fuse(self) -> None:
        """Join projections of the same input, after loading. Call this once. Raises ModelError where the clusters do not contain every
        token exactly once."""
        from mlxspec.models.gemma_layers import fuse_layer  # slow to import

        for layer, shape in zip(self.model.layers, self.config.text.layers, strict=True):
            fuse_layer(layer, self.config.text, shape, self.dtype)
        for name in ("pre_projection", "post_projection"):
            self[name] = FusedLinear([self[name]])
        if "masked_embedding" in self:
            order = np.sort(numbers(self.masked_embedding.token_ordering))
            if not np.array_equal(order, np.arange(len(order))):
                raise ModelError("The assistant's token_ordering does not name every token once.")

    def views(self, cache: ModelCache, rows: Sequence[int]) -> dict[bool, list[View]]:
        """Return the target's keys and values of these rows, which the assistant reads: under True for layers with a window, under False
        for layers without one. cache: the target's, without an open transaction."""
        own = [shape for shape in self._target[0].config.layers if shape.source is None]
        found: dict[bool, list[View]] = {}
        for windowed in {shape.window is not None for shape in self.config.text.layers}:
            place = max(i for i, shape in enumerate(own) if (shape.window is not None) == windowed)
            window, layer = own[place].window, cache.attention(place)
            found[windowed] = []
            for r in rows:
                keys, values = layer.view(r, cache.lengths[r])
                if window is not None:
                    seen = min(window - 1, keys.shape[2])
                    keys, values = (unpacked(x)[:, :, -seen:] for x in (keys, values))  # a window's are plain
                found[windowed].append((keys, values))
        return found

    def step(
        self,
        tokens: mx.array,
        hidden: mx.array,
        positions: Sequence[int],
        views: Mapping[bool, Sequence[View]],
        *,
        head: Callable[[mx.array], mx.array] | None = None,
    ) -> Output:
        """Draft one token for each row: return an Output with logits (B, V) and the next hidden states (B, target's H). tokens (B,) int32:
        the newest tokens; hidden (B, target's H): the hidden states that they were sampled from. positions, views: one for each row. head:
        turns (B, H) into logits in place of the assistant's own head."""
        c, rows = self.config.text, FlatRows((1,) * tokens.shape[0])
        where = mx.array(np.asarray(positions, np.int32))
        run = self._segments.begin(rows)
        x = self.pre_projection(mx.concatenate([self._target[0].embed(tokens), hidden], axis=-1))[:, None]
        with attending_by_row():
            for i, shape in enumerate(c.layers):
                run.add(i, self._before, where)
                x, asked = run.through(x)
                out = attend_rows(asked.queries[:, :, 0], views[shape.window is not None], rows, c.scale)
                run.add(i, self._behind, out.reshape(*asked.queries.shape[:3], -1), where)
            x, _ = run.through(x)
        x = rms_norm(x[:, 0], self.model.norm.weight, c.rms_eps)
        return Output(logits=(head or self._head)(x), hidden=self.post_projection(x), is_warm=run.is_warm)

    @property
    def scored(self) -> float:
        """Return the share of the vocabulary whose logits are computed for a drafted token."""
        c = self.config
        return c.num_chosen / c.num_centroids if "masked_embedding" in self else 1.0

    @property
    def vocab_size(self) -> int:
        return self.config.text.vocab_size

    @property
    def head_module(self) -> nn.Module | None:
        """Return the module with the weight of the language-model head; None where only the tokens of some clusters are scored."""
        return None if "masked_embedding" in self else self.model.embed_tokens

    def _head(self, x: mx.array) -> mx.array:
        """Return the logits (B, V) of hidden states (B, H). Tokens of clusters that are not scored get the lowest score minus 1."""
        if "masked_embedding" not in self:
            return project(self.model.embed_tokens, x)
        k, masked = self.config.num_chosen, self.masked_embedding
        clusters = masked.token_ordering.reshape(self.config.num_centroids, -1)
        chosen = mx.argpartition(project(masked.centroids, x), kth=-k, axis=-1)[:, -k:]
        ids = clusters[chosen].reshape(x.shape[0], -1)  # (B, k * V / C)
        scores = (self.model.embed_tokens(ids) @ x[..., None])[..., 0]
        rest = scores.min(axis=-1, keepdims=True) - 1.0
        everything = mx.broadcast_to(rest, (x.shape[0], self.config.text.vocab_size))
        return mx.put_along_axis(everything, ids, scores, axis=-1)


def sanitize_assistant(weights: Weights) -> Weights:
    """Drop the language-model head, which is tied to the embedding, and cast `masked_embedding.token_ordering` to int32 if it holds
    integers."""
    out = {k: v for k, v in weights.items() if not k.startswith("lm_head.")}
    name = "masked_embedding.token_ordering"
    if name in out and mx.issubdtype(out[name].dtype, mx.integer):
        out[name] = out[name].astype(mx.int32)
    return out


NO_ASSISTANT = "A Gemma 4 assistant cannot draft for a model that is divided among ranks: it reads keys and values of all heads."


def _build(config: Mapping[str, Any], given: Weights, target: Any) -> tuple[Gemma4Assistant, Weights]:
    if not isinstance(target, Gemma):
        raise ModelError("A Gemma 4 assistant drafts for Gemma 4 models only.")
    if is_divided(target):
        raise ModelError(NO_ASSISTANT)
    return Gemma4Assistant(AssistantConfig.from_dict(config), target), sanitize_assistant(given)


FOLDER = DrafterFolder(
    kind="assistant",
    is_one=lambda names, config: config.get("model_type") in tuple(ASSISTANT_TYPES),
    build=_build,
)
