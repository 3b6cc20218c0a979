"""Outputs that README and docs show have the form of what the program prints, with texts, drafters, prompts and commits that there are."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import FENCE, PAGES, ROOT

import mlxspec
from mlxspec.bench import demo_prompts
from mlxspec.cli.main import main
from mlxspec.config import DRAFTER_NAMES
from mlxspec.demo import WORKLOADS

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
DRAFTED = re.compile(r"(?<![\w-])([a-z][a-z0-9-]*) (\d+)/(\d+)(?! *(?:MB|GB|ms))")
COMMIT = re.compile(r"\bcommits? ((?:[0-9a-f]{7}(?: \([^)]*\))?(?:, (?:and )?| and )?)+)", re.IGNORECASE)


def shown(text: str) -> list[str]:
    """Outputs of a page: fences of text, and indented lines that are no commands."""
    fences = [body for kind, body in FENCE.findall(text) if kind == "text"]
    indented = re.findall(r"(?:^ {4}.*\n)+", FENCE.sub("", text), re.MULTILINE)
    return [*fences, *indented]


def shape(line: str) -> str:
    """A line of figures without its figures: numbers, machine, and which drafters drafted."""
    line = re.split(r" · peak memory ", line)[0]
    line = re.sub(r"\d[\d,]*(?:\.\d+)?", "0", line)
    line = re.sub(r"(?: · [a-z0-9-]+ 0/0 \(0 deep, 0 accepted\))+", " · DRAFTERS", line)
    # said where there are plain rounds to compare with
    line = re.sub(r", 0 times as fast as without drafting \(0 to 0\)", "", line)
    return line.replace("0 tokens, 0 tok/s", "0 tokens").replace(" (0 cached)", "")


def test_an_answer_and_its_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is what the command writes, and the two lines below it say what they say now."""
    command = 'generate "what does os.path.join do?" -n 48 --stats'
    assert f"mlxspec {command}" in COMMANDS
    (block,) = (body for body in shown(COMMANDS) if "tokens a round · mtp" in body)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b""), encoding="utf-8"))
    assert main(["generate", "what does os.path.join do?", "-n", "48", "--stats"]) == 0
    captured = capsys.readouterr()
    *text, line, details = block.rstrip("\n").split("\n")
    assert "\n".join(text) == captured.out.rstrip("\n")
    told = [said for said in captured.err.splitlines() if said]
    assert shape(details) in [shape(said) for said in told]
    now = next(said for said in told if " drafted tokens accepted" in said)
    assert [p.split("(")[0].strip() for p in shape(line).split(" · ")] == [
        p.split("(")[0].strip() for p in shape(now).split(" · ")
    ]


def test_the_rows_of_the_demo() -> None:
    """Names of prompts, and a range that holds the ratio of the speeds, below the text that the built-in model gives."""
    (block,) = (body for body in shown(COMMANDS) if "same text · off" in body)
    prompts = {prompt.name: prompt for prompt in demo_prompts.PROMPTS}
    answers = re.findall(r"^([a-z]+): .*\n((?:    .*\n)+?)    same text · (.*)$", block, re.MULTILINE)
    assert answers
    for name, text, row in answers:
        lines = [line for line in prompts[name].wanted.splitlines() if line]
        assert text.splitlines() == [f"    {line}" for line in (*lines[:4], *["..."] * (len(lines) > 4))]
        off, on, *_, least, most = map(float, re.findall(r"[\d.]+", row))
        assert least / 1.02 <= on / off <= most * 1.02
    assert block.rstrip().splitlines()[-1].startswith("Same text in 6 of 6. ")


