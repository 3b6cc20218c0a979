"""Every public call with a name that it does not have, with nothing, and with a value of another kind: one sentence of an MlxspecError."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import mlxspec
from mlxspec.compat import mlx_lm as compat
from mlxspec.engine.engine import Engine
from mlxspec.engine.worker import Worker
from mlxspec.errors import ConfigError, MlxspecError
from tests import tiny_models

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = (mlxspec.SamplingParams, mlxspec.SpecConfig, mlxspec.EngineConfig)
METHODS = ("generate", "stream", "chat", "chat_prompt", "chat_input", "submit", "cancel", "probe")
COMPAT = ("load", "generate", "stream_generate", "batch_generate")
LOADED = tuple(inspect.signature(mlxspec.load).parameters)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_models.target(), tiny_models.tokenizer())


def refused(call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(MlxspecError) as caught:
        list(call())
    said = str(caught.value)
    assert said.endswith((".", "?"))
    assert "\n" not in said
    for word in words:
        assert word in said, said


@pytest.mark.parametrize("config", CONFIGS)
def test_fields_that_are_none(config: Any) -> None:
    first = fields(config)[0].name
    refused(
        lambda: config(**{f"{first}x": 1}), f"{config.__name__} has no argument", f"did you mean {first}?"
    )
    refused(lambda: config(qqqq=1), "there are: ")
    refused(
        lambda: config(1), f"takes no values by position; name them, as in {config.__name__}({first}=...)"
    )


@pytest.mark.parametrize("config", CONFIGS)
def test_fields_of_another_kind(config: Any) -> None:
    for each in fields(config):
        refused(lambda each=each: config(**{each.name: object()}), each.name)  # type: ignore[misc]


def test_fields_that_went_say_why() -> None:
    gone = {
        mlxspec.SpecConfig: ("acceptance", "draft_sampling"),
        mlxspec.EngineConfig: ("rollback", "num_states", "prefix_states"),
    }
    for config, names in gone.items():
        for name in names:
            refused(lambda config=config, name=name: config(**{name: "x"}), f"There is no {name} any more: ")  # type: ignore[misc]


@pytest.mark.parametrize("name", METHODS)
def test_methods(engine: Engine, name: str) -> None:
    method: Any = getattr(engine, name)
    form = inspect.signature(method)
    first = next(iter(form.parameters))
    if form.parameters[first].default is inspect.Parameter.empty:
        refused(method, f"{name} needs {first}")
    refused(lambda: method([1, 2], qqqq=1), "qqqq")
    refused(lambda: method(*range(9)), "by position")
    for keyword in ("params", "spec", "template"):
        if keyword in form.parameters and name != "chat":  # the tiny engine has no template
            refused(lambda keyword=keyword: method([1, 2], **{keyword: 5}))  # type: ignore[misc]
    if name not in ("cancel", "probe"):
        refused(lambda: method(5.5))


def test_params_and_templates_of_another_kind(engine: Engine) -> None:
    refused(lambda: engine.generate([1, 2], 5, max_tokens=3), "params must be SamplingParams")  # type: ignore[call-overload]
    with mlxspec.load("demo", draft="off") as demo:
        refused(lambda: demo.chat("x", template=5), "template must be Mapping")
        refused(lambda: demo.chat("x", 5), "SamplingParams")
        refused(lambda: demo.chat("x", enable_thinking=False), "template={...}")
        refused(lambda: demo.chat("x", temp=1), "did you mean temperature?")
        refused(lambda: demo.chat([{"role": "user"}]), "messages[0] has no content")
        refused(lambda: demo.chat([{"role": "user", "content": 5}]), "messages[0].content must be")


def test_a_variable_that_the_template_does_not_read_is_named() -> None:
    with (
        mlxspec.load("demo", draft="off") as demo,
        pytest.warns(UserWarning, match="The chat template of demo does not read enable_thinkin"),
    ):
        demo.chat("x", template={"enable_thinkin": False, "add_generation_prompt": True}, max_tokens=1)


def test_prove_without_parameters(engine: Engine) -> None:
    answer = engine.generate([1, 2])
    assert engine.prove([1, 2], answer).is_equal
    refused(lambda: engine.prove([1, 2], answer, 5), "params must be SamplingParams")  # type: ignore[arg-type]
    refused(lambda: engine.prove([1, 2], "x"), "Give prove the Result")  # type: ignore[arg-type]


def test_a_second_thread_is_told_what_to_use(engine: Engine) -> None:
    said: list[str] = []

    def other() -> None:
        try:
            engine.generate([1, 2], max_tokens=1)
        except MlxspecError as error:
            said.append(str(error))

    def processor(tokens: Any, logits: Any) -> Any:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return logits

    assert engine.generate([1, 2], max_tokens=1, logits_processors=[processor]).error is None
    assert said
    assert "another thread" in said[0]
    assert "AsyncEngine" in said[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_is_told_to_load_a_model() -> None:
    """MLX's threads are not in it, so it would wait for them for ever."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.stdout.startswith("This process was forked from the one that loaded the engine"), done.stderr


