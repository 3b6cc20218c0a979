"""The route handlers. Each starts the work that a checked body requests, and writes the answers in the form of its API."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxspec import __version__
from mlxspec.config import SamplingParams
from mlxspec.engine.ratio import ratio
from mlxspec.engine.worker import Worker
from mlxspec.errors import EngineStoppedError
from mlxspec.loading.hub import DEMO_AGENT
from mlxspec.server import (
    chat_api,
    compaction_api,
    completions_api,
    embeddings,
    llama_api,
    lm_studio_api,
    messages_api,
    ollama_api,
    page,
    responses_api,
)
from mlxspec.server.answer_writer import LINES, AnswerWriter, Read, encode
from mlxspec.server.answers_file import AnswersFile
from mlxspec.server.demo_agent import scripted_rules
from mlxspec.server.errors import INVALID, ApiError
from mlxspec.server.http import log
from mlxspec.server.http.endpoint import Asked, ClientTurn, Endpoint, Reply, Work
from mlxspec.server.http.fairness import Gate, Lanes
from mlxspec.server.http.security import App, Guard, error_response, owner_of
from mlxspec.server.job import ChatRequest, Job
from mlxspec.server.job_run import End, JobRun, Progress
from mlxspec.server.library import Library, check_is_own
from mlxspec.server.metrics import Metrics
from mlxspec.server.models import Known, Loaded, Models
from mlxspec.server.next_prompt import next_beginning
from mlxspec.server.noted import note
from mlxspec.server.ollama_api import (
    OllamaChatRequest,
    OllamaChatWriter,
    OllamaGenerateWriter,
    ollama_model,
    ollama_name,
    unloads,
)
from mlxspec.server.openapi import document
from mlxspec.server.params import scales_of
from mlxspec.server.prompt import Context, MakeRules, rendered
from mlxspec.server.routes import ROUTES, RouteForm
from mlxspec.server.rules import rules_of
from mlxspec.server.settings import ServerConfig

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine

_MOST_SCALES = 1000  # of keys and models
T = TypeVar("T")
# Each takes the form of its route.
Reader = Callable[[Any, Context], Read]
ReadTexts = Callable[..., embeddings.Texts]
Teller = Callable[[Any, "Engine"], Mapping[str, Any]]


class Server:
    """The handlers of all routes, over a table of models. app: the ASGI application, with the checks of Guard around it."""

    def __init__(self, models: Models, config: ServerConfig, library: Library) -> None:
        self.models, self.config, self.library = models, config, library
        self.metrics = Metrics()
        self._answers = None if config.record is None else AnswersFile(config.record)
        # of adapters, by owner and the model's name, where a client has set them
        self._scales: dict[tuple[str, str], dict[str, float]] = {}
        # templates are other people's programs, prompts and grammars may be large: not in the event loop
        self._lanes, self._gate = Lanes(), Gate(config.limits)
        starlette = Starlette(
            routes=[Route(p, self._endpoint(r, p), methods=[r.method]) for r in ROUTES for p in r.paths],
            exception_handlers={HTTPException: _http_error},
        )
        starlette.router.redirect_slashes = False
        self.app: App = Guard(with_usual_paths(starlette), config)

    def _endpoint(self, route: RouteForm, path: str) -> Endpoint:
        return Endpoint(
            self._handler(route.name),
            self.config.limits,
            self.metrics,
            self._gate,
            self._lanes,
            form=route.form,
            path=path,
        )

    def _handler(self, name: str) -> Work:
        """Return the function that answers an operation of the routes: from the tables of this module, or the method named `_` + name."""
        if name in _ANSWERED:
            return partial(self._answer, read=_ANSWERED[name])
        if name in _OLLAMA:
            return partial(self._ollama, read=_OLLAMA[name])
        if name in _VECTORS:
            return partial(self._vectors, read=_VECTORS[name])
        if name in _TOLD:
            return partial(self._tell, found=_TOLD[name])
        found: Work = getattr(self, f"_{name}")
        return found

    def close(self) -> None:
        self._lanes.close()
        self.library.cancel()

    # --- answers

    async def _ollama(self, asked: Asked, reply: Reply, *, read: Reader) -> None:
        """Answer a request of Ollama's API for a conversation or a prompt. A request without either only loads the model, or unloads it
        by `keep_alive`. read: makes the job of the request."""
        form = asked.form
        form.model = ollama_name(form.model, self.models.names)
        name, leaves = self.models.resolve(form.model), unloads(form.keep_alive)
        is_chat = isinstance(form, OllamaChatRequest)
        writer = OllamaChatWriter if is_chat else OllamaGenerateWriter
        if form.messages if is_chat else form.prompt or form.suffix:
            try:
                await self._answer(asked, reply, read=read)
            finally:
                if leaves:
                    self.models.unload(name)
        elif leaves:
            await asyncio.shield(self.models.unload(name))
            await reply.json(writer.loaded(name, is_unloaded=True))
        else:
            async with self.models.use(name) as loaded:
                await reply.json(writer.loaded(loaded.name))

    async def _answer(self, asked: Asked, reply: Reply, *, read: Reader) -> None:
        async with self.models.use(self.models.resolve(asked.form.model)) as loaded:
            at = self._context(asked, loaded)
            job, write = await self._prepare(asked.turn, partial(read, asked.form, at))
            note(job.notices)
            writer = write(loaded.name, job)
            keep = (
                None if self._answers is None else partial(self._answers.append, loaded.engine, loaded.worker)
            )
            run = JobRun(job, loaded.worker, asked.turn.client, keep)
            await run.start()  # what the engine refuses is an answer of its own, before any stream opens
            try:
                if job.streams:
                    await self._stream(run, writer, reply)
                else:
                    async for update in run.updates():
                        if update is not None:
                            self._count_end(update, run)
                            writer.take(update)
                    await reply.json(writer.whole())
            finally:
                run.close()
                _expect_next(job, run.answer, at, loaded.worker, asked.turn.client)

    def _context(self, asked: Asked, loaded: Loaded) -> Context:
        """Return the model and the settings that the reader of a request needs in addition to the request's form."""
        model = asked.form.model
        other = model is not None and model not in self.models.names
        unknown = [f"{str(model)[:100]} is not served here; {loaded.name} answers."] if other else []
        return Context(
            engine=loaded.engine,
            defaults=self._defaults_of(loaded, asked),
            limits=self.config.limits,
            owner=owner_of(asked.request.headers),
            fingerprint=loaded.fingerprint,
            rules=_SCRIPTS.get(loaded.engine.name, rules_of),
            notices=(*unknown, *asked.notices),
        )

    async def _stream(self, run: JobRun, writer: AnswerWriter, reply: Reply) -> None:
        wire = writer.wire

        async def say(text: str) -> None:
            if wire.comment is not None:
                await reply.event(wire.comment(text))

        await reply.start_stream(wire.media, lambda error: b"".join(map(wire.frame, writer.failed(error))))
        for chunk in writer.begin():
            await reply.event(wire.frame(chunk))
        # looked at twice in the time, so that a client never waits longer for a sign
        most, spoken = self.config.keepalive_seconds / 2, time.monotonic()
        async for update in run.updates(pause_seconds=most):
            frames = [] if update is None else [wire.frame(chunk) for chunk in writer.chunks(update)]
            if isinstance(update, Progress):
                await say(f"prompt {update.num_done}/{update.num_total}")
            if not frames and time.monotonic() - spoken >= most:
                # nothing has come, or a call that is not closed, or a piece of a prompt
                await say(f"a call, {run.num_held} characters so far" if run.num_held else "still here")
                sign = writer.pause()
                if sign is not None:
                    await reply.event(wire.frame(sign))
                spoken = time.monotonic()
            if update is not None:
                self._count_end(update, run)
            for frame in frames:
                await reply.event(frame)
                spoken = time.monotonic()
        for chunk in writer.end():
            await reply.event(wire.frame(chunk))
        await reply.event(wire.last, is_last=True)

    def _count_end(self, update: object, run: JobRun) -> None:
        if isinstance(update, End):
            self.metrics.answer(update.reason, update.stats)
            note(update.stats.notices)
            if update.choice == 0 and run.first_token is not None:
                self.metrics.first_token(run.first_token - run.started)

    def _defaults(self, name: str, known: Known, owner: str) -> SamplingParams:
        """Return the default sampling parameters for this owner's requests to the model or adapter `name`, with the adapter scales that the
        owner has set. Raises ApiError for an adapter that cannot be used."""
        why = known.refused.get(name)
        if why is not None:
            raise ApiError(
                f"There is no {name[:100]}. {why}", status=404, param="model", code="model_not_found"
            )
        own = {name: 1.0} if name in known.adapters else {}
        scales = self._scales.get((owner, name), own)
        return replace(known.params or self.config.params, adapters=scales)

    def _defaults_of(self, loaded: Loaded, asked: Asked) -> SamplingParams:
        """Return the default sampling parameters of a request to a model that is in memory. Raises ApiError for an adapter that cannot
        be used, and EngineStoppedError where the model has left memory."""
        known = self.models.known(loaded.name)
        if known is None:
            raise EngineStoppedError("The model is not in memory any more.")
        return self._defaults(loaded.name, known, owner_of(asked.request.headers))

    def _known(self, asked: Asked) -> tuple[str, Known, SamplingParams]:
        """Return the name of the model that the query parameter `model` of a GET means, the facts about it, and its default sampling
        parameters. Loads no model, since any web page can send a GET. Raises ApiError for a model that has never been loaded."""
        name = self.models.resolve(asked.request.query_params.get("model"))
        known = self.models.known(name)
        if known is None:
            is_loading = self.models.state == "loading"
            said = (
                "it is being loaded"
                if is_loading
                else "a GET loads none, the first request for an answer does"
            )
            status, code = (503, "loading") if is_loading else (400, "model_not_loaded")
            raise ApiError(f"{name[:100]} is not in memory: {said}.", status=status, param="model", code=code)
        return name, known, self._defaults(name, known, owner_of(asked.request.headers))

    async def _prepare(self, turn: ClientTurn, make: Callable[[], T]) -> T:
        """Run `make` in a thread of the client's turn, and return its result. Compiling a grammar or decoding an image may take long.
        Raises ApiError after `prepare_seconds`."""
        try:
            async with asyncio.timeout(self.config.limits.prepare_seconds):
                return await turn.run(make)
        except TimeoutError as error:
            raise ApiError(
                "Preparing this request (template, tokens, grammar) takes too long.", code="preparing"
            ) from error

    # --- vectors

    async def _ollama_embed(self, asked: Asked, reply: Reply) -> None:
        asked.form.model = ollama_name(asked.form.model, self.models.listed)
        await self._vectors(asked, reply, read=embeddings.ollama_embeddings)

    async def _native_embed(self, asked: Asked, reply: Reply) -> None:
        await self._vectors(asked, reply, read=embeddings.native_embeddings)

    async def _vectors(self, asked: Asked, reply: Reply, *, read: ReadTexts) -> None:
        """Answer a request for embeddings or a rerank. read: returns the texts of the request, from its form, the engine that makes the
        vectors, and whether this engine is held for vectors alone."""
        name, model = self.models.for_vectors(asked.form.model)
        async with self.models.use(model) as loaded:
            beside = self.models.beside(name)
            if beside is None and self._defaults_of(loaded, asked).adapters:
                raise ApiError("Vectors are made without adapters: ask for the model itself.", param="model")
            engine = loaded.engine if beside is None else beside
            texts = await self._prepare(
                asked.turn, partial(read, asked.form, engine, is_beside=beside is not None)
            )
            found = await texts.run(loaded.worker)
            said = await asked.turn.run(lambda: encode(texts.answer(name, found)), is_slow=len(found) > 8)
            await reply.text(said, "application/json")

    # --- prompts and tokens

    async def _tell(self, asked: Asked, reply: Reply, *, found: Teller) -> None:
        """Answer with the JSON object that `found` returns for the request's form and the engine of its model."""
        async with self.models.use(self.models.resolve(asked.form.model)) as loaded:
            said = await self._prepare(asked.turn, lambda: encode(found(asked.form, loaded.engine)))
            await reply.text(said, "application/json")

    async def _response(self, asked: Asked, reply: Reply) -> None:
        raise ApiError(
            "Responses are not stored here; send the whole conversation as input.",
            status=404,
            code="response_not_found",
        )

    # --- models of this machine

    async def _library(self, asked: Asked, reply: Reply) -> None:
        check_is_own(self.config, asked.request.headers)
        await reply.json(await asked.turn.run(self.library.listed, is_slow=True))

    async def _change_library(self, asked: Asked, reply: Reply) -> None:
        check_is_own(self.config, asked.request.headers)
        if asked.form.action == "cancel":
            self.library.cancel()
        else:
            name = asked.form.model or ""
            self.models.add(name, await asked.turn.run(partial(self.library.to_serve, name), is_slow=True))
        await reply.json({"success": True})

    async def _lm_load(self, asked: Asked, reply: Reply) -> None:
        began = time.perf_counter()
        context = await self._load(asked)
        await reply.json(lm_studio_api.loaded(asked.form.model, context, time.perf_counter() - began))

    async def _llama_load(self, asked: Asked, reply: Reply) -> None:
        await self._load(asked)
        await reply.json({"success": True})

    async def _load(self, asked: Asked) -> int:
        """Load the model that a request names, and return its context in tokens. A model that is not served yet is added to the served
        ones, for requests of this machine's user alone. Raises ApiError."""
        name = asked.form.model
        if name not in self.models.names:
            if name in self.models.listed:
                raise ApiError(f"{name} is loaded with the first model.", param="model")
            check_is_own(self.config, asked.request.headers)
            self.models.add(name, await asked.turn.run(partial(self.library.to_serve, name), is_slow=True))
        async with self.models.use(name) as loaded:
            return loaded.engine.max_context

    async def _lm_unload(self, asked: Asked, reply: Reply) -> None:
        await self._leave(asked.form.instance_id)
        await reply.json({"instance_id": asked.form.instance_id})

    async def _llama_unload(self, asked: Asked, reply: Reply) -> None:
        await self._leave(asked.form.model)
        await reply.json({"success": True})

    async def _leave(self, name: str) -> None:
        """Unload a model. Raises ApiError for a name that is not served, and for a model that is not in memory or is in use."""
        if name not in self.models.names:
            raise self.models.unknown(name)
        if not self.models.meta(name)["loaded"]:
            raise ApiError(
                f"{name[:100]} is not in memory.", status=404, param="model", code="model_not_loaded"
            )
        await asyncio.shield(self.models.unload(name))
        if self.models.meta(name)["loaded"]:
            raise ApiError(
                f"{name[:100]} is answering; try again when it has.", status=409, code="model_in_use"
            )

    async def _lm_models(self, asked: Asked, reply: Reply) -> None:
        await reply.json({"models": await self._for_lm_studio(asked, lm_studio_api.new_model)})

    async def _lm_old_models(self, asked: Asked, reply: Reply) -> None:
        data = await self._for_lm_studio(asked, lm_studio_api.old_model)
        await reply.json({"object": "list", "data": data})

    async def _lm_old_model(self, asked: Asked, reply: Reply) -> None:
        name = asked.request.path_params["name"]
        if name not in self.models.listed:
            raise self.models.unknown(name)
        await reply.json((await self._for_lm_studio(asked, lm_studio_api.old_model, name))[0])

    async def _for_lm_studio(
        self, asked: Asked, tell: Callable[[lm_studio_api.ModelTold], dict[str, Any]], *names: str
    ) -> list[dict[str, Any]]:
        """Return one object of LM Studio's API for each of these models, or for all of them where no name is given. tell: makes the
        object."""
        found, wanted = [], names or self.models.listed
        read = await asked.turn.run(lambda: [lm_studio_api.stored(self.library.model_of(n)) for n in wanted])
        for name, stored in zip(wanted, read, strict=True):
            meta = self.models.meta(name)
            told = lm_studio_api.ModelTold(
                name=name,
                stored=stored,
                is_loaded=meta["loaded"],
                context=meta.get("n_ctx", stored.context),
                can=meta.get("capabilities", ()),
                makes_vectors=name not in self.models.names,
            )
            found.append(tell(told))
        return found

    async def _pull(self, asked: Asked, reply: Reply) -> None:
        """Download a model, and answer in Ollama's form. The download continues if the client disconnects."""
        check_is_own(self.config, asked.request.headers)
        fetch = self.library.fetch(asked.form.model or "")
        streams = asked.form.stream is not False
        if streams:
            await reply.start_stream(LINES.media, lambda error: LINES.frame({"error": str(error)}))
        async for told in fetch.updates():
            if streams:
                await reply.event(LINES.frame(told))
        if fetch.error:
            raise ApiError(fetch.error, status=500, code="not_fetched")
        done = {"status": "success", "notices": fetch.notices}
        await (reply.event(LINES.frame(done), is_last=True) if streams else reply.json(done))

    async def _ratio(self, asked: Asked, reply: Reply) -> None:
        form = asked.form
        if len(form.drafted) != len(form.plain):
            raise ApiError("drafted and plain must have one number for each pair of runs.")
        pairs = list(zip(form.drafted, form.plain, strict=True))
        found = ratio(pairs, num_rounds=form.rounds, num_drafted_rounds=form.drafted_rounds)
        await reply.json(found.data())

    # --- about models and this server

    async def _models(self, asked: Asked, reply: Reply) -> None:
        names = self.models.listed
        data = [self._described(name, asked) for name in names]
        of_anthropic = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        of_codex = {
            "models": [llama_api.codex_model(name, self.models.meta(name), i) for i, name in enumerate(names)]
        }
        await reply.json({"object": "list", "data": data, **of_anthropic, **of_codex})

    async def _model(self, asked: Asked, reply: Reply) -> None:
        name = asked.request.path_params["name"]
        if name not in self.models.listed:
            raise self.models.unknown(name)
        await reply.json(self._described(name, asked))

    def _described(self, name: str, asked: Asked) -> dict[str, Any]:
        """Return the description of a model, in the fields of OpenAI, vLLM, OpenRouter and Anthropic together. Anthropic's clients
        expect another kind of `capabilities`, so they get null, which means unknown."""
        meta = self.models.meta(name)
        created = datetime.datetime.fromtimestamp(self.models.created, datetime.UTC)
        length = meta.get("n_ctx")
        known = {} if length is None else {"context_length": length, "max_model_len": length}
        is_anthropic = "anthropic-version" in asked.request.headers
        return {
            "id": name,
            "object": "model",
            "created": self.models.created,
            "owned_by": "mlxspec",
            "type": "model",
            "display_name": name,
            "created_at": created.isoformat(),
            "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
            "capabilities": None if is_anthropic else meta.get("capabilities", []),
            "lifecycle": "active",
            "max_input_tokens": length,
            "max_tokens": length,
            **known,
            "meta": meta,
        }

    async def _ollama_tags(self, asked: Asked, reply: Reply) -> None:
        await reply.json({"models": [ollama_model(n, self.models.created) for n in self.models.listed]})

    async def _ollama_show(self, asked: Asked, reply: Reply) -> None:
        wanted = ollama_name(asked.form.model or asked.form.name, self.models.listed)
        name = wanted or self.models.names[0]
        if name not in self.models.listed:
            raise self.models.unknown(name)
        facts = self.models.facts(name)
        length = {"mlxspec.context_length": facts["n_ctx"]} if facts else {}
        await reply.json(
            {
                **ollama_model(name, self.models.created),
                "capabilities": facts.get("capabilities", ["completion"]),
                "model_info": {"general.architecture": "mlxspec", **length},
                **dict.fromkeys(("modelfile", "parameters", "template"), ""),
            }
        )

    async def _ollama_running(self, asked: Asked, reply: Reply) -> None:
        await reply.json(llama_api.running(self.models))

    async def _props(self, asked: Asked, reply: Reply) -> None:
        await reply.json(llama_api.props(*self._known(asked), self.models.load))

    async def _tokenizer_info(self, asked: Asked, reply: Reply) -> None:
        await reply.json(llama_api.tokenizer_info(self._known(asked)[1]))

    async def _slots(self, asked: Asked, reply: Reply) -> None:
        await reply.json(llama_api.slots(self.models))

    async def _lora_adapters(self, asked: Asked, reply: Reply) -> None:
        _, known, defaults = self._known(asked)
        await reply.json(llama_api.adapters(known, defaults.adapters))

    async def _set_lora_adapters(self, asked: Asked, reply: Reply) -> None:
        """Set the adapter scales of later requests with this API key, from the request's body. Requests that run, and those of other
        keys, keep their scales."""
        async with self.models.use(self.models.resolve(asked.request.query_params.get("model"))) as loaded:
            self._defaults_of(loaded, asked)
            key = owner_of(asked.request.headers), loaded.name
            if key not in self._scales and len(self._scales) >= _MOST_SCALES:
                raise ApiError(
                    "Too many keys have set how much adapters count; say it by lora in each request."
                )
            self._scales[key] = scales_of(asked.form.body, loaded.engine, "body")
        await reply.json({"success": True})

    async def _ollama_version(self, asked: Asked, reply: Reply) -> None:
        await reply.json({"version": __version__})

    async def _limits(self, asked: Asked, reply: Reply) -> None:
        await reply.json(self.config.limits.published())

    async def _health(self, asked: Asked, reply: Reply) -> None:
        state = self.models.state
        if state not in ("ready", "unloaded"):
            raise ApiError(f"The server is {state}.", status=503, kind="unavailable_error", code=state)
        await reply.json({"status": "ok", "model": state})

    async def _metrics(self, asked: Asked, reply: Reply) -> None:
        gauges = {**self.models.gauges(), "log_left_out_total": log.writing.num_left_out}
        await reply.text(self.metrics.text(gauges), "text/plain; version=0.0.4; charset=utf-8")

    async def _openapi(self, asked: Asked, reply: Reply) -> None:
        await reply.text(await asked.turn.run(lambda: encode(document())), "application/json")

    async def _page(self, asked: Asked, reply: Reply) -> None:
        await page.send(asked.request, reply, page.INDEX)

    async def _page_file(self, asked: Asked, reply: Reply) -> None:
        await page.send(asked.request, reply, asked.request.path_params["name"])