def test_pictures_are_of_this_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they say of models and drafters is what the program says now; one that says otherwise is found."""
    pytest.importorskip("pyte", reason="the pictures' script needs the package pyte")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import make_pictures

    pictures = ROOT / "docs" / "pictures"
    with mlxspec.load("demo") as engine:
        assert make_pictures.check(pictures, engine) == []
    with mlxspec.load("demo", draft="ngram-simple") as other:
        assert len(make_pictures.check(pictures, other)) == 2


def test_the_readme_can_be_typed() -> None:
    """No placeholder stands in a command, and no page asks for an address of the repository."""
    for page in PAGES:
        assert "REPOSITORY" not in page.read_text(encoding="utf-8"), page.name
    for words in re.findall(r"^(?:mlxspec|uvx|uv|pip|scripts)\b.*$", README, re.MULTILINE):
        assert not re.search(r"\b[A-Z]{4,}\b|<\w+>", words.split("#")[0]), words


MODEL = re.compile(
    r"\b(?:Qwen|Gemma|Llama|DeepSeek|Mistral|gpt-oss|qwen|gemma|llama)[\w.-]*(?:[-: ]\d[\w.]*[bBM]\b|:\d+\w*)|\b[\d.]+B\b(?! shape)"
)
FIGURE = re.compile(
    r"(?<![\w.:/-])\d[\d,.]*(?: to \d[\d,.]*)?(?: ?(?:%|GB|MB|kB|tok/s|tokens a second|times))?(?![\w/-]|\.\d)"
)
SOURCE = re.compile(
    r"https?://[^)\s]*\d|(?:scripts|tests)/\w+|mlxspec inspect|[Cc]ommits? [0-9a-f]{7}|measurements/|\b[0-9a-f]{7,8} \|"
    r"|the shapes|published"
)


def without_source(page: str) -> list[str]:
    """Return the lines of a page that have a figure and the name of a sized model, in a section without a source; commands are left out."""
    found = []
    text = re.sub(r"^```.*?^```$|^    [^\n]*$", "", page, flags=re.MULTILINE | re.DOTALL)
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE):
        lines = [line for line in section.splitlines() if MODEL.search(line)]
        figures = [line for line in lines if FIGURE.search(MODEL.sub("", line))]
        found += figures * (SOURCE.search(section) is None)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_figures_of_named_models_have_a_source(page: Path) -> None:
    """A link with a number, a script or a file of measurements, a commit, or what counts memory, in the same section."""
    assert without_source(page.read_text("utf-8")) == []


def test_a_figure_without_a_source_is_found() -> None:
    row = "| 64 GB | `qwen3.6:35b-a3b` | 29 |"
    assert without_source(f"# a\n\n{row}\n\n# b\n\n`scripts/simulate` wrote this.\n") == [row]
    assert without_source(f"# a\n\n{row}\n\nBy `scripts/simulate`.\n") == []
    assert without_source("Qwen3.8-27B makes 47 tok/s.") == ["Qwen3.8-27B makes 47 tok/s."]
    assert without_source("```sh\nmlxspec run qwen3.5:4b -n 40\n```\nRun qwen3.5:4b.") == []


def test_drafters_that_outputs_name_are_there() -> None:
    found = {
        name
        for page in PAGES
        for body in shown(page.read_text("utf-8"))
        for name, *_ in DRAFTED.findall(body)
    }
    assert {"mtp", "ngram-simple"} <= found <= set(DRAFTER_NAMES)


def test_the_page_on_drafters_lists_all_of_them() -> None:
    part = (ROOT / "docs" / "drafters.md").read_text("utf-8").split("## All drafters")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", part, re.MULTILINE)) == set(DRAFTER_NAMES)


def test_workloads_that_the_bench_shows_are_there() -> None:
    (block,) = (body for body in shown(COMMANDS) if "tokens a round, mtp" in body)
    names = re.findall(r"^(\S+) +(?:not settled|[\d.]+x) \(", block, re.MULTILINE)
    assert names
    assert set(names) <= set(WORKLOADS)


def test_what_inspect_and_doctor_show_has_their_labels(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (
        body
        for body in shown((ROOT / "docs" / "checkpoints.md").read_text("utf-8"))
        if "architecture  " in body
    )
    labels = re.findall(r"^    ([A-Za-z]+(?: [a-z]+)?)  +\S", block, re.MULTILINE)
    assert len(labels) > 4
    assert main(["inspect", "demo"]) == 0
    told = capsys.readouterr().out
    assert all(re.search(rf"^{label}  ", told, re.MULTILINE) for label in labels), labels


def test_commits_that_pages_name_are_in_the_history() -> None:
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if shallow.stdout.strip() != "false":
        pytest.skip("no whole history is here")
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    named = {c for text in texts for found in COMMIT.findall(text) for c in re.findall(r"[0-9a-f]{7}", found)}
    assert len(named) > 5
    for commit in sorted(named):
        asked = [*git, "cat-file", "-e", f"{commit}^{{commit}}"]
        assert subprocess.run(asked, capture_output=True).returncode == 0, f"there is no commit {commit}"


def test_what_is_compared() -> None:
    assert (
        shape("34 tokens · 178 tok/s · 100 % of 23 drafted tokens accepted")
        == "0 tokens · 0 tok/s · 0 % of 0 drafted tokens accepted"
    )
    assert DRAFTED.findall("mtp 8/9, ngram-simple 64/80") == [("mtp", "8", "9"), ("ngram-simple", "64", "80")]
    assert COMMIT.findall("Commits f1d0c76 (float32), d406a9a (4 bits).") != []
    assert isinstance(ROOT, Path)
