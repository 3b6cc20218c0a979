"""mlx-lm's calls on our engine: the same signatures, the same responses, the same greedy text on the demo model, with drafting."""

from __future__ import annotations

import copy
import inspect
import pkgutil
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from planting import catches, rewritten

from mlxspec.compat import mlx_lm as ours
from mlxspec.config import EngineConfig
from mlxspec.errors import (
    ConfigError,
    EngineBusyError,
    MlxspecError,
    ModelError,
    VocabularyError,
)
from mlxspec.platform.resources import demo_folder
from tests.models.test_adapters import write_adapter

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mlx_lm
    from mlx_lm.generate import GenerationResponse, generate_step, speculative_generate_step
    from mlx_lm.models import cache as their_cache
    from mlx_lm.sample_utils import make_logits_processors, make_sampler

MODULES = [
    "",
    *(f".{m.name}" for m in pkgutil.iter_modules(mlx_lm.__path__) if m.name not in ("__main__", "_version")),
    *(".models.cache", ".models.qwen3_5", ".models.gemma3", ".tuner.utils", ".tuner.lora", ".quant.awq"),
]
QUESTION = [{"role": "user", "content": "what does os.path.join do?"}]
CODE = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return"


@cache
def loaded() -> tuple[ours.LoadedModel, Any]:
    return ours.load("demo")


@cache
def plain() -> tuple[ours.LoadedModel, Any]:
    return ours.load("demo", draft="off")


@cache
def theirs() -> tuple[Any, Any]:
    return mlx_lm.load(str(demo_folder("target")))


def prompts(tokenizer: Any) -> list[Any]:
    return [tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True), CODE, mx.array([5, 6, 7])]


OURS = {
    "load": ours.load,
    "generate": ours.generate,
    "stream_generate": ours.stream_generate,
    "batch_generate": ours.batch_generate,
}
THEIRS = {name: getattr(mlx_lm, name, None) for name in OURS}
DEFAULTS_OF_OURS = {
    "prefill_step_size": None,
    "quantized_kv_start": 0,
}  # the engine's own chunk; no such cache


@pytest.mark.parametrize("name", list(OURS))
def test_signatures_are_theirs(name: str) -> None:
    def arguments(call: Any) -> list[tuple[str, Any, Any]]:
        given = inspect.signature(call).parameters.values()
        return [
            (p.name, p.kind, DEFAULTS_OF_OURS.get(p.name, p.default))
            for p in given
            if p.kind is not p.VAR_KEYWORD
        ]

    assert arguments(OURS[name]) == arguments(THEIRS[name])


@catches(
    "a stand-in loads a module of theirs again",
    "mlxspec.compat.mlx_lm._imports:StandIn.__getattr__",
    lambda right: lambda self, name: copy.copy(right(self, name)),
)
def test_every_import_works_and_is_theirs() -> None:
    """Every module below mlx_lm that imports here; the four functions are ours, and so is nothing else."""
    kept = ("load", "generate", "stream_generate", "batch_generate")
    found = 0
    for name in MODULES:
        try:
            theirs = import_module(f"mlx_lm{name}")
        except ImportError:  # an extra that is not installed
            continue
        mine = import_module(f"mlxspec.compat.mlx_lm{name}")
        found += 1
        for attribute, value in vars(theirs).items():
            if attribute in kept and inspect.isfunction(value):
                assert getattr(mine, attribute) is getattr(ours, attribute), (name, attribute)
            elif not attribute.startswith("__") and not inspect.ismodule(value):
                assert getattr(mine, attribute) is value, (name, attribute)
    assert found >= 16
    assert inspect.isfunction(ours.generate)  # the module of this name does not hide it
    with pytest.raises(ModuleNotFoundError):
        import_module("mlxspec.compat.mlx_lm.nothing")
    with pytest.raises(ImportError, match="nothing"):
        exec("from mlxspec.compat.mlx_lm import nothing")
    with pytest.raises(ConfigError, match=r"mlx_lm\.load returns"):
        next(generate_step(mx.array([5]), loaded()[0]))


