"""The shape of the source tree: imports point downwards, every file says what it is, and nothing names a machine.

Reads the source as text; imports nothing of it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mlxspec"

# Lowest first. A module may import from its own layer and from those below; `cli.main` is loaded by name in `__main__`.
LAYERS = (
    ("errors", "version"),
    ("option", "drafter_kinds"),
    ("config",),
    ("events",),
    ("platform", "platform.folders", "platform.helper", "platform.helper_child"),
    (
        "platform.resources",
        "platform.kept_json",
        "platform.processes",
        "platform.bundled_blas",
        "platform.blas",
        "platform.compile_folder",
        "platform.nvidia",
    ),
    ("platform.device", "platform.host"),
    ("platform.memory", "platform.watchdog", "platform.macos"),
    ("parsers",),
    ("images",),
    ("loading",),
    ("kernels",),
    ("cache",),
    ("models",),
    ("checkpoints",),
    ("sampling",),
    ("drafters",),
    ("policy",),
    ("engine",),
    ("server", "cli", "bench", "demo", "compat"),
    ("__init__", "__main__"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FREE_OF_ARRAYS = ("errors", "option", "config", "events", *(name for names in LAYERS[4:6] for name in names))
MACHINE_PATHS = re.compile(r"/(?:work|root|farm)/|/tmp/[a-z]")
SOURCES = sorted(PACKAGE.rglob("*.py"))


def layer_of(module: str) -> str:
    """`kernels` for "mlxspec.kernels.flat", `platform.blas` for "mlxspec.platform.blas", `__init__` for "mlxspec" itself."""
    parts = module.split(".")
    if parts[1:2] == ["platform"]:
        return ".".join(parts[1:3])
    return parts[1] if len(parts) > 1 else "__init__"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from runtime_nodes(node)


def imports(path: Path) -> Iterator[str]:
    """Full names of what `path` imports: `from mlxspec import x` counts as mlxspec.x."""
    package = module_of(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    for node in runtime_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, node.module] if node.module else base
            for alias in node.names:
                yield (
                    ".".join([*base, alias.name])
                    if base in (["mlxspec"], ["mlxspec.platform"], [])
                    else ".".join(base)
                )


DEVICELESS = ("cache", "models", "drafters", "policy", "engine")
CPU = re.compile(r"cpu", re.IGNORECASE)


def test_only_platform_and_kernels_name_a_cpu() -> None:
    """Other rooms ask the platform what the machine can do. What is written for CPUs alone is in kernels/."""
    found = [
        f"{label(path)}:{number}: {line.strip()}"
        for room in DEVICELESS
        for path in (PACKAGE / room).rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if CPU.search(line)
    ]
    assert not found


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_imports_point_downwards(path: Path) -> None:
    own = layer_of(module_of(path))
    assert own in LEVEL, f"{label(path)} is in no layer of tests/test_layers.py"
    for name in imports(path):
        if name.split(".")[0] == "mlxspec" and name not in ("mlxspec", "mlxspec.__version__"):
            other = layer_of(name)
            assert other in LEVEL, f"{label(path)} imports {name}, which is in no layer"
            assert LEVEL[other] <= LEVEL[own], f"{label(path)} ({own}) imports {name} from a layer above it"


def import_graph() -> dict[str, set[str]]:
    """Module -> modules of the package that it imports anywhere: in functions and under TYPE_CHECKING too."""
    paths = {module_of(path).removesuffix(".__init__"): path for path in SOURCES}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        graph[module] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in paths else str(node.module) for name in inside]
            else:
                names = []
            graph[module] |= {name for name in names if name in paths and name != module}
    return graph


def cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Groups of modules that reach each other by imports."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        wave = {start}
        while wave:
            wave = set().union(*(graph[name] for name in wave)) - seen
            seen |= wave
        reached[start] = seen
    return {
        frozenset({name, *(other for other in reached[name] if name in reached[other])})
        for name in graph
        if name in reached[name]
    }


def test_no_imports_go_round_in_a_circle() -> None:
    assert not cycles(import_graph())


def test_cycles_are_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == {frozenset("abc")}
    assert not cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_no_two_classes_have_one_name() -> None:
    names = [
        node.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert {name for name in names if names.count(name) > 1} == set()


def test_helpers_of_tests_are_not_called_as_scripts_are() -> None:
    """Both are imported by name alone. If two had one name, the first folder that a test run opens would decide which is meant."""
    scripts = [p for p in (ROOT / "scripts").iterdir() if p.suffix == ".py" or any(p.glob("*.py"))]
    tests = [
        p
        for p in (ROOT / "tests").rglob("*.py")
        if not p.name.startswith("test_") and p.stem not in ("conftest", "__init__")
    ]
    names = Counter(p.stem for p in [*scripts, *tests])
    assert [name for name, number in names.items() if number > 1] == []


def test_drafters_know_no_policy() -> None:
    """They are asked; who is asked and when is decided above them."""
    assert "auto" not in (PACKAGE / "drafters" / "drafts.py").read_text(encoding="utf-8")
    assert all(
        not name.startswith("mlxspec.policy") for p in PACKAGE.glob("drafters/*.py") for name in imports(p)
    )


@pytest.mark.parametrize("path", [p for p in SOURCES if layer_of(module_of(p)) in FREE_OF_ARRAYS], ids=label)
def test_low_layers_know_no_arrays(path: Path) -> None:
    heavy = {"mlx", "mlx_lm", "numpy", "transformers", "huggingface_hub"}
    assert not heavy & {name.split(".")[0] for name in imports(path)}


def test_array_packages_load_the_device_layer_first() -> None:
    """Whoever imports any of them must get the real BLAS before mlx.core comes in."""
    for init in PACKAGE.glob("*/__init__.py"):
        users = [
            p for p in init.parent.rglob("*.py") if any(n.split(".")[0] == "mlx" for n in top_imports(p))
        ]
        if users and init.parent.name != "platform":
            assert any(name.startswith("mlxspec.platform.device") for name in imports(init)), (
                f"{label(init)} lacks it"
            )


def top_imports(path: Path) -> set[str]:
    """Names imported when the module itself is: those outside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_files_are_introduced(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), f"{label(path)} does not say what it is"


