"""What the readers of the APIs make of bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxspec.server import chat_api, messages_api, responses_api
from mlxspec.server.answer_format import AnswerFormat
from mlxspec.server.chat_api import ChatCompletionRequest, ChatMessage
from mlxspec.server.forms.base import Fields, review
from mlxspec.server.job import ChatRequest
from mlxspec.server.messages import normalize
from mlxspec.server.messages_api import MessagesRequest
from mlxspec.server.responses_api import ResponsesRequest


def notices(form: type[Fields], body: Mapping[str, Any]) -> list[str]:
    """Sentences on fields that are ignored."""
    return review(form, body)[1]


def chat_form(body: Mapping[str, Any]) -> ChatCompletionRequest:
    return review(ChatCompletionRequest, body)[0]


def chat(body: Mapping[str, Any]) -> ChatRequest:
    return chat_api.conversation(chat_form(body))


def messages(body: Mapping[str, Any]) -> ChatRequest:
    return messages_api.conversation(review(MessagesRequest, {"max_tokens": 1, **body})[0])


def responses(body: Mapping[str, Any]) -> ChatRequest:
    return responses_api.conversation(review(ResponsesRequest, body)[0])


def normalized(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return normalize([review(ChatMessage, turn)[0] for turn in turns])


def wanted(**fields: Any) -> AnswerFormat | None:
    """The format that these fields of a chat ask for."""
    return chat({"messages": [{"role": "user", "content": "x"}], **fields}).wanted