def test_every_option_of_theirs_is_honoured_or_refused_by_name() -> None:
    """What is accepted is held by a test of its effect below; whatever is not is named."""
    model, tokenizer = loaded()
    passed = {"prompt", "model", "draft_model", "stream", "max_tokens"}
    steps = (generate_step, speculative_generate_step)
    options = {p for step in steps for p in inspect.signature(step).parameters} - passed
    honoured = {
        "sampler",  # test_their_processors_and_samplers_work
        "logits_processors",
        "prompt_cache",  # test_a_prompt_cache_...
        "num_draft_tokens",  # test_num_draft_tokens_bounds_the_drafts
        "prefill_step_size",  # test_prefill_step_size_cuts_prompts
        "prompt_progress_callback",  # test_limits_progress_and_printing
        "kv_bits",  # test_kv_bits_...
    }
    without_effect = {"kv_group_size", "quantized_kv_start"}  # as with mlx-lm where kv_bits is None
    for name in sorted(options - honoured - without_effect):
        ours.stream_generate(model, tokenizer, CODE, max_tokens=2, **{name: None}).close()
        with pytest.raises(ConfigError, match=name):
            ours.stream_generate(model, tokenizer, CODE, **{name: 8})
    for name in ("max_kv_size", "prefill_batch_size"):
        with pytest.raises(ConfigError, match=name):
            ours.batch_generate(model, tokenizer, [[5, 6]], **{name: 8})
    with pytest.raises(ConfigError, match="nonsense"):
        ours.stream_generate(model, tokenizer, CODE, nonsense=1)
    with pytest.raises(ConfigError, match="nonsense"):
        ours.batch_generate(model, tokenizer, [[5, 6]], nonsense=1)


@pytest.mark.parametrize("bits", [8, 4])
def test_kv_bits_are_those_of_an_engine_with_as_many(bits: int) -> None:
    """Drafted, in a batch, and behind a prompt cache; without kv_bits the model has its own again."""
    model, tokenizer = ours.load("demo", config=EngineConfig(max_rows=4))
    wanted, _ = ours.load("demo", draft="off", config=EngineConfig(kv_bits=bits, prefix_budget=0))
    prompt = tokenizer.encode(CODE * 3)
    plain = ours.generate(plain_demo(), tokenizer, prompt, max_tokens=24)
    quantized = ours.generate(wanted, tokenizer, prompt, max_tokens=24)
    assert ours.generate(model, tokenizer, prompt, max_tokens=24, kv_bits=bits) == quantized
    assert model.engine.config.kv_bits == bits
    (batched,) = ours.batch_generate(model, tokenizer, [prompt], max_tokens=24, kv_bits=bits).texts
    assert batched.lstrip() == quantized.lstrip()  # the tokenizer's own decoding keeps the first space
    cache = their_cache.make_prompt_cache(model)
    ours.generate(model, tokenizer, prompt[:40], max_tokens=1, kv_bits=bits, prompt_cache=cache)
    their_cache.trim_prompt_cache(cache, cache[0].offset - 40)
    rest = ours.generate(model, tokenizer, prompt[40:], max_tokens=24, kv_bits=bits, prompt_cache=cache)
    assert rest == quantized
    assert ours.generate(model, tokenizer, prompt, max_tokens=24) == plain
    assert model.engine.config.kv_bits == 16


def plain_demo() -> ours.LoadedModel:
    return plain()[0]


