"""EAGLE-3: what it proposes is what the algorithm proposes anew from the whole text, from every published layout; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

from mlxspec.config import EngineConfig, SamplingParams
from mlxspec.drafters.base import Ask, Draft, Unread
from mlxspec.drafters.eagle3 import Eagle3
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine
from mlxspec.errors import ModelError
from mlxspec.models.assemble_drafter import assemble_drafter
from mlxspec.models.eagle3 import Eagle3Config, Eagle3Head
from mlxspec.models.fill import check_finite
from mlxspec.models.folder import ModelFolder
from mlxspec.platform import device, memory
from mlxspec.platform.host import numbers
from mlxspec.sampling.noise import gumbel
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler
from tests import families, tiny_models
from tests.drafters.eagle3_checkpoints import KINDS, Arrays, Kind, config, steps, write
from tests.drafters.residual_streams import shown
from tests.engine import equality

SIZE = 64
LAYERS = (1, 0, 2)
AT_MOST = 1e-4  # of a logit in float32
NEAR_TIE = 1e-3  # logits closer than this: either token may come first, and what follows it is not compared
DEPTH = 3


def load(folder: Path, target=None, dtype: mx.Dtype | None = None) -> Eagle3Head:  # type: ignore[no-untyped-def]
    found = ModelFolder(folder)
    assert found.kind() == "eagle3"
    return assemble_drafter("eagle3", found.config(), found.read, target or tiny_models.target(), dtype)


def made(
    folder: Path, kind: Kind, layers: tuple[int, ...] = LAYERS, target=None, **how
) -> tuple[Eagle3Head, Arrays]:  # type: ignore[no-untyped-def]
    target = target or tiny_models.target()
    values = write(folder, kind, tiny_models.VOCAB, target.hidden_size, layers, **how)
    return load(folder, target), values


def table(target) -> np.ndarray:  # type: ignore[no-untyped-def]
    """The target's embedding (V, H), as it lies in its folder."""
    return numbers(target.language_model.model.embed_tokens(mx.arange(tiny_models.VOCAB)).astype(mx.float32))


