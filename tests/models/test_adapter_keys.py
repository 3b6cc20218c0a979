"""Keys of an adapter_config.json: each is used, idle or refused by name, and the documents have the same table."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from planting import catches, rewritten
from test_adapters import logits_of

from mlxspec.errors import ModelError
from mlxspec.models.adapter_files import read_adapter
from mlxspec.models.adapter_keys import MLX_LM_KEYS, MLX_LM_READ, PEFT_KEYS, PEFT_READ
from tests.models.mlx_lm_families import write

DOC = Path(__file__).parents[2] / "docs" / "checkpoints.md"
REFUSED: dict[str, Any] = {
    "alora_invocation_tokens": [1, 2], "arrow_config": {"top_k": 3}, "bias": "all",
    "init_lora_weights": "pissa", "kasa_config": {"beta": 1},
    "layer_replication": [[0, 2], [1, 3]], "lora_bias": True, "monteclora_config": {"num_samples": 4}, "use_bdlora": {"nblocks": 2},
    "use_qalora": True, "a_key_of_tomorrow": {"x": 1}, "peft_type": "LOHA",
}  # fmt: skip


def adapter(folder: Path, more: dict[str, Any] | None = None, **config: Any) -> Path:
    """A change to two projections of Qwen3 as PEFT writes it. more: further tensors."""
    folder.mkdir()
    mx.random.seed(7)
    arrays = dict(more or {})
    for name, out in (("q_proj", 128), ("v_proj", 64)):
        path = f"base_model.model.model.layers.1.self_attn.{name}"
        arrays[f"{path}.lora_A.weight"] = 0.3 * mx.random.normal((4, 64))
        arrays[f"{path}.lora_B.weight"] = 0.3 * mx.random.normal((out, 4))
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), arrays)
    told = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@catches(
    "keys of adapters are not judged",
    "mlxspec.models.adapter_keys:check_keys",
    lambda right: lambda config, *, of_mlx_lm: None,
    case="use_qalora",
)
@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_changes_the_computation_is_refused(key: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=key) as caught:
        logits_of(model, adapter(tmp_path / "a", **{key: REFUSED[key]}))
    assert str(caught.value).count(". ") == 0


@pytest.mark.parametrize("key", sorted(PEFT_KEYS.idle))
def test_an_idle_key_changes_nothing(key: str, model: Path, tmp_path: Path) -> None:
    plain = logits_of(model, adapter(tmp_path / "plain"))
    value = ["x"] if key.startswith(("target", "exclude", "layers")) else "x"
    np.testing.assert_array_equal(logits_of(model, adapter(tmp_path / "a", **{key: value})), plain)


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save names lm_head"),
        ({"modules_to_save": "lm_head"}, {}, "no list of names"),
        ({"trainable_token_indices": [3]}, {}, "trainable_token_indices"),
        ({"trainable_token_indices": [3, -1]}, {}, "no list of ids"),
        (
            {"trainable_token_indices": [3, 999]},
            {"model.embed_tokens.token_adapter.trainable_tokens_delta": (2, 64)},
            "do not match",
        ),
        ({"use_dora": True}, {}, "has no lengths"),
        ({}, {"model.layers.0.input_layernorm.weight": (64,)}, "can be replaced"),
        ({}, {"model.layers.0.self_attn.q_proj.lora_B.bias": (64,)}, "no tensor of an adapter"),
        ({}, {"model.layers.0.self_attn.q_proj.weight": (64, 65)}, "its shape differs"),
        (
            {},
            {
                "model.layers.0.mlp.experts.lora_A.weight": (16, 64),
                "model.layers.0.mlp.experts.lora_B.weight": (64, 16),
            },
            "no layer",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    config: dict[str, Any], more: dict[str, tuple[int, ...]], said: str, model: Path, tmp_path: Path
) -> None:
    arrays = {f"base_model.model.{name}": mx.zeros(shape) for name, shape in more.items()}
    with pytest.raises(ModelError, match=said):
        logits_of(model, adapter(tmp_path / "a", arrays, **config))


@catches(
    "rows are compared with those of a layer that is replaced",
    "mlxspec.models.adapter_files:_check_embeddings",
    rewritten(
        "made.layers[path].shape if path in made.layers else shapes.get(path, (0,))", "shapes.get(path, (0,))"
    ),
)
@catches(
    "a row behind the last one is taken",
    "mlxspec.models.adapter_files:_check_embeddings",
    rewritten("max(ids, default=0) >= shape[0]", "max(ids, default=0) > shape[0]"),
)
@catches(
    "the last row cannot be trained",
    "mlxspec.models.adapter_files:_check_embeddings",
    rewritten("max(ids, default=0) >= shape[0]", "max(ids, default=0) >= shape[0] - 1"),
    errors=(ModelError,),
)
def test_rows_up_to_the_last_one_can_be_trained(tmp_path: Path) -> None:
    """Writing to a row behind the last one would end the process."""
    modules = {"language_model.model.embed_tokens": nn.Embedding(50, 64)}
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    rows = {name: mx.ones((2, 64))}
    with read_adapter(adapter(tmp_path / "a", rows, trainable_token_indices=[3, 49]), modules) as found:
        assert [ids for ids, _ in found.rows.values()] == [[3, 49]]
    behind = adapter(tmp_path / "b", rows, trainable_token_indices=[3, 50])
    with pytest.raises(ModelError, match="do not match"), read_adapter(behind, modules):
        pass
    saved = {"base_model.model.model.embed_tokens.weight": mx.zeros((40, 64))}
    for last, fits in ((39, True), (40, False)):
        fewer = adapter(tmp_path / f"{last}", rows | saved, trainable_token_indices=[3, last])
        with (
            nullcontext() if fits else pytest.raises(ModelError, match="do not match"),
            read_adapter(fewer, modules),
        ):
            pass


def test_keys_of_mlx_lms_training_are_known() -> None:
    from mlx_lm.lora import CONFIG_DEFAULTS

    assert set(CONFIG_DEFAULTS) <= MLX_LM_READ | MLX_LM_KEYS.idle


def rows() -> list[str]:
    refused = [
        f"| `{key}` | {', '.join(f'`{json.dumps(v)}`' for v in allowed) or 'only null'} |"
        for key, allowed in sorted(PEFT_KEYS.only.items())
    ]
    return [
        "| Key of PEFT | |",
        "| --- | --- |",
        f"| {', '.join(f'`{key}`' for key in sorted(PEFT_READ))} | read |",
        f"| {', '.join(f'`{key}`' for key in sorted(PEFT_KEYS.idle))} | idle: training, or told by the tensors |",
        *refused,
        "| any other | refused by name |",
    ]


def test_the_documents_have_the_table() -> None:
    assert "\n".join(rows()) in DOC.read_text()
