"""Writes the shipped folders: weights, configuration, tokenizer, chat template, notices. Knows file layouts, not training.

Matrices are bfloat16; norms, A_log and dt_bias stay float32 (adding one to a zero-centred bfloat16 norm costs 2e-2 in the
logits). Names are those of the Hugging Face text-only checkpoint.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from demo_data.chat import CHAT_TEMPLATE
from safetensors.torch import load_file, save_file

from .gemma_network import GEMMA, GemmaModel, GemmaShape
from .network import DRAFT, TARGET, LanguageModel, Shape

MAX_POSITIONS = 2048


def build(s: Shape | GemmaShape) -> LanguageModel | GemmaModel:
    """The network of one member, untrained."""
    return GemmaModel(s) if isinstance(s, GemmaShape) else LanguageModel(s)


def gemma_config(s: GemmaShape) -> dict[str, object]:
    """config.json of the Gemma member, in the dialect of today's transformers and in the one before, which mlx-lm reads."""
    kinds = ["full_attention" if s.is_full(i) else "sliding_attention" for i in range(s.layers)]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.ffn,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "query_pre_attn_scalar": s.head_dim,
        "sliding_window": s.window,
        "sliding_window_pattern": s.interval,
        "layer_types": kinds,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rope_local_base_freq": s.theta_windowed,
        "rope_theta": s.theta_full,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": s.theta_windowed},
            "full_attention": {"rope_type": "default", "rope_theta": s.theta_full},
        },
        "dtype": "bfloat16",
    }


def config(s: Shape | GemmaShape, context: int = MAX_POSITIONS) -> dict[str, object]:
    """config.json of one member. context: tokens, of a Qwen3.5 member."""
    if isinstance(s, GemmaShape):
        return gemma_config(s)
    kinds = ["full_attention" if (i + 1) % s.interval == 0 else "linear_attention" for i in range(s.layers)]
    quarter = int(s.head_dim * s.rotary_fraction) // 2
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.ffn,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "linear_num_key_heads": s.linear_heads,
        "linear_num_value_heads": s.linear_heads,
        "linear_key_head_dim": s.linear_key_dim,
        "linear_value_head_dim": s.linear_value_dim,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": s.interval,
        "layer_types": kinds,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "mtp_num_hidden_layers": int(s.mtp),
        "mtp_use_dedicated_embeddings": False,
        "mamba_ssm_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": s.rope_theta,
            "partial_rotary_factor": s.rotary_fraction,
            "mrope_section": [quarter - 2 * (quarter // 3), quarter // 3, quarter // 3],
            "mrope_interleaved": True,
        },
        "dtype": "bfloat16",
    }


def _tensor(name: str, value: torch.Tensor) -> torch.Tensor:
    keep = name.endswith(("A_log", "dt_bias")) or "norm" in name.split(".")[-2]
    return (value.float() if keep else value.bfloat16()).contiguous()


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_member(
    folder: Path, model: LanguageModel | GemmaModel, tokenizer: Path, *, context: int = MAX_POSITIONS
) -> None:
    """One Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: _tensor(name, value) for name, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    _write_json(folder / "config.json", config(model.s, context))
    generation = {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": False, "max_new_tokens": 512}
    _write_json(folder / "generation_config.json", generation)
    shutil.copy(tokenizer, folder / "tokenizer.json")
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", described)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE + "\n")


def read_member(folder: Path, s: Shape | GemmaShape) -> LanguageModel | GemmaModel:
    """The shipped weights back in the training network, float32, frozen."""
    model = build(s)
    model.load_state_dict(
        {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    )
    return model.requires_grad_(False).eval()


def load_states(work: Path) -> tuple[LanguageModel, LanguageModel | None]:
    """Target (with the tuned MTP head where there is one) and draft model from the checkpoints in `work`."""
    target = LanguageModel(TARGET)
    target.load_state_dict(torch.load(work / "main.pt")["model"])
    if (work / "mtp.pt").exists():
        target.mtp.load_state_dict(torch.load(work / "mtp.pt")["model"])  # type: ignore[union-attr]
    draft = None
    if (work / "draft.pt").exists():
        draft = LanguageModel(DRAFT)
        draft.load_state_dict(torch.load(work / "draft.pt")["model"])
    return target, draft


def export_gemma(work: Path, out: Path) -> None:
    """Write `out/gemma` from its checkpoint in `work`."""
    model = GemmaModel(GEMMA)
    model.load_state_dict(torch.load(work / "gemma.pt")["model"])
    write_member(out / "gemma", model, work / "tokenizer.json")


def export(work: Path, out: Path) -> None:
    """Write `out/target` and, where they are trained, `out/draft` and `out/gemma`, and the list of sources."""
    if (work / "gemma.pt").exists():
        export_gemma(work, out)
    if not (work / "main.pt").exists():
        return
    target, draft = load_states(work)
    write_member(out / "target", target, work / "tokenizer.json")
    if draft is not None:
        write_member(out / "draft", draft, work / "tokenizer.json")
    sources = json.loads((work / "sources.json").read_text())
    lines = [
        f"{f['sha256']}  {'held-out' if f['held_out'] else 'training'}  {f['path']}" for f in sources["files"]
    ]
    header = f"# CPython {sources['python']} standard library, {sources['licence']}, generator seed {sources['seed']}\n"
    (out / "SOURCES.txt").write_text(header + "\n".join(lines) + "\n")
