"""Every field that a published API names is honoured, refused by name, or listed as harmless; what is honoured does what it says."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.errors import ConfigError, GrammarError
from mlxspec.option import options
from mlxspec.server.answer_format import AnswerFormat
from mlxspec.server.chat_api import ChatCompletionRequest
from mlxspec.server.errors import BadField
from mlxspec.server.forms.base import Fields, names_of, review
from mlxspec.server.params import spec_of
from tests.engine import equality
from tests.server.published_fields import LLAMA_CPP, VLLM, honoured
from tests.server.readers import chat_form, notices, wanted
from tests.server.serving import QUESTION, Served, content

USER = {"role": "user", "content": QUESTION}
REQUEST = options(SamplingParams) | options(SpecConfig)
BODY: dict[str, Any] = {"messages": [USER], "max_tokens": 12}


def lists_of(path: str, form: type[Fields] = ChatCompletionRequest) -> list[str]:
    """Which of the three lists a field is in, nested ones by a dotted path; a dotted name of the body itself comes first."""
    lists = {"honoured": honoured(form), "refused": form.refused, "harmless": form.harmless}
    found = [name for name, listed in lists.items() if path in listed]
    head, _, rest = path.partition(".")
    inner = honoured(form).get(head)
    return lists_of(rest, inner) if not found and rest and inner is not None else found


def openai_fields() -> list[str]:
    params = pytest.importorskip(
        "openai.types.chat.completion_create_params", reason="openai is not installed"
    )
    options = pytest.importorskip("openai.types.chat.chat_completion_stream_options_param")
    nested = options.ChatCompletionStreamOptionsParam.__annotations__
    return [
        *params.CompletionCreateParamsBase.__annotations__,
        "stream",
        *(f"stream_options.{n}" for n in nested),
    ]


@pytest.mark.parametrize("api", ["openai", "llama.cpp", "vllm"])
def test_every_published_field_is_in_one_list(api: str) -> None:
    names = {"openai": openai_fields, "llama.cpp": lambda: LLAMA_CPP, "vllm": lambda: VLLM}[api]()
    assert len(names) > 30
    wrong = {name: found for name in names if len(found := lists_of(name)) != 1}
    assert not wrong


def accepts(make: Any, error: type[Exception]) -> bool:
    try:
        make()
    except error:
        return False
    return True


@pytest.mark.parametrize(
    "name", [o.name for o in REQUEST.values() if o.kind in (int, float) and o.body and o.name != "seed"]
)
def test_a_form_takes_the_numbers_that_the_config_class_takes(name: str) -> None:
    """But for -1, "not set" of other servers; and a whole number may be written as 5.0."""
    span = REQUEST[name]
    made = SpecConfig if name in options(SpecConfig) else SamplingParams
    more = {"max_tokens": 1 << 24} if name == "min_tokens" else {}
    for value in (-2, 0, 1, 0.5, span.low, span.high, span.high + 1, True, "1"):
        by_class = accepts(lambda v=value: made(**{name: v}, **more), ConfigError)
        by_form = accepts(lambda v=value: review(ChatCompletionRequest, {**BODY, name: v}), BadField)
        assert by_class == by_form, value
    assert accepts(lambda: review(ChatCompletionRequest, {**BODY, name: 1.0}), BadField)


def test_no_draft_of_a_model_as_by_the_flag(demo: Served) -> None:
    """--draft-max 0."""
    none = demo.chat(n_max=0, draft="mtp", policy="fixed")
    some = demo.chat(n_max=2.0, draft="mtp", policy="fixed")
    assert none["choices"][0]["message"] == some["choices"][0]["message"]
    assert not none["mlxspec"]["drafters"]
    assert some["mlxspec"]["drafters"]["mtp"]["drafted"] > 0


def test_lists_do_not_overlap_and_aliases_lead_to_fields() -> None:
    forms = [ChatCompletionRequest]
    for form in forms:
        for name in (*form.refused, *form.harmless):
            assert len(lists_of(name, form)) == 1, (form, name)
        forms += [inner for inner in honoured(form).values() if inner is not None and inner not in forms]
    assert len(forms) > 10
    for alias, name in names_of(ChatCompletionRequest).other.items():
        assert lists_of(alias) == lists_of(name) == ["honoured"]


REFUSALS = [
    (name, value)
    for name, value in {
        "mirostat": 2, "dynatemp_range": 0.5, "n_probs": 2, "include_reasoning": False, "echo": True,
        "speculative.type": "draft", "best_of": 2, "functions": [{"name": "f"}],
        "guided_whitespace_pattern": " ", "cache_salt": "x", "skip_special_tokens": False, "use_beam_search": True, "length_penalty": 0.5,
    }.items()
]  # fmt: skip


def test_refused_fields_name_themselves(demo: Served) -> None:
    for name, value in REFUSALS:
        status, answer = demo.post("/v1/chat/completions", {**BODY, name: value})
        assert (status, answer["error"]["param"]) == (400, name), answer
        assert answer["error"]["message"].startswith(f"{name} cannot be honoured: ")
    for more, path in (
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ):  # fmt: skip
        status, answer = demo.post("/v1/chat/completions", {**BODY, **more})
        assert (status, answer["error"]["param"]) == (400, path), answer


def test_usage_in_every_chunk(demo: Served) -> None:
    """As load tools ask for it: guidellm 0.8.1's request."""
    asked = {"include_usage": True, "continuous_usage_stats": True}
    more = {"max_completion_tokens": 16, "ignore_eos": True, "stream_options": asked}
    for path, body in (
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/completions", {"prompt": QUESTION}),
    ):
        chunks, _, _ = demo.stream(path, {**body, **more})
        *texts, _, last = [
            c for c in chunks if c["choices"] == [] or c["choices"][0].get("delta", {}).get("role") is None
        ]
        counted = [c["usage"]["completion_tokens"] for c in texts]
        assert counted == sorted(counted)
        assert 0 < counted[0] <= counted[-1] == last["usage"]["completion_tokens"] == 16
        assert {c["usage"]["prompt_tokens"] for c in texts} == {last["usage"]["prompt_tokens"]}
        chunks, _, _ = demo.stream(path, {**body, **more, "stream_options": {"include_usage": True}})
        assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_values_that_ask_for_nothing_are_taken() -> None:
    for name, refused in ChatCompletionRequest.refused.items():
        for value in (None, *refused.neutral):
            assert notices(ChatCompletionRequest, {**BODY, name: value}) == []
        wanted = {**BODY, "repetition_penalty": 1.1, name: "surely not neutral"}
        with pytest.raises(BadField, match=re.escape(name)):
            review(ChatCompletionRequest, wanted)


