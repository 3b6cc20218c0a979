"""The lines at the top of a chat: model, format of the weights, memory, drafters, and the longest possible conversation.

Knows the engine's facts and the model's config.json; knows no stream.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mlxspec.cli import stats_line, terminal
from mlxspec.cli.recommended import USUAL

if TYPE_CHECKING:
    from mlxspec.cli.conversation import Conversation
    from mlxspec.engine.engine import Engine

DEMO = "demo"


def tell(talk: Conversation) -> None:
    """Write the header of a chat to stderr."""
    for name, text in rows(talk).items():
        terminal.note_row(name, text, 9)


def rows(talk: Conversation) -> dict[str, str]:
    """Return the texts of the header's rows by their names, in order."""
    engine, spec = talk.engine, talk.spec
    drafters = ", ".join(spec.drafters)
    policy = "where it pays" if spec.policy == "auto" else "always"
    params, chosen = talk.params, ", the model's recommendation" if talk.recommended else ""
    if talk.recommended == USUAL:
        chosen = ", as the model's files recommend nothing"
    more = f", top-p {params.top_p:g}" * (params.top_p < 1) + f", top-k {params.top_k}" * (params.top_k > 0)
    from mlxspec.engine.measured import measured

    tried = measured(engine.name)
    return {
        "model": f"{engine.name} · {weights(engine)}",
        "drafting": f"{drafters} ({policy})" if drafters else "off",
        "sampling": f"temperature {params.temperature:g}{more}{chosen}"
        if params.temperature
        else "always the most likely token",
        "context": f"{engine.max_context:,} tokens{stats_line.kept_bits(engine)}",
        **({"speed": tried} if tried else {}),
    }


def weights(engine: Engine) -> str:
    """Return the format and size of the model's weights, such as `4-bit in groups of 64 · 15.1 GB`. Where the model is computed in
    another format than it is stored in, both are named."""
    from mlx.utils import tree_flatten

    parameters: Any = getattr(engine.model, "parameters", dict)
    arrays = [value for _, value in tree_flatten(parameters())]
    sizes: dict[str, int] = {}
    for array in arrays:
        sizes[str(array.dtype)] = sizes.get(str(array.dtype), 0) + array.nbytes
    kind = max(sizes, key=lambda k: sizes[k]).removeprefix("mlx.core.") if sizes else "no weights"
    stored = quantization(engine.name)
    if stored is not None:
        kind = stored if kind == "uint32" else f"{stored}, computed as {kind}"
    return f"{kind} · {stats_line.size(sum(sizes.values()))}"


def quantization(model: str) -> str | None:
    """Return the quantization of the model's folder, such as "4-bit in groups of 64" or "FP8"; None where it is not quantized or cannot
    be read."""
    from mlxspec.errors import MlxspecError
    from mlxspec.loading import hub
    from mlxspec.loading.published import of_mlx
    from mlxspec.loading.weights import read_folder

    try:
        folder = hub.resolve(model)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        unpacked = {how.format for how in read_folder(folder).stored.values()}
    except (MlxspecError, OSError, ValueError):
        return None
    found = of_mlx(config)
    if unpacked or not isinstance(found.get("bits"), int):
        return " and ".join(sorted(unpacked)) or None
    mode = found.get("mode", "affine")
    return (
        f"{found['bits']}-bit{'' if mode == 'affine' else f' {mode}'} in groups of {found.get('group_size')}"
    )
