"""What README and docs show: every command parses, commands that need no network run on the demo model, and every Python block runs.

Also held: links and their anchors, the length of pages, the scripts that pages name, and that no paragraph stands twice.
"""

from __future__ import annotations

import io
import re
import shlex
import sys
import warnings
from pathlib import Path

import mlx.core as mx
import pytest
from published_shapes import known

from mlxspec.cli import options
from mlxspec.cli.main import main
from mlxspec.kernels import launch
from mlxspec.models import registry

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
# what a user reads to use mlxspec: at most so many lines each
USE = (
    "README",
    "docs/getting-started",
    "docs/drafters",
    "docs/commands",
    "docs/python",
    "docs/server",
    "docs/agents",
    "docs/checkpoints",
)
LINES_OF_USE, WORDS_OF_NEVER_SLOWER = 250, 1200
EXAMPLES = ("metal/rms_rows.metal", "mlxspec/kernels/rms_rows.py")  # files that a page writes as an example
MEASURING = ("demo", "bench", "tune", "doctor")  # commands that take their time
ELSEWHERE = (
    "serve",
    "launch",
    "run",
    "pull",
    "rm",
    "convert",
)  # need a network, a repository, or never end
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    (mlxspec .*)$", re.MULTILINE)


def commands(page: Path) -> list[str]:
    """What is to be typed after `mlxspec`, from shell fences and indented lines."""
    text = page.read_text(encoding="utf-8")
    fences = [body for kind, body in FENCE.findall(text) if kind in ("sh", "bash", "console", "shell")]
    lines = [line for body in fences for line in body.replace("\\\n", " ").splitlines()]
    found = [*lines, *INDENTED.findall(FENCE.sub("", text))]
    found = [line.split("  # ")[0].strip().removeprefix("$ ") for line in found]
    return [line.removeprefix("mlxspec").strip() for line in found if re.match(r"mlxspec\b", line)]


def blocks(page: Path, kind: str = "python") -> list[str]:
    """The bodies of a page's fences of one kind."""
    return [body for found, body in FENCE.findall(page.read_text(encoding="utf-8")) if found == kind]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


COMMANDS = list(dict.fromkeys(c for page in PAGES for c in commands(page)))


def words(command: str) -> list[str]:
    return shlex.split(command, comments=True)


def is_local(command: str) -> bool:
    """Whether it can run here: no model but the demo, and nothing that never ends."""
    given = words(command)
    is_plain = not any(re.fullmatch(r"[\w.-]+/[\w.-]+|https?:.*|[~/<|>].*", w.split("=")[-1]) for w in given)
    searches = given[:1] == ["models"] and any(not word.startswith("-") for word in given[1:])
    return bool(given) and given[0] not in ELSEWHERE and is_plain and not searches


def takes_long(command: str) -> bool:
    given = words(command)
    return given[0] in MEASURING or "auto" in given


LOCAL = [c for c in COMMANDS if is_local(c)]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one(command: str) -> None:
    given = words(command)
    if any(w in ("-h", "--help", "--version") for w in given):
        with pytest.raises(SystemExit):
            options.parse(given)
    elif given and "|" not in given and ">" not in given:
        options.parse(given)


def run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b""), encoding="utf-8"))
    code = main([*words(command), *_fewer(words(command))])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert captured.out or words(command)[0] == "chat"


def _fewer(given: list[str]) -> list[str]:
    """Makes a benchmark of every recorded prompt one of a few."""
    if given[0] != "bench" or "--items" in given:
        return []
    return ["--items", "1", "--repeat", "1"]


@pytest.mark.parametrize("command", [c for c in LOCAL if not takes_long(c)])
def test_commands_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(command, tmp_path, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in LOCAL if takes_long(c)])
def test_commands_that_measure_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(command, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=name_of)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page one after the other, in one namespace. What a page registers is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "ARCHITECTURES", dict(registry.ARCHITECTURES))
    if blocks(page, "metal"):
        _write_kernels(page, tmp_path, monkeypatch)
    space: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page), 1):
        code = compile(block, f"{page.name}, block {number}", "exec")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other packages' words on being imported
            exec(code, space)


