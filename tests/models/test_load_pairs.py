"""A target's folder and that of what drafts for it, through `load` and the command line: the same text with and without, and accepted
drafts; what cannot draft is one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import tiny
import tiny_assistant
import tiny_gemma
import tiny_qwen3
from test_mtp_layouts import head, save
from tiny_gemma import Arrays
from zoo import Zoo

import mlxspec
from mlxspec.cli.main import main
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.demo import TARGET
from mlxspec.errors import ConfigError, ModelError
from tests.tiny_models import VOCAB, tokenizer

WINDOW_AND_MORE = SamplingParams(max_tokens=40, ignore_eos=True)  # of 11 tokens
FIXED = SpecConfig(policy="fixed")


def add_tokenizer(folder: Path, num_ids: int = VOCAB) -> Path:
    if num_ids == VOCAB:
        tokenizer()._inner.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[-1].content }}"}')
        return folder
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({f"w{i}": i for i in range(num_ids)}, "w0")).save(
        str(folder / "tokenizer.json")
    )
    return folder


def led_by_the_last_token(named: Arrays) -> Arrays:
    """Layers add little to the residual stream, and a head of its own is decisive: what passes embeddings on is often right."""
    rng = np.random.default_rng(8)
    table = named["model.embed_tokens.weight"]
    out = {k: v * np.float32(0.3) if "post_" in k else v for k, v in named.items()}
    out["model.embed_tokens.weight"] = rng.normal(0.0, table.shape[1] ** -0.5, table.shape)
    out["lm_head.weight"] = rng.normal(0.0, 12.0 * table.shape[1] ** -0.5, table.shape)
    return {k: np.asarray(v, np.float32) for k, v in out.items()}


def gemma_pair(root: Path, name: str, clusters: int = 0) -> tuple[Path, Path]:
    """A target and an assistant that mostly passes its token's embedding on to the target's own head."""
    c = {**tiny_gemma.CONFIGS[name], "vocab_size": VOCAB, "tie_word_embeddings": False}
    c |= {"final_logit_softcapping": 30.0}
    c |= {"vocab_size_per_layer_input": VOCAB} if "vocab_size_per_layer_input" in c else {}
    target = add_tokenizer(tiny_gemma.write_text(root / "target", c, led_by_the_last_token))
    lm_head = np.array(mx.load(str(target / "model.safetensors"))["lm_head.weight"])
    size = c["hidden_size"]

    def passes_on(named: Arrays) -> Arrays:
        out = {
            k: v * 0.2 if "post_attention" in k or "post_feedforward" in k else v for k, v in named.items()
        }
        noise = 0.3 * named["pre_projection.weight"]
        out["pre_projection.weight"] = np.concatenate([np.eye(size), np.zeros((size, size))], axis=1) + noise
        return out | {"model.embed_tokens.weight": lm_head}

    config = tiny_assistant.config(c, clusters, max(2, clusters // 4), hidden=size)
    return target, tiny_assistant.write(root / "assistant", config, passes_on)


@pytest.mark.parametrize(
    ("name", "clusters"),
    [
        ("gemma4-dense", 12),
        pytest.param("gemma4-e", 0, marks=pytest.mark.slow),
        pytest.param("gemma4-moe", 0, marks=pytest.mark.slow),
    ],
)
def test_a_gemma_4_assistant(name: str, clusters: int, tmp_path: Path) -> None:
    target, assistant = gemma_pair(tmp_path, name, clusters)
    prompts = ["aA1" * 9, "b"]
    plain = mlxspec.load(str(target), draft="off").generate(prompts, WINDOW_AND_MORE)
    for draft in ("auto", "mtp"):
        engine = mlxspec.load(str(target), draft=draft, draft_model=str(assistant), spec=FIXED)
        assert "mtp" in engine.spec.drafters
        drafted = engine.generate(prompts, WINDOW_AND_MORE)
        assert [r.tokens for r in drafted] == [r.tokens for r in plain]
        counts = [r.stats.drafters["mtp"] for r in drafted]
        alone = engine.generate(prompts[0], WINDOW_AND_MORE)  # its text is known by now
        assert alone.tokens == plain[0].tokens
        assert 0 < sum(c.num_accepted for c in counts) < sum(c.num_drafted for c in counts)


def test_an_assistant_proposes_from_rows_of_its_own_head(tmp_path: Path) -> None:
    target, assistant = gemma_pair(tmp_path / "whole", "gemma4-dense")
    prompts, spec = ["aA1" * 9, "b"], SpecConfig(policy="fixed", draft_vocab=48)
    plain = mlxspec.load(str(target), draft="off").generate(prompts, WINDOW_AND_MORE)
    engine = mlxspec.load(str(target), draft="mtp", draft_model=str(assistant), spec=spec)
    assert any("mtp proposes over 48 of 96 tokens" in notice for notice in engine.notices)
    drafted = [*engine.generate(prompts, WINDOW_AND_MORE), engine.generate(prompts[0], WINDOW_AND_MORE)]
    assert [r.tokens for r in drafted] == [r.tokens for r in (*plain, plain[0])]
    counts = [r.stats.drafters["mtp"] for r in drafted]
    assert 0 < sum(c.num_accepted for c in counts) < sum(c.num_drafted for c in counts)
    drafter = engine.drafts.drafters["mtp"]
    assert 0 < drafter.reads.head == drafter.reduced.weight_bytes
    target, assistant = gemma_pair(tmp_path / "clusters", "gemma4-dense", 12)
    engine = mlxspec.load(str(target), draft="mtp", draft_model=str(assistant), spec=spec)
    assert any("--draft-vocab is not used: the assistant scores clusters" in n for n in engine.notices)
    assert engine.drafts.drafters["mtp"].reduced is None


def test_a_gemma_4_assistant_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, assistant = gemma_pair(tmp_path, "gemma4-dense", 12)
    command = ["generate", "-p", "aAbB1", "--max-tokens", "40", "--model", str(target)]
    assert main([*command, "--draft", "off"]) == 0
    plain = capsys.readouterr().out
    # whether drafting pays on a busy machine is not what is tested
    assert main([*command, "--policy", "fixed", "--stats", "--draft-model", str(assistant)]) == 0
    drafted = capsys.readouterr()
    assert drafted.out == plain
    assert " mtp " in drafted.err
    assert main([*command, "--draft", "draft-model", "--draft-model", str(assistant)]) == 2
    assert "asked for as `mtp`" in capsys.readouterr().err


@pytest.mark.parametrize("lender", ["split", "original"])
def test_a_head_of_its_own(zoo: Zoo, lender: str, tmp_path: Path) -> None:
    """Beside mlx-lm's conversion, which has none: a folder of nothing but the head, or the original model."""
    target = add_tokenizer(Path(shutil.copytree(zoo.folder("tied", "mlx"), tmp_path / "target")), tiny.VOCAB)
    if lender == "split":
        other = tmp_path / "head"
        save(other / "model.safetensors", head("tied", "converted"))
    else:
        other = zoo.folder("tied", "hub")
    plain = mlxspec.load(str(target))
    assert plain.spec.drafters == ("suffix", "ngram-simple")
    assert "its folder lacks" in plain.notices[-1]
    assert "--graft-mtp" in plain.notices[-1]
    engine = mlxspec.load(str(target), draft="mtp", draft_model=str(other), spec=FIXED)
    assert engine.notices == ()
    wanted, got = (e.generate([1, 2, 3, 4], WINDOW_AND_MORE) for e in (plain, engine))
    assert got.tokens == wanted.tokens
    assert got.stats.drafters["mtp"].num_drafted > 0
    if lender == "split":
        assert mlxspec.load(str(target), draft_model=str(other), spec=FIXED).spec.drafters == (
            "suffix",
            "ngram-simple",
            "mtp",
        )


