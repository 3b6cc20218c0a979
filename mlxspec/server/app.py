"""The routes of the server. Each handler checks a body, starts its requests, and writes the answers in one protocol."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxspec import __version__
from mlxspec.config import SamplingParams
from mlxspec.server import log, page, request_parsing, sse, work
from mlxspec.server.chat import ChatProtocol, chat_request
from mlxspec.server.chat_request import ChatRequest
from mlxspec.server.completions import CompletionProtocol
from mlxspec.server.endpoint import Asked, Endpoint, Reply, Work, encode
from mlxspec.server.error_forms import error_body
from mlxspec.server.errors import INVALID, ApiError, BadField
from mlxspec.server.fairness import Gate, Lanes, check_wanted
from mlxspec.server.forms.base import Fields, review
from mlxspec.server.forms.chat import ChatCompletionRequest
from mlxspec.server.forms.completions import (
    CompletionRequest,
    DetokenizeRequest,
    NativeRequest,
    TokenizeRequest,
)
from mlxspec.server.forms.messages import CountTokensRequest, MessagesRequest
from mlxspec.server.forms.ollama import OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest
from mlxspec.server.forms.responses import ResponsesRequest
from mlxspec.server.forms.shared import canonical
from mlxspec.server.images import holds_images, take_images
from mlxspec.server.job_run import End, JobRun, Progress
from mlxspec.server.llama_completion import LlamaProtocol
from mlxspec.server.messages_api import MessagesProtocol, messages_request, shows_thinking
from mlxspec.server.metrics import Metrics
from mlxspec.server.models import Loaded, Models
from mlxspec.server.ollama_api import (
    OllamaProtocol,
    context_notice,
    ollama_chat_request,
    ollama_model,
    ollama_name,
    ollama_prompt_request,
    options_of,
    raw_body,
)
from mlxspec.server.openapi import document
from mlxspec.server.prompt_watch import PromptWatch
from mlxspec.server.protocol import AnswerProtocol
from mlxspec.server.responses_api import ResponsesProtocol, responses_request
from mlxspec.server.security import PAGE_FOLDER, App, Guard
from mlxspec.server.settings import ServerConfig
from mlxspec.server.stored_responses import StoredResponse, StoredResponses
from mlxspec.server.usage import Extras

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine

T = TypeVar("T")


class Server:
    """Handlers over a table of models. `app` is the ASGI application, its guard included."""

    def __init__(self, models: Models, config: ServerConfig) -> None:
        self.models, self.config = models, config
        self.metrics = Metrics()
        self._watch = PromptWatch()
        self._stored = StoredResponses(config.limits.max_stored, config.limits.stored_seconds)
        # templates are other people's programs, prompts and grammars may be large: not in the event loop
        self._lanes, self._gate = Lanes(), Gate(config.limits)
        starlette = Starlette(
            routes=self._routes(),
            exception_handlers={HTTPException: _http_error},
        )
        starlette.router.redirect_slashes = False
        self.app: App = Guard(starlette, config)

    def _routes(self) -> list[Route]:
        posts: dict[str, Work] = {
            "/chat/completions": self._chat,
            "/completions": self._completions,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/apply-template": self._apply_template,
            "/chat/completions/input_tokens": self._count_chat_tokens,
            "/completion": self._native,
            "/messages": self._messages,
            "/messages/count_tokens": self._count_message_tokens,
            "/responses": self._responses,
            "/responses/input_tokens": self._count_response_tokens,
        }
        gets: dict[str, Work] = {
            "/models": self._models,
            "/models/{name:path}": self._model,
            "/responses/{name}": self._stored_response,
            "/health": self._health,
            "/limits": self._limits,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
        }
        routes = [
            self._route("/", "GET", self._page),
            self._route(PAGE_FOLDER + "{name}", "GET", self._page),
            self._route("/api/chat", "POST", self._ollama_chat),
            self._route("/api/generate", "POST", self._ollama_generate),
            self._route("/api/show", "POST", self._ollama_show),
            self._route("/api/tags", "GET", self._ollama_tags),
            self._route("/api/version", "GET", self._ollama_version),
        ]
        for prefix in ("/v1", ""):
            routes += [self._route(prefix + path, "POST", handler) for path, handler in posts.items()]
            routes += [self._route(prefix + path, "GET", handler) for path, handler in gets.items()]
            routes.append(self._route(prefix + "/responses/{name}", "DELETE", self._delete_response))
        return routes

    def _route(self, path: str, method: str, handler: Work) -> Route:
        endpoint = Endpoint(
            handler, self.config.limits, self.metrics, self._gate, self._lanes, reads_body=method == "POST"
        )
        return Route(path, endpoint, methods=[method])

    # --- answers

    async def _chat(self, asked: Asked, reply: Reply) -> None:
        body, notices = await self._checked(asked, ChatCompletionRequest)
        async with self.models.use(self.models.resolve(asked.body.get("model"))) as loaded:
            job = await self._chat_job(asked, loaded, chat_request, body)
            protocol = ChatProtocol(
                loaded.name,
                len(job.asks),
                fingerprint=loaded.fingerprint,
                extras=Extras.of(body),
                notices=(*notices, *job.notices),
            )
            await self._answer(asked, loaded, job, protocol, bool(body.get("stream")), reply)

    async def _messages(self, asked: Asked, reply: Reply) -> None:
        body, notices = await self._checked(asked, MessagesRequest)
        async with self.models.use(self.models.resolve(asked.body.get("model"))) as loaded:
            job = await self._chat_job(asked, loaded, messages_request, body)
            protocol = MessagesProtocol(
                loaded.name,
                extras=Extras.of(body),
                notices=(*notices, *job.notices),
                shows_thinking=shows_thinking(body),
            )
            await self._answer(asked, loaded, job, protocol, bool(body.get("stream")), reply)

    async def _count_message_tokens(self, asked: Asked, reply: Reply) -> None:
        body, _ = await self._checked(asked, CountTokensRequest)
        await self._tell(asked, reply, lambda e: {"input_tokens": _count(messages_request(body), e)})

    async def _responses(self, asked: Asked, reply: Reply) -> None:
        body, notices = await self._checked(asked, ResponsesRequest)
        earlier = self._earlier(body)
        read = partial(responses_request, earlier=() if earlier is None else earlier.items)
        async with self.models.use(self.models.resolve(asked.body.get("model"))) as loaded:
            job = await self._chat_job(asked, loaded, read, body)
            protocol = ResponsesProtocol(
                loaded.name,
                body,
                job.asks[0].params,
                notices=(*notices, *job.notices),
                earlier=earlier,
                store=None if body.get("store") is False else self._stored,
            )
            await self._answer(asked, loaded, job, protocol, bool(body.get("stream")), reply)

    async def _ollama_chat(self, asked: Asked, reply: Reply) -> None:
        body, notices = await self._checked(asked, OllamaChatRequest)
        read = ollama_chat_request if body.get("messages") else None
        await self._ollama(asked, reply, body, notices, read, is_chat=True)

    async def _ollama_generate(self, asked: Asked, reply: Reply) -> None:
        body, notices = await self._checked(asked, OllamaGenerateRequest)
        read = ollama_prompt_request if body.get("prompt") else None
        await self._ollama(asked, reply, body, notices, read, is_chat=False)

    async def _ollama(
        self,
        asked: Asked,
        reply: Reply,
        body: Mapping[str, Any],
        notices: Sequence[str],
        read: Callable[[Mapping[str, Any]], ChatRequest] | None,
        *,
        is_chat: bool,
    ) -> None:
        """read: None for a request that asks for nothing but the model."""
        async with self.models.use(self.models.resolve(ollama_name(body, self.models.names))) as loaded:
            if read is None:
                await reply.json(OllamaProtocol(loaded.name, is_chat=is_chat).loaded())
                return
            if body.get("raw"):
                raw = raw_body(body)
                make = partial(self._job, request_parsing.completion_job, raw, loaded)
                job = await self._prepare(asked, make, raw)
            else:
                job = await self._chat_job(asked, loaded, read, body)
            protocol = OllamaProtocol(
                loaded.name,
                is_chat=is_chat,
                extras=Extras.of(options_of(body)),
                notices=(*notices, *job.notices, *context_notice(body, loaded.engine.max_context)),
            )
            await self._answer(asked, loaded, job, protocol, body.get("stream") is not False, reply)

    async def _ollama_tags(self, asked: Asked, reply: Reply) -> None:
        await reply.json({"models": [ollama_model(n, self.models.created) for n in self.models.names]})

    async def _ollama_show(self, asked: Asked, reply: Reply) -> None:
        body, _ = await self._checked(asked, OllamaShowRequest)
        given = {"model": body.get("model") or body.get("name")}
        name = self.models.resolve(ollama_name(given, self.models.names))
        facts = self.models.facts(name)
        length = {"mlxspec.context_length": facts["n_ctx"]} if facts else {}
        await reply.json(
            {
                **ollama_model(name, self.models.created),
                "capabilities": facts.get("capabilities", ["completion"]),
                "model_info": {"general.architecture": "mlxspec", **length},
                "modelfile": "",
                "parameters": "",
                "template": "",
            }
        )

    async def _ollama_version(self, asked: Asked, reply: Reply) -> None:
        await reply.json({"version": __version__})

    def _earlier(self, body: Mapping[str, Any]) -> StoredResponse | None:
        """The response that a request goes on from. Raises ApiError."""
        name = body.get("previous_response_id")
        found = None if name is None else self._stored.find(name)
        if name is not None and found is None:
            raise ApiError(
                f"previous_response_id: there is no stored response {name[:100]!r}; send the whole conversation as input.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found

    async def _count_response_tokens(self, asked: Asked, reply: Reply) -> None:
        body, _ = await self._checked(asked, ResponsesRequest)
        earlier = self._earlier(body)
        read = partial(responses_request, body, () if earlier is None else earlier.items)
        await self._tell(asked, reply, lambda engine: _input_tokens(_count(read(), engine)))

    async def _stored_response(self, asked: Asked, reply: Reply) -> None:
        await reply.json(self._stored.get(asked.request.path_params["name"]).response)

    async def _delete_response(self, asked: Asked, reply: Reply) -> None:
        name = asked.request.path_params["name"]
        self._stored.delete(name)
        await reply.json({"id": name, "object": "response", "deleted": True})

    async def _completions(self, asked: Asked, reply: Reply) -> None:
        body, notices = await self._checked(asked, CompletionRequest)
        async with self.models.use(self.models.resolve(asked.body.get("model"))) as loaded:
            job = await self._prepare(
                asked, partial(self._job, request_parsing.completion_job, body, loaded), body
            )
            protocol = CompletionProtocol(
                loaded.name,
                len(job.asks),
                fingerprint=loaded.fingerprint,
                num_prompts=job.num_prompts,
                extras=Extras.of(body),
                echo=await asked.off_loop(partial(_echo, job, loaded)) if body.get("echo") else (),
                notices=notices,
            )
            await self._answer(asked, loaded, job, protocol, bool(body.get("stream")), reply)

    async def _native(self, asked: Asked, reply: Reply) -> None:
        body, notices = await self._checked(asked, NativeRequest)
        async with self.models.use(self.models.resolve(asked.body.get("model"))) as loaded:
            make = partial(self._job, request_parsing.completion_job, body, loaded)
            job = await self._prepare(asked, make, body)
            protocol = LlamaProtocol(
                loaded.name,
                job,
                prompts=await asked.off_loop(partial(_echo, job, loaded)),
                returns_tokens=bool(body.get("return_tokens")),
                extras=Extras.of(body),
                notices=notices,
            )
            await self._answer(asked, loaded, job, protocol, bool(body.get("stream")), reply)

    async def _answer(
        self,
        asked: Asked,
        loaded: Loaded,
        job: request_parsing.Job,
        protocol: AnswerProtocol,
        streams: bool,
        reply: Reply,
    ) -> None:
        answers = JobRun(job, loaded.worker, asked.client)
        await answers.start()  # what the engine refuses is an answer of its own, before any stream opens
        try:
            if streams:
                await self._stream(answers, protocol, reply)
            else:
                async for update in answers.updates():
                    self._count(update, answers)
                    protocol.take(update)
                await reply.json(protocol.whole())
        finally:
            answers.close()

    async def _stream(self, answers: JobRun, protocol: AnswerProtocol, reply: Reply) -> None:
        wire = protocol.wire

        def failed(error: ApiError) -> bytes:
            return b"".join(map(wire.frame, protocol.failed(error)))

        async def say(text: str) -> None:
            if wire.comment is not None:
                await reply.event(wire.comment(text))

        await reply.start_stream(wire.media, failed)
        for chunk in protocol.begin():
            await reply.event(wire.frame(chunk))
        async for update in sse.with_pauses(answers.updates(), self.config.keepalive_seconds):
            if update is None:
                sign = protocol.pause()
                await (say("still here") if sign is None else reply.event(wire.frame(sign)))
                continue
            if isinstance(update, Progress):
                await say(f"prompt {update.num_done}/{update.num_total}")
            self._count(update, answers)
            for chunk in protocol.chunks(update):
                await reply.event(wire.frame(chunk))
        for chunk in protocol.end():
            await reply.event(wire.frame(chunk))
        await reply.end_stream(wire.last)

    def _count(self, update: object, answers: JobRun) -> None:
        if isinstance(update, End):
            self.metrics.answer(update.reason, update.stats)
            if update.choice == 0 and answers.first_token is not None:
                self.metrics.first_token(answers.first_token - answers.started)

    async def _checked(self, asked: Asked, form: type[Fields]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """As `_checked` below, in the event loop where the body is small."""
        check = partial(_checked, asked.body, form)
        return await asked.off_loop(check) if asked.is_large else check()

    async def _chat_job(
        self,
        asked: Asked,
        loaded: Loaded,
        read: Callable[[Mapping[str, Any]], ChatRequest],
        body: Mapping[str, Any],
    ) -> request_parsing.Job:
        """The job of a chat in any API's form. read: the form's adapter."""

        def make(body: Mapping[str, Any], engine: Engine, defaults: SamplingParams) -> request_parsing.Job:
            job = request_parsing.chat_job(read(body), engine, defaults, self.config.limits)
            said = self._watch.see(client, request_parsing.token_ids(job.asks[0].prompt))
            if said is not None:
                log.line(said)
            return job

        headers = asked.request.headers
        # programs on one machine share its address, and open a connection for each request as they like
        client = f"{(asked.request.client or ('',))[0]} {headers.get('user-agent', '')}"
        return await self._prepare(asked, partial(self._job, make, body, loaded), body)

    def _job(
        self,
        make: Callable[[Mapping[str, Any], Engine, SamplingParams], request_parsing.Job],
        body: Mapping[str, Any],
        loaded: Loaded,
    ) -> request_parsing.Job:
        """Everything that is done for a request before the engine hears of it, within the limits."""
        work.check_number_of_answers(body, self.config.limits)
        job = make(body, loaded.engine, loaded.params or self.config.params)
        return work.compiled(job, loaded.engine, self.config.limits)

    async def _prepare(self, asked: Asked, make: Callable[[], T], body: Mapping[str, Any] | None = None) -> T:
        """What `make` returns, made in a thread. body: of a request whose answers may be constrained, which may take long to compile, or
        that may hold images, which may take long to decode."""
        is_large = asked.is_large or (
            body is not None and (work.may_compile_long(body) or holds_images(body))
        )
        try:
            async with asyncio.timeout(self.config.limits.prepare_seconds):
                return await asked.off_loop(make, is_large=is_large)
        except TimeoutError as error:
            raise ApiError(
                "Preparing this request (template, tokens, grammar) takes too long.", code="preparing"
            ) from error

    async def _limits(self, asked: Asked, reply: Reply) -> None:
        await reply.json(self.config.limits.published())

    # --- about models and this server

    async def _tokenize(self, asked: Asked, reply: Reply) -> None:
        body, _ = await self._checked(asked, TokenizeRequest)
        await self._tell(asked, reply, partial(_tokenized, body))

    async def _detokenize(self, asked: Asked, reply: Reply) -> None:
        body, _ = await self._checked(asked, DetokenizeRequest)
        await self._tell(asked, reply, partial(_detokenized, body))

    async def _apply_template(self, asked: Asked, reply: Reply) -> None:
        body, _ = await self._checked(asked, ChatCompletionRequest)
        await self._tell(asked, reply, partial(_applied, body))

    async def _count_chat_tokens(self, asked: Asked, reply: Reply) -> None:
        body, _ = await self._checked(asked, ChatCompletionRequest)
        await self._tell(asked, reply, lambda engine: _input_tokens(_count(chat_request(body), engine)))

    async def _tell(self, asked: Asked, reply: Reply, found: Callable[[Engine], Mapping[str, Any]]) -> None:
        """Answer with what `found` says about the model that is asked for."""
        async with self.models.use(self.models.resolve(asked.body.get("model"))) as loaded:
            await reply.encoded(await self._prepare(asked, lambda: encode(found(loaded.engine))))

    async def _models(self, asked: Asked, reply: Reply) -> None:
        names = self.models.names
        # the last three are Anthropic's
        await reply.json(
            {
                "object": "list",
                "data": [self._described(n, asked) for n in names],
                "has_more": False,
                "first_id": names[0],
                "last_id": names[-1],
            }
        )

    async def _model(self, asked: Asked, reply: Reply) -> None:
        name = asked.request.path_params["name"]
        if name not in self.models.names:
            raise ApiError(f"There is no model {name[:100]!r} here.", status=404, code="model_not_found")
        await reply.json(self._described(name, asked))

    def _described(self, name: str, asked: Asked) -> dict[str, Any]:
        """In the fields of OpenAI, vLLM, OpenRouter and Anthropic, which clients read what a model can do from. Anthropic's clients know
        another kind of `capabilities`, and take null for not known."""
        meta = self.models.meta(name)
        created = datetime.datetime.fromtimestamp(self.models.created, datetime.UTC)
        length = meta.get("n_ctx")
        known = {} if length is None else {"context_length": length, "max_model_len": length}
        return {
            "id": name,
            "object": "model",
            "created": self.models.created,
            "owned_by": "mlxspec",
            "type": "model",
            "display_name": name,
            "created_at": created.isoformat(),
            "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
            "capabilities": None
            if "anthropic-version" in asked.request.headers
            else meta.get("capabilities", []),
            "lifecycle": "active",
            "max_input_tokens": length,
            "max_tokens": length,
            **known,
            "meta": meta,
        }

    async def _health(self, asked: Asked, reply: Reply) -> None:
        state = self.models.state
        if state not in ("ready", "unloaded"):
            raise ApiError(f"The server is {state}.", status=503, kind="unavailable_error", code=state)
        await reply.json({"status": "ok", "model": state})

    async def _metrics(self, asked: Asked, reply: Reply) -> None:
        await reply.text(self.metrics.text(self.models.gauges()), "text/plain; version=0.0.4; charset=utf-8")

    async def _openapi(self, asked: Asked, reply: Reply) -> None:
        await reply.encoded(await asked.off_loop(lambda: encode(document())))

    async def _page(self, asked: Asked, reply: Reply) -> None:
        await page.send(asked.request, reply, asked.request.path_params.get("name", page.INDEX))

    def close(self) -> None:
        self._lanes.close()


def _checked(body: dict[str, Any], form: type[Fields]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The body under the fields' own names, and what there is to say about fields that do nothing. Raises BadField."""
    take_images(body)
    ignored = review(form, body)
    if body.get("stream_options") is not None and not body.get("stream"):
        raise BadField("stream_options", "stream_options needs stream to be true.")
    checked = canonical(body)
    if isinstance(body.get("options"), dict):  # Ollama's
        checked["options"] = canonical(body["options"])
    return checked, tuple(f"{path} is no field of this request and was ignored" for path in ignored)