def _write_kernels(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a page's Metal sources where the package looks for kernels, each under the name that its first line begins with."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "metal"))
    import emulator

    if mx.metal.is_available():
        pytest.skip("the page is about checking a kernel without Metal")
    if reason := emulator.missing_compiler():
        pytest.skip(reason)
    for source in blocks(page, "metal"):
        found = re.match(r"// (\w+): ", source)
        assert found, f"a Metal source of {page.name} does not begin with its name"
        (tmp_path / f"{found[1]}.metal").write_text(source, encoding="utf-8")
    monkeypatch.setattr("mlxspec.platform.resources.metal_folder", lambda: tmp_path)
    for name in ("_checks", "_reports", "_speedups"):
        monkeypatch.setattr(launch, name, dict(getattr(launch, name)))


def test_the_extraction_finds_what_there_is() -> None:
    """A page whose commands nobody finds is a page nobody checks."""
    assert len(commands(ROOT / "docs" / "commands.md")) >= 15
    assert len(blocks(ROOT / "docs" / "python.md")) >= 5
    assert any(c.startswith("demo") for c in commands(ROOT / "README.md"))
    assert {words(c)[0] for c in LOCAL} >= {
        "generate",
        "chat",
        "demo",
        "bench",
        "tune",
        "doctor",
        "inspect",
        "models",
    }


def anchors(page: Path) -> set[str]:
    """What a link to a heading of a page may name, as GitHub makes it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_pictures_are_there(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        other = page.parent / target if target else page
        assert other.exists(), f"{name_of(page)} points to {target}"
        if anchor:
            assert anchor in anchors(other), f"{name_of(page)} points to #{anchor} of {name_of(other)}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_pages_name_are_there(page: Path) -> None:
    """Paths of the checkout, in backticks or in commands. NAME and stars stand for any name."""
    text = page.read_text(encoding="utf-8")
    for found in re.findall(r"(?<![\w/.-])((?:mlxspec|tests|scripts|metal)/[\w./*-]*\w)", text):
        pattern = found.replace("NAME", "*")
        assert found in EXAMPLES or any(ROOT.glob(pattern)), (
            f"{name_of(page)} names {found}, which is not there"
        )


def test_tests_that_pages_name_are_there() -> None:
    """The names of tests stand behind their file: `tests/room/test_file.py`, `test_one`, `test_other`."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = [
        (path, name)
        for path, names in re.findall(r"`(tests/[\w/]+\.py)`((?:, `test_\w+`)+)", text)
        for name in re.findall(r"test_\w+", names)
    ]
    assert named
    assert len(named) == len(re.findall(r"`test_\w+`", text)), "a test is named without its file"
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path} has no {name}"


def test_no_paragraph_stands_twice() -> None:
    """Paragraphs and list items of at least twelve words, over all pages."""
    seen: dict[str, str] = {}
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for part in re.split(r"\n\s*\n|\n(?=[*|\d-])", text):
            told = " ".join(part.split())
            if len(told.split()) >= 12:
                assert told not in seen, f"{name_of(page)} and {seen[told]} both say: {told[:80]}"
                seen[told] = name_of(page)


def test_ten_files_are_named_to_read_first() -> None:
    """With 3,500 lines at most, and `submit` in the first of them."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    part = text.split("## Read these ten files first")[1].split("\n## ")[0]
    files = [ROOT / "mlxspec" / name for name in re.findall(r"^\d+\. `([^`]+)`", part, re.MULTILINE)]
    assert len(files) == 10
    assert "def submit(" in files[0].read_text()
    assert sum(len(file.read_text().splitlines()) for file in files) <= 3500


def test_every_page_is_listed() -> None:
    """The index of docs/ leads to every page."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in PAGES:
        if page.name != "README.md":
            assert f"{page.name})" in index, f"docs/README.md lacks {page.name}"


def test_pages_keep_their_length() -> None:
    for name in USE:
        lines = (ROOT / f"{name}.md").read_text(encoding="utf-8").splitlines()
        assert len(lines) <= LINES_OF_USE, f"{name}.md has {len(lines)} lines"
    words = (ROOT / "docs" / "never-slower.md").read_text(encoding="utf-8").split()
    assert len(words) <= WORDS_OF_NEVER_SLOWER


def test_slowest_answers_are_given_with_the_number_of_answers() -> None:
    """In its column's head or beside each figure: a minimum of few is not a minimum of many."""
    num = 0
    for page in PAGES:
        for table in re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
            head, _, *rows = (
                [cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()
            )
            for column, name in enumerate(head):
                if re.match("slowest|worst", name) and not re.search(r" of \d", name):
                    num += 1
                    for cell in (row[column] for row in rows if re.search(r"\d", row[column])):
                        assert re.search(r" of \d", cell), f"{page.name}, {name}: {cell}"
    assert num  # some are given beside the figure


def test_scripts_that_pages_name_are_there() -> None:
    for page in [*PAGES, ROOT / "scripts" / "README.md"]:
        for name in re.findall(r"scripts/[\w./]*\w", page.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_the_page_on_scripts_names_all_of_them() -> None:
    text = (ROOT / "scripts" / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "scripts").iterdir():
        if path.suffix in ("", ".py") and path.name != "__pycache__":
            assert re.search(rf"`{path.stem}(\.py|/)?`", text), f"scripts/README.md lacks {path.name}"


def test_measurements_are_what_their_script_makes() -> None:
    import measurements

    page = measurements.PAGE.read_text(encoding="utf-8")
    assert measurements.filled(page) == page
    places = [m.group(2, 3) for m in measurements.PLACE.finditer(page)]
    assert len(places) >= 6
    with pytest.raises(KeyError):
        measurements.filled("<!-- peers nothing -->\n")
    assert (
        measurements.filled("<!-- peers plain -->\n| old |\n")
        == f"<!-- peers plain -->\n{measurements.table('peers', 'plain')}"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("column", "context"), [(2, 1 << 15), (3, 1 << 17)])
def test_memory_of_models_for_agents(column: int, context: int) -> None:
    """The table of docs/agents.md is what shapes give."""
    text = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| `mlx-community/(\S+)-([48])bit` \| ([\d.]+) GB \| ([\d.]+) GB \|", text)
    assert len(rows) == 6
    models = {name.partition("/")[2]: m for m in known(context) for name in m.names}
    for row in rows:
        model = models[row[0]]
        total = model.weights[f"{row[1]} bits"] + model.state + model.head_bytes
        assert f"{total / 1e9:.1f}" == row[column], row
