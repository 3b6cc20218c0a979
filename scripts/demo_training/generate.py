"""Batched generation in PyTorch, one token a step with recurrent state and key/value buffers: for samples and evaluation.

Knows the network's layers, greedy and temperature sampling; no drafting, no stop strings. All rows start at position 0 and
move together: a row is fed its own prompt first and its own samples after, so ragged prompts need no padding rules.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .batches import Data
from .gemma_generate import GemmaDecoder
from .gemma_network import GemmaModel
from .network import Attention, DeltaNet, LanguageModel, Layer, _unit, rotate

END_OF_TURN = 2
Network = LanguageModel | GemmaModel


class _LinearState:
    def __init__(self, mixer: DeltaNet, rows: int) -> None:
        s = mixer.s
        self.mixer = mixer
        self.window = torch.zeros(rows, 3, 2 * mixer.key_width + mixer.value_width)
        self.state = torch.zeros(rows, s.linear_heads, s.linear_key_dim, s.linear_value_dim)
        self.taps = mixer.conv1d.weight[:, 0].T.contiguous()  # (4, W)

    def step(self, x: Tensor, position: int) -> Tensor:
        m, rows = self.mixer, x.shape[0]
        heads = m.s.linear_heads
        seen = torch.cat([self.window, m.in_proj_qkv(x)[:, None]], 1)
        self.window = seen[:, 1:]
        mixed = F.silu((seen * self.taps).sum(1))
        q, k, v = mixed.split([m.key_width, m.key_width, m.value_width], -1)
        q, k, v = (t.view(rows, heads, -1) for t in (q, k, v))
        q, k = _unit(q) * m.s.linear_key_dim**-0.5, _unit(k)
        beta = m.in_proj_b(x).sigmoid()[..., None]
        decay = (-m.A_log.exp() * F.softplus(m.in_proj_a(x) + m.dt_bias)).exp()
        self.state *= decay[..., None, None]
        delta = (v - (self.state * k[..., None]).sum(-2)) * beta
        self.state += k[..., None] * delta[..., None, :]
        out = (self.state * q[..., None]).sum(-2)
        return m.out_proj(m.norm(out, m.in_proj_z(x).view(rows, heads, -1)).reshape(rows, -1))


class _AttentionState:
    def __init__(self, mixer: Attention, rows: int, capacity: int) -> None:
        s = mixer.s
        self.mixer = mixer
        self.keys = torch.zeros(rows, s.kv_heads, capacity, s.head_dim)
        self.values = torch.zeros(rows, s.kv_heads, capacity, s.head_dim)
        dims = int(s.head_dim * s.rotary_fraction)
        rates = s.rope_theta ** (-torch.arange(0, dims, 2).float() / dims)
        angles = torch.arange(capacity).float()[:, None] * rates
        angles = torch.cat([angles, angles], -1)
        self.cos, self.sin = angles.cos(), angles.sin()

    def step(self, x: Tensor, position: int) -> Tensor:
        m, s, rows = self.mixer, self.mixer.s, x.shape[0]
        here = slice(position, position + 1)
        query, gate = m.q_proj(x).view(rows, s.heads, 2 * s.head_dim).chunk(2, -1)
        q = rotate(m.q_norm(query)[:, :, None], self.cos[here], self.sin[here])
        k = m.k_norm(m.k_proj(x).view(rows, s.kv_heads, s.head_dim))[:, :, None]
        self.keys[:, :, here] = rotate(k, self.cos[here], self.sin[here])
        self.values[:, :, here] = m.v_proj(x).view(rows, s.kv_heads, 1, s.head_dim)
        keys, values = self.keys[:, :, : position + 1], self.values[:, :, : position + 1]
        out = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        return m.o_proj(out.reshape(rows, -1) * torch.sigmoid(gate.reshape(rows, -1)))


class Decoder:
    """One batch of rows in lock-step."""

    def __init__(self, model: LanguageModel, rows: int, capacity: int) -> None:
        self.model, self.position = model, 0
        self.layers: list[tuple[Layer, _LinearState | _AttentionState]] = []
        for layer in model.model.layers:
            state = (
                _AttentionState(layer.self_attn, rows, capacity)
                if layer.attention
                else _LinearState(layer.linear_attn, rows)
            )
            self.layers.append((layer, state))  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """ids (B,) -> logits (B, V) for the token after them."""
        x = self.model.model.embed_tokens(ids)
        for layer, state in self.layers:
            x = x + state.step(layer.input_layernorm(x), self.position)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.position += 1
        return self.model.lm_head(self.model.model.norm(x))


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]


def complete(
    model: Network, prompts: list[list[int]], budgets: list[int], *, temperature: float = 0.0, stop: int | None = END_OF_TURN,
    seed: int = 0,
) -> list[list[int]]:  # fmt: skip
    """Continuations of `prompts`, each up to its budget or `stop` (included when reached)."""
    rows = len(prompts)
    capacity = max(len(p) + b for p, b in zip(prompts, budgets, strict=True))
    decoder = (GemmaDecoder if isinstance(model, GemmaModel) else Decoder)(model, rows, capacity)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    outputs: list[list[int]] = [[] for _ in prompts]
    finished = [b == 0 for b in budgets]
    for position in range(capacity - 1):
        fed = []
        for i, prompt in enumerate(prompts):
            taken = position - len(prompt)
            fed.append(prompt[position] if taken < 0 else outputs[i][taken] if taken < len(outputs[i]) else 0)
        chosen = _choose(decoder.step(torch.tensor(fed)), temperature, generator).tolist()
        for i, prompt in enumerate(prompts):
            if position >= len(prompt) - 1 and not finished[i]:
                outputs[i].append(chosen[i])
                finished[i] = chosen[i] == stop or len(outputs[i]) >= budgets[i]
        if all(finished):
            break
    return outputs


def sample_rows(model: LanguageModel, data: Data, rows: int, length: int, seed: int = 5) -> np.ndarray:
    """Rows (rows, length) of the target's own text at temperatures 0.7 and 1, from openings of raw code and chats."""
    rng = np.random.default_rng(seed)
    done: list[np.ndarray] = []
    kinds = ["rename", "known", "rename_function", "docstring", "explain", "continue", "refusal", "literal"]
    while sum(map(len, done)) < rows:
        prompts = []
        for i in range(64):
            if i % 2:
                prompts.append(data.raw(rng, int(rng.integers(8, 48))).tolist())
                continue
            kind = data.train[kinds[int(rng.integers(len(kinds)))]]
            ids, start = kind.row(int(rng.integers(len(kind))))
            prompts.append(ids[: min(start, length - 40)].tolist())
        budgets = [length - len(p) for p in prompts]
        temperature = 0.7 if len(done) % 2 else 1.0
        outputs = complete(model, prompts, budgets, temperature=temperature, stop=None, seed=seed + len(done))
        done.append(np.array([p + o for p, o in zip(prompts, outputs, strict=True)], np.int64))
    return np.concatenate(done)[:rows]