def test_harmless_fields_are_taken_without_a_word(demo: Served) -> None:
    plain = demo.chat(**{k: v for k, v in BODY.items() if k != "messages"})
    more = dict.fromkeys(ChatCompletionRequest.harmless, "x")
    found = demo.chat(**{k: v for k, v in BODY.items() if k != "messages"}, **more)
    assert found["mlxspec"]["notices"] == []
    assert found["choices"][0]["message"] == plain["choices"][0]["message"]


def test_members_that_a_schema_leaves_free_are_not_unknown() -> None:
    body = {
        **BODY,
        "logit_bias": {"5": 1},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"anything": {"x": 1}}, "odd": 1}, "odd": {}}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object", "x": 1}, "odd": 1}},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "odd": 1}]}, {**USER, "odd": None}],
    }  # fmt: skip
    found = {said.partition(" ")[0] for said in notices(ChatCompletionRequest, body)}
    assert found == {
        "tools[0].function.odd",
        "tools[0].odd",
        "response_format.json_schema.odd",
        "messages[0].content[0].odd",
        "messages[1].odd",
    }


def test_other_names_of_a_field() -> None:
    names = names_of(ChatCompletionRequest)
    for alias, name in names.other.items():
        value = 0.5 if "p_min" in name or "penalty" in name else 3
        for body in ({alias: value}, {alias: value, name: value}, {alias: None, name: value}):
            assert getattr(chat_form({"messages": BODY["messages"], **body}), names.attributes[name]) == value
        with pytest.raises(BadField, match=re.escape(alias)):
            chat_form({"messages": BODY["messages"], alias: value, name: value + (0.25 if value < 1 else 1)})


