"""Snippets of chat templates, as templates on the hub have them, in the dialect of transformers. What each one renders to, by transformers
5.24, is in template_snippets.json; `python -m tests.loading.template_snippets` writes it anew.
"""
# ruff: noqa: E501  (a template is a line)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("template_snippets.json")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<img>"}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Says \"what\" is <b>&</b> 'é'.", "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "at": {"type": "array", "items": {"type": "number"}}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "add", "parameters": {"b": 1, "a": 2.5, "c": None, "d": True}}},
]  # fmt: skip
DOCUMENTS = [{"title": "One", "text": "First\ntext"}, {"title": "Zwei", "text": "中文"}]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "  What's the weather in <Köln>?\n", "name": None},
    {"role": "assistant", "content": None, "reasoning_content": "I should ask.\nYes.", "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "at": [1, 2.0]}}}]},
    {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "{\"t\": 7}"},
    {"role": "assistant", "content": "<think>x</think>It is 7 °C.", "refusal": None},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "image"}, {"type": "text", "text": "here?"}]},
]  # fmt: skip

SNIPPETS: dict[str, str] = {
    # --- tags
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}[{{ m.role }}]{% endif %}{% endfor %}",
    "generation with dashes": "{%- for m in messages -%}\n  {%- if m.role == 'assistant' -%}\n    {%- generation -%}\n  {{ m.role }} {%- endgeneration -%}\n  {%- endif -%}\n{%- endfor -%}",
    "generation keeps what is set inside": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "generation around a loop": "{% generation %}{% for i in range(3) %}{{ loop.index }}{% endfor %}{% endgeneration %}",
    "generation in a macro": "{% macro say(t) %}{% generation %}{{ t }}{% endgeneration %}{% endmacro %}{{ say('hi') }}",
    "break and continue": "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }} {% endfor %}",
    "trim_blocks": "{% if true %}\na\n{% endif %}\n  {% if true %}\n  b\n  {% endif %}\nc",
    "lstrip_blocks": "x\n    {% set y = 1 %}\n    {{ y }}\n",
    "keeps no last newline": "a\n",
    "comments": "a{# nothing #}b{#- nor this -#} c",
    "raw": "{% raw %}{{ x }}{% endraw %}",
    "filter block": "{% filter upper %}a{{ messages[0].role }}{% endfilter %}",
    "set block": "{% set t %}a{{ messages[0].content | trim }}b{% endset %}{{ t }}{{ t | length }}",
    "set block with a filter": "{% set t | upper %}ab{% endset %}{{ t }}",
    "call block": "{% macro wrap(x) %}<{{ caller(x) }}>{% endmacro %}{% call(y) wrap('q') %}{{ y }}!{% endcall %}",
    "with": "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}",
    "recursive loop": "{% for m in [[1, [2, 3]], 4] recursive %}{% if m is iterable %}({{ loop(m) }}){% else %}{{ m }}{% endif %}{% endfor %}",
    "else of a loop": "{% for m in [] %}x{% else %}none{% endfor %}",
    "loop with a condition": "{% for m in messages if m.role != 'user' %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ',' }}{% endfor %}",
    "neighbours in a loop": "{% for m in messages %}{{ loop.previtem.role if loop.previtem is defined else '^' }}>{{ loop.nextitem.role if loop.nextitem is defined else '$' }} {% endfor %}",
    "cycle and changed": "{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}{% endfor %}",
    "unpacking": "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }};{% endfor %}{% set x, y = (1, 2) %}{{ y }}{{ x }}",
    "macro with defaults": "{% macro f(a, b='d') %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1) }}{{ f(1, 2, 3, x=4) }}",
    "namespace": "{% set ns = namespace(n=0, seen=[]) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.seen = ns.seen + [m.role] %}{% endfor %}{{ ns.n }}{{ ns.seen }}",
    "a scope of a loop": "{% set x = 1 %}{% for i in range(2) %}{% set x = 5 %}{% endfor %}{{ x }}",
    # --- what a template is given
    "tools are none": "{{ tools is none }}{{ tools is defined }}{{ documents is none }}{% if tools %}x{% endif %}{{ tools }}",
    "documents": "{% if documents %}{% for d in documents %}{{ d.title }}: {{ d['text'] }}\n{% endfor %}{% endif %}",
    "contents that are none": "{% for m in messages %}[{{ m.content is defined }}{{ 'content' in m }}]{% endfor %}",
    "members that are none": "{{ 'name' in messages[1] }}{{ messages[1].name is defined }}{{ messages[4].refusal }}",
    "a thought's names": "{{ messages[2].reasoning_content }}|{{ messages[2].thinking }}|{{ messages[2].reasoning }}|{{ 'thinking' in messages[1] }}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ image_token }}{{ pad_token is defined }}{{ unk_token }}",
    "generation prompt": "{{ add_generation_prompt }}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "options": "{{ enable_thinking is defined and enable_thinking is false }}{{ extra.a[1] }}{{ missing is defined }}",
    "parts of a content": "{% for p in messages[5].content %}{% if p.type == 'image' %}{{ image_token }}{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}",
    "parts that are mappings": "{% set c = messages[5].content %}{{ c is string }}{{ c is sequence }}{{ c is mapping }}{{ c[0] is mapping }}{{ c is iterable }}",
    "the last message": "{{ messages[-1]['role'] }}{{ messages[:-1] | length }}{{ messages[1:3] | map(attribute='role') | list }}{{ messages[::-1][0].role }}",
    # --- tojson
    "tojson": "{{ tools[0] | tojson }}",
    "tojson keeps HTML": "{{ '<b>&\\'\"</b>' | tojson }}",
    "tojson with indent": "{{ tools[1] | tojson(indent=4) }}",
    "tojson with a text as indent": "{{ [1, [2]] | tojson(indent='->') }}",
    "tojson with separators": "{{ tools[1] | tojson(separators=(',', ':')) }}",
    "tojson with sorted keys": "{{ tools[1] | tojson(sort_keys=true) }}",
    "tojson in ASCII": "{{ 'Köln 中文' | tojson(ensure_ascii=true) }}{{ 'Köln 中文' | tojson(ensure_ascii=False) }}",
    "tojson by place": "{{ {'b': 'é', 'a': 1} | tojson(true, 2) }}",
    "tojson of scalars": "{{ none | tojson }}{{ true | tojson }}{{ 1.0 | tojson }}{{ 'a\nb' | tojson }}{{ [] | tojson }}",
    "tojson of arguments": "{% for c in messages[2].tool_calls %}{\"name\": {{ c.function.name | tojson }}, \"arguments\": {{ c.function.arguments | tojson }}}{% endfor %}",
    "tojson of all tools": "{% for t in tools %}{{- t | tojson ~ '\n' }}{% endfor %}",
    # --- functions
    "dict": "{{ dict(a=1, b=2) }}{{ dict({'a': 1}, c=3) }}",
    "range": "{% for i in range(0, 10, 3) %}{{ i }}{% endfor %}{{ range(3) | list }}",
    "joiner and cycler": "{% set j = joiner(', ') %}{% set c = cycler('x', 'y') %}{% for i in range(3) %}{{ j() }}{{ c.next() }}{% endfor %}",
    "lipsum is there": "{{ lipsum is defined }}{{ lipsum(n=1, html=false, min=3, max=4) is string }}",
    "strftime_now": "{{ strftime_now('%d %b') | length }}{{ strftime_now is defined }}{{ strftime_now('x') }}",
    # --- filters
    "filter trim": "[{{ messages[1].content | trim }}][{{ 'xxax' | trim('x') }}]",
    "filter items": "{% for k, v in tools[1].function.parameters | items %}{{ k }}:{{ v }};{% endfor %}",
    "filter dictsort": "{{ {'b': 1, 'A': 3, 'c': 2} | dictsort }}{{ {'b': 1, 'a': 3} | dictsort(false, 'value') }}",
    "filter selectattr": "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | selectattr('tool_calls', 'defined') | map(attribute='role') | list }}",
    "filter rejectattr": "{{ messages | rejectattr('role', 'in', ['user', 'tool']) | map(attribute='role') | join('+') }}",
    "filters select and reject": "{{ [1, 2, 3, 4] | select('even') | list }}{{ [1, 2, 3] | reject('equalto', 2) | list }}",
    "filter map": "{{ ['a', 'b'] | map('upper') | join }}{{ tools | map(attribute='function.name') | list }}{{ messages | map(attribute='name', default='?') | list }}",
    "filter join": "{{ [1, 'b', none] | join('|') }}{{ messages | join(',', attribute='role') }}",
    "filter replace": "{{ 'aaa' | replace('a', 'b') }}{{ 'aaa' | replace('a', 'b', 2) }}",
    "filter default": "{{ nothing | default('d') }}{{ '' | default('e', true) }}{{ none | default('f') }}{{ nothing | d(1) }}",
    "filter length and count": "{{ 'abc' | length }}{{ messages | count }}{{ {} | length }}",
    "filters first and last": "{{ messages | map(attribute='role') | first }}{{ messages | map(attribute='role') | list | last }}{{ 'abc' | last }}",
    "filter indent": "{{ 'a\n\nb\nc' | indent }}|{{ 'a\nb' | indent(2, true) }}|{{ 'a\n\nb' | indent(2, blank=true) }}|{{ 'a\nb' | indent('>>') }}",
    "filters of case": "{{ 'hELLO wORLD' | capitalize }}{{ 'hello world' | title }}{{ 'a' | upper }}{{ 'B' | lower }}",
    "filters of numbers": "{{ '12' | int + 1 }}{{ 'x' | int(5) }}{{ '0x1f' | int(0, 16) }}{{ '2.5' | float }}{{ 2.567 | round(1) }}{{ 2.5 | round(method='floor') | int }}{{ -3 | abs }}",
    "filter string": "{{ 5 | string ~ none | string ~ true | string }}",
    "filter list": "{{ 'abc' | list }}{{ {'a': 1} | list }}",
    "filters sort and unique": "{{ [3, 1, 2] | sort }}{{ [3, 1, 2] | sort(reverse=true) }}{{ ['b', 'A', 'c'] | sort }}{{ messages | map(attribute='role') | unique | list }}{{ messages | sort(attribute='role') | map(attribute='role') | list }}",
    "filters min, max, sum": "{{ [3, 1] | min }}{{ [3, 1] | max }}{{ [3, 1.5] | sum }}{{ [{'n': 1}, {'n': 4}] | sum('n') }}",
    "filter groupby": "{% for r, ms in messages | groupby('role') %}{{ r }}:{{ ms | length }} {% endfor %}",
    "filters slice and batch": "{% for s in range(5) | slice(2) %}{{ s }}{% endfor %}{{ range(5) | batch(2, 'x') | list }}",
    "filter reverse": "{{ 'abc' | reverse }}{{ [1, 2] | reverse | list }}",
    "filter wordcount and truncate": "{{ 'a b c' | wordcount }}{{ 'a long sentence' | truncate(9) }}{{ 'abcdef' | truncate(5, true, '..') }}",
    "filters of markup": "{{ '<a> & b' | escape }}{{ '<a>' | e | safe }}{{ '<b>x</b>' | striptags }}{{ '<i>' | forceescape }}",
    "filter format": "{{ '%s-%03d-%.2f' | format('a', 7, 1.5) }}",
    "filters center and wordwrap": "[{{ 'a' | center(5) }}]{{ 'aa bb cc' | wordwrap(5) }}",
    "filter urlencode": "{{ 'a b&c/é' | urlencode }}{{ {'a': 1, 'b': 'x y'} | urlencode }}",
    "filter xmlattr": "<a{{ {'x': 1, 'y': none, 'z': 'é\"'} | xmlattr }}>",
    "filter pprint and filesizeformat": "{{ [1, 'a'] | pprint }}{{ 13000 | filesizeformat }}",
    "filter attr": "{{ messages[0] | attr('role') is defined }}{{ ('a' | attr('upper'))() }}",
    # --- methods and operators
    "methods of text": "{{ ' a '.strip() }}{{ 'a,b,c'.split(',') }}{{ 'a b'.split() }}{{ 'x-y'.rsplit('-', 1)[0] }}{{ 'abc'.startswith('ab') }}{{ 'abc'.endswith(('x', 'c')) }}{{ 'abc'.find('c') }}{{ 'aXb'.lower() }}{{ 'a'.join(['1', '2']) }}{{ 'a-b'.partition('-') }}",
    "more methods of text": "{{ 'x'.ljust(3) }}|{{ 'x'.rjust(3, '.') }}|{{ '5'.zfill(3) }}|{{ 'a\tb'.expandtabs(4) }}|{{ 'ab'.encode() }}|{{ 'aab'.count('a') }}|{{ 'abc'.removeprefix('a').removesuffix('c') }}|{{ 'a\nb'.splitlines() }}|{{ 'ab'.isalpha() }}{{ '1'.isdigit() }}{{ 'a b'.title() }}{{ 'ab'.swapcase() }}",
    "the thought of an answer": "{{ messages[4].content.split('</think>')[-1].lstrip('\\n') }}|{{ messages[4].content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] }}",
    "format of text": "{{ '{:>4}|{!r}|{n:03d}|{0}'.format('a', 'b', n=7) if false else '{:>4}|{!r}|{n:03d}'.format('a', 'b', n=7) }}{{ '%s=%d' % ('a', 5) }}{{ '{a}'.format_map({'a': 1}) }}",
    "methods of dicts": "{% set d = {'a': 1, 'b': none} %}{{ d.get('a') }}{{ d.get('z', 'no') }}{{ d.keys() | list }}{{ d.values() | list }}{{ d.items() | list }}{{ 'b' in d }}{{ d.copy() }}",
    "methods of lists": "{% set l = [1, 2, 2] %}{{ l.count(2) }}{{ l.index(2) }}{{ l + [3] }}{{ l * 2 }}{{ l[-1] }}{{ l[1:] }}",
    "operators": "{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ 7 / 2 }}{{ 1 ~ 'a' ~ none }}{{ not true }}{{ 1 < 2 <= 2 }}{{ 'a' not in 'b' }}{{ (1, 2) }}{{ 1 if false }}{{ [1] == [1.0] }}",
    "tests": "{{ 1 is odd }}{{ 4 is divisibleby 2 }}{{ 'a' is string }}{{ 1 is number }}{{ 1.5 is float }}{{ 2 is integer }}{{ true is boolean }}{{ none is none }}{{ x is undefined }}{{ {} is mapping }}{{ 'a' is in 'abc' }}{{ 'a' is eq 'a' }}{{ 3 is gt 2 }}{{ 'A' is upper }}{{ 'upper' is filter }}{{ 'odd' is test }}{{ raise_exception is callable }}{{ 1 is sameas 1 }}",
    "undefined is empty": "[{{ nothing }}][{{ messages[0].nothing }}]{% for x in nothing %}x{% endfor %}{{ nothing | length }}",
    "whole ChatML": "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + (m['content'] if m['content'] is string else '') + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "whole Llama 2": "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% endif %}{% for m in loop_messages %}{% if loop.index0 == 0 %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + m['content'] %}{% else %}{% set content = m['content'] %}{% endif %}{% if m['role'] == 'user' and content is string %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif m['role'] == 'assistant' and content %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    # --- refusals
    "raise_exception": "{% if messages[1].role == 'user' %}{{ raise_exception('Roles must alternate!') }}{% endif %}",
    "an operator on none": "{{ messages[2].content + 'x' }}",
    "an unknown filter": "{{ 'a' | unknown_filter }}",
    "a list that would change": "{% set _ = messages.append({}) %}",
    "Python's internals": "{{ ''.__class__.__mro__ }}",
    "a namespace's internals": "{% set ns = namespace(__class__=1) %}{{ ns }}",
    "another template": "{% include 'x' %}",
    "tojson of undefined": "{{ nothing | tojson }}",
}  # fmt: skip

OPTIONS: dict[str, dict[str, Any]] = {
    "tools are none": {"tools": None},
    "options": {"enable_thinking": False, "extra": {"a": [1, 2]}},
    "generation prompt": {"add_generation_prompt": False},
}


def options_of(name: str) -> dict[str, Any]:
    """What a snippet is rendered with besides the messages."""
    return {
        "tools": TOOLS,
        "documents": DOCUMENTS,
        "add_generation_prompt": True,
        **OPTIONS.get(name, {}),
    } | ({"documents": None} if name == "tools are none" else {})


def by_transformers(name: str) -> str | None:
    """What transformers makes of a snippet; None where it refuses."""
    from transformers.utils import chat_template_utils as theirs

    try:
        rendered, _ = theirs.render_jinja_template(
            conversations=[theirs._normalize_chat_messages(MESSAGES)],
            chat_template=SNIPPETS[name],
            **SPECIAL,
            **options_of(name),
        )
    except Exception:
        return None
    return str(rendered[0])


if __name__ == "__main__":
    found = {name: by_transformers(name) for name in SNIPPETS}
    RECORDED.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
