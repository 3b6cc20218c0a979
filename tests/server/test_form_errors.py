"""One sentence says which field is wrong and what it must be, also where a value may have several types."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from mlxspec.server.chat_api import ChatCompletionRequest
from mlxspec.server.completions_api import CompletionRequest
from mlxspec.server.errors import BadField
from mlxspec.server.forms.base import Fields, review
from mlxspec.server.messages_api import MessagesRequest
from mlxspec.server.ollama_api import OllamaChatRequest
from mlxspec.server.responses_api import ResponsesRequest

pytestmark = pytest.mark.smoke

USER = {"role": "user", "content": "x"}
BODIES: dict[type[Fields], dict[str, Any]] = {
    ChatCompletionRequest: {"messages": [USER]},
    CompletionRequest: {"prompt": "x"},
    MessagesRequest: {"messages": [USER], "max_tokens": 1},
    ResponsesRequest: {"input": "x"},
    OllamaChatRequest: {"messages": [USER]},
}
WRONG: list[tuple[type[Fields], dict[str, Any], str]] = [
    (ChatCompletionRequest, {"temperature": True}, "temperature must be a number."),
    (ChatCompletionRequest, {"temperature": float("inf")}, "temperature must be a number."),
    (ChatCompletionRequest, {"temperature": 101}, "temperature must be between 0 and 100."),
    (ChatCompletionRequest, {"top_p": 0}, "top_p must be above 0 and at most 1."),
    (ChatCompletionRequest, {"top_k": 1.5}, "top_k must be an integer."),
    (ChatCompletionRequest, {"n": "1"}, "n must be an integer."),
    (ChatCompletionRequest, {"stop": 5}, "stop must be text or a list."),
    (ChatCompletionRequest, {"stop": ["a", ""]}, "stop[1] must not be empty."),
    (ChatCompletionRequest, {"stop": ["a"] * 17}, "stop must have at most 16 items."),
    (ChatCompletionRequest, {"draft": 5}, "draft must be true or false, text or a list."),
    (ChatCompletionRequest, {"logit_bias": {"": 1}}, "a name in logit_bias must not be empty."),
    (ChatCompletionRequest, {"logit_bias": {"1": 200}}, "logit_bias.1 must be between -100 and 100."),
    (ChatCompletionRequest, {"tool_choice": "some"}, "tool_choice must be one of none, auto, required."),
    (ChatCompletionRequest, {"tool_choice": 5}, "tool_choice must be text or an object."),
    (ChatCompletionRequest, {"modalities": ["text", "audio"]}, 'modalities[1] must be "text".'),
    (ChatCompletionRequest, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs must not have 'a'."),
    (ChatCompletionRequest, {"messages": [USER, {"role": "user", "content": [{"type": "text", "text": 5}]}]},
     "messages[1].content[0].text must be text."),
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type is missing."),
    (CompletionRequest, {"prompt": 5}, "prompt must be text, a list or an object."),
    (CompletionRequest, {"prompt": ["a", True]}, "prompt[1] must be an integer or text."),
    (CompletionRequest, {"prompt": [1, ["a"]]}, "prompt[1] must be an integer or text."),
    (CompletionRequest, {"prompt": [[1], []]}, "prompt[1] must have at least 1 item."),
    (ResponsesRequest, {"input": [5]}, "input[0] must be an object."),
    (ResponsesRequest, {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text is missing."),
    (ResponsesRequest, {"metadata": {str(i): "" for i in range(65)}}, "metadata must have at most 64 members."),
    (MessagesRequest, {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "", "content": [{"type": "x"}]}]}]},
     "messages[0].content[0].content[0].type must be one of text, image, document, search_result, tool_reference."),
    (OllamaChatRequest, {"think": 5}, "think must be true or false or text."),
    (OllamaChatRequest, {"options": {"num_predict": -3}}, "options.num_predict must be between 1 and"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "more", "sentence"), WRONG)
def test_the_sentence(form: type[Fields], more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadField) as found:
        review(form, {**BODIES[form], **more})
    assert str(found.value).startswith(sentence)
    assert sentence.startswith(found.value.param)


def test_integers_may_be_written_with_a_point_and_bodies_stay_as_they_are() -> None:
    body = {**BODIES[ChatCompletionRequest], "top_k": 5.0, "max_tokens": -1, "odd": 1}
    before = dict(body)
    assert review(ChatCompletionRequest, body)[1] == ["odd is no field of this request and was ignored"]
    assert body == before
    assert type(body["top_k"]) is float


def test_other_threads_run_while_a_long_history_is_checked() -> None:
    """A thread that wakes up every half millisecond does so often: the check gives way between items."""
    parts = [{"type": "text", "text": "x"} for _ in range(100_000)]
    woken, done = [0], threading.Event()

    def wake() -> None:
        while not done.is_set():
            time.sleep(0.0005)
            woken[0] += 1

    other = threading.Thread(target=wake)
    other.start()
    ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": parts}]})
    before_end = woken[0]
    done.set()
    other.join()
    assert before_end >= 5
