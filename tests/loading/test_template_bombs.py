"""Templates that would compute for ever, fill the memory or crash: each ends in one sentence, within its limits, and delays nobody."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2.defaults import DEFAULT_FILTERS as FILTERS

from mlxspec.errors import ConfigError, HelperError
from mlxspec.loading import template
from mlxspec.loading.template import ChatTemplate
from mlxspec.server.messages import render_conversation
from tests.loading.template_bombs import BOMBS, FEW, WHEN_COMPILED
from tests.server.serving import Served

MESSAGES = [{"role": "user", "content": "Hi"}]
LONG = 20.0
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def ends(source: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The sentence that it ends in, or a text of a size that a prompt may have."""
    monkeypatch.setattr(template, "PROGRAM", replace(template.PROGRAM, seconds=0.4))
    began = time.monotonic()
    try:
        text = ChatTemplate(source, {}).render(MESSAGES, one=1)
        assert len(text) <= template.MOST_TEXT
    except (ConfigError, HelperError) as error:
        text = str(error)
        assert text.startswith("The chat template ")
        assert "\n" not in text
        assert len(text) < 600
    assert time.monotonic() - began < LONG
    return text


@pytest.mark.smoke
def test_limits_are_those_that_the_docs_name() -> None:
    assert template.PROGRAM.seconds < 2
    assert template.PROGRAM.memory < 256 << 20


@pytest.mark.parametrize("what", FEW)
def test_a_template_that_has_no_end_is_ended(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ends(BOMBS[what], monkeypatch).startswith("The chat template ")


@pytest.mark.slow
@pytest.mark.parametrize("what", [name for name in BOMBS if name not in FEW])
def test_every_template_that_has_no_end_is_ended(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends(BOMBS[what], monkeypatch)


@pytest.mark.parametrize("what", WHEN_COMPILED)
def test_a_template_that_its_compiler_computes_with_is_ended(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends(WHEN_COMPILED[what], monkeypatch)
    began = time.monotonic()
    fault = ChatTemplate(WHEN_COMPILED[what], {}).check()
    assert fault is None or fault.startswith("The chat template ")
    assert time.monotonic() - began < LONG


_EXPRESSIONS = st.recursive(
    st.sampled_from(["1", "'ab'", "messages", "[1, 2]", "{'a': 1}", "ns.x", "range(99)", "none", "9" * 30, "(1,)", "missing"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "**", "%", "~", "//", "/", "==", "in", "and"]), inner).map(
            lambda x: f"({x[0]} {x[1]} {x[2]})"
        ),
        st.tuples(inner, st.sampled_from(sorted(FILTERS))).map(lambda x: f"({x[0]} | {x[1]})"),
        st.tuples(inner, st.sampled_from([m for m in dir(str) if m[0] != "_"]), inner).map(lambda x: f"{x[0]}.{x[1]}({x[2]})"),
        st.tuples(inner, inner).map(lambda x: f"[{x[0]}, {x[1]}]"),
    ),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(parts=st.lists(_EXPRESSIONS, min_size=1, max_size=3), depth=st.integers(0, 2))
def test_any_template_ends(monkeypatch: pytest.MonkeyPatch, parts: list[str], depth: int) -> None:
    body = "".join(f"{{% set ns.x = {p} %}}{{{{ ns.x }}}}" for p in parts)
    for i in range(depth):
        body = f"{{% for i{i} in range(40) %}}{body}{{% endfor %}}"
    ends(f"{{% set ns = namespace(x=2) %}}{body}", monkeypatch)


def test_long_conversations_are_no_burden() -> None:
    source = "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}{% endfor %}{{ ns.l | length }}"
    many = [{"role": "user", "content": "x" * 2000}] * 1500
    assert ChatTemplate(source, {}).render(many) == "1500"


def test_an_overrun_is_not_tried_again_in_another_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server renders a refused conversation once more with its later system messages as the user's."""
    calls = []
    monkeypatch.setattr(template, "PROGRAM", replace(template.PROGRAM, seconds=0.3))
    made = ChatTemplate(BOMBS["a large range"], {})
    run = made._run
    monkeypatch.setattr(made, "_run", lambda asked: calls.append(1) or run(asked))
    with pytest.raises(HelperError):
        render_conversation(made, [*MESSAGES, {"role": "system", "content": "x"}], {})
    assert len(calls) == 1


def test_what_jinja_keeps_from_a_template() -> None:
    """Python's internals, files and other templates."""
    escapes = [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages | map(attribute='__class__') | list | first }}",
        "{{ (messages | attr('__class__')).x }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ self._TemplateReference__context.x }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ tojson.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as o %}",
        "{% extends 'x' %}",
        "{% set _ = messages.append(1) %}",
        "{% set _ = messages[0].update(role='x') %}",
    ]
    shown = []
    for source in escapes:
        try:
            shown.append(ChatTemplate(source, {}).render(MESSAGES))
        except ConfigError:
            continue
    assert not [text for text in shown if text.strip() not in ("", "Undefined")]


