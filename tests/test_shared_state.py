"""All that outlives a request in a process and could be seen by another API key: each container of a module, each cached function, and each
cache of an object, with the reason why one key learns nothing of another by it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

from mlxspec.config import SamplingParams
from mlxspec.images.prepared import PreparedImage
from mlxspec.models.image_features import HeldFeatures, ImageFeatures
from mlxspec.sampling.constraints import ConstraintMaker
from tests import tiny_models

PACKAGE = Path(__file__).parents[1] / "mlxspec"
_CACHES = {"OrderedDict", "WeakKeyDictionary", "WeakValueDictionary"}
_CONTAINERS = {"dict", "list", "set", "Counter", "deque", "defaultdict", *_CACHES}

MACHINE = "facts about the machine and its kernels, the same for every request"
PROGRAM = "a part of the program, read once"
LINE = "the command line serves one person"
BY_OWNER = "kept by owner"
SIZES = "follows from sizes and positions, which requests of all texts have"
SHARED = {
    "checkpoints/catalogue.py:catalogue": PROGRAM,
    "cli/other_programs.py:table": LINE,
    "cli/terminal.py:_held": LINE,
    "kernels/attention.py:_is_right": MACHINE,
    "kernels/gdn_prefill.py:mlx_agrees": MACHINE,
    **{
        f"kernels/launch.py:{name}": MACHINE
        for name in (
            "_checked",
            "_checks",
            "_of_models",
            "_raced",
            "_refusals",
            "_reports",
            "_speedups",
            "_texts",
            "_unless_lost",
        )
    },
    "loading/progress.py:_watchers": LINE,
    "loading/short_names.py:short_names": PROGRAM,
    "loading/sandbox.py:_compiled": "chat templates of models, in a process of their own; no request brings one",
    "models/adapted/classes.py:OWN": PROGRAM,
    "models/row_attention.py:_mask": SIZES,
    "models/row_attention.py:_mask_with_blocks": SIZES,
    "models/image_features.py:ImageFeatures._kept": BY_OWNER,
    "option.py:_KNOWN": PROGRAM,
    "platform/device.py:_claims": "bytes by engine",
    "platform/macos.py:_library": MACHINE,
    "server/http/log.py:_noted": "when a line of each kind was last logged; no request reads it",
    **{
        f"platform/device.py:{name}": MACHINE
        for name in ("_compile_state", "_compiles_for_cpu", "backend", "gpu_generation", "has_matrix_units")
    },
    "platform/folders.py:_temporary": "a folder by process",
    "platform/nvidia.py:has_gpu": MACHINE,
    "policy/cost_file.py:_followed": "costs of rounds and rates of acceptance, learned from all: numbers of tokens and seconds, no text",
    "sampling/bad_words.py:BadWords._masks": "of one request's words",
    "sampling/grammar.py:GrammarCompiler._kept": BY_OWNER,
    "sampling/noise.py:_words": SIZES,
    "sampling/survivors.py:_cuts": SIZES,
    "server/answers_file.py:AnswersFile._weights": "digests of models' weights, the same for every request",
    "server/forms/base.py:_NAMES": PROGRAM,
    "server/http/fairness.py:Lane._waiting": "requests that wait, by client, until they run",
    "server/images.py:_made": "images of requests that run, found by random marks that never leave the process",
    "server/openapi.py:document": PROGRAM,
    "server/page.py:files": PROGRAM,
}


def _name(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_empty_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.List):
        return not value.elts
    return isinstance(value, ast.Call) and _name(value) in _CONTAINERS and not value.args


def _assigned(node: ast.stmt) -> tuple[ast.expr | None, ast.expr | None]:
    if isinstance(node, ast.Assign):
        return node.targets[0], node.value
    return (node.target, node.value) if isinstance(node, ast.AnnAssign) else (None, None)


def kept_in(tree: ast.Module) -> Iterator[str]:
    """Names of a module's containers that begin empty, of its cached functions, and `Class.attribute` of caches by recency or by life."""
    for statement in tree.body:
        target, value = _assigned(statement)
        if isinstance(target, ast.Name) and _is_empty_container(value):
            yield target.id
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and {"cache", "lru_cache"} & {
            _name(d) for d in node.decorator_list
        }:
            yield node.name
        for inner in ast.walk(node) if isinstance(node, ast.ClassDef) else ():
            target, value = _assigned(inner) if isinstance(inner, ast.stmt) else (None, None)
            if isinstance(target, ast.Attribute) and isinstance(value, ast.Call) and _name(value) in _CACHES:
                yield f"{node.name}.{target.attr}"


def test_everything_that_requests_share_is_known_with_a_reason() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in kept_in(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found - set(SHARED) == set(), "say what another key could learn by it"
    assert set(SHARED) - found == set(), "gone"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("_kept: dict[int, str] = {}", ["_kept"]),
        ("_kept = OrderedDict[int, str]()", ["_kept"]),
        ("_NAMES = {'a': 1}", []),
        ("@lru_cache(8)\ndef f(): ...", ["f"]),
        (
            "class A:\n    def __init__(self):\n        self._x: OrderedDict[int, int] = OrderedDict()",
            ["A._x"],
        ),
    ],
)
def test_what_is_looked_for(text: str, names: list[str]) -> None:
    assert list(kept_in(ast.parse(text))) == names


@catches(
    "a compiled grammar is everybody's",
    "mlxspec.sampling.grammar:GrammarCompiler.compile",
    lambda right: lambda self, params, owner="": right(self, params),
)
def test_a_grammar_is_compiled_for_each_owner() -> None:
    maker = ConstraintMaker(tiny_models.tokenizer(), tiny_models.VOCAB)
    params = SamplingParams(regex="[ab]+")
    first, again, other = (maker.compile(params, owner=owner).grammar for owner in ("a", "a", "b"))
    assert first is again
    assert other is not first


@catches(
    "an image's rows are everybody's",
    "mlxspec.models.image_features:ImageFeatures.rows",
    lambda right: lambda self, prepared, owner: right(self, prepared, ""),
)
def test_an_image_is_computed_for_each_owner() -> None:
    features = ImageFeatures(lambda prepared: mx.zeros((2, 4)))  # type: ignore[arg-type]
    image = PreparedImage(
        pixels=np.zeros((1, 3), np.float32), grid=(1, 1, 1), tokens=2, positions=None, digest=b"x" * 32
    )
    for owner in ("a", "a", "b", ""):
        assert HeldFeatures(features, owner)(image).shape == (2, 4)
    assert features.num_runs == 3
    assert image in HeldFeatures(features, "b")
    assert image not in HeldFeatures(features, "c")
