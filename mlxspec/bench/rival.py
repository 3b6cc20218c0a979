"""Asks another server on this machine, by OpenAI's API, and notes when each piece of its answer came.

A rival is not trusted: it may hang, send something else than a stream, end in the middle, or count its tokens wrongly. Each fault ends in
one sentence. Knows HTTP and JSON; knows no engine.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from urllib.parse import SplitResult, urlsplit

from mlxspec.errors import ConfigError, RivalError

_MOST_BYTES = 1 << 24  # of one answer, and of a list of models
_LONGEST_LINE = 1 << 20  # bytes
_MOST_OF_ERROR = 1 << 16  # bytes of an error's body
_SHOWN = 200  # characters of what a rival says
T = TypeVar("T")


class TimedPiece(NamedTuple):
    """A piece of an answer. seconds: since the request was sent."""

    seconds: float
    text: str


@dataclass(frozen=True, kw_only=True)
class TimedAnswer:
    """An answer with the times at which its pieces arrived, thinking included. num_said: its number of tokens as the server reports it,
    None where it reports none. is_whole: the answer ended by itself or at the limit, and was not broken off."""

    pieces: tuple[TimedPiece, ...]
    num_said: int | None = None
    is_whole: bool = True

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def first_seconds(self) -> float:
        """Return the seconds from the request to the first piece."""
        return self.pieces[0].seconds if self.pieces else 0.0

    @property
    def decode_seconds(self) -> float:
        """Return the seconds from the first piece to the last."""
        return self.pieces[-1].seconds - self.pieces[0].seconds if self.pieces else 0.0


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A server with OpenAI's API. url: its address, with or without /v1. model: the server's name of the model. key: sent as a bearer
    token. silence: the most seconds without any data. any_host: whether it may run on another machine, which then sees the prompts."""

    url: str
    model: str = ""
    key: str = field(default="", repr=False)
    silence: float = 120.0
    any_host: bool = False

    def __post_init__(self) -> None:
        parts = self._parts
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{self.url!r} is no address of a server; write it like http://127.0.0.1:8080.")
        if not self.any_host and not _is_here(parts.hostname):
            raise ConfigError(
                f"{parts.hostname} is another machine, which would see the prompts; --any-host allows that."
            )

    @property
    def _parts(self) -> SplitResult:
        try:
            parts = urlsplit(self.url)
            _ = parts.port
        except ValueError as error:
            raise ConfigError(f"{self.url!r} is no address of a server: {error}.") from error
        return parts

    @property
    def port(self) -> int:
        """Return the port that the server listens on."""
        parts = self._parts
        return parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def is_here(self) -> bool:
        """Return whether the server runs on this machine."""
        return _is_here(self._parts.hostname or "")

    def models(self) -> list[str]:
        """Return the names of the models that the server lists. Raises RivalError."""
        with self._sent("GET", "/models") as response:
            raw = self._guarded(lambda: response.read(_MOST_BYTES))
        try:
            return [str(entry["id"]) for entry in json.loads(raw)["data"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._fault("does not list its models as OpenAI's API does") from error

    def answer(
        self, messages: list[dict[str, str]], max_tokens: int, *, told: Callable[[str], None] = lambda _: None
    ) -> TimedAnswer:
        """Return the server's greedy answer to a conversation, read as a stream. told: called with each piece of text. Raises
        RivalError."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.perf_counter()
        pieces, num_said, reason = list[TimedPiece](), None, None
        with self._sent("POST", "/chat/completions", body) as response:
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                raise self._fault(f"answers with {kind} where a stream was requested")
            for event in self._events(response):
                usage, choices = event.get("usage"), event.get("choices")
                if isinstance(usage, Mapping) and isinstance(usage.get("completion_tokens"), int):
                    num_said = usage["completion_tokens"]
                for choice in choices if isinstance(choices, list) else ():
                    text = _text_of(choice)
                    if text:
                        pieces.append(TimedPiece(time.perf_counter() - began, text))
                        told(text)
                    if isinstance(choice, Mapping) and choice.get("finish_reason"):
                        reason = choice["finish_reason"]
        if reason is None:
            raise self._fault("ended its answer in the middle, without a finish_reason")
        if not pieces:
            raise self._fault("gave an answer without a text")
        return TimedAnswer(pieces=tuple(pieces), num_said=num_said)

    def _events(self, response: http.client.HTTPResponse) -> Iterator[Mapping[str, Any]]:
        """Yield the objects of a stream of server-sent events."""
        size = 0
        while line := self._guarded(lambda: response.readline(_LONGEST_LINE)):
            size += len(line)
            if size > _MOST_BYTES:
                raise self._fault("sends an answer without an end")
            name, _, data = line.strip().partition(b":")
            data = data.strip()
            if name != b"data" or not data:
                continue
            if data == b"[DONE]":
                return
            try:
                found = json.loads(data)
            except (ValueError, RecursionError) as error:
                raise self._fault("sends a stream whose events are not JSON") from error
            if not isinstance(found, dict):
                raise self._fault("sends a stream whose events are not objects")
            if found.get("error"):
                raise self._fault(f"ends its answer with an error: {_sentence(found)}")
            yield found

    @contextmanager
    def _sent(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and yield the response, whose status is 200. Raises RivalError."""
        parts = self._parts
        make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = make(parts.hostname or "", self.port, timeout=self.silence)
        headers = {"Accept": "text/event-stream, application/json", "Connection": "close"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        data = None if body is None else json.dumps(body)
        base = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")

        def send() -> http.client.HTTPResponse:
            connection.request(method, f"{base}/v1{path}", data, headers)
            return connection.getresponse()

        with closing(connection), self._guarded(send) as response:
            if response.status != 200:
                raw = self._guarded(lambda: response.read(_MOST_OF_ERROR))
                raise self._fault(f"answers {path} with status {response.status}: {_sentence(raw)}")
            yield response

    def _guarded(self, work: Callable[[], T]) -> T:
        """Return what `work` returns. Raises RivalError for what goes wrong with the connection."""
        try:
            return work()
        except TimeoutError as error:
            raise self._fault(f"said nothing for {self.silence:g} seconds") from error
        except ConnectionRefusedError as error:
            raise self._fault("does not run: the connection is refused") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = str(error).strip().rstrip(".") or type(error).__name__
            raise self._fault(f"broke off: {why[:_SHOWN]}") from error

    def _fault(self, what: str) -> RivalError:
        return RivalError(f"The server at {self.url} {what}.")


def _is_here(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _text_of(choice: Any) -> str:
    """Return the text of a stream's choice, thinking included."""
    delta = choice.get("delta") if isinstance(choice, Mapping) else None
    if not isinstance(delta, Mapping):
        return ""
    said = (delta.get(name) for name in ("reasoning_content", "reasoning", "content"))
    return next((text for text in said if isinstance(text, str) and text), "")


def _sentence(raw: object) -> str:
    """Return what an error's body says, on one short line."""
    found = raw
    if isinstance(raw, bytes):
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            found = "a page of HTML" if raw.lstrip()[:1] == b"<" else raw.decode("utf-8", "replace")
    if isinstance(found, Mapping):
        found = found.get("error", found.get("detail", found))
    if isinstance(found, Mapping):
        found = found.get("message", found)
    return " ".join("".join(c if c.isprintable() else " " for c in str(found)).split())[:_SHOWN].rstrip(".")
