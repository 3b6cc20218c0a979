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
from tests import tiny_models
from tests.loading import byte_tokenizer

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
        ((*parts, "Dense"), flags, "names Dense, which is not supported"),
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
