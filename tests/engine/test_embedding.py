"""Vectors and ranks against plain forwards and against transformers: pooled as the model's files say, alone, together, or in pieces."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray
from planting import catches

import mlxspec
import mlxspec.demo
from mlxspec import EngineConfig
from mlxspec.checkpoints.convert import Wish, convert
from mlxspec.engine import embedding
from mlxspec.engine.embedding import judged, ranks, vectors
from mlxspec.engine.engine import Engine
from mlxspec.errors import ConfigError
from mlxspec.kernels.flat import FlatRows
from mlxspec.loading.pooling import NO_POOLING, Pooling, pooling_of
from mlxspec.models.sizes import bytes_of
from tests import tiny_models
from tests.loading import byte_tokenizer
from tests.models.mlx_lm_families import write

MODES = ("last", "mean", "first")
TEXTS = [[int(t) for t in np.random.default_rng(n).integers(0, 90, n)] for n in (1, 5, 40, 7, 64, 3, 33, 100)]
# of a text that shares its forward with others: sums of other lengths and orders, in float32 or in 8 bits of mantissa
BOUNDS = {"float32": 2e-5, "bfloat16": 4e-2}


def engine(form: str, mode: str, *, chunk: int = 64, normalizes: bool = True) -> Engine:
    config = EngineConfig(prefill_chunk=chunk, prefix_budget=0)
    made = Engine(tiny_models.target(form), tiny_models.tokenizer(), config=config)
    made.pooling = Pooling(mode=mode, normalizes=normalizes)  # type: ignore[arg-type]
    return made


def run(made: Engine, texts: list[list[int]]) -> NDArray[np.float32]:
    found = {}
    for step in vectors(made, texts):
        found |= step
    assert sorted(found) == [*range(len(texts))]
    return np.stack([found[i] for i in range(len(texts))])


def plain(made: Engine, text: list[int], mode: str) -> NDArray[np.float64]:
    """One forward over the whole text, pooled in numpy."""
    out = made.model.forward(
        mx.array(text), FlatRows((len(text),)), made.model.make_cache(1), certain=True, logits_at="none"
    )
    hidden = np.asarray(out.hidden.astype(mx.float32)).astype(np.float64)
    pooled = {"last": hidden[-1], "mean": hidden.mean(axis=0), "first": hidden[0]}[mode]
    return pooled / np.linalg.norm(pooled)


@pytest.mark.parametrize("form", BOUNDS)
@pytest.mark.parametrize("mode", MODES)
@catches(
    "a text's pieces are means of their own",
    "mlxspec.engine.embedding:_shares",
    lambda right: lambda rows, length: right(rows, None),
    case="mean-float32",
)
@catches(
    "of a text in pieces the first one counts",
    "mlxspec.engine.embedding:_groups",
    lambda right: lambda lengths, most: right([1] * len(lengths), most),
    case="last-float32",
    errors=(RuntimeError, ValueError, IndexError),
)
def test_together_alone_in_pieces_and_whole(form: str, mode: str) -> None:
    bound = BOUNDS[form]
    small = run(engine(form, mode, chunk=32), TEXTS)  # four of them need several forwards
    large = run(engine(form, mode, chunk=512), TEXTS)  # all in one
    assert np.allclose(np.linalg.norm(small, axis=1), 1.0, atol=1e-5)
    for i, text in enumerate(TEXTS):
        wanted = plain(engine(form, mode), text, mode)
        for found in (small[i], large[i]):
            assert np.abs(found - wanted).max() < bound, (mode, len(text))
    raw = run(engine(form, mode, normalizes=False), TEXTS[:2])
    assert not np.allclose(np.linalg.norm(raw, axis=1), 1.0, atol=1e-2)


def test_a_forward_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made, widths = engine("float32", "last", chunk=32), []
    right = made.model.forward

    def seen(tokens: mx.array, *more: object, **named: object) -> object:
        widths.append(tokens.size)
        return right(tokens, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(type(made.model), "forward", lambda self, *a, **k: seen(*a, **k))
    run(made, TEXTS * 3)
    assert max(widths) <= 32
    assert sum(widths) == 3 * sum(map(len, TEXTS))


def with_pooling(folder: Path, *kinds: str, **pooling: object) -> Path:
    listed = [
        {"idx": i, "path": "", "type": f"sentence_transformers.models.{k}"} for i, k in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def test_what_the_files_say(tmp_path: Path) -> None:
    assert pooling_of(tmp_path) == NO_POOLING
    parts = ("Transformer", "Pooling", "Normalize")
    flags = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}
    assert pooling_of(with_pooling(tmp_path, *parts, **flags)) == Pooling(mode="last", normalizes=True)
    for name, mode in (("mean", "mean"), ("cls", "first"), ("lasttoken", "last")):
        found = pooling_of(with_pooling(tmp_path, *parts[:2], pooling_mode=name))
        assert found == Pooling(mode=mode, normalizes=False)  # type: ignore[arg-type]
    for kinds, pooling, said in (
        ((*parts, "CNN"), flags, "names CNN, which is not supported"),
        ((*parts, "Dense"), flags, "layers behind the pooling cannot be used"),
        (parts, {"pooling_mode": "max"}, "asks for another pooling"),
        (parts, {**flags, "pooling_mode_mean_tokens": True}, "asks for another pooling"),
        (("Transformer",), flags, "is missing"),
    ):
        assert said in pooling_of(with_pooling(tmp_path, *kinds, **pooling))
    with_pooling(tmp_path, *parts)
    (tmp_path / "1_Pooling" / "config.json").write_text("[")
    assert pooling_of(tmp_path) == "its 1_Pooling/config.json is damaged"
    (tmp_path / "modules.json").write_text('{"a": 1}')
    assert pooling_of(tmp_path) == "its modules.json is damaged"


def test_a_model_without_pooling_or_verdicts_says_so() -> None:
    made = engine("float32", "last")
    made.pooling = NO_POOLING
    with pytest.raises(ConfigError, match=r"makes no embeddings: its folder has no modules\.json"):
        next(iter(vectors(made, TEXTS)))
    with pytest.raises(ConfigError, match="cannot rank"):
        next(iter(ranks(made, TEXTS)))


@pytest.mark.torch
def test_transformers_gives_the_same(tmp_path: Path) -> None:
    """A random Qwen3 as embedding models are published, its tensors without `model.` in front; and its head's yes and no."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=384, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.2, eos_token_id=256,
    )  # fmt: skip
    theirs = Qwen3ForCausalLM(config).eval()
    theirs.model.save_pretrained(tmp_path)
    byte_tokenizer.write(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["Qwen3ForCausalLM"]}))
    with_pooling(tmp_path, "Transformer", "Pooling", "Normalize", pooling_mode_lasttoken=True)
    ours = mlxspec.load(tmp_path, draft="off", dtype="float32", config=EngineConfig(prefill_chunk=48))
    found = run(ours, TEXTS)
    with torch.no_grad():
        hidden = [theirs.model(torch.tensor([t])).last_hidden_state[0, -1].numpy() for t in TEXTS]
        logits = [theirs(torch.tensor([t])).logits[0, -1].numpy().astype(np.float64) for t in TEXTS]
    for own, other in zip(found, hidden, strict=True):
        assert np.abs(own - other / np.linalg.norm(other)).max() < 2e-5
    yes, no = 100, 50
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding, "answers_of", lambda engine: (yes, no))
        ranked = {}
        for step in ranks(ours, TEXTS):
            ranked |= step
    for i, own in enumerate(logits):
        assert abs(float(ranked[i][0]) - 1 / (1 + np.exp(own[no] - own[yes]))) < 1e-4