def _echo(job: request_parsing.Job, loaded: Loaded) -> list[str]:
    tokenizer = loaded.engine.tokenizer
    return [tokenizer.decode(request_parsing.token_ids(ask.prompt)) if tokenizer else "" for ask in job.asks]


def _tokenized(body: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    if (body.get("content") is None) == (body.get("messages") is None):
        raise BadField("content", "Give either content or messages.")
    if engine.tokenizer is None:
        raise ApiError("This model has no tokenizer.")
    if body.get("messages") is not None:
        tokens = request_parsing.token_ids(request_parsing.rendered(chat_request(body), engine)[1])
    else:
        special = bool(body.get("add_special"))
        tokens = engine.tokenizer.encode(body["content"], special=special, pause=check_wanted)
    if not body.get("with_pieces"):
        return {"tokens": tokens, "count": len(tokens)}
    pieces = [{"id": t, "piece": engine.tokenizer.token_text(t)} for t in tokens]
    return {"tokens": pieces, "count": len(tokens)}


def _applied(body: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    return {"prompt": request_parsing.rendered(chat_request(body), engine)[0]}


def _count(request: ChatRequest, engine: Engine) -> int:
    """Tokens of the prompt that a conversation becomes. Raises MlxspecErrors."""
    return len(request_parsing.rendered(request, engine)[1])


def _input_tokens(num: int) -> dict[str, Any]:
    return {"object": "response.input_tokens", "input_tokens": num}


def _detokenized(body: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    if engine.tokenizer is None:
        raise ApiError("This model has no tokenizer.")
    tokens = [int(t) for t in body["tokens"]]
    if any(t >= engine.model.vocab_size for t in tokens):
        raise BadField(
            "tokens", f"tokens holds an id that is not there; ids end at {engine.model.vocab_size - 1}."
        )
    return {"content": engine.tokenizer.decode(tokens)}


async def _http_error(request: Request, error: Exception) -> Response:
    """No such route, or not with this method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(getattr(error, "headers", None) or {})
    message = {
        404: "There is no such route here; GET / says what there is.",
        405: "This route takes another method.",
    }
    found = ApiError(message.get(status, "That is not possible."), status=status, kind=INVALID)
    log.request(request.scope, status, 0.0, str(found))
    return JSONResponse(error_body(found, request.url.path), status_code=status, headers=headers)
