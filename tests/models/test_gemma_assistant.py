"""The Gemma 4 assistant: against transformers' on the very keys and values of our target, and as a drafter that changes no text."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import tiny_assistant
import tiny_gemma
from compare import array, assert_same_logits, load_ours, to_numpy, tokens_of
from mlx.utils import tree_flatten
from planting import catches

from mlxspec.cache.model_cache import ModelCache
from mlxspec.config import SamplingParams
from mlxspec.drafters.base import Ask
from mlxspec.drafters.gemma_assistant import GemmaAssistant
from mlxspec.errors import ModelError
from mlxspec.kernels.flat import FlatRows
from mlxspec.loading.weights import read_folder
from mlxspec.models.assemble_drafter import assemble_drafter
from mlxspec.models.gemma import Gemma
from mlxspec.models.gemma4_assistant import Gemma4Assistant
from mlxspec.sampling.row import RowSampler
from mlxspec.sampling.sampler import BatchSampler

CLUSTERED = 192  # a vocabulary that clusters divide
TARGETS = ("gemma4-dense", "gemma4-e", "gemma4-moe")


def load_assistant(folder: Path, target: Gemma) -> Gemma4Assistant:
    return assemble_drafter(
        "assistant", json.loads((folder / "config.json").read_text()), lambda: read_folder(folder), target
    )


def prefilled(model: Gemma, lengths: tuple[int, ...], vocab: int) -> tuple[ModelCache, mx.array]:
    """A cache of rows of so many random tokens, and the hidden of each row's last."""
    tokens = [t for r, n in enumerate(lengths) for t in tokens_of(r, n, vocab)]
    cache, rows = model.make_cache(len(lengths)), FlatRows(lengths)
    out = model.forward(array(tokens), rows, cache, certain=True)
    cache.commit()
    return cache, out.hidden[rows.last_indices]


@pytest.mark.torch
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("clusters", [0, 16])
def test_steps_against_transformers(
    name: str, clusters: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps of a draft behind texts shorter and longer than the window."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    from transformers import Gemma4AssistantForCausalLM, Gemma4TextConfig

    # transformers 5.23 looks for the layers that keep what others read, and refuses a model that has none
    reuse = property(lambda text: ["reuse"] * text.num_hidden_layers)
    monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", reuse)
    c = {**tiny_gemma.CONFIGS[name], "vocab_size": CLUSTERED, "vocab_size_per_layer_input": CLUSTERED}
    model = load_ours(tiny_gemma.write_text(tmp_path / "target", c)).model
    folder = tiny_assistant.write(tmp_path / "assistant", tiny_assistant.config(c, clusters, 3))
    ours = load_assistant(folder, model)
    theirs = Gemma4AssistantForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )

    theirs.save_pretrained(tmp_path / "saved")
    again = load_assistant(tmp_path / "saved", model)
    for (what, a), (_, b) in zip(
        tree_flatten(ours.parameters()), tree_flatten(again.parameters()), strict=True
    ):
        assert mx.array_equal(a, b), what

    def tensor(x: mx.array):  # type: ignore[no-untyped-def]
        return torch.from_numpy(np.array(x))

    for length in (5, 60):
        target_cache, hidden = prefilled(model, (length,), CLUSTERED)
        views = ours.views(target_cache, [0])
        keys = {"sliding_attention": views[True][0], "full_attention": views[False][0]}
        states = {kind: (tensor(k), tensor(v)) for kind, (k, v) in keys.items()}
        token, their_hidden = 7, tensor(hidden)[None]
        for step in range(3):
            out = ours.step(array([token]), hidden, [length], views)
            embedded = tensor(model.embed(array([token])))[None]
            with torch.no_grad():
                reference = theirs(
                    inputs_embeds=torch.cat([embedded, their_hidden], dim=-1),
                    position_ids=torch.tensor([[length]]),
                    shared_kv_states=states,
                )
            what = f"{name}, {clusters} clusters, step {step} behind {length}"
            ours_now, theirs_now = to_numpy([out.logits]), reference.logits[0].numpy()
            np.testing.assert_allclose(ours_now, theirs_now, atol=1e-4, err_msg=what)
            assert ours_now.argmax() == theirs_now.argmax()
            their_hidden = reference.last_hidden_state
            np.testing.assert_allclose(
                to_numpy([out.hidden]), their_hidden[0].numpy(), atol=1e-4, err_msg=what
            )
            hidden = mx.array(
                their_hidden[0].numpy()
            )  # the same for both: rounding of one step must not grow over others
            print(f"{what}: largest difference {np.abs(ours_now - theirs_now).max():.1e}")
            token = int(theirs_now.argmax())


@pytest.mark.parametrize("name", TARGETS)
def test_rows_together_are_the_rows_alone(name: str, tmp_path: Path) -> None:
    c = tiny_gemma.CONFIGS[name]
    model = load_ours(tiny_gemma.write_text(tmp_path / "target", c)).model
    ours = load_assistant(tiny_assistant.write(tmp_path / "assistant", tiny_assistant.config(c)), model)
    lengths = (3, 60, 17)
    target_cache, hidden = prefilled(model, lengths, tiny_gemma.VOCAB)
    together = ours.step(array([4, 5, 6]), hidden, lengths, ours.views(target_cache, [0, 1, 2]))
    for r, length in enumerate(lengths):
        alone = ours.step(array([4 + r]), hidden[r : r + 1], [length], ours.views(target_cache, [r]))
        assert_same_logits(
            to_numpy([together.logits])[r : r + 1], to_numpy([alone.logits]), f"{name}, row {r}"
        )