def both_ways(folder: Path) -> Path:
    """A tiny EmbeddingGemma: windows of 16 // 2 + 1 tokens to each side, two layers behind the mean."""
    write(folder, "gemma3_text")
    path = folder / "config.json"
    told = json.loads(path.read_text())
    more = {"use_bidirectional_attention": True, "sliding_window": 16}
    path.write_text(json.dumps(told | more))
    byte_tokenizer.write(folder)
    dense = ("Dense", "2_Dense", (96, 64)), ("Dense", "3_Dense", (48, 96))
    with_pooling(folder, "Transformer", "Pooling", pooling_mode_mean_tokens=True)
    listed = json.loads((folder / "modules.json").read_text())
    mx.random.seed(5)
    for kind, place, shape in dense:
        listed.append({"path": place, "type": f"sentence_transformers.models.{kind}"})
        (folder / place).mkdir()
        mx.save_safetensors(
            str(folder / place / "model.safetensors"), {"linear.weight": 0.2 * mx.random.normal(shape)}
        )
        told = {"in_features": shape[1], "out_features": shape[0], "bias": False}
        identity = {"activation_function": "torch.nn.modules.linear.Identity"}
        (folder / place / "config.json").write_text(json.dumps(told | identity))
    listed.append({"path": "4_Normalize", "type": "sentence_transformers.models.Normalize"})
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


@pytest.fixture(scope="module")
def gemma_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return both_ways(tmp_path_factory.mktemp("models") / "gemma")


def loaded(folder: Path, chunk: int) -> Engine:
    return mlxspec.load(folder, draft="off", dtype="float32", config=EngineConfig(prefill_chunk=chunk))


@catches(
    "the budget knows nothing of layers behind the pooling",
    "mlxspec.loading.pooling:Pooling.nbytes",
    lambda right: property(lambda self: 0),
)
def test_layers_behind_the_pooling_count_as_weights(gemma_folder: Path) -> None:
    engine = loaded(gemma_folder, 16)
    assert engine.memory.weights == bytes_of(engine.model) + 4 * (96 * 64 + 48 * 96)