def test_kv_bits_that_we_do_not_do_are_refused_in_a_sentence() -> None:
    model, tokenizer = loaded()
    for options, said in (
        ({"kv_bits": 6}, "kv_bits must be one of 4, 8, 16, not 6"),
        ({"kv_bits": 8, "kv_group_size": 32}, "kv_group_size must be 64"),
        ({"kv_bits": 8, "quantized_kv_start": 5000}, "quantized_kv_start must be 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            ours.generate(model, tokenizer, CODE, **options)
    ours.generate(
        model, tokenizer, CODE, max_tokens=2, kv_group_size=32, quantized_kv_start=5000
    )  # mean nothing alone
    open_one = ours.stream_generate(model, tokenizer, CODE, max_tokens=20)
    next(open_one)
    with pytest.raises(EngineBusyError, match="kv_bits cannot become 8 while requests run"):
        ours.generate(model, tokenizer, CODE, kv_bits=8)
    open_one.close()


def test_prefill_step_size_cuts_prompts() -> None:
    """Counted in forwards over the prompt; a call without it has the engine's own again."""
    model, tokenizer = ours.load("demo", config=EngineConfig(prefix_budget=0))
    prompt = tokenizer.encode(CODE * 8)
    own = model.engine.prefill_chunk
    assert len(prompt) > 150

    def pieces(**options: Any) -> list[int]:
        told: list[int] = []
        options["prompt_progress_callback"] = lambda done, total: told.append(done)
        ours.generate(model, tokenizer, prompt, max_tokens=1, **options)
        return told

    whole = pieces()
    assert whole == [0, len(prompt)]
    assert pieces(prefill_step_size=32) == [*range(0, len(prompt), 32), len(prompt)]
    assert model.engine.memory.chunk == 32
    assert pieces() == whole
    assert model.engine.prefill_chunk == model.engine.memory.chunk == own
    for bad in (0, 8, 1 << 20, "many", 64.0):
        with pytest.raises(ConfigError, match="prefill_step_size"):
            pieces(prefill_step_size=bad)
    long = tokenizer.encode(CODE * 60)  # more than one of the engine's chunks
    assert len(long) > 2 * own
    told: list[int] = []
    options = {
        "prompt_progress_callback": lambda done, total: told.append(done),
        "prefill_step_size": 2 * own,
    }
    ours.batch_generate(model, tokenizer, [prompt], max_tokens=1, prefill_step_size=16)
    assert model.engine.prefill_chunk == 16
    ours.generate(model, tokenizer, long, max_tokens=1, **options)
    assert told[:2] == [0, 2 * own]


def test_num_draft_tokens_bounds_the_drafts() -> None:
    """Of a drafter that runs a model: lookup has lengths of its own."""
    model, tokenizer = ours.load("demo", draft="mtp")
    prompt = prompts(tokenizer)[0]
    runs = {}
    for num in (0, 1, 4):
        got = [r.from_draft for r in ours.stream_generate(model, tokenizer, prompt, 40, num_draft_tokens=num)]
        longest = max(len(run) for run in "".join("d" if d else " " for d in got).split(" "))
        runs[num] = longest
    assert runs[0] == 0
    assert runs[1] == 1
    assert 1 < runs[4] <= 4


def test_a_prompt_cache_is_extended_copied_and_cut() -> None:
    model, tokenizer = loaded()
    cache = their_cache.make_prompt_cache(model)
    assert cache[0].empty()
    first, second = tokenizer.encode(CODE), tokenizer.encode("\n\n\ndef mul(a, b):")
    answer = [
        r.token for r in ours.stream_generate(model, tokenizer, first, max_tokens=8, prompt_cache=cache)
    ]
    assert cache[0].tokens == [*first, *answer]
    copied = copy.deepcopy(cache)
    text = ours.generate(model, tokenizer, second, max_tokens=16, prompt_cache=cache)
    assert text == ours.generate(model, tokenizer, [*first, *answer, *second], max_tokens=16)
    assert copied[0].tokens == [*first, *answer]  # the other one is as it was
    assert text == ours.generate(model, tokenizer, second, max_tokens=16, prompt_cache=copied)
    assert their_cache.can_trim_prompt_cache(copied)
    assert their_cache.trim_prompt_cache(copied, 3) == 3
    assert copied[0].offset == cache[0].offset - 3
    assert their_cache.trim_prompt_cache(copied, 10**6) == cache[0].offset - 3
    assert copied[0].empty()
    stream = ours.stream_generate(model, tokenizer, first, max_tokens=30, prompt_cache=copied)
    taken = [next(stream).token for _ in range(3)]
    stream.close()
    assert copied[0].tokens == [*first, *taken]  # what was not asked for is not in it


@pytest.mark.parametrize("how", ["cut", "taken over", "copied"])
def test_a_generator_that_still_lives_does_not_overwrite_a_cache(how: str) -> None:
    """As in mlx-lm, a cache grows with each token, and it belongs to whoever cut or used it last."""
    model, tokenizer = loaded()
    cache = their_cache.make_prompt_cache(model)
    prompt = tokenizer.encode(CODE)
    old = ours.stream_generate(model, tokenizer, prompt, prompt_cache=cache)
    first = [next(old).token for _ in range(3)]
    assert cache[0].tokens == [*prompt, *first]
    mine = copy.deepcopy(cache) if how == "copied" else cache
    if how != "taken over":
        assert their_cache.trim_prompt_cache(mine, 3) == 3
    before = list(mine[0].tokens)
    new = ours.stream_generate(model, tokenizer, prompt[-1:], prompt_cache=mine)
    next(old)
    old.close()
    assert mine[0].tokens == before
    assert len(cache[0].tokens) == len(before) + (4 if how == "copied" else 0)
    given = [next(new).token for _ in range(2)]
    assert mine[0].tokens == [*before, prompt[-1], *given]


def test_a_prompt_cache_that_is_saved_or_another_models_is_refused(tmp_path: Path) -> None:
    model, tokenizer = loaded()
    cache = their_cache.make_prompt_cache(model)
    ours.generate(model, tokenizer, CODE, max_tokens=2, prompt_cache=cache)
    with pytest.raises(ConfigError, match="cannot be saved"):
        their_cache.save_prompt_cache(str(tmp_path / "c.safetensors"), cache)
    foreign = their_cache.make_prompt_cache(theirs()[0])
    with pytest.raises(ConfigError, match="make_prompt_cache"):
        ours.generate(model, tokenizer, CODE, prompt_cache=foreign)


def test_a_cached_prompt_is_not_read_again() -> None:
    """Counted in tokens that were read."""
    model, tokenizer = loaded()
    cache = their_cache.make_prompt_cache(model)
    first, second = tokenizer.encode(CODE * 6), tokenizer.encode("\n\n\ndef mul(a, b):")
    ours.generate(model, tokenizer, first, max_tokens=8, prompt_cache=cache)
    read = counting(model)
    ours.generate(model, tokenizer, second, max_tokens=8, prompt_cache=cache)
    assert read[-1] <= len(second) + 8


def counting(model: ours.LoadedModel) -> list[int]:
    """Gets the number of tokens that each request reads of its prompt."""
    read: list[int] = []
    leave = model.engine._leave

    def counted(request: Any) -> None:
        read.append(request.stats.num_read)
        leave(request)

    model.engine._leave = counted  # type: ignore[method-assign]
    return read


def test_processors_see_what_mlx_lm_shows_them() -> None:
    """Behind a prompt cache only the tokens of this call."""
    model, tokenizer = loaded()
    seen: dict[str, list[int]] = {}

    def listener(name: str) -> Any:
        def listening(tokens: mx.array, logits: mx.array) -> mx.array:
            seen.setdefault(name, tokens.tolist())
            return logits

        return listening

    for name, (package, pair, caches) in {
        "ours": (ours, (model, tokenizer), their_cache),
        "theirs": (mlx_lm, theirs(), their_cache),
    }.items():
        cache = caches.make_prompt_cache(pair[0])
        package.generate(*pair, CODE, max_tokens=4, prompt_cache=cache)
        package.generate(*pair, [7, 8], max_tokens=2, prompt_cache=cache, logits_processors=[listener(name)])
    assert seen["ours"] == seen["theirs"] == [7, 8]


def test_a_batch_is_its_answers_one_by_one() -> None:
    model, tokenizer = loaded()
    texts = [CODE, "import os\n", "class A:\n    def", "x = [1, 2, 3]\n"]
    asked = [tokenizer.encode(t) for t in texts]
    limits = [24, 1, 40, 12]
    done = ours.batch_generate(
        model,
        tokenizer,
        asked,
        max_tokens=limits,
        return_token_ids=True,
        return_logprobs=True,
        completion_batch_size=2,
    )
    for prompt, limit, text, tokens, logprobs in zip(
        asked, limits, done.texts, done.token_ids, done.logprobs, strict=True
    ):
        alone = list(ours.stream_generate(model, tokenizer, prompt, max_tokens=limit))
        assert [r.token for r in alone if r.finish_reason != "stop"] == tokens
        assert text == tokenizer.decode(tokens)
        own = [r.logprobs[r.token].item() for r in alone if r.finish_reason != "stop"]
        assert mx.allclose(mx.array(logprobs), mx.array(own), atol=1e-3)
    assert done.caches is None
    assert model.engine.is_idle
    with pytest.raises(ConfigError, match="as many"):
        ours.batch_generate(model, tokenizer, asked, max_tokens=[1])
    with pytest.raises(ConfigError, match="token ids"):
        ours.batch_generate(model, tokenizer, ["text"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="empty"):
        ours.batch_generate(model, tokenizer, [[]])

    def failing(tokens: mx.array, logits: mx.array) -> mx.array:
        raise ValueError("no")

    with pytest.raises(MlxspecError, match="failing failed: ValueError: no"):
        ours.batch_generate(model, tokenizer, asked, logits_processors=[failing])
    assert model.engine.is_idle


def test_a_batch_tells_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = loaded()
    ours.batch_generate(model, tokenizer, [[5, 6], [7, 8]], max_tokens=4, verbose=True)
    out = capsys.readouterr().out
    assert "Finished processing 2/2" in out
    assert "tokens-per-sec" in out


def test_greedy_text_is_theirs() -> None:
    model, tokenizer = loaded()
    for prompt in prompts(tokenizer):
        wanted = list(mlx_lm.stream_generate(*theirs(), prompt, max_tokens=48))
        got = list(ours.stream_generate(model, tokenizer, prompt, max_tokens=48, num_draft_tokens=2))
        assert [r.token for r in got] == [r.token for r in wanted]
        assert [r.text for r in got] == [r.text for r in wanted]
        for a, b in zip(got, wanted, strict=True):
            assert type(a) is GenerationResponse
            assert (a.prompt_tokens, a.generation_tokens) == (b.prompt_tokens, b.generation_tokens)
            assert a.finish_reason == b.finish_reason
            assert a.logprobs.shape == b.logprobs.shape
            assert mx.allclose(a.logprobs, b.logprobs, atol=1e-2, rtol=1e-3)
        assert any(r.from_draft for r in got)
        assert ours.generate(model, tokenizer, prompt, max_tokens=48) == "".join(r.text for r in wanted)


def test_their_processors_and_samplers_work() -> None:
    model, tokenizer = loaded()
    prompt = prompts(tokenizer)[0]
    options = {
        "logits_processors": make_logits_processors(repetition_penalty=1.3, logit_bias={9: 2.0}),
        "sampler": make_sampler(temp=0.0),
        "max_tokens": 32,
    }
    assert ours.generate(model, tokenizer, prompt, **options) == mlx_lm.generate(*theirs(), prompt, **options)
    options["sampler"] = make_sampler(temp=0.8, top_p=0.9, min_p=0.02, top_k=20)
    mx.random.seed(3)
    assert len(ours.generate(model, tokenizer, prompt, **options)) > 10


@pytest.mark.parametrize("seed", [0, 3])
def test_a_seed_of_mlx_gives_their_text_where_nobody_drafts(seed: int) -> None:
    """A sampler that draws from MLX's random generator is called once a token, in order. Drafts would draw in between."""
    (model, tokenizer), pair = plain(), theirs()  # making modules draws, too
    options = {"max_tokens": 24, "sampler": make_sampler(temp=1.0, top_p=0.95)}
    mx.random.seed(seed)
    wanted = mlx_lm.generate(*pair, CODE, **options)
    mx.random.seed(seed)
    assert ours.generate(model, tokenizer, CODE, **options) == wanted


def test_an_adapter_gives_their_text(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", demo_folder("target"))
    pair = ours.load("demo", adapter_path=str(adapter))
    wanted = mlx_lm.generate(
        *mlx_lm.load(str(demo_folder("target")), adapter_path=str(adapter)), CODE, max_tokens=16
    )
    assert ours.generate(*pair, CODE, max_tokens=16) == wanted
    assert wanted != ours.generate(*loaded(), CODE, max_tokens=16)


def test_a_draft_model_drafts_and_another_vocabulary_is_refused(tmp_path: Any) -> None:
    model, tokenizer = loaded()
    small, _ = ours.load("demo-draft", draft="off")
    prompt = prompts(tokenizer)[0]
    plain = ours.generate(model, tokenizer, prompt, max_tokens=40)
    got = list(
        ours.stream_generate(model, tokenizer, prompt, max_tokens=40, draft_model=small, num_draft_tokens=3)
    )
    assert "".join(r.text for r in got) == plain
    assert any(r.from_draft for r in got)
    other, _ = ours.load("demo-draft", draft="off")
    other.engine.tokenizer = _Foreign(other.engine.tokenizer)
    with pytest.raises(VocabularyError):
        ours.stream_generate(model, tokenizer, prompt, draft_model=other)


class _Foreign:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def token_text(self, token: int) -> str:
        return f"other {token}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_limits_progress_and_printing(capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = loaded()
    said: list[tuple[int, int]] = []
    stream = ours.stream_generate(
        model, tokenizer, CODE, max_tokens=5, prompt_progress_callback=lambda *a: said.append(a)
    )
    assert [r.finish_reason for r in stream] == [None] * 4 + ["length"]
    assert said[0][0] == 0
    assert said[-1][0] == said[-1][1] == len(tokenizer.encode(CODE))
    text = ours.generate(model, tokenizer, CODE, max_tokens=5, verbose=True)
    out = capsys.readouterr().out
    assert text in out
    assert "tokens-per-sec" in out
    first = next(it := ours.stream_generate(model, tokenizer, CODE, max_tokens=-1))
    it.close()
    assert first.generation_tokens == 1
    assert model.engine.is_idle


@catches(
    "tokens of the prompt cache are told as read",
    "mlxspec.compat.mlx_lm._answers:_responses",
    rewritten("max(0, event.num_done - len(before))", "event.num_done"),
)
def test_progress_is_that_of_the_new_tokens() -> None:
    """With a prompt cache, too: never more than the whole, and never less than before."""
    model, tokenizer = ours.load("demo", config=EngineConfig(prefix_budget=0))
    prompt = tokenizer.encode(CODE * 4)
    cache = their_cache.make_prompt_cache(model)
    for _ in range(3):
        told: list[tuple[int, int]] = []
        ours.generate(
            model,
            tokenizer,
            prompt,
            max_tokens=2,
            prompt_cache=cache,
            prefill_step_size=16,
            prompt_progress_callback=lambda *a, told=told: told.append(a),
        )
        done = [num for num, _ in told]
        assert {total for _, total in told} == {len(prompt)}
        assert (done[0], done[-1]) == (0, len(prompt))
        assert done == sorted(done)
        assert max(done) == len(prompt)


def test_what_cannot_be_honoured_says_so() -> None:
    model, tokenizer = loaded()
    with pytest.raises(ModelError):
        ours.load("demo", adapter_path="/there/is/none")
    for options in ({"model_config": {"a": 1}}, {"trust_remote_code": True}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            ours.load("demo", **options)
    with pytest.raises(ConfigError, match="max_tokens"):
        ours.stream_generate(model, tokenizer, CODE, max_tokens=0)
    with pytest.raises(ConfigError, match="stream"):
        ours.stream_generate(model, tokenizer, CODE, stream=None)
    with pytest.raises(ConfigError, match="compat"):
        ours.stream_generate(object(), tokenizer, CODE)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="layers"):
        model.layers()

    def failing(tokens: mx.array, logits: mx.array) -> mx.array:
        raise ValueError("no")

    with pytest.raises(MlxspecError, match="failing failed: ValueError: no"):
        ours.generate(model, tokenizer, CODE, logits_processors=[failing])
    assert len(ours.load("demo", return_config=True)) == 3