def _expect_next(job: Job, answer: tuple[str, bool] | None, at: Context, worker: Worker, client: str) -> None:
    """Let the engine prefill, while it is idle, the beginning of a conversation's next prompt. Returns at once. If this fails, the next
    prompt is read when it arrives. answer: the text of the job's answer and whether a limit cut it; None where it is not complete."""
    talk, parser = job.talk, job.parser()
    if talk is None or parser is None or answer is None or worker.num_open:
        return

    def expect() -> None:
        with suppress(Exception):
            text, is_cut = answer
            beginning = next_beginning(talk, at, [*parser.push(text), *parser.finish(cut=is_cut)])
            worker.expect(beginning, job.spec, client, adapters=job.asks[0].params.adapters)

    asyncio.get_running_loop().run_in_executor(None, expect)


def _counted(read: Callable[[Any], ChatRequest], **more: str) -> Teller:
    """Return a function that counts the tokens of a conversation's prompt, as the member `input_tokens` of an object. read: makes the
    conversation from the request's form. more: other members of the object."""
    return lambda form, engine: {**more, "input_tokens": len(rendered(read(form), engine)[1])}


def _applied(form: chat_api.ChatCompletionRequest, engine: Engine) -> dict[str, Any]:
    """Return the prompt of a conversation, as the text that the chat template renders, in the member `prompt`."""
    return {"prompt": rendered(chat_api.conversation(form), engine)[0]}