# ---- beside a live server


def children_of(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def most_memory(pids: list[int]) -> int:
    """The most bytes that any of these processes ever had."""
    most = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        most = max(most, *(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), 0)
    return most


class Watch:
    """Asks a server's health and looks at its helpers' memory, again and again. slowest: seconds of an answer; most: bytes."""

    def __init__(self, served: Served) -> None:
        self.served, self.slowest, self.most, self.num = served, 0.0, 0, 0
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._ask), threading.Thread(target=self._look)]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        while not self._ends.wait(0.02):
            began = time.monotonic()
            assert self.served.ask("GET", "/health")[0] == 200
            self.slowest, self.num = max(self.slowest, time.monotonic() - began), self.num + 1

    def _look(self) -> None:
        while not self._ends.wait(0.01):
            self.most = max(self.most, most_memory(children_of(self.served.process.pid)))


def one_template(named: dict[str, str]) -> str:
    """A template that is one of these, as the last message asks; else a plain one."""
    cases = "".join(f"{{% elif said == {name!r} %}}{source}" for name, source in named.items())
    return (
        "{% set said = messages[-1].content %}{% set one = messages | length %}"
        "{% if false %}" + cases + "{% else %}{% for m in messages %}{{ m.content }}{% endfor %}{% endif %}"
    )


@LINUX
@pytest.mark.slow
def test_a_live_server_answers_beside_every_one_of_them(tmp_path: Path) -> None:
    """Each program ends with a 400 at the limit of processor time or memory; its helper never has more than 256 MB, and the server's health
    is told all the while."""
    named = {name: source for name, source in BOMBS.items() if "block" not in source or "set" in source}
    file, report = tmp_path / "bombs.jinja", []
    file.write_text(one_template(named), encoding="utf-8")
    with Served("--draft", "off", "--chat-template", str(file)) as served:
        served.chat("hi", max_tokens=2)
        with Watch(served) as watch:
            for name in named:
                began = time.monotonic()
                status, answer = served.post(
                    "/v1/chat/completions", {"messages": [{"role": "user", "content": name}], "max_tokens": 2}
                )
                report.append((time.monotonic() - began, name, status, str(answer)[:160]))
        served.chat("hi", max_tokens=2)
        print(
            f"health: {watch.num} answers, slowest {watch.slowest:.3f} s; helpers: at most {watch.most >> 20} MiB"
        )
        for seconds, name, status, answer in report:
            print(f"{seconds:5.2f} s  {status}  {name}: {answer}")
    assert {status for _, _, status, _ in report} <= {200, 400}
    assert sum(status == 400 for _, _, status, _ in report) >= 60
    assert max(report)[0] < LONG
    assert watch.num > len(report)
    assert watch.slowest < LONG
    assert 0 < watch.most < 256 << 20


@LINUX
@pytest.mark.slow
def test_a_hostile_client_does_not_hold_up_another_one(tmp_path: Path) -> None:
    """While one client's requests burn, again and again, another one's are answered before the first burning one has ended."""
    file = tmp_path / "bombs.jinja"
    file.write_text(one_template({"burn": BOMBS["a large range"]}), encoding="utf-8")
    body = {"messages": [{"role": "user", "content": "burn"}], "max_tokens": 2}
    with Served("--draft", "off", "--chat-template", str(file)) as served:
        served.chat("hi", max_tokens=2)
        ended: list[str] = []

        def burn() -> None:
            for _ in range(3):
                assert served.post("/v1/chat/completions", body)[0] == 400
                ended.append("burnt")

        thread = threading.Thread(target=burn)
        thread.start()
        time.sleep(0.2)
        for _ in range(3):
            served.chat("hi", max_tokens=2)
            ended.append("answered")
        thread.join()
    assert ended.index("answered") < ended.index("burnt")
    assert ended[:4].count("answered") >= 2