@pytest.mark.parametrize("norms", ["raw", "shifted"])
@pytest.mark.parametrize("prefix", ["mtp.", ""])
def test_a_head_alone_is_accepted_whether_its_norms_are_shifted_or_not(
    norms: str, prefix: str, tmp_path: Path
) -> None:
    """The demo's own head, in a folder as converters write them."""
    stored = mx.load(str(TARGET / "model.safetensors"))
    own = {k.removeprefix("mtp."): v for k, v in stored.items() if k.startswith("mtp.")}
    if norms == "shifted":
        own = {k: v.astype(mx.float32) + 1 if "norm" in k and v.ndim == 1 else v for k, v in own.items()}
    save(tmp_path / "model.safetensors", {prefix + k: v for k, v in own.items()})
    config = {"model_type": "qwen3_5_mtp", "text_config": json.loads((TARGET / "config.json").read_text())}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = mlxspec.load("demo", draft="mtp", draft_model=str(tmp_path), spec=FIXED)
    chat = [{"role": "user", "content": "what does os.path.join do?"}]
    done = engine.chat(chat, SamplingParams(max_tokens=40, temperature=0.0)).stats.drafters["mtp"]
    assert done.num_accepted > 0.8 * done.num_drafted > 8


def zoo_with_head(zoo: Zoo, folder: Path) -> Path:
    """A model with a head and a tokenizer."""
    there = folder / "with-head"
    source = zoo.folder("tied", "hub")
    return there if there.exists() else add_tokenizer(Path(shutil.copytree(source, there)), tiny.VOCAB)


def test_a_draft_model_that_is_named_drafts_beside_a_head(zoo: Zoo, tmp_path: Path) -> None:
    target = zoo_with_head(zoo, tmp_path)
    small = add_tokenizer(Path(shutil.copytree(zoo.folder("tied", "mlx"), tmp_path / "small")), tiny.VOCAB)
    plain = mlxspec.load(str(target), spec=FIXED)
    assert plain.spec.drafters == ("suffix", "ngram-simple", "mtp")
    named = mlxspec.load(str(target), draft_model=str(small), spec=FIXED)
    assert named.spec.drafters == ("suffix", "ngram-simple", "draft-model")
    assert "--draft mtp,draft-model uses both" in named.notices[-1]
    result = named.generate([1, 2, 3, 4], WINDOW_AND_MORE)
    assert result.stats.drafters["draft-model"].num_drafted > 0
    both = mlxspec.load(str(target), draft="mtp,draft-model", draft_model=str(small), spec=FIXED)
    assert both.spec.drafters == ("mtp", "draft-model")
    assert not any("uses both" in notice for notice in both.notices)
    off = mlxspec.load(str(target), draft="off", draft_model=str(small))
    assert off.spec.drafters == ()


