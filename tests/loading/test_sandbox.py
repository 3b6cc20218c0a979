"""Templates that would compute for ever or fill the memory end in one sentence; what real ones do is what Jinja does."""
# ruff: noqa: E501  (a template is a line)

from __future__ import annotations

import json
import threading
import time
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlxspec.errors import ConfigError, TokenizerError
from mlxspec.loading import sandbox
from mlxspec.loading.template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>there</b>"},
    {"role": "assistant", "content": "<think>x</think>Yes", "tool_calls": [{"name": "f", "arguments": {"a": [1, "é"]}}]},
    {"role": "tool", "content": "7"},
]  # fmt: skip

LONG = {
    "a tower of powers": "{{ 10 ** (10 ** 10) }}",
    "a power of a power": "{% set ns = namespace(n=2) %}{% for i in range(99) %}{% set ns.n = ns.n ** 2 %}{% endfor %}",
    "a product that grows": "{% set ns = namespace(n=2) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "a sum that grows": "{% set ns = namespace(n=2**4000) %}{% for i in range(9999) %}{% set ns.n = ns.n + ns.n %}{% endfor %}",
    "a rounding": "{{ 5 | round(-1000000000) }}",
    "a text times a number": "{{ 'x' * 10**9 }}",
    "a number times a text": "{{ 10**9 * 'x' }}",
    "a list times a number": "{{ [1] * 10**9 }}",
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops of nothing": "{% for a in range(99999) if a == 0 %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in [messages] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "macros that call twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "blocks that call twice": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "a text that doubles": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "a text that doubles by ~": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "a block that doubles": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}{% endfor %}",
    "a macro that doubles": "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = f(ns.s) %}{% endfor %}",
    "a list that doubles": "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "a list in itself twice": "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "a tuple in itself twice": "{% set ns = namespace(l=(1,)) %}{% for i in range(60) %}{% set ns.l = (ns.l, ns.l) %}{% endfor %}{{ ns.l | tojson }}",
    "a dict in itself twice": "{% set ns = namespace(l={}) %}{% for i in range(60) %}{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{{ ns.l | string }}",
    "dict() of itself": "{% set ns = namespace(l={}) %}{% for i in range(60) %}{% set ns.l = dict(a=ns.l, b=ns.l) %}{% endfor %}{{ ns.l | string }}",
    "lists times two": "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l * 2] * 2 %}{% endfor %}{{ ns.l == 1 }}",
    "namespaces of themselves": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "namespaces in a list": "{% set ns = namespace(x=1) %}{% set l = [ns] %}{{ l }}",
    "a wide %": "{{ '%1000000000d' % 1 }}",
    "a computed width": "{{ '%*d' % (1000000000, 1) }}",
    "a wide precision": "{{ '%.1000000000f' % 1 }}",
    "a wide format": "{{ '{:>1000000000}'.format(1) }}",
    "a nested format": "{{ '{:>{}}'.format(1, 1000000000) }}",
    "a wide format_map": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "the format filter": "{{ '%1000000000d' | format(1) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "bytes": "{{ 'x'.encode().center(1000000000) }}",
    "to_bytes": "{{ (5).to_bytes(1000000000, 'big') }}",
    "replace": "{% set s = 'x' * 100000 %}{{ s.replace('x', s) }}",
    "the replace filter": "{% set s = 'x' * 100000 %}{{ s | replace('x', s) }}",
    "replacing nothing": "{% set s = 'x' * 100000 %}{{ s.replace('', s) }}",
    "join": "{% set s = 'x' * 100000 %}{{ s.join(range(9999) | map('string') | list) }}",
    "the join filter": "{% set s = 'x' * 100000 %}{{ range(9999) | join(s) }}",
    "join of what runs backwards": "{% set s = 'x' * 100000 %}{{ range(9999) | reverse | join(s) }}",
    "join of what map makes": "{% set s = 'x' * 1000000 %}{{ range(99999) | map('replace', '1', s) | join }}",
    "a wide indent": "{{ 'a\nb' | indent(1000000000) }}",
    "an indent of many lines": "{% set s = 'a\n' * 100000 %}{{ s | indent(9999) }}",
    "JSON with a wide indent": "{{ [1] | tojson(indent=1000000000) }}",
    "a sum of lists": "{{ range(99999) | map('string') | map('list') | sum(start=[]) }}",
    "a filter that Jinja has": "{{ 'x' | center(1000000000) }}",
    "another": "{{ 'x ' * 1000 | wordwrap(1) }}",
    "lorem ipsum": "{{ lipsum(n=1000000) }}",
    "output": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("what", LONG)
def test_what_has_no_end_is_ended(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.3)
    started = time.thread_time()
    tracemalloc.start()
    try:
        with pytest.raises((ConfigError, TokenizerError)) as caught:
            ChatTemplate(LONG[what], {}).render(MESSAGES)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    text = str(caught.value)
    assert text.startswith("The chat template ")
    assert "\n" not in text
    assert len(text) < 500
    assert time.thread_time() - started < 10.0  # tracing memory makes everything slow
    assert most < 600 << 20


def test_rendering_is_bounded_in_time_not_by_other_threads() -> None:
    """The clock is the thread's own, so a busy machine refuses nothing; budgets of two threads are two."""
    template = ChatTemplate("{% for i in range(20000) %}{{ i }}{% endfor %}", {})
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(template.render(MESSAGES))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["".join(map(str, range(20000)))] * 4


def test_a_long_template_is_refused() -> None:
    with pytest.raises(TokenizerError, match="more than"):
        ChatTemplate("x" * (sandbox.LONGEST + 1), {})


ORDINARY = [
    "{%- for m in messages -%}{{ loop.index0 }}{{ m.role | upper }}:{{ m['content'] | trim }}{% if not loop.last %}\n{% endif %}{%- endfor %}",
    "{% set ns = namespace(last=-1, seen=[]) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% set ns.seen = ns.seen + [m.role] %}{% endfor %}{{ ns.last }} {{ ns.seen | join(', ') }}",
    "{% for m in messages if m.tool_calls %}{% for c in m.tool_calls %}{% for k, v in c.arguments | items %}<parameter={{ k }}>{{ v if v is string else v | tojson }}</parameter>{% endfor %}{% endfor %}{% endfor %}",
    "{% macro show(x, n=2) %}{% for i in range(n) %}[{{ x }}]{% endfor %}{% endmacro %}{{ show('a') }}{{ show(messages[0].content, n=1) }}",
    "{{ messages[2].content.split('</think>')[-1].lstrip('\n') }}|{{ 'a-b-c'.rsplit('-', 1) }}|{{ 'abc'[::-1] }}|{{ messages[::-1] | length }}",
    "{% set a, b = 1, 2 %}{{ a ~ '-' ~ b ~ messages[0].role }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ '%05.1f %s' % (3.14159, 'x') }}{{ '{:>6}|{!r}'.format('y', 'z') }}",
    "{% set d = {'x': [1, (2, 3)], 'y': none} %}{{ d }}{{ d.items() | list }}{{ d | dictsort }}{{ d.get('z', 'no') }}{% for k in d %}{{ k }}{% endfor %}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}{{ messages | map(attribute='role') | unique | join('/') }}{{ [3, 1, 2] | sort | first }}{{ messages | rejectattr('tool_calls', 'defined') | list | length }}",
    "{% set t %}a{{ messages[0].content }}b{% endset %}{{ t | length }}{{ t | replace('a', '*') }}{{ 'x\ny' | indent(2) }}{{ 'a b' | title }}{{ 3.7 | round | int }}{{ '12' | int + 1 }}{{ none is none }}{{ missing is defined }}",
    "{% for m in messages recursive %}{{ m.role if m.role is defined else m }}{% if m.tool_calls %}{{ loop(m.tool_calls | map(attribute='name')) }}{% endif %}{% endfor %}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% elif m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}{% else %}none{% endfor %}{{ ([1, 2] + [3]) | sum }}{{ 'x' * 3 }}{{ [0] * 2 }}{{ 5 if messages else 6 }}",
    "{% filter upper %}{{ messages[1].content }}{% endfilter %}{{ messages[1].content | e }}{% macro wrap() %}{{ caller('q') }}{% endmacro %}{% call(x) wrap() %}{{ x }}!{% endcall %}",
]  # fmt: skip


def as_jinja(source: str) -> str:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    return environment.from_string(source).render(messages=MESSAGES, add_generation_prompt=True)


@pytest.mark.parametrize("source", ORDINARY)
def test_ordinary_templates_are_what_jinja_makes_of_them(source: str) -> None:
    assert ChatTemplate(source, {}).render(MESSAGES) == as_jinja(source)


def test_long_conversations_are_no_burden() -> None:
    source = "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}{% endfor %}{{ ns.l | length }}"
    many = [{"role": "user", "content": "x" * 2000}] * 1500
    assert ChatTemplate(source, {}).render(many) == "1500"


def test_more_text_than_any_prompt_is_refused_before_it_is_rendered() -> None:
    with pytest.raises(ConfigError, match="million characters"):
        ChatTemplate("{{ messages }}", {}).render([{"role": "user", "content": "x" * (sandbox.HEAVIEST + 1)}])


_EXPRESSIONS = st.recursive(
    st.sampled_from(["1", "'ab'", "messages", "[1, 2]", "{'a': 1}", "ns.x", "range(99)", "none", "9" * 30, "(1,)", "missing"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "**", "%", "~", "//", "/", "==", "in", "and"]), inner).map(
            lambda x: f"({x[0]} {x[1]} {x[2]})"
        ),
        st.tuples(inner, st.sampled_from(sorted(sandbox.Sandbox().filters))).map(lambda x: f"({x[0]} | {x[1]})"),
        st.tuples(inner, st.sampled_from(sorted(sandbox._TEXT_METHODS)), inner).map(lambda x: f"{x[0]}.{x[1]}({x[2]})"),
        st.tuples(inner, inner).map(lambda x: f"[{x[0]}, {x[1]}]"),
    ),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(parts=st.lists(_EXPRESSIONS, min_size=1, max_size=3), depth=st.integers(0, 2))
def test_any_template_ends(parts: list[str], depth: int) -> None:
    body = "".join(f"{{% set ns.x = {p} %}}{{{{ ns.x }}}}" for p in parts)
    for i in range(depth):
        body = f"{{% for i{i} in range(40) %}}{body}{{% endfor %}}"
    started = time.thread_time()
    with suppress(ConfigError, TokenizerError):
        ChatTemplate(f"{{% set ns = namespace(x=2) %}}{body}", {}).render(MESSAGES)
    assert time.thread_time() - started < 2 * sandbox.SECONDS
