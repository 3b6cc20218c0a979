"""Writes the folders of a family: weights, tokenizer, and the shipped configuration and chat template. Knows file layouts, not training.

Matrices are bfloat16; norms, A_log and dt_bias stay float32 (adding one to a zero-centred bfloat16 norm costs 2e-2 in the logits). Names
are those of Hugging Face checkpoints. Configurations are those of the shipped family: the networks here have their sizes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mlxspec import demo

from .gemma import GEMMA, GemmaModel
from .network import DRAFT, TARGET, LanguageModel
from .train import Network, load_target
from .vision import IMAGE, VISION_END, VISION_START
from .vision_network import Reader

BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
)
VISION_TOKENS = {VISION_START: "<|vision_start|>", VISION_END: "<|vision_end|>", IMAGE: "<|image_pad|>"}


def untrained(member: str) -> Network:
    """The network of a member: target, draft or gemma."""
    return GemmaModel(GEMMA) if member == "gemma" else LanguageModel(TARGET if member == "target" else DRAFT)


def _tensor(name: str, value: Tensor) -> Tensor:
    keep = name.endswith(("A_log", "dt_bias")) or "norm" in name.split(".")[-2]
    return (value.float() if keep else value.bfloat16()).contiguous()


def write_member(folder: Path, member: str, state: dict[str, Tensor], tokenizer: Path) -> None:
    """A Hugging Face folder of a member (target, draft, gemma or vision) with these weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: _tensor(name, value) for name, value in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in BESIDE:
        shipped = demo.ROOT / member / name
        if shipped.exists() and shipped.parent != folder:
            shutil.copy(shipped, folder / name)
    if member != "vision":
        shutil.copy(tokenizer, folder / "tokenizer.json")
        return
    described = json.loads(tokenizer.read_text())
    like = described["added_tokens"][0]
    described["added_tokens"] += [like | {"id": i, "content": text} for i, text in VISION_TOKENS.items()]
    (folder / "tokenizer.json").write_text(json.dumps(described, ensure_ascii=False) + "\n")


def read_member(folder: Path, member: str) -> Network:
    """The weights of an exported target, draft or Gemma member back in the training network, float32, frozen."""
    model = untrained(member)
    state = load_file(folder / "model.safetensors")
    model.load_state_dict({name: value.float() for name, value in state.items()})
    return model.requires_grad_(False).eval()


def write_trained(work: Path, out: Path) -> None:
    """Write `out/target`, `out/draft` and `out/gemma`, of those that `work` has checkpoints of, and the list of sources."""
    states: dict[str, nn.Module] = {}
    if (work / "main.pt").exists():
        states["target"] = load_target(work)
    for member in ("draft", "gemma"):
        if (work / f"{member}.pt").exists():
            states[member] = untrained(member)
            states[member].load_state_dict(torch.load(work / f"{member}.pt")["model"])
    for member, model in states.items():
        write_member(out / member, member, model.state_dict(), work / "tokenizer.json")
    sources = json.loads((work / "sources.json").read_text())
    head = f"# CPython {sources['python']} standard library, {sources['licence']}, generator seed {sources['seed']}\n"
    sides = {True: "held-out", False: "training"}
    lines = [f"{f['sha256']}  {sides[f['held_out']]}  {f['path']}\n" for f in sources["files"]]
    (out / "SOURCES.txt").write_text(head + "".join(lines))


def write_vision(reader: Reader, out: Path, tokenizer: Path) -> None:
    """Write the member that reads pictures."""

    def name_of(name: str) -> str:
        if name.startswith("visual."):
            return f"model.{name}"
        name = name.removeprefix("text.")
        return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name

    state = {name_of(name): value for name, value in reader.state_dict().items()}
    write_member(out, "vision", state, tokenizer)