def test_what_cannot_draft(zoo: Zoo, tmp_path: Path) -> None:
    target, assistant = gemma_pair(tmp_path, "gemma4-dense")
    qwen = add_tokenizer(Path(shutil.copytree(zoo.folder("tied", "mlx"), tmp_path / "qwen")), tiny.VOCAB)
    own = tmp_path / "head"
    save(own / "model.safetensors", head("tied", "raw"), "mtp.")
    for draft in ("ngram-simple", "mtp"):
        with pytest.raises(ConfigError, match=r"would not be used: add draft-model"):
            mlxspec.load(str(zoo_with_head(zoo, tmp_path)), draft=draft, draft_model=str(qwen))
    with pytest.raises(ConfigError, match=r"would not be used: add mtp"):
        mlxspec.load(str(qwen), draft="ngram-simple", draft_model=str(own))
    for model, other, says in (
        (qwen, assistant, "Gemma 4 models only"),
        (target, own, "Qwen3.5 models only"),
        (qwen, qwen, "holds no MTP head either"),
    ):
        with pytest.raises(ModelError, match=says):
            mlxspec.load(str(model), draft="mtp", draft_model=str(other))
    with pytest.raises(ModelError, match=r"holds no MTP head: .* leave `mtp` out"):
        mlxspec.load(str(qwen), draft="mtp")
    with pytest.raises(ConfigError, match="asked for as `mtp`"):
        mlxspec.load(str(qwen), draft="draft-model", draft_model=str(own))
    (assistant / "config.json").write_text(json.dumps({"model_type": ["gemma4_assistant"]}))
    with pytest.raises(ModelError, match="names no model_type"):
        mlxspec.load(str(target), draft="draft-model", draft_model=str(assistant))


def test_a_small_qwen3_drafts_for_one_with_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both in their published layout, named as in the command that the documentation gives."""

    def decisive(named: Arrays) -> Arrays:
        ends = ("o_proj.weight", "down_proj.weight", "down_proj")
        return led_by_the_last_token({k: v * 0.3 if k.endswith(ends) else v for k, v in named.items()})

    folders = {}
    for name in ("qwen3-moe", "qwen3"):
        config = tiny_qwen3.CONFIGS[name] | {"vocab_size": VOCAB}
        folders[name] = add_tokenizer(tiny_qwen3.write(tmp_path / name, config, change=decisive))
    target, draft = map(str, folders.values())
    plain = mlxspec.load(target, draft="off").generate(["aA1" * 9, "b"], WINDOW_AND_MORE)
    engine = mlxspec.load(target, draft_model=draft, spec=FIXED)
    assert engine.spec.drafters == ("suffix", "ngram-simple", "draft-model")
    assert engine.notices == ()
    drafted = engine.generate(["aA1" * 9, "b"], WINDOW_AND_MORE)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert sum(r.stats.drafters["draft-model"].num_accepted for r in drafted) > 0
    assert main(["inspect", target, "--draft-model", draft]) == 0
    said = capsys.readouterr().out
    assert "qwen3_moe" in said
    assert "models of this family have none" in said
    with pytest.raises(ModelError, match="models of this family have none"):
        mlxspec.load(target, draft="mtp")
    own = tmp_path / "head"
    save(own / "model.safetensors", head("tied", "raw"), "mtp.")
    with pytest.raises(ModelError, match="models of this family have none") as caught:
        mlxspec.load(target, draft="mtp", draft_model=str(own))
    assert "\n" not in str(caught.value)


def test_links_out_of_the_folder(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of links loads, wherever its files are; a link to a file of another name may be to anything."""
    source = zoo.folder("tied", "mlx")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    add_tokenizer(folder, tiny.VOCAB)
    assert mlxspec.load(str(folder), draft="off").model.vocab_size == tiny.VOCAB
    (tmp_path / "secret.json").write_text("{}")
    (folder / "generation_config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ModelError, match="is a link out of that folder"):
        mlxspec.load(str(folder), draft="off")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert mlxspec.load(str(folder), draft="off").model.vocab_size == tiny.VOCAB
    loop = Path(shutil.copytree(source, tmp_path / "loop"))
    (loop / "config.json").unlink()
    (loop / "config.json").symlink_to("config.json")
    with pytest.raises(ModelError, match=r"leads nowhere|no config.json"):
        mlxspec.load(str(loop), draft="off")
    twin = tmp_path / "linked folder"
    twin.symlink_to(Path(shutil.copytree(source, tmp_path / "real")))
    add_tokenizer(twin, tiny.VOCAB)
    assert mlxspec.load(str(twin), draft="off").model.vocab_size == tiny.VOCAB
