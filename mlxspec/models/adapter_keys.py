"""Classifies every key of an adapter_config.json: its value is used, or changes nothing about text, or is refused by name.

PEFT writes the settings of LoRA beside the tensors, mlx-lm those of a training. What neither is known to write may change what the adapter
computes, so it is refused. Knows keys; knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxspec.errors import ModelError
from mlxspec.loading.names import printable
from mlxspec.models.config_values import Keys, Values

CONFIG_FILE = "adapter_config.json"
# What PEFT's other ways to begin a training leave in the weights of the model itself, which a folder of a model does not have.
_BEGINNINGS = (True, False, "gaussian", "orthogonal", "eva")
PEFT_READ = frozenset(
    """
    alpha_pattern ensure_weight_tying lora_alpha modules_to_save peft_type target_parameters trainable_token_indices use_dora use_rslora
    """.split()
)
PEFT_KEYS = Keys(
    # tensors tell which layers are adapted, and their ranks; the rest is of training, or of PEFT's own running
    idle=frozenset(
        """
        auto_mapping base_model_name_or_path base_model_class corda_config eva_config exclude_modules fan_in_fan_out inference_mode
        layers_pattern layers_to_transform loftq_config lora_dropout lora_ga_config megatron_config megatron_core parent_library
        peft_version qalora_group_size r rank_pattern revision runtime_config target_modules task_type unsloth_fixed unsloth_version
        velora_config
        """.split()
    ),
    only={
        "alora_invocation_tokens": ([],),
        "arrow_config": (),
        "bias": ("none",),
        "init_lora_weights": _BEGINNINGS,
        "kasa_config": (),
        "layer_replication": ([],),
        "lora_bias": (False,),
        "monteclora_config": (),
        "use_bdlora": (False,),
        "use_qalora": (False,),
    },
)
MLX_LM_READ = frozenset({"fine_tune_type", "lora_parameters"})
MLX_LM_KEYS = Keys(
    idle=frozenset(
        """
        adapter_path batch_size beta clear_cache_threshold config data dpo_cpo_loss_type epochs grad_accumulation_steps grad_checkpoint
        gradient_accumulation_steps hf_dataset iters learning_rate lora_layers lr_schedule mask_prompt max_seq_length model num_layers
        optimizer optimizer_config peft_type project_name report_to resume_adapter_file save_every seed steps_per_eval steps_per_report
        test test_batches train train_mode train_type trust_remote_code val_batches wandb
        """.split()
    ),
)
_LORA_PARAMETERS = frozenset({"rank", "scale", "dropout", "keys"})


def check_keys(config: Mapping[str, Any], *, of_mlx_lm: bool) -> None:
    """Raise ModelError for a key of adapter_config.json that may change the adapter's effect and that mlxspec does not support. The message
    names the key. of_mlx_lm: whether mlx-lm wrote the file, else PEFT."""
    keys, read = (MLX_LM_KEYS, MLX_LM_READ) if of_mlx_lm else (PEFT_KEYS, PEFT_READ)
    kind = config.get("peft_type")
    if not of_mlx_lm and kind not in (None, "LORA"):
        raise ModelError(f"peft_type is {printable(kind)}, and only LORA is supported.")
    get = Values(config, keys, CONFIG_FILE)
    get.skip(*read)
    unknown = list(get.unread())
    inner = config.get("lora_parameters")
    if of_mlx_lm and isinstance(inner, Mapping):
        unknown += sorted(inner.keys() - _LORA_PARAMETERS)
    if unknown:
        raise ModelError(
            f"{CONFIG_FILE} has a key that is not known here and may change what it computes: {printable(unknown[0], 60)}."
        )