FORKED = """
import os, signal
from mlxspec.engine.engine import Engine
from mlxspec.errors import EngineStoppedError
from tests import tiny_models

engine = Engine(tiny_models.target())
engine.generate([1, 2], max_tokens=1)
child = os.fork()
if child:
    os.waitpid(child, 0)
else:
    signal.alarm(20)
    try:
        engine.generate([1, 2], max_tokens=1)
    except EngineStoppedError as error:
        print(error, flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("keyword", [name for name in LOADED if name != "model"])
def test_load_with_a_value_of_another_kind(keyword: str) -> None:
    refused(lambda: mlxspec.load("demo", **{keyword: 5.5}))


def test_load_and_engines() -> None:
    refused(lambda: mlxspec.load("demo", drafts="off"), "did you mean draft")
    refused(lambda: mlxspec.load("demo", "off"), "takes 1 value by position")
    refused(lambda: mlxspec.load(5), "named by a string or a path, not by 5")
    refused(lambda: mlxspec.load("demo", draft="of"), "did you mean off?")
    refused(lambda: mlxspec.load("demo", draft="qqqq"), "auto, off")
    refused(lambda: Engine(), "Engine needs model")  # type: ignore[call-arg]
    refused(lambda: Engine(5), "mlxspec.load")  # type: ignore[arg-type]
    refused(lambda: mlxspec.AsyncEngine("demo", 5), "by position")
    refused(lambda: Worker("demo"), "Worker(lambda: mlxspec.load('demo'))")  # type: ignore[arg-type]


def test_the_asynchronous_engine_says_the_same() -> None:
    async def ask() -> None:
        async with mlxspec.AsyncEngine("demo", draft="off") as engine:
            for call in (engine.generate, engine.chat):
                refused(call, "needs")
            for wrong, said in (({"template": 5}, "template"), ({"params": 5}, "SamplingParams")):
                with pytest.raises(ConfigError, match=said):
                    await engine.chat("x", **wrong)
            with pytest.raises(ConfigError, match="did you mean max_tokens"):
                await engine.generate("x", max_token=1)

    asyncio.run(ask())


@pytest.mark.parametrize("name", COMPAT)
def test_mlx_lms_calls(name: str) -> None:
    call: Any = getattr(compat, name)
    refused(call, f"{name} needs")
    if name != "load":
        model, tokenizer = compat.load("demo")
        refused(lambda: call(model, tokenizer, [1, 2], qqqq=1), "has no argument 'qqqq'")
        refused(lambda: call(model, tokenizer, [1, 2], temp=0.5), "sampler=make_sampler(temp=...)")
        refused(lambda: call(model, tokenizer, 5), "must be")
        refused(lambda: call(5, tokenizer, [1, 2]), "compat.mlx_lm.load")
    else:
        refused(lambda: call("demo", qqqq=1), "qqqq")


def test_an_older_python_is_told_in_one_sentence(tmp_path: Path) -> None:
    code = (
        "import sys; sys.version_info = (3, 10, 1)\n"
        f"sys.path.insert(0, {str(Path(mlxspec.__file__).parents[1])!r})\n"
        "try: import mlxspec\nexcept ImportError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert ran.stdout == "mlxspec needs Python 3.11 or newer; this is 3.10.\n", ran