# By operation, what reads its form.
_ANSWERED: dict[str, Reader] = {
    "chat": chat_api.read,
    "message": messages_api.read,
    "respond": responses_api.read,
    "compact": compaction_api.read,
    "complete": completions_api.read,
    "native": completions_api.read_native,
    "infill": completions_api.read_infill,
}
_OLLAMA: dict[str, Reader] = {
    "ollama_chat": ollama_api.read_chat,
    "ollama_generate": ollama_api.read_generate,
}
_VECTORS: dict[str, ReadTexts] = {"embed": embeddings.embeddings, "rerank": embeddings.reranking}
_TOLD: dict[str, Teller] = {  # what is told of a form by the model that it names
    "tokenize": completions_api.tokenized,
    "detokenize": completions_api.detokenized,
    "template": _applied,
    "count": _counted(chat_api.conversation, object="response.input_tokens"),
    "count_message": _counted(messages_api.conversation),
    "count_response": _counted(responses_api.conversation, object="response.input_tokens"),
}
_SCRIPTS: dict[str, MakeRules] = {DEMO_AGENT: scripted_rules}  # by the model whose answers follow one


_ELSEWHERE = {  # routes of Ollama's that are not here
    **dict.fromkeys(
        ("/api/create", "/api/copy", "/api/push"),
        "Models are fetched by `mlxspec pull`, and made by `mlxspec convert`, at a terminal.",
    ),
    "/api/embeddings": "Job /api/embed, which came after it.",
    "/api/delete": "Models are removed by `mlxspec rm` at a terminal.",
}


def with_usual_paths(app: App) -> App:
    """Return an ASGI application that accepts the paths of clients with a wrong base URL, and passes requests on to `app`: /v1 may be
    repeated, and a slash may be at the end."""

    async def taken(scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "/")
        while path.startswith("/v1/v1/"):
            path = path.removeprefix("/v1")
        if path.endswith("/"):
            path = path.rstrip("/") or "/"
        if path != scope.get("path", "/"):
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await app(scope, receive, send)

    return taken


async def _http_error(request: Request, error: Exception) -> Response:
    """Return the error response for a path that has no route, or not for the request's method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    base = request.base_url
    headers = getattr(error, "headers", None) or {}
    methods = " or ".join(sorted(headers.get("Allow", "").split(", ")))
    nowhere = (
        f"There is no such route here; the base URL is {base}v1 for clients of OpenAI and {base} for others, and {base}openapi.json "
        "lists the routes."
    )
    message = {404: _ELSEWHERE.get(request.url.path, nowhere), 405: f"This route takes {methods} alone."}
    found = ApiError(message.get(status, "That is not possible."), status=status, kind=INVALID)
    log.request(request.scope, status, 0.0, str(found))
    response = error_response(found, request.url.path)
    response.headers.update(headers)
    return response