def test_no_limit_as_others_write_it(demo: Served) -> None:
    for more in ({"n_predict": 2}, {"max_completion_tokens": 2}, {"max_tokens": 2, "n_predict": 2}):
        status, answer = demo.post("/v1/chat/completions", {"messages": [USER], **more})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 2)
    forever = {"messages": [USER], "ignore_eos": True, "draft": "off"}
    status, answer = demo.post(
        "/v1/completions", {"prompt": "x" * 3900, "max_tokens": -1, "ignore_eos": True}
    )
    assert status == 200
    usage = answer["usage"]
    assert usage["total_tokens"] == 2048
    assert answer["choices"][0]["finish_reason"] == "length"
    for wrong in (0, -2):
        status, answer = demo.post("/v1/chat/completions", {**forever, "max_tokens": wrong})
        assert (status, answer["error"]["param"]) == (400, "max_tokens")
    sampled = {"temperature": 1.0, "seed": 3, "max_tokens": 12}
    assert demo.chat(**sampled, top_k=-1)["choices"] == demo.chat(**sampled)["choices"]
    drawn = {demo.chat(temperature=1.5, seed=-1, max_tokens=12)["mlxspec"]["seeds"][0] for _ in range(3)}
    assert len(drawn) == 3


FORMATS = [
    {"json_schema": {"const": "42"}},
    {"guided_json": {"const": "42"}},
    {"guided_json": '{"const": "42"}'},
    {"structured_outputs": {"json": {"const": "42"}}},
    {"response_format": {"type": "json_object", "schema": {"const": "42"}}},
    {"response_format": {"type": "json_schema", "schema": {"const": "42"}}},
    {"grammar": r'root ::= "\"42\""'},
    {"guided_grammar": r'root ::= "\"4" two' + "\n" + r'two ::= "2\""'},
    {"guided_grammar": r'start: "\"42\""'},
    {"structured_outputs": {"grammar": r'root ::= "\"42\""'}},
    {"guided_regex": '"42"'},
    {"structured_outputs": {"regex": '"42"'}},
    {"guided_choice": ['"42"']},
    {"structured_outputs": {"choice": ['"42"']}},
]


def test_every_name_of_an_answers_format_is_honoured(demo: Served) -> None:
    for more in FORMATS:
        for sampled in ({}, {"temperature": 1.0, "seed": 1}):
            answer = demo.chat(max_tokens=20, **more, **sampled)["choices"][0]
            assert answer["message"]["content"] == '"42"', more
    answer = demo.chat(max_tokens=60, structured_outputs={"json_object": True})
    assert answer["choices"][0]["message"]["content"].startswith("{")
    status, answer = demo.post(
        "/v1/completions", {"prompt": "x", "max_tokens": 20, "grammar": 'root ::= "a"{5}'}
    )
    assert (status, answer["choices"][0]["text"]) == (200, "aaaaa")


def test_formats_that_cannot_be_used() -> None:
    with pytest.raises(BadField, match="regex and response_format both"):
        wanted(response_format={"type": "json_object"}, regex="a")
    with pytest.raises(BadField, match="guided_json is no valid JSON"):
        wanted(guided_json="{")
    with pytest.raises(BadField, match="must hold a JSON object"):
        wanted(guided_json="[1]")
    for broken in (
        "root ::= this is (not valid GBNF",
        "nothing",
        "root ::= " + "(" * 100_000,
        "root ::= [",
        'root ::= "a',
    ):
        with pytest.raises((GrammarError, BadField), match=r"grammar (is no valid GBNF|must have at most)"):
            wanted(grammar=broken)
    assert wanted(response_format={"type": "text"}, structured_outputs={"json_object": False}) is None
    found = wanted(guided_choice=["a", 'b"\n'])
    assert found == AnswerFormat(field="guided_choice", kind="lark", value='start: "a" | "b\\"\\n"')


