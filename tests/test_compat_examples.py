"""What mlx-lm's README and its examples show, as scripts that run twice: as they are, and with `mlx_lm` replaced in their imports.

What they print must be equal. The scripts print tokens and texts only; speeds differ.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import warnings
from pathlib import Path

import pytest

from mlxspec.platform.resources import demo_folder

MODELS = {
    "MODEL": str(demo_folder("target")),
    "GEMMA": str(demo_folder("gemma")),
    "DRAFT": str(demo_folder("draft")),
}

GENERATE = """
from mlx_lm import generate, load

model, tokenizer = load(MODEL)
question = [{"role": "user", "content": "what does os.path.join do?"}]
print(generate(model, tokenizer, prompt=tokenizer.apply_chat_template(question, add_generation_prompt=True)))
print(generate(model=model, tokenizer=tokenizer, prompt="def add(a, b):", max_tokens=40))
"""

STREAM = """
from mlx_lm import load, stream_generate

model, tokenizer = load(path_or_hf_repo=MODEL)
question = [{"role": "user", "content": "what does str.split do?"}]
prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
for response in stream_generate(model, tokenizer, prompt, max_tokens=64):
    print(response.token, repr(response.text), response.generation_tokens, response.finish_reason)
"""

BATCH = """
from mlx_lm import batch_generate, load

model, tokenizer = load(MODEL)


def asked(text):
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)


first = ["what does len do?", "what does os.path.join do?", "what does str.upper do?"]
done = batch_generate(
    model, tokenizer, [asked(t) for t in first], max_tokens=[24, 40, 32], return_prompt_caches=True
)
print(done.texts)
again = ["what does str.split do?", "what is a list?", "what does sorted do?"]
more = batch_generate(
    model, tokenizer, [asked(t) for t in again], prompt_caches=done.caches, max_tokens=32, return_token_ids=True
)
print(more.texts, more.token_ids, done.stats.prompt_tokens, more.stats.generation_tokens)
"""

PROMPT_CACHE = """
from mlx_lm import generate, load
from mlx_lm.models.cache import make_prompt_cache

model, tokenizer = load(MODEL)
prompt_cache = make_prompt_cache(model)


def turn(text, cache):
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    return generate(model, tokenizer, prompt=prompt, max_tokens=48, prompt_cache=cache)


print(turn("what does len do?", prompt_cache))
print(turn("what does str.split do?", prompt_cache))
print(turn("what does sorted do?", prompt_cache))
"""

SAMPLERS = """
import mlx.core as mx
from mlx_lm import generate, load
from mlx_lm.sample_utils import make_logits_processors, make_sampler

model, tokenizer = load(MODEL)
prompt = tokenizer.apply_chat_template([{"role": "user", "content": "what is a list?"}], add_generation_prompt=True)
processors = make_logits_processors(logit_bias={9: 1.5}, repetition_penalty=1.2, repetition_context_size=16)
print(generate(model, tokenizer, prompt, sampler=make_sampler(temp=0.0), logits_processors=processors, max_tokens=48))


def no_newline(tokens, logits):
    return logits.at[:, tokenizer.encode("\\n")[-1]].add(-1e9)


print(generate(model, tokenizer, prompt, logits_processors=[no_newline], max_tokens=48))
"""

SPECULATIVE = """
from mlx_lm import load, stream_generate

model, tokenizer = load(GEMMA)
draft_model, _ = load(DRAFT)
prompt = tokenizer.apply_chat_template(
    [{"role": "user", "content": "what does os.path.join do?"}], add_generation_prompt=True
)
answer = stream_generate(
    model, tokenizer, prompt, max_tokens=48, draft_model=draft_model, num_draft_tokens=3
)
for response in answer:
    print(response.token, repr(response.text))
"""

TRIM = """
from mlx_lm import generate, load
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

model, tokenizer = load(GEMMA)
prompt_cache = make_prompt_cache(model)
question = [{"role": "user", "content": "what does len do?"}]
prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
text = generate(model, tokenizer, prompt, max_tokens=8, prompt_cache=prompt_cache)
print(text, can_trim_prompt_cache(prompt_cache), prompt_cache[0].offset)
print(trim_prompt_cache(prompt_cache, 5), prompt_cache[0].offset)
print(generate(model, tokenizer, tokenizer.encode(" a"), max_tokens=16, prompt_cache=prompt_cache))
"""

EXAMPLES = {
    "generate": GENERATE,
    "stream": STREAM,
    "batch": BATCH,
    "prompt cache": PROMPT_CACHE,
    "samplers and processors": SAMPLERS,
    "a draft model": SPECULATIVE,
    "a trimmed cache": TRIM,
}
FAST = ("stream", "batch", "prompt cache")


def printed(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.mkdir()
    monkeypatch.chdir(folder)
    out = io.StringIO()
    space: dict[str, object] = {"__name__": "__main__", **MODELS}
    with warnings.catch_warnings(), contextlib.redirect_stdout(out):
        warnings.simplefilter("ignore")  # other packages' words on being imported
        exec(compile(script, "example", "exec"), space)
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in EXAMPLES]
)
def test_examples_of_mlx_lm_print_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = EXAMPLES[name]
    ours = re.sub(r"\bfrom mlx_lm\b", "from mlxspec.compat.mlx_lm", script)
    assert ours != script
    theirs = printed(script, tmp_path / "theirs", monkeypatch)
    loaded = set(sys.modules)
    assert printed(ours, tmp_path / "ours", monkeypatch) == theirs
    assert theirs.strip()
    assert "mlxspec.compat.mlx_lm" in {*loaded, *sys.modules}