class Watched(Eagle3):
    """logits: of each forward that gave some, of the rows in the cache's order. drafts: by row, (tokens known then, drafted tokens,
    their probabilities)."""

    def __init__(self, head: Eagle3Head, max_context: int = 2048) -> None:
        super().__init__(head, max_context)
        self.logits: list[np.ndarray] = []
        self.drafts: dict[int, list[tuple[int, list[int], list[float]]]] = {}
        self.num_behind = 0

    def _forward(self, *args):  # type: ignore[no-untyped-def]
        out = super()._forward(*args)
        if out.logits is not None:
            self.logits.append(numbers(out.logits.astype(mx.float32)).copy())
        return out

    def draft(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        lengths, drafts = [len(a.history) for a in asks], super().draft(asks, sampler)
        self._keep(asks, lengths, drafts)
        return drafts

    def draft_behind(self, asks: Sequence[Ask], sampler: BatchSampler, unread: Unread) -> list[Draft] | None:
        drafts = super().draft_behind(asks, sampler, unread)
        if drafts is not None:
            self.num_behind += 1
            lengths = [
                len(a.history) + int(n) for a, n in zip(asks, unread.num_committed.tolist(), strict=True)
            ]
            self._keep(asks, lengths, drafts)
        return drafts

    def _keep(self, asks: Sequence[Ask], lengths: list[int], drafts: Sequence[Draft]) -> None:
        for ask, length, draft in zip(asks, lengths, drafts, strict=True):
            tokens, sure = np.array(draft.tokens).tolist(), np.array(draft.confidences).tolist()
            self.drafts.setdefault(ask.row, []).append((length, tokens, sure))


def drive(
    drafter: Watched,
    target,
    texts: Sequence[Sequence[int]],
    rounds: int,
    seed: int,
    layers=LAYERS,  # type: ignore[no-untyped-def]
) -> list[tuple[list[int], np.ndarray]]:
    """Prompts and then so many rounds in which every row's text goes on by 1 to 5 tokens: of each draft, in order, the text before it and
    its logits (DEPTH, R)."""
    rng, found = np.random.default_rng(seed), []
    given = [mx.array(shown(target, text, layers)) for text in texts]
    ends = [0] * len(texts)
    for row in range(len(texts)):
        drafter.begin(row)
    sampler = [RowSampler(SamplingParams(), [1], tiny_models.VOCAB) for _ in texts]
    for turn in range(rounds + 1):
        for row, text in enumerate(texts):
            more = int(rng.integers(2, 24)) if turn == 0 else int(rng.integers(1, 6))
            end = ends[row] + more
            drafter.hear(row, text[ends[row] : end], given[row][ends[row] : end])
            ends[row] = end
        if turn == 0:
            drafter.prime(0)
        asks = [Ask(r, list(t[: ends[r]]), DEPTH, sampler[r]) for r, t in enumerate(texts)]
        drafter.logits.clear()
        drafter.draft(asks, BatchSampler(sampler, tiny_models.VOCAB))
        for row, text in enumerate(texts):
            found.append((list(text[: ends[row]]), np.stack([logits[row] for logits in drafter.logits])))
    return found


def same_steps(kind: Kind, values: Arrays, target, text: list[int], got: np.ndarray, layers=LAYERS) -> int:  # type: ignore[no-untyped-def]
    """Compare logits (n, R); returns how many steps were: behind a near tie either token may have been taken."""
    wanted, _ = steps(kind, values, table(target), text, shown(target, text, layers), len(got))
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        np.testing.assert_allclose(a, b, rtol=0, atol=AT_MOST, err_msg=f"step {i} behind {len(text)} tokens")
        second, best = np.sort(b)[-2:]
        if best - second < NEAR_TIE:
            return i + 1
    return len(got)


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_the_algorithm(tmp_path: Path, name: str) -> None:
    """Ragged prompts and 20 rounds of ragged rows: each draft's logits, in every published layout."""
    kind, target = KINDS[name], tiny_models.target()
    head, values = made(tmp_path, kind)
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, tiny_models.VOCAB, 140).tolist() for _ in range(3)]
    found = drive(Watched(head), target, texts, rounds=20, seed=4)
    assert len(found) == 3 * 21
    compared = [same_steps(kind, values, target, text, got) for text, got in found[:9] + found[-6:]]
    assert sum(compared) > 2.5 * len(compared)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("stays", [False, True], ids=["unpacked", "packed"])