def test_nothing_names_a_machine() -> None:
    """No path of anybody's machine, in sources, scripts or pages."""
    kinds = {".py", ".md", ".toml", ".sh", ".metal", ".yml", ""}
    folders = ("mlxspec", "metal", "tests", "scripts", "docs", ".ci")
    paths = [ROOT / "pyproject.toml", ROOT / "README.md"]
    paths += [
        p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in kinds and p.is_file()
    ]
    for path in paths:
        if path.stat().st_size > 1 << 20 or path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            assert not MACHINE_PATHS.search(line), f"{label(path)}:{number} names a machine's path"


def _is_of_the_host(call: ast.Call) -> bool:
    """Whether what numpy is given is written out, comes from numpy, or is converted to integers: never a 16-bit array."""
    given = call.args[0] if call.args else None
    if len(call.args) > 1 or call.keywords:
        dtype = ast.unparse(call.args[1] if len(call.args) > 1 else call.keywords[0].value)
        if "int" in dtype or dtype.startswith("'<"):
            return True
    if isinstance(given, ast.Call):
        return ast.unparse(given.func).startswith("np.")
    return isinstance(given, (ast.List, ast.ListComp, ast.GeneratorExp))


def _crossings(source: str) -> list[str]:
    """Calls by which a module could read an MLX array of floats into numpy other than by `host.numbers`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        reads = name in ("np.asarray", "np.array", "np.from_dlpack") and not _is_of_the_host(node)
        if reads or name == "memoryview":
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_device_arrays_are_read_in_one_place(path: Path) -> None:
    """numpy cannot read an MLX array of bfloat16: only `host.numbers` converts. Modules without MLX have no such arrays."""
    source = path.read_text(encoding="utf-8")
    if "import mlx.core" not in source or path.name == "host.py":
        return
    assert not _crossings(source)


def test_what_reads_device_arrays_is_found() -> None:
    assert _crossings("np.asarray(draft.confidences).tolist()")
    assert _crossings("np.array(x, np.float32)")
    assert _crossings("memoryview(x)")
    assert not _crossings("np.asarray(history, np.int32)")
    assert not _crossings("np.asarray([1.0, 2.0], np.float32)")


ARCHITECTURE = ROOT / "docs" / "architecture.md"
ROOM = re.compile(r"^\| `(\w+)/?` \| [^|]+ \| ([\w, ]*)\|$", re.MULTILINE)


def rooms() -> dict[str, set[str]]:
    """docs/architecture.md's table: room -> rooms that it may import, in the table's order."""
    found = ROOM.findall(ARCHITECTURE.read_text(encoding="utf-8"))
    return {name: {other.strip() for other in others.split(",") if other.strip()} for name, others in found}


def room_of(module: str) -> str:
    return layer_of(module).split(".")[0]


def foreign_imports(graph: dict[str, set[str]], allowed: dict[str, set[str]]) -> list[str]:
    """Imports from one room into another that the table does not allow."""
    return [
        f"{module} imports {other}, but docs/architecture.md does not let {room_of(module)} import {room_of(other)}"
        for module, others in sorted(graph.items())
        for other in sorted(others)
        if other != "mlxspec" and room_of(other) not in {room_of(module), *allowed[room_of(module)]}
    ]


def test_the_architecture_lists_every_room() -> None:
    there = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    there |= {p.stem for p in PACKAGE.glob("*.py")}
    assert set(rooms()) == there


def test_rooms_are_listed_from_the_bottom_up() -> None:
    above: set[str] = set()
    for name, others in rooms().items():
        assert others <= above, (
            f"{name} may import {others - above}, which docs/architecture.md lists below it"
        )
        above.add(name)


def test_rooms_import_what_the_architecture_allows() -> None:
    assert not foreign_imports(import_graph(), rooms())
    planted = {"mlxspec.kernels.flat": {"mlxspec.engine.round"}}
    assert foreign_imports(planted, rooms())


def test_files_that_the_architecture_names_are_there() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    order = re.findall(r"^\d+\. `([\w/]+\.py)`", text, re.MULTILINE)
    assert len(order) == len(set(order)) == 10
    named = {*order, *re.findall(r"`([\w/]+\.py)`", text)}
    for name in sorted(named):
        there = (ROOT / name).exists() or (PACKAGE / name).exists()
        assert there, f"docs/architecture.md names {name}, which is not there"
