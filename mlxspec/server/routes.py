"""Every route: its path, what it is called, and the forms of its requests and of its answers. The handlers (app.py) and the description
(openapi.py) are made from this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mlxspec.server import (
    chat_api,
    compaction_api,
    completions_api,
    embeddings,
    lm_studio_api,
    messages_api,
    ollama_api,
    responses_api,
)
from mlxspec.server.answer_writer import EVENTS, JSON_LINES
from mlxspec.server.forms import models, shared
from mlxspec.server.forms.base import Fields

PAGE_FOLDER = "/page/"  # files of the page at /


@dataclass(frozen=True)
class RouteForm:
    """A route of the server. name: of the operation, by which the handler is found. form: the form of the request's body; None without
    one. answer: a form, a JSON schema, or the media types of an answer that is not JSON. stream: the media type of a streamed answer.
    statuses: HTTP statuses of errors, in addition to those of every route. also: further paths, under which other servers have the
    route."""

    method: Literal["GET", "POST"]
    path: str
    name: str
    summary: str
    answer: Any
    form: type[Fields] | None = None
    stream: str | None = None
    statuses: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """Return all paths of the route. Each path has a second one under /v1, except the page, its files and paths below /api."""
        is_own = self.path.startswith(("/api/", PAGE_FOLDER)) or self.path == "/"
        return (*((self.path,) if is_own else (f"/v1{self.path}", self.path)), *self.also)


def _post(
    path: str,
    name: str,
    summary: str,
    form: type[Fields],
    answer: Any,
    stream: str | None = None,
    also: tuple[str, ...] = (),
) -> RouteForm:
    statuses = ("400", "404", "408", "413", "415", "500", "503")
    return RouteForm("POST", path, name, summary, answer, form, stream, statuses, also)


def _get(
    path: str, name: str, summary: str, answer: Any, *statuses: str, also: tuple[str, ...] = ()
) -> RouteForm:
    return RouteForm("GET", path, name, summary, answer, statuses=statuses, also=also)


_UNLOADED = ("400", "404", "503")  # of what is told of a model

ROUTES: tuple[RouteForm, ...] = (
    _post("/chat/completions", "chat", "Answer a conversation.", chat_api.ChatCompletionRequest, chat_api.ChatAnswer, EVENTS,
          ("/api/v0/chat/completions",)),
    _post("/completions", "complete", "Continue a text.", completions_api.CompletionRequest, completions_api.CompletionAnswer,
          EVENTS, ("/api/v0/completions",)),
    _post("/tokenize", "tokenize", "Token ids of a text or a conversation.", completions_api.TokenizeRequest,
          completions_api.TokenizeAnswer),
    _post("/detokenize", "detokenize", "Text of token ids.", completions_api.DetokenizeRequest, models.ContentAnswer),
    _get("/tokenizer_info", "tokenizer_info", "Special tokens and chat template, as vLLM tells them.", models.TokenizerAnswer, *_UNLOADED),
    _post("/apply-template", "template", "The prompt that a conversation becomes.", chat_api.ChatCompletionRequest, models.PromptAnswer),
    _post("/chat/completions/input_tokens", "count", "How many tokens that prompt has.", chat_api.ChatCompletionRequest, shared.Counted),
    _post("/completion", "native", "Continue a text, in llama.cpp's form.", completions_api.NativeRequest,
          completions_api.NativeAnswers, EVENTS),
    _post("/infill", "infill", "Fill a gap in a text, in llama.cpp's form.", completions_api.InfillRequest,
          completions_api.NativeAnswers, EVENTS),
    _post("/lora-adapters", "set_lora_adapters", "How much each adapter counts where a request does not say.", models.AdapterScales,
          models.Success),
    _post("/embeddings", "embed", "Vectors of texts.", embeddings.EmbeddingsRequest, embeddings.EmbeddingsAnswer, None,
          ("/api/v0/embeddings",)),
    _post("/embedding", "native_embed", "Vectors of texts, in llama.cpp's form.", embeddings.NativeEmbedRequest,
          embeddings.NativeEmbedAnswer),
    _post("/rerank", "rerank", "How well documents answer a query.", embeddings.RerankRequest, embeddings.RerankAnswer, None,
          ("/reranking", "/v1/reranking")),
    _post("/messages", "message", "Answer a conversation, in Anthropic's form.", messages_api.MessagesRequest,
          messages_api.MessagesAnswer, EVENTS),
    _post("/messages/count_tokens", "count_message", "How many tokens its prompt has.", messages_api.CountTokensRequest,
          messages_api.CountAnswer),
    _post("/responses", "respond", "Answer a conversation, in the form of OpenAI's Responses.", responses_api.ResponsesRequest,
          responses_api.ResponsesAnswer, EVENTS),
    _post("/responses/compact", "compact", "Summarise a conversation of Responses.", responses_api.ResponsesRequest,
          compaction_api.CompactedAnswer),
    _post("/responses/input_tokens", "count_response", "How many tokens its prompt has.", responses_api.ResponsesRequest, shared.Counted),
    _post("/api/chat", "ollama_chat", "Answer a conversation, in Ollama's form.", ollama_api.OllamaChatRequest, ollama_api.OllamaChatAnswer,
          JSON_LINES),
    _post("/api/generate", "ollama_generate", "Answer a prompt.", ollama_api.OllamaGenerateRequest,
          ollama_api.OllamaGenerateAnswer, JSON_LINES),
    _post("/api/embed", "ollama_embed", "Vectors of texts, in Ollama's form.", embeddings.OllamaEmbedRequest, embeddings.OllamaEmbedAnswer),
    _post("/api/show", "ollama_show", "What a model can do.", ollama_api.OllamaShowRequest, ollama_api.OllamaShown),
    _post("/api/pull", "pull", "Fetch a model; a download that runs is joined.", models.PullRequest, models.Pulled, JSON_LINES),
    _get("/api/library", "library", "The models of this machine, and those that fit it.", models.LibraryAnswer),
    _post("/api/library", "change_library", "Serve a model of this machine, or end a download.", models.LibraryRequest, models.Success),
    _post("/api/ratio", "ratio", "How many times as fast pairs of runs say that drafting is.", models.RatioRequest, models.RatioAnswer),
    _post("/models/load", "llama_load", "Load a model, in llama.cpp's form.", lm_studio_api.LlamaLoadRequest, models.Success),
    _post("/models/unload", "llama_unload", "Unload a model.", lm_studio_api.LlamaLoadRequest, models.Success),
    _post("/api/v1/models/load", "lm_load", "Load a model, in LM Studio's form.", lm_studio_api.LoadRequest, lm_studio_api.Loaded),
    _post("/api/v1/models/unload", "lm_unload", "Unload a model.", lm_studio_api.UnloadRequest, lm_studio_api.Unloaded),
    _get("/api/v1/models", "lm_models", "The models of this server, as LM Studio tells them.", lm_studio_api.NewModels),
    _get("/api/v0/models", "lm_old_models", "The same, in the older form.", lm_studio_api.OldModels),
    _get("/api/v0/models/{name:path}", "lm_old_model", "One of them.", lm_studio_api.OldModel, "404"),
    _get("/", "page", "A page to chat on.", ("text/html",)),
    _get(PAGE_FOLDER + "{name}", "page_file", "A file of the page.", ("text/*", "image/svg+xml"), "404"),
    _get("/responses/{name}", "response", "Says that responses are not stored here.", responses_api.ResponsesAnswer, "404"),
    _get("/models", "models", "The models of this server.", models.ModelsAnswer),
    _get("/models/{name:path}", "model", "One of them.", models.ModelAnswer, "404"),
    _get("/health", "health", "Whether it answers.", models.HealthAnswer, "503", also=("/ping",)),
    _get("/limits", "limits", "Bounds on the work that a client may cause.", {"type": "object"}),
    _get("/metrics", "metrics", "Counters for Prometheus.", ("text/plain",)),
    _get("/props", "props", "What llama.cpp tells of a model.", models.PropsAnswer, *_UNLOADED),
    _get("/lora-adapters", "lora_adapters", "Adapters beside a model, by llama.cpp's numbers.", models.AdaptersAnswer, *_UNLOADED),
    _get("/slots", "slots", "Places for rows, and how many are busy.", models.SlotsAnswer),
    _get("/openapi.json", "openapi", "This description.", {"type": "object"}),
    _get("/api/tags", "ollama_tags", "The models of this server.", ollama_api.OllamaTags),
    _get("/api/ps", "ollama_running", "The models in memory.", ollama_api.OllamaRunning),
    _get("/api/version", "ollama_version", "Its version.", ollama_api.OllamaVersion, also=("/version",)),
)  # fmt: skip