@catches(
    "a draft begins with the first hidden of a round",
    "mlxspec.drafters.gemma_assistant:GemmaAssistant.hear",
    lambda right: (
        lambda self, row, tokens, hidden: right(self, row, tokens, None if hidden is None else hidden[:1])
    ),
)
def test_a_draft_begins_with_the_hidden_of_the_newest_token(tmp_path: Path) -> None:
    c = tiny_gemma.CONFIGS["gemma4-dense"]
    model = load_ours(tiny_gemma.write_text(tmp_path / "target", c)).model
    ours = load_assistant(tiny_assistant.write(tmp_path / "assistant", tiny_assistant.config(c)), model)
    cache, _ = prefilled(model, (9,), tiny_gemma.VOCAB)
    hidden, found = 3.0 * mx.random.normal((3, model.hidden_size), key=mx.random.key(1)), list[list[float]]()
    for seen in (hidden, hidden[2:], hidden[:1]):
        drafter = GemmaAssistant(ours, 100)
        drafter.attach(cache, [0])
        drafter.begin(0)
        drafter.hear(0, [1] * len(seen), seen)
        ask = Ask(0, [1] * 10, 3, RowSampler(SamplingParams(), [], tiny_gemma.VOCAB))
        (draft,) = drafter.draft([ask], BatchSampler([ask.sampler], tiny_gemma.VOCAB))
        found.append(mx.array(draft.confidences).tolist())
    assert found[0] == found[1] != found[2]


def test_views_are_the_window_and_everything(tmp_path: Path) -> None:
    c = tiny_gemma.CONFIGS["gemma4-dense"]
    model = load_ours(tiny_gemma.write_text(tmp_path / "target", c)).model
    ours = load_assistant(tiny_assistant.write(tmp_path / "assistant", tiny_assistant.config(c)), model)
    views = ours.views(prefilled(model, (4, 60), tiny_gemma.VOCAB)[0], [1, 0])
    assert [k.shape[2] for k, _ in views[True]] == [c["sliding_window"] - 1, 4]
    assert [v.shape[2] for _, v in views[False]] == [60, 4]


def test_clusters_that_are_all_chosen_score_like_no_clusters(tmp_path: Path) -> None:
    c = {**tiny_gemma.CONFIGS["gemma4-dense"], "vocab_size": CLUSTERED}
    model = load_ours(tiny_gemma.write_text(tmp_path / "target", c)).model
    target_cache, hidden = prefilled(model, (20, 9), CLUSTERED)
    found = []
    for clusters in (0, 16):
        folder = tiny_assistant.write(tmp_path / str(clusters), tiny_assistant.config(c, clusters, 16))
        ours = load_assistant(folder, model)
        found.append(ours.step(array([1, 2]), hidden, (20, 9), ours.views(target_cache, [0, 1])).logits)
    np.testing.assert_allclose(to_numpy(found[:1]), to_numpy(found[1:]), atol=1e-5)


def test_an_assistant_of_another_model_is_one_sentence(tmp_path: Path) -> None:
    c = tiny_gemma.CONFIGS["gemma4-dense"]
    model = load_ours(tiny_gemma.write_text(tmp_path / "target", c)).model
    right = tiny_assistant.config(c)
    wrong = {
        "hidden size": right | {"backbone_hidden_size": 96},
        "another shape": right | {"text_config": right["text_config"] | {"head_dim": 32}},
        "windows": right | {"text_config": right["text_config"] | {"sliding_window": 12}},
        "num_centroids": right | {"use_ordered_embeddings": True, "num_centroids": 16},
    }
    for what, config in wrong.items():
        with pytest.raises(ModelError, match=what):
            load_assistant(tiny_assistant.write(tmp_path / what, config), model)
    gemma3 = load_ours(tiny_gemma.write_text(tmp_path / "gemma3", tiny_gemma.CONFIGS["gemma3"])).model
    with pytest.raises(ModelError, match=r"another hidden size|another shape"):
        load_assistant(tiny_assistant.write(tmp_path / "right", right), gemma3)


def test_an_ordering_that_is_none_is_refused(tmp_path: Path) -> None:
    c = {**tiny_gemma.CONFIGS["gemma4-dense"], "vocab_size": CLUSTERED}
    model = load_ours(tiny_gemma.write_text(tmp_path / "target", c)).model
    folder = tiny_assistant.write(tmp_path / "assistant", tiny_assistant.config(c, 16, 3))
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    tensors["masked_embedding.token_ordering"] += 1
    mx.save_safetensors(str(folder / "changed.safetensors"), tensors, metadata={"format": "pt"})
    (folder / "changed.safetensors").rename(folder / "model.safetensors")
    with pytest.raises(ModelError, match="does not name every token once"):
        load_assistant(folder, model)