def test_a_last_message_of_the_assistant_is_continued(demo: Served) -> None:
    """The prompt ends where the message does, and the answer is what the model would have gone on with."""
    whole = demo.chat(max_tokens=24)["choices"][0]["message"]["content"]
    for length in (1, 7, len(whole) - 3):
        begun = {"role": "assistant", "content": whole[:length]}
        for more in (
            {},
            {"continue_final_message": True},
            {"continue_final_message": True, "add_generation_prompt": False},
        ):
            body = {"messages": [USER, begun], **more}
            status, prompt = demo.post("/apply-template", body)
            assert status == 200
            assert prompt["prompt"].endswith(begun["content"])
            assert prompt["prompt"].startswith(
                demo.post("/apply-template", {"messages": [USER]})[1]["prompt"]
            )
        tokens = demo.post("/tokenize", {"content": prompt["prompt"]})[1]["tokens"]
        direct = demo.post("/v1/completions", {"prompt": tokens, "max_tokens": 12})[1]["choices"][0]["text"]
        status, answer = demo.post("/v1/chat/completions", {"messages": [USER, begun], "max_tokens": 12})
        assert status == 200
        assert answer["choices"][0]["message"]["content"] == direct
    new_turn = demo.post("/apply-template", {"messages": [USER, begun], "continue_final_message": False})[1][
        "prompt"
    ]
    assert new_turn.endswith(demo.post("/apply-template", {"messages": [USER]})[1]["prompt"][-12:])
    ended = demo.post("/apply-template", {"messages": [USER, begun], "add_generation_prompt": False})[1][
        "prompt"
    ]
    assert new_turn.startswith(ended)


def test_what_cannot_be_continued(demo: Served) -> None:
    begun = {"role": "assistant", "content": "a"}
    call = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
    for more, param in (
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        (
            {"messages": [USER, begun], "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"messages": [USER, begun, begun]}, "messages[2]"),
        ({"messages": [USER, call]}, "messages[1]"),
    ):
        status, answer = demo.post("/v1/chat/completions", {"max_tokens": 1, **more})
        assert (status, answer["error"]["param"]) == (400, param)


def test_broken_arguments_of_an_earlier_call_are_passed_on(demo: Served) -> None:
    """A model that once wrote broken JSON must not end its conversation."""
    for arguments in ('{"a": ', "[1]", "none", {"a": 1}, ""):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turns = [
            USER,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ]
        status, answer = demo.post("/apply-template", {"messages": turns})
        assert status == 200, answer
        if isinstance(arguments, str) and arguments:
            assert arguments in answer["prompt"] or json.dumps(arguments)[1:-1] in answer["prompt"]
        assert demo.post("/v1/chat/completions", {"messages": turns, "max_tokens": 2})[0] == 200


def test_sounds_and_files_are_named(demo: Served) -> None:
    for kind, name in (("input_audio", "Sounds"), ("file", "Files")):
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind}]}]}
        status, answer = demo.post("/v1/chat/completions", body)
        assert status == 400
        assert (
            answer["error"]["message"]
            == f"{name} are not supported yet: messages[0].content[1] must be text or an image."
        )


