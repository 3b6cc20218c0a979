"""OpenAI's `/v1/responses/compact`: a conversation becomes the user's messages and a summary that the model writes.

A client sends the answer in place of the conversation. The summary is an item of the type `compaction`, whose `encrypted_content` is the
summary in base64 and no secret.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from mlxspec.server.answer_writer import Read
from mlxspec.server.errors import BadField
from mlxspec.server.forms import base as t
from mlxspec.server.forms import shared
from mlxspec.server.forms.shared import Count
from mlxspec.server.images import ImageText, pieces
from mlxspec.server.job import Job
from mlxspec.server.job_run import End
from mlxspec.server.params import Own, chat_job
from mlxspec.server.prompt import Context, chat_prompt
from mlxspec.server.responses_api import (
    MessageItem,
    ResponsesRequest,
    ResponsesWriter,
    conversation,
    input_items,
    message_text,
    sealed,
)

_ASKS = (
    "Summarise the conversation above, so that someone who has not read it can go on with the work. Keep what was asked for, what was "
    "decided and why, names of files and what was changed in them, commands and their results, errors, and what is left to do. Answer "
    "with the summary alone."
)


CompactedAnswer = t.answer(
    "CompactedAnswer", id=str, object=Literal["response.compaction"], created_at=Count, output=list[dict[str, Any]],
    usage=dict[str, Any], **shared.MEASURED,
)  # fmt: skip


def read(form: ResponsesRequest, at: Context) -> Read:
    """Return the job that makes the model write a summary, and the function that makes the writer of the response from the model's name
    and the job. Raises subclasses of MlxspecError."""
    if form.stream:
        raise BadField("stream", "stream: a compaction is answered whole.")
    if form.text is not None and form.text.format is not None and form.text.format.type != "text":
        raise BadField("text.format", "text.format: a summary is plain text.")
    items = input_items(form.input)
    if not items:
        raise BadField("input", "input must not be empty.")
    kept = [_parts(item) for item in items if isinstance(item, MessageItem) and item.role == "user"]
    request = form.model_copy(
        update={
            "input": [*items, MessageItem(role="user", content=_ASKS)],
            "tools": None,
            "tool_choice": None,
        }
    )
    prompt = chat_prompt(conversation(request), at)
    own = Own(max_tokens=form.max_output_tokens, stop=None, streams=False)
    return chat_job(request, at, prompt, own), partial(CompactionWriter, kept=kept)


def _parts(item: MessageItem) -> list[dict[str, Any]]:
    """Return the texts and images of a message as parts of the Responses API, as the client sent them."""
    return [
        {"type": "input_image", "image_url": piece.data}
        if isinstance(piece, ImageText)
        else {"type": "input_text", "text": piece}
        for piece in pieces(message_text(item))
    ]


class CompactionWriter(ResponsesWriter):
    """A writer of the response to a request for a compaction. kept: the parts of each message of the user, which the response repeats."""

    def __init__(self, model: str, job: Job, *, kept: Sequence[list[dict[str, Any]]]) -> None:
        super().__init__(model, job, is_sealed=False, tools=(), echo={})
        self._kept = kept

    def _whole(self, end: End) -> dict[str, Any]:
        """Return the body of the response: the user's messages and the summary. Raises BadField where the summary is empty or was cut."""
        summary = "".join(block.text for block in self._answer.blocks if block.kind == "text").strip()
        if end.reason == "length" or not summary:
            raise BadField(
                "max_output_tokens",
                "The model did not end its summary; give it more max_output_tokens, or a shorter conversation.",
            )
        said = [
            {
                "id": f"msg_{secrets.token_hex(24)}",
                "status": "completed",
                "type": "message",
                "role": "user",
                "content": parts,
            }
            for parts in self._kept
        ]
        item = {
            "id": f"cmp_{secrets.token_hex(24)}",
            "type": "compaction",
            "encrypted_content": sealed(summary),
        }
        return {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*said, item],
            "usage": self._usage(end),
            **self._measured(),
        }