def test_quantized_ones(tmp_path: Path, bits: int, stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As MLX packs them, unpacked by loading and left packed."""
    if stays:
        monkeypatch.setattr(memory, "UNPACKED_AT_MOST", 0)
    kind, target = KINDS["speculators"], tiny_models.target()
    head, values = made(tmp_path, kind, bits=bits)
    texts = [np.random.default_rng(5).integers(0, tiny_models.VOCAB, 60).tolist()]
    for text, got in drive(Watched(head), target, texts, rounds=4, seed=6):
        same_steps(kind, values, target, text, got)


def test_it_computes_in_the_dtype_of_its_own_matrices(tmp_path: Path) -> None:
    """16-bit matrices stay so on request, whatever the target computes in; drafts are those of float32 but for near ties."""
    kind, target = KINDS["SafeAILab"], tiny_models.target()
    write(tmp_path, kind, tiny_models.VOCAB, SIZE, LAYERS, dtype=mx.bfloat16)
    head = load(tmp_path, target, mx.bfloat16)
    assert head.dtype == mx.bfloat16
    texts = [np.random.default_rng(5).integers(0, tiny_models.VOCAB, 60).tolist()]
    drafter = Watched(head)
    ((text, got), *_) = drive(drafter, target, texts, rounds=2, seed=6)
    assert drafter._cache is not None
    assert drafter._cache.layers[0].dtype == mx.bfloat16
    values = write(tmp_path, kind, tiny_models.VOCAB, SIZE, LAYERS, dtype=mx.bfloat16)
    wanted, _ = steps(kind, values, table(target), text, shown(target, text, LAYERS), 1)
    np.testing.assert_allclose(got[0], wanted[0], atol=0.05 * np.abs(wanted[0]).max())


@pytest.mark.parametrize("form", ["gemma3", "gemma4-e"])
def test_for_gemma_the_embedding_is_the_table_without_its_scale(tmp_path: Path, form: str) -> None:
    target, kind = families.target(form), KINDS["target's embedding"]
    head, values = made(tmp_path, kind, target=target)
    texts = [np.random.default_rng(5).integers(0, tiny_models.VOCAB, 60).tolist()]
    for text, got in drive(Watched(head), target, texts, rounds=3, seed=6):
        same_steps(kind, values, target, text, got)


@pytest.mark.parametrize(
    ("depth", "overlaps"),
    [
        (3, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, False), (1, True), (3, False))),
    ],
)
def test_what_the_engine_feeds_it(tmp_path: Path, overlaps: bool, depth: int) -> None:
    """Over whole answers, prompts read in pieces, a second turn behind a prefix hit, and rounds drafted behind unread ones: every draft is
    the algorithm's from the whole text. So accepted positions are fed again with the target's own streams, and no rejected one is."""
    kind, target = KINDS["speculators"], tiny_models.target()
    head, values = made(tmp_path, kind)
    watched = Watched(head)
    config_ = EngineConfig(prefill_chunk=16)
    run = Engine(target, tiny_models.tokenizer(), drafters=[watched], config=config_)
    run.pipeline.overlaps, run.prefix.near = overlaps, 1
    plain = Engine(target, tiny_models.tokenizer(), config=config_)
    texts, wish = equality.prompts(3, 9), equality.spec("eagle3", n_max=depth)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    for turn in range(2):
        watched.drafts.clear()
        wanted, got = (e.generate(texts, params, spec=s) for e, s in ((plain, equality.PLAIN), (run, wish)))
        whole = []
        for text, a, b in zip(texts, wanted, got, strict=True):
            equality.same(a, b, text, params, f"turn {turn}", target)
            assert not b.stats.notices
            assert turn == 0 or b.stats.num_cached
            whole.append([*text, *b.tokens])
        compared = 0
        for text, row in zip(whole, sorted(watched.drafts), strict=True):
            drafts = watched.drafts[row]
            for length, tokens, sure in drafts:
                if 2 <= length <= len(text) and compared < 60:
                    compared += _same_draft(kind, values, target, text[:length], tokens, sure)
        assert compared > 20
        texts = [[*text, *equality.prompts(3, 10)[2][:4]] for text in whole]
    assert (watched.num_behind > 0) == overlaps


def _same_draft(
    kind: Kind, values: Arrays, target, text: list[int], tokens: list[int], sure: list[float]
) -> bool:  # type: ignore[no-untyped-def]
    logits, said = steps(kind, values, table(target), text, shown(target, text, LAYERS), len(tokens))
    for i, (row, token) in enumerate(zip(logits, said, strict=True)):
        second, best = np.sort(row)[-2:]
        if best - second < NEAR_TIE:
            return True
        assert tokens[i] == token, f"step {i} behind {len(text)} tokens"
        assert abs(sure[i] - 1 / np.exp(row - best).sum()) < 2e-4
    return True


@catches(
    "rows of a reduced head are taken for the target's tokens",
    "mlxspec.drafters.eagle3:Eagle3.ids",
    lambda right: property(lambda self: None),
    errors=(ValueError,),
)
def test_drafts_are_of_its_own_vocabulary(tmp_path: Path) -> None:
    head, values = made(tmp_path, KINDS["speculators"])
    ids = np.arange(72) + values["d2t"]
    drafter = Watched(head)
    drafter.begin(0)
    text = [1, 2, 3, 4]
    drafter.hear(0, text, mx.array(shown(tiny_models.target(), text, LAYERS)))
    params = SamplingParams(temperature=1.0, seed=3)
    row = RowSampler(params, text, tiny_models.VOCAB)
    (draft,) = drafter.draft([Ask(0, text, 6, row)], BatchSampler([row], tiny_models.VOCAB))
    assert set(np.array(draft.tokens).tolist()) <= set(ids.tolist())
    noise = np.array(gumbel([row.seed] * 6, range(len(text), len(text) + 6), tiny_models.VOCAB))
    wanted = ids[(np.concatenate(drafter.logits) + noise[:, ids]).argmax(axis=1)]
    assert np.array(draft.tokens).tolist() == wanted.tolist()


def change(folder: Path, tensors: dict | None = None, **keys: object) -> None:
    """The folder with other tensors and keys of config.json; None takes them out."""
    path = folder / "config.json"
    told = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({k: v for k, v in told.items() if v is not None}))
    if tensors:
        held = dict(mx.load(str(folder / "model.safetensors"))) | tensors
        mx.eval([v for v in held.values() if v is not None])
        mx.save_safetensors(
            str(folder / "model.safetensors"), {k: v for k, v in held.items() if v is not None}
        )


BAD: dict[str, tuple[dict, str]] = {
    "another hidden size": (
        {"target_hidden_size": 128},
        r"another model: its target's hidden size is 128, and this model's 64\.",
    ),
    "another vocabulary": (
        {"transformer_layer_config": {**config(Kind(), 500, SIZE, LAYERS)["transformer_layer_config"]}},
        r"another model: its target's vocabulary is 500, and this model's 96\.",
    ),
    "layers beyond the model": (
        {"eagle_aux_hidden_state_layer_ids": [2, 3, 9]},
        r"reads layers 1, 2, 8 of its target \(the first is 0\), and this model has 3 layers\.",
    ),
    "a layer twice": (
        {"eagle_aux_hidden_state_layer_ids": [2, 2, 3]},
        r"which does not name different layers of the target\.",
    ),
    "before the first layer": (
        {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]},
        r"which does not name different layers of the target\.",
    ),
    "layers that are none": ({"eagle_aux_hidden_state_layer_ids": ["a"]}, r"which is no list of layer ids\."),
    "no layers, and a target too shallow for the common ones": (
        {"eagle_aux_hidden_state_layer_ids": None},
        r"reads layers 1, 0, -1 of its target",
    ),
    "half a checkpoint": (
        {"tensors": {"fc.weight": None, "norm.weight": None}},
        r"tensors are missing \(fc.weight, norm.weight\)\.",
    ),
    "without what tells it": (
        {"tensors": {"layers.0.hidden_norm.weight": None}},
        r"tensors are missing \(layers.0.hidden_norm.weight\)\.",
    ),
    "a tensor that nobody knows": (
        {"tensors": {"layers.0.self_attn.sinks": mx.ones(16)}},
        r"tensors are unknown \(layers.0.self_attn.sinks\)\.",
    ),
    "half of the norms of heads": (
        {"tensors": {"layers.0.self_attn.q_norm.weight": mx.ones(16)}},
        r"tensors are missing \(layers.0.self_attn.k_norm.weight\)\.",
    ),
    "no table of the vocabulary": ({"tensors": {"d2t": None}}, r"tensors are missing \(d2t\)\."),
    "d2t beyond the vocabulary": (
        {"tensors": {"d2t": mx.full((72,), 40, mx.int64)}},
        r"its d2t names token 96, and the target has tokens 0 to 95\.",
    ),
    "d2t below 0": ({"tensors": {"d2t": mx.full((72,), -1, mx.int64)}}, r"its d2t names token -1,"),
    "d2t with a token twice": (
        {"tensors": {"d2t": mx.array([0, -1, *[0] * 70], mx.int64)}},
        r"its d2t names a token twice\.",
    ),
    "d2t of floats": ({"tensors": {"d2t": mx.zeros(72)}}, r"d2t holds float32, expected int32\."),
    "two layers": ({"tensors": {"layers.1.mlp.up_proj.weight": mx.ones((96, SIZE))}}, r"have one layer"),
    "a reduced head is absent": (
        {"tensors": {"lm_head.weight": None}},
        r"tensors are missing \(lm_head.weight",
    ),
    "both norms before fc": ({"norm_before_fc": True, "fc_norm": True}, r"exclude each other\."),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_one_sentence(tmp_path: Path, name: str) -> None:
    made(tmp_path, KINDS["speculators"])
    keys, message = BAD[name]
    change(tmp_path, **keys)
    with pytest.raises(ModelError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    made(tmp_path, KINDS["speculators"])
    check_finite(load(tmp_path), "The EAGLE-3 drafter")
    change(tmp_path, {"layers.0.mlp.down_proj.weight": mx.full((SIZE, 96), mx.nan)})
    with pytest.raises(
        ModelError, match=r"The EAGLE-3 drafter cannot be used: \S* holds values that are no numbers\."
    ):
        check_finite(load(tmp_path), "The EAGLE-3 drafter")


def test_without_an_embedding_the_sizes_must_be_the_targets(tmp_path: Path) -> None:
    made(tmp_path, KINDS["smaller than the target"])
    change(tmp_path, {"embed_tokens.weight": None})
    with pytest.raises(ModelError, match="has no embedding, and the target's is of another size"):
        load(tmp_path)


@catches(
    "a target's head reads what was not normed",
    "mlxspec.models.eagle3:Eagle3Head._normed",
    lambda right: lambda self, x: x,
)
def test_without_a_head_it_has_the_targets(tmp_path: Path) -> None:
    """Over a whole vocabulary; config.json may tell the target's number of layers."""
    made(tmp_path, KINDS["whole vocabulary"])
    model = tiny_models.target()
    change(tmp_path, {"lm_head.weight": None}, num_hidden_layers=40)
    head = load(tmp_path, model)
    assert "lm_head" not in head
    assert head.num_proposed == model.vocab_size
    hidden = mx.random.normal((3, SIZE))
    normed = hidden * mx.rsqrt(mx.mean(hidden**2, axis=-1, keepdims=True) + 1e-6) * head.norm.weight
    np.testing.assert_allclose(np.array(head.head(hidden)), np.array(model.head(normed)), atol=1e-3)
    assert head.proposes_all  # rows of the target's head would be taken of what is not normed


def test_what_deepspec_writes_of_its_training_is_no_unknown_key() -> None:
    assert Eagle3Config.from_dict(config(KINDS["DeepSpec"], 96, SIZE, LAYERS)).unread == ()


def test_layer_lists_of_all_kinds_name_layers(tmp_path: Path) -> None:
    """[1, 2, 3] of SpecForge is [2, 3, 4] of speculators; and without a list the common ones of a deeper target."""
    target = tiny_models.stack("ends-linear")
    for number, (ids, layers) in enumerate(
        (([1, 2, 3], (1, 2, 3)), ([2, 3, 4], (1, 2, 3)), ([4, 2, 3], (3, 1, 2)))
    ):
        folder = tmp_path / str(number)
        made(folder, Kind(more={"eagle_aux_hidden_state_layer_ids": ids}), (0, 1, 2), target)
        assert load(folder, target).layers_read == layers
    made(
        tmp_path / "DeepSpec",
        Kind(layout="DeepSpec", rows=None, more={"target_layer_ids": [0, 2, 3]}),
        (0, 1, 2),
        target,
    )
    assert load(tmp_path / "DeepSpec", target).layers_read == (0, 2, 3)
    assert isinstance(target.num_layers, int)


def test_both_a_head_and_an_eagle_draft_in_one_engine(tmp_path: Path) -> None:
    """Each is fed what it needs, over the same forwards, for rows that use one of them or both."""
    target = tiny_models.target()
    drafters = [Mtp(tiny_models.mtp_head(), 2048), Eagle3(tiny_models.eagle3(), 2048)]
    run = Engine(target, tiny_models.tokenizer(), drafters=drafters)
    alone = {
        d.name: Engine(target, tiny_models.tokenizer(), drafters=[d])
        for d in (Mtp(tiny_models.mtp_head(), 2048), Eagle3(tiny_models.eagle3(), 2048))
    }
    some, params = equality.prompts(4, 12), equality.asked(0, 4)
    wishes = [equality.spec(n) for n in ("mtp", "eagle3", "eagle3", "mtp")]
    requests = [run.submit(p, s, spec=w) for p, s, w in zip(some, params, wishes, strict=True)]
    while not run.is_idle:
        run.step()
    for prompt, asked, wish, request in zip(some, params, wishes, requests, strict=True):
        got = alone[wish.drafters[0]].generate(prompt, asked, spec=wish)
        if request.history[len(prompt) :] == list(got.tokens):
            figures = [{n: d.by_position for n, d in s.drafters.items()} for s in (request.stats, got.stats)]
            assert figures[0] == figures[1] or device.report().blas_kind != "wheel"
