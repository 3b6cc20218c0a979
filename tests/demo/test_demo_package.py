"""The shipped family: files, configuration and tokenizer fit together, and the card speaks of these weights."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from mlxspec import demo
from mlxspec.errors import ConfigError

MEMBERS = {"target": demo.TARGET, "draft": demo.DRAFT}
EVERY = {**MEMBERS, "gemma": demo.GEMMA}
FIGURES = json.loads(demo.FIGURES.read_text())


def _tensors(folder: Path) -> dict[str, dict[str, object]]:
    with (folder / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header


def test_the_whole_family_stays_small() -> None:
    assert sum(p.stat().st_size for p in demo.ROOT.rglob("*") if p.is_file()) <= 24 * 2**20


@pytest.mark.parametrize("member", EVERY)
def test_the_figures_are_of_these_weights(member: str) -> None:
    digest = hashlib.sha256((EVERY[member] / "model.safetensors").read_bytes()).hexdigest()
    assert (FIGURES["sha256"] | {"gemma": FIGURES["gemma"]["sha256"]})[member] == digest


@pytest.mark.parametrize(("name", "folder"), [("eagle3", demo.EAGLE3), ("dflash", demo.DFLASH)])
def test_a_drafter_of_layers_is_small_and_its_card_has_its_figures(name: str, folder: Path) -> None:
    weights, found = folder / "model.safetensors", FIGURES["layers"][name]
    assert weights.stat().st_size < 3_000_000
    assert found["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    card = (folder / "README.md").read_text()
    for text in ("held_out_code", "held_out_chats", "sampled_0.7", "sampled_1.0"):
        for who in (name, "mtp"):
            shares = found[text][f"{who}_accepted_at_depth"]
            assert " / ".join(f"{100 * x:.1f} %" for x in shares) in card


@pytest.mark.parametrize("member", MEMBERS)
def test_configuration_and_weights_fit(member: str) -> None:
    folder = MEMBERS[member]
    config, tensors = json.loads((folder / "config.json").read_text()), _tensors(folder)
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    hidden, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    assert (
        tensors["model.embed_tokens.weight"]["shape"] == tensors["lm_head.weight"]["shape"] == [vocab, hidden]
    )
    for i, kind in enumerate(config["layer_types"]):
        assert kind == (
            "full_attention" if (i + 1) % config["full_attention_interval"] == 0 else "linear_attention"
        )
        mixer = "self_attn.q_proj" if kind == "full_attention" else "linear_attn.in_proj_qkv"
        assert f"model.layers.{i}.{mixer}.weight" in tensors
    assert len(config["layer_types"]) == layers
    assert any(name.startswith("mtp.") for name in tensors) == bool(config["mtp_num_hidden_layers"])
    assert all(
        d % 32 == 0
        for d in (config["head_dim"], config["linear_key_head_dim"], config["linear_value_head_dim"])
    )
    for name, entry in tensors.items():
        small = name.endswith(("A_log", "dt_bias")) or "norm" in name.split(".")[-2]
        assert entry["dtype"] == ("F32" if small else "BF16"), name


def test_the_gemma_member_is_a_gemma_3_text_checkpoint() -> None:
    config, tensors = json.loads((demo.GEMMA / "config.json").read_text()), _tensors(demo.GEMMA)
    assert (config["architectures"], config["model_type"]) == (["Gemma3ForCausalLM"], "gemma3_text")
    assert config["tie_word_embeddings"]
    assert "lm_head.weight" not in tensors
    assert tensors["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    kinds, pattern = config["layer_types"], config["sliding_window_pattern"]
    assert len(kinds) == config["num_hidden_layers"]
    assert kinds == [
        "full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(len(kinds))
    ]
    assert config["sliding_window"] * 4 <= config["max_position_embeddings"]
    for name, entry in tensors.items():
        assert entry["dtype"] == ("F32" if "norm" in name.split(".")[-2] else "BF16"), name
    assert (demo.GEMMA / "model.safetensors").stat().st_size < 3 * 2**20


def test_the_member_that_reads_pictures() -> None:
    folder, known = demo.VISION, FIGURES["vision"]
    assert known["sha256"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    config, tensors = json.loads((folder / "config.json").read_text()), _tensors(folder)
    text, tower = config["text_config"], config["vision_config"]
    assert (config["architectures"], config["model_type"]) == (["Qwen3_5ForConditionalGeneration"], "qwen3_5")
    assert tower["out_hidden_size"] == text["hidden_size"]
    assert tensors["model.visual.patch_embed.proj.weight"]["shape"][0] == tower["hidden_size"]
    assert any(name.startswith("mtp.") for name in tensors)
    assert (folder / "model.safetensors").stat().st_size < 5 * 2**20
    family = json.loads((demo.TARGET / "tokenizer.json").read_text())
    own = json.loads((folder / "tokenizer.json").read_text())
    added = own["added_tokens"][len(family["added_tokens"]) :]
    assert {t["content"]: t["id"] for t in added} == {
        "<|vision_start|>": config["vision_start_token_id"],
        "<|vision_end|>": config["vision_end_token_id"],
        "<|image_pad|>": config["image_token_id"],
    }
    assert own["model"] == family["model"]
    card = (folder / "README.md").read_text()
    for kind in known["kinds"].values():
        assert f"{100 * kind['characters_right']:.1f} %" in card
        for fed in ("rows", "placeholder"):
            found = kind[fed]
            assert f"{100 * found['accepted'][0] / found['drafted'][0]:.1f} %" in card
    assert "MIT License" in (folder / "LICENSE").read_text()


@pytest.mark.parametrize("member", EVERY)
def test_tokenizer_template_and_end_of_turn(member: str) -> None:
    folder = EVERY[member]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 2048
    generation = json.loads((folder / "generation_config.json").read_text())
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    assert generation["eos_token_id"] == ends
    described = json.loads((folder / "tokenizer_config.json").read_text())
    template = (demo.TARGET / "chat_template.jinja").read_text()
    assert (folder / "chat_template.jinja").read_text() == template == described["chat_template"] + "\n"
    text = "def f(naïve):\n\treturn '日本'  # ok\r\n"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_all_members_share_the_tokenizer() -> None:
    assert len({(folder / "tokenizer.json").read_bytes() for folder in EVERY.values()}) == 1


@pytest.mark.parametrize("member", EVERY)
def test_card_licence_and_notice_are_there(member: str) -> None:
    folder = EVERY[member]
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (folder / "LICENSE").read_text()
    assert "Python Software Foundation" in (folder / "NOTICE").read_text()
    card, known = (folder / "README.md").read_text(), FIGURES["gemma"]
    said = FIGURES["acceptance"]["held_out_code"]["mtp_accepted_at_depth"]
    if member == "gemma":
        said = [known["held_out_code"]["right"], known["held_out_code"]["draft_accepted"]]
        said += [known["edits"][k]["greedy_exact"] for k in known["edits"]]
    for figure in said:
        assert f"{100 * figure:.1f} %" in card


def test_the_card_says_what_longer_prompts_give() -> None:
    cell = FIGURES["long"]["sizes"]["6000"]["all"]
    card = " ".join((demo.TARGET / "README.md").read_text().split())
    assert f"{round(cell['exact'] * cell['prompts'])} of {cell['prompts']} edits in pasted files" in card
    assert " / ".join(f"{100 * x:.1f} %" for x in cell["head_accepted_at_depth"]) in card
    assert f"In prompts of {cell['prompt_tokens']:,} tokens" in card


def test_every_missed_goal_is_said_in_the_card() -> None:
    card = (demo.TARGET / "README.md").read_text()
    depths = FIGURES["acceptance"]["held_out_code"]["mtp_accepted_at_depth"]
    met = all(d >= g for d, g in zip(depths, (0.68, 0.66, 0.64), strict=True))
    line = next(x for x in card.splitlines() if x.startswith("| MTP accepted") and "held-out code" in x)
    assert line.endswith("| yes |" if met else "| missed |")


@pytest.mark.parametrize("name", demo.WORKLOADS)
def test_workloads_are_held_out_texts_without_loops(name: str) -> None:
    workload = json.loads(demo.workload(name).read_text())
    assert workload["name"] == name
    assert len(workload["items"]) >= 10
    assert workload["distinct_4gram"] > 0.6
    for item in workload["items"]:
        assert item["reference"]
        assert item["prompt"] if name == "sampled" else item["messages"][-1]["role"] == "user"


def test_an_unknown_workload_is_named() -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        demo.workload("nonsense")