def test_progress_and_timings_in_a_stream(demo: Served) -> None:
    long = {"role": "user", "content": " ".join(f"unseen{i}" for i in range(80))}
    for path, body in (
        ("/v1/chat/completions", {"messages": [long], "max_tokens": 6}),
        ("/v1/completions", {"prompt": long["content"][::-1], "max_tokens": 6}),
    ):
        asked = {**body, "return_progress": True, "timings_per_token": True}
        chunks, _, done = demo.stream(path, asked)
        assert done
        steps = [c["prompt_progress"] for c in chunks if "prompt_progress" in c]
        assert len(steps) > 2
        assert [s["processed"] for s in steps] == sorted({s["processed"] for s in steps})
        assert steps[0]["processed"] == steps[0]["cache"]
        assert steps[-1]["processed"] == steps[-1]["total"]
        assert {s["total"] for s in steps} == {steps[0]["total"]}
        said = [c for c in chunks if c["choices"] and "timings" in c and not c["choices"][0]["finish_reason"]]
        counts = [c["timings"]["predicted_n"] for c in said]
        assert counts
        assert counts == sorted(counts)
        quiet, _, _ = demo.stream(path, body)
        assert not [
            c
            for c in quiet
            if "prompt_progress" in c or ("timings" in c and not c["choices"][0]["finish_reason"])
        ]
        if "messages" in body:
            assert content(chunks) == content(quiet)


def test_fingerprint_and_overflow(demo: Served) -> None:
    answer = demo.chat(max_tokens=1)
    chunks, _, _ = demo.stream("/v1/chat/completions", BODY)
    assert {c["system_fingerprint"] for c in chunks} == {answer["system_fingerprint"]}
    assert answer["system_fingerprint"].startswith("mlxspec-")
    status, answer = demo.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "ab " * 5000}]}
    )
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 2048 tokens" in answer["error"]["message"]


def test_completions_in_llama_cpps_form(demo: Served) -> None:
    asked = {"prompt": "def main():", "n_predict": 12, "return_tokens": True}
    status, whole = demo.post("/completion", asked)
    assert status == 200
    direct = demo.post("/v1/completions", {"prompt": "def main():", "max_tokens": 12})[1]["choices"][0][
        "text"
    ]
    assert whole["content"] == direct
    assert demo.post("/detokenize", {"tokens": whole["tokens"]})[1]["content"] == direct
    assert (whole["tokens_predicted"], whole["stop_type"], whole["truncated"]) == (12, "limit", False)
    assert whole["prompt"] == "def main():"
    chunks, _, done = demo.stream("/completion", {**asked, "return_progress": True})
    assert not done  # OpenAI's mark; here the object that stops is the last
    assert "".join(c["content"] for c in chunks) == direct
    assert [t for c in chunks for t in c["tokens"]] == whole["tokens"]
    quiet, _, _ = demo.stream("/completion", {"prompt": "def main():", "n_predict": 12})
    assert [t for c in quiet for t in c["tokens"]] == whole[
        "tokens"
    ]  # a stream always has them, as llama.cpp's
    assert [c["stop"] for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["timings"]["predicted_n"] == 12
    several = demo.post("/completion", {"prompt": ["a", "b"], "n": 2, "n_predict": 2})[1]
    assert [s["index"] for s in several] == [0, 1, 2, 3]
    stopped = demo.post("/completion", {**asked, "stop": direct[4:6]})[1]
    assert (stopped["stop_type"], stopped["content"]) == ("word", direct[: direct.index(direct[4:6])])
    ended = demo.post("/completion", {"prompt": "x", "grammar": 'root ::= "ab"'})[1]
    assert (ended["stop_type"], ended["content"]) == ("eos", "ab")
    full = demo.post("/completion", {"prompt": "x" * 3900, "n_predict": -1, "ignore_eos": True})[1]
    assert (full["stop_type"], full["truncated"]) == ("limit", True)
    status, answer = demo.post("/chat/completions/input_tokens", {"messages": [USER]})
    prompt = demo.post("/apply-template", {"messages": [USER]})[1]["prompt"]
    assert answer["input_tokens"] == demo.post("/tokenize", {"content": prompt})[1]["count"]


def test_a_request_may_choose_policy_auto_where_the_server_drafts_always() -> None:
    engine = equality.engine(["mtp"])
    spec = spec_of(chat_form({**BODY, "policy": "auto"}), engine)
    assert spec == SpecConfig(drafters=("mtp",), policy="auto")
    assert engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4), spec=spec)[0].stats.num_rounds > 0
    assert engine.policies.auto is not None
