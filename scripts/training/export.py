"""What a drafter learns from, written for those who train elsewhere: tokens, hidden states, and how far drafts were accepted.

The layout is that of the speculators library (0.9): `data.jsonl` has a row for each piece, its `input_ids` and `loss_mask`, which
`speculators prepare-data` takes as they are; `hidden_states/hs_I.safetensors` has those of row I, `token_ids` (T,) and `hidden_states`
(T, layers + 1, H): residual streams behind the layers, and that behind the last one, before the final norm. Beside them is `accepted` (T,),
which the library passes over: how many tokens of the draft behind a token the model would have taken greedily, -1 where none was made.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import mlx.core as mx

from mlxspec.errors import ConfigError, StorageError
from mlxspec.models.registry import Trunk
from training.network import Head, Network
from training.states import Batch, write


def check_folder(folder: Path) -> None:
    """Make it. Raises ConfigError where it holds something, StorageError where it cannot be made."""
    try:
        (folder / "hidden_states").mkdir(parents=True)
    except FileExistsError as error:
        raise ConfigError(f"{folder} holds hidden states already; name another folder.") from error
    except OSError as error:
        raise StorageError(f"{folder} cannot be made: {error.strerror}.") from error


def export(
    folder: Path, target: Trunk, pieces: Iterable[Sequence[int]], drafter: tuple[Network, Head] | None
) -> int:
    """Write as many pieces of text as come into a folder of `check_folder`. drafter: whose drafts are judged, None for none. Returns how
    many were written. `data.jsonl` is written last: a folder without it is not whole. Raises StorageError where the disk is full."""
    num, rows = target.num_layers, list[str]()
    own = () if drafter is None else drafter[0].layers
    layers = own or tuple(sorted({i for i in (1, num // 2 - 1, num - 4) if i >= 0}))  # those of most drafters
    every = tuple(dict.fromkeys((*layers, num - 1)))
    for i, tokens in enumerate(pieces):
        batch = Batch.of(target, every, [list(tokens)])
        if batch.streams is None:
            raise ValueError("a target was asked for residual streams and gave none")
        streams = batch.streams[0].reshape(len(tokens), len(every), -1)
        arrays = {
            "token_ids": batch.tokens[0].astype(mx.int64),
            "hidden_states": streams[:, [every.index(layer) for layer in (*layers, num - 1)]],
        }
        if drafter is not None:
            seen = streams[:, : len(own)].reshape(1, len(tokens), -1) if own else None
            arrays["accepted"] = accepted_at(*drafter, batch._replace(streams=seen))
        write(folder / "hidden_states" / f"hs_{i}.safetensors", arrays)
        rows.append(json.dumps({"input_ids": list(tokens), "loss_mask": [1] * len(tokens)}) + "\n")
    try:
        (folder / "data.jsonl").write_text("".join(rows), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror}.") from error
    return len(rows)


def accepted_at(network: Network, head: Head, batch: Batch) -> mx.array:
    """(T,) int32, of a batch of one text: how many tokens of the draft that is made behind each the target would have taken greedily."""
    length, depth = batch.tokens.shape[1], len(network.depths)
    agreed, behind, right = (
        list[mx.array](),
        network.begins_behind,
        network.logits(batch.hidden[0]).argmax(axis=-1),
    )
    scored = network.scored(head, batch, mx.arange(length - depth), is_drafting=True)
    for j, (own, *_) in enumerate(scored, behind):
        drafted = own[0].argmax(axis=-1)
        drafted = drafted if network.ids is None else network.ids[drafted]
        agreed.append((drafted == right[j : j + length - depth]).astype(mx.int32))
    found = mx.cumprod(mx.stack(agreed), axis=0).sum(axis=0)
    return mx.concatenate(
        [mx.full(behind, -1, mx.int32), found.astype(mx.int32), mx.full(depth - behind, -1, mx.int32)]
    )