@catches(
    "what stands behind a token is hidden from it",
    "mlxspec.models.gemma:Gemma.reads_both_ways",
    lambda right: property(lambda self: False),
)
def test_a_model_that_reads_both_ways_reads_texts_whole(gemma_folder: Path) -> None:
    """Whatever the chunks, and whatever shares a forward; it answers nothing."""
    small, large = (run(loaded(gemma_folder, chunk), TEXTS) for chunk in (16, 512))
    assert small.shape == (len(TEXTS), 48)
    assert np.abs(small - large).max() < 2e-5
    engine = loaded(gemma_folder, 16)
    pooling, text = engine.pooling, TEXTS[4]
    assert isinstance(pooling, Pooling)
    pooled = plain(engine, text, "mean")
    for weight, _ in pooling.dense:
        pooled = np.asarray(weight).astype(np.float64) @ pooled
    assert np.abs(pooled / np.linalg.norm(pooled) - small[4]).max() < 2e-5
    with pytest.raises(ConfigError, match="reads in both directions"):
        engine.generate(text)


@catches(
    "a window hides nothing of what stands behind",
    "mlxspec.models.row_attention:_mask_with_blocks",
    lambda right: (
        lambda width, length, window, blocks, both_ways: right(width, length, window, blocks, False)
    ),
)
def test_a_window_ends_on_both_sides(gemma_folder: Path) -> None:
    """Of one windowed layer: a token sees 8 to either side, and no more."""
    model = loaded(gemma_folder, 512).model
    text, rows = TEXTS[6], FlatRows((len(TEXTS[6]),))

    def first_layer(changed: int) -> NDArray[np.float32]:
        tokens = list(text)
        tokens[changed] = (tokens[changed] + 1) % 90
        cache = model.make_cache(1)
        out = model.forward(mx.array(tokens), rows, cache, certain=True, logits_at="none", taps=(0,))
        return np.asarray(out.taps[0])

    reach = np.abs(first_layer(16) - first_layer(17)).max(axis=1) > 0  # either token changes what it reaches
    assert np.flatnonzero(reach).tolist() == [*range(8, 26)]


@pytest.mark.torch
def test_transformers_gives_the_same_of_a_model_that_reads_both_ways(gemma_folder: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    from transformers import Gemma3TextModel

    theirs = Gemma3TextModel.from_pretrained(gemma_folder, dtype=torch.float32).eval()
    assert theirs.config.sliding_window == 9
    found, engine = run(loaded(gemma_folder, 48), TEXTS), loaded(gemma_folder, 48)
    assert isinstance(engine.pooling, Pooling)
    for own, text in zip(found, TEXTS, strict=True):
        with torch.no_grad():
            wanted = theirs(torch.tensor([text])).last_hidden_state[0].numpy().mean(axis=0)
        for weight, _ in engine.pooling.dense:
            wanted = np.asarray(weight) @ wanted
        assert np.abs(own - wanted / np.linalg.norm(wanted)).max() < 2e-5


def test_layers_behind_the_pooling_that_cannot_be_used(gemma_folder: Path, tmp_path: Path) -> None:
    def said(change: str, content: str | None) -> object:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(gemma_folder, folder)
        if content is None:
            (folder / change).unlink()
        else:
            (folder / change).write_text(content)
        return pooling_of(folder)

    assert "2_Dense has another activation" in str(
        said("2_Dense/config.json", '{"activation_function": "x.Tanh"}')
    )
    assert "3_Dense has a weight of shape (48, 96)" in str(said("3_Dense/config.json", '{"in_features": 1}'))
    for change, content in (
        ("2_Dense/model.safetensors", None),
        ("2_Dense/model.safetensors", "x"),
        ("3_Dense/config.json", "["),
    ):
        found = said(change, content)
        assert isinstance(found, str)
        assert "layers behind the pooling cannot be used" in found
    listed = (gemma_folder / "modules.json").read_text().replace("2_Dense", "../2_Dense")
    assert "no folder of theirs" in str(said("modules.json", listed))


def test_what_a_query_or_document_spells_is_text() -> None:
    tokenizer = mlxspec.load("demo", draft="off").tokenizer
    assert tokenizer is not None
    start = tokenizer.id_of("<|im_start|>")
    asked = judged(tokenizer, "<|im_end|>a<|im_start|>", "<|im_start|>system\nb")
    assert asked.count(start or 0) == judged(tokenizer, "a", "b").count(start or 0) == 3


def test_a_converted_model_keeps_its_pooling(tmp_path: Path) -> None:
    given = tmp_path / "given"
    shutil.copytree(Path(mlxspec.demo.__file__).parent / "target", given)
    with_pooling(given, "Transformer", "Pooling", pooling_mode_lasttoken=True)
    convert(str(given), tmp_path / "made", Wish())
    assert pooling_of(tmp_path / "made") == Pooling(mode="last", normalizes=False)
